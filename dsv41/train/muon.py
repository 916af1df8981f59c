"""Muon: momentum whose direction is orthogonalised, block by block (training.md section 3.2).

`optax.contrib.scale_by_muon` is near but not this: its momentum is bias-corrected, which weighs the newest gradient
differently in the first steps, and it adds 1e-8 to a norm that may well be smaller. A test holds the parts that agree
against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dsv41.train.labels import key_path_name

# Eight steps that bring singular values of 3e-5 and more near one, two that settle them within 0.002 of it.
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
# Blocks of one shape are iterated together, as far as the stack is no larger; it exists beside the gradients.
_STACK_BYTES = 256 << 20


class MuonState(NamedTuple):
    """State of `scale_by_muon`."""

    momentum: Any  # the parameters' tree


def newton_schulz(x: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Singular values of matrices go to one, singular vectors stay.

    Args:
      x: float32 [n, rows, cols], rows <= cols for the least work. Zero matrices stay zero.
      dtype: of the products' inputs; sums are float32.

    Returns:
      float32 [n, rows, cols]. A singular value below 3e-5 of the matrix's norm does not get to one.
    """
    # The largest value first: squares of what 1,000 steps without gradient leave would underflow.
    largest = jnp.abs(x).max(axis=(1, 2), keepdims=True)
    x = x / jnp.where(largest < jnp.finfo(jnp.float32).tiny, jnp.inf, largest)
    norm = jnp.sqrt((x * x).sum(axis=(1, 2), keepdims=True))
    x = x / jnp.where(norm == 0, 1.0, norm)

    def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            equation,
            a.astype(dtype),
            b.astype(dtype),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    def step(x: jax.Array, coefficients: jax.Array) -> tuple[jax.Array, None]:
        a, b, c = coefficients
        square = product("nij,nkj->nik", x, x)
        polynomial = b * square + c * product("nij,njk->nik", square, square)
        return a * x + product("nij,njk->nik", polynomial, x), None

    return jax.lax.scan(step, x, jnp.asarray(NEWTON_SCHULZ, jnp.float32))[0]


def orthogonalize(
    matrices: Sequence[jax.Array],
    blocks: Sequence[int],
    *,
    dtype: Any = jnp.float32,
    spread: jax.sharding.NamedSharding | None = None,
) -> list[jax.Array]:
    """Every block of every matrix orthogonalised by `newton_schulz`, and scaled to a root mean square of one.

    Blocks of one shape, up to transposition, are stacked and iterated together.

    Args:
      matrices: float32 [..., rows, cols]; leading axes hold separate matrices.
      blocks: into how many blocks of rows each is cut.
      dtype: as in `newton_schulz`.
      spread: a sharding of one axis; the stacks are spread over its devices, whole matrices each. None: the compiler
        decides.

    Returns:
      arrays of the shapes of `matrices`. A block of lower rank has a lower root mean square: only what its gradient
      reaches moves.
    """
    stacks: dict[tuple[int, int, int], list[tuple[int, jax.Array]]] = {}
    for i, (matrix, count) in enumerate(zip(matrices, blocks, strict=True)):
        rows, cols = matrix.shape[-2] // count, matrix.shape[-1]
        stack = matrix.reshape(-1, rows, cols)
        stack = stack.swapaxes(1, 2) if rows > cols else stack
        # What divides among the devices stays by itself: experts that are spread already are not moved.
        alone = spread is not None and stack.shape[0] % spread.num_devices == 0
        part = -1 - i if alone else _part_with_room(stacks, stack)
        stacks.setdefault((*stack.shape[1:], part), []).append((i, stack))
    out: list[Any] = [None] * len(matrices)
    for (_, longer, _), members in stacks.items():
        result = _iterate(jnp.concatenate([stack for _, stack in members]), dtype, spread) * math.sqrt(longer)
        first = 0
        for i, stack in members:
            mine = result[first : first + stack.shape[0]]
            first += stack.shape[0]
            tall = matrices[i].shape[-2] // blocks[i] > matrices[i].shape[-1]
            out[i] = (mine.swapaxes(1, 2) if tall else mine).reshape(matrices[i].shape)
    return out


def _part_with_room(stacks: dict[tuple[int, int, int], list[tuple[int, jax.Array]]], stack: jax.Array) -> int:
    """Number of the first stack of this shape that `stack` still fits into."""
    part = 0
    while members := stacks.get((*stack.shape[1:], part)):
        if 4 * (sum(s.size for _, s in members) + stack.size) <= _STACK_BYTES:
            break
        part += 1
    return part


def _iterate(stack: jax.Array, dtype: Any, spread: jax.sharding.NamedSharding | None) -> jax.Array:
    if spread is None:
        return newton_schulz(stack, dtype)
    count = stack.shape[0]
    stack = jnp.pad(stack, ((0, -count % spread.num_devices), (0, 0), (0, 0)))
    stack = jax.lax.with_sharding_constraint(stack, spread)
    return jax.lax.with_sharding_constraint(newton_schulz(stack, dtype), spread)[:count]


def scale_by_muon(
    blocks_of: Callable[[str], int],
    *,
    momentum: float = 0.95,
    rms: float = 0.18,
    momentum_dtype: Any = jnp.float32,
    dtype: Any = jnp.bfloat16,
    spread: jax.sharding.NamedSharding | None = None,
) -> optax.GradientTransformation:
    """Gradients of matrices -> updates whose root mean square is `rms` in every block of full rank.

    Nesterov momentum: M <- momentum M + G; what is orthogonalised is momentum M + G.

    Args:
      blocks_of: name of a parameter -> blocks of its rows.
      momentum: decay of the momentum.
      rms: of the updates, before the learning rate.
      momentum_dtype: what the momentum is stored in.
      dtype, spread: as in `orthogonalize`.
    """

    def init(params):
        return MuonState(jax.tree.map(lambda p: jnp.zeros(p.shape, momentum_dtype), params))

    def update(updates, state, params=None):
        del params
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        total = jax.tree.map(lambda m, g: momentum * m.astype(jnp.float32) + g, state.momentum, gradients)
        ahead = jax.tree.map(lambda m, g: momentum * m + g, total, gradients)
        leaves, structure = jax.tree_util.tree_flatten_with_path(ahead)
        blocks = [blocks_of(key_path_name(path)) for path, _ in leaves]
        directions = orthogonalize([leaf for _, leaf in leaves], blocks, dtype=dtype, spread=spread)
        scaled = jax.tree.unflatten(structure, [rms * x for x in directions])
        return scaled, MuonState(jax.tree.map(lambda m: m.astype(momentum_dtype), total))

    return optax.GradientTransformation(init, update)
