"""Arithmetic of the vision tower (architecture.md section 7)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.ops.rope import rope_frequencies, rope_table
from pallas_kernels.rounding import round_bf16, round_to_bf16
from pallas_kernels.tiling import map_query_tiles, query_tile

# Keys that are summed in one go on CPU, where the order of a longer sum would depend on the padding.
KEY_BLOCK = 256
_QUERY_TILE = 256
# Scores of a tile elsewhere, where few large steps are faster.
_SCORE_BYTES = 256 << 20


def rope_2d(rows: np.ndarray, cols: np.ndarray, head_dim: int, theta: float) -> np.ndarray:
    """Cosine and sine of patches at (row, column): float32 [N, 2, head_dim / 2].

    The first half of the angles counts rows and the second half columns, with the same head_dim / 4 frequencies.
    """
    frequencies = rope_frequencies(head_dim // 2, theta, None)
    return np.concatenate([rope_table(frequencies, rows), rope_table(frequencies, cols)], axis=-1)


def rotate_halves(x: jax.Array, table: jax.Array) -> jax.Array:
    """Rotates channel i with channel i + H / 2: x bfloat16 [N, heads, H], table float32 [N, 2, H / 2] -> as x."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = table[:, None, 0], table[:, None, 1]
    return round_to_bf16(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """bfloat16 + bfloat16 -> bfloat16, one rounding."""
    return round_to_bf16(x.astype(jnp.float32) + y.astype(jnp.float32))


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) rounded to bfloat16, times up: bfloat16 [..., F] each -> bfloat16 [..., F]."""
    gate = gate.astype(jnp.float32)
    return round_to_bf16(round_bf16(gate * jax.nn.sigmoid(gate)) * up.astype(jnp.float32))


def gelu(x: jax.Array) -> jax.Array:
    """The erf form, bfloat16 -> bfloat16."""
    return round_to_bf16(jax.nn.gelu(x.astype(jnp.float32), approximate=False))


def full_attention(q: jax.Array, k: jax.Array, v: jax.Array, count: jax.Array) -> jax.Array:
    """Softmax attention of every patch to the first `count` patches, probabilities not rounded.

    Args:
      q, k, v: bfloat16 [N, heads, H], N a multiple of `KEY_BLOCK`.
      count: int32 [], at least 1; what lies behind is padding.

    Returns:
      bfloat16 [N, heads, H]; never holds scores of all pairs. On CPU its bits do not depend on N.
    """

    def by_blocks(q: jax.Array) -> jax.Array:
        q, keys = q.astype(jnp.float32), k.astype(jnp.float32)
        return map_query_tiles(by_key_blocks(keys, v, count), _QUERY_TILE, q[None])[0]

    def by_tiles(q: jax.Array) -> jax.Array:
        tile = query_tile(q.shape[0], q.shape[0] * q.shape[1] * 4, _SCORE_BYTES)
        return map_query_tiles(whole_rows(k, v, count), tile, q[None])[0]

    return jax.lax.platform_dependent(q, cpu=by_blocks, default=by_tiles)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q [t, heads, H], k [s, heads, H], of one type -> float32 [heads, t, s], scaled."""
    products = jnp.einsum("qhd,khd->hqk", q, k, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return products * q.shape[-1] ** -0.5


def _weighted(p: jax.Array, v: jax.Array) -> jax.Array:
    """p float32 [heads, t, s], v [s, heads, H] -> float32 [t, heads, H]."""
    return jnp.einsum("hqk,khd->qhd", p, v.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def whole_rows(k: jax.Array, v: jax.Array, count: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Attention of queries [1, t, heads, H] to keys and values [N, heads, H], all keys in one go."""
    seen = jnp.arange(k.shape[0]) < count

    def tile(q: jax.Array) -> jax.Array:
        p = jax.nn.softmax(jnp.where(seen, _scores(q[0], k), -jnp.inf), axis=-1)
        return round_to_bf16(_weighted(p, v))[None]

    return tile


def by_key_blocks(k: jax.Array, v: jax.Array, count: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """As `whole_rows`, a block of keys after the other with a running maximum; a block of padding changes no bit."""
    blocks = k.shape[0] // KEY_BLOCK
    k, v = (x.reshape(blocks, KEY_BLOCK, *x.shape[1:]) for x in (k, v))
    seen = (jnp.arange(blocks * KEY_BLOCK) < count).reshape(blocks, KEY_BLOCK)

    def tile(q: jax.Array) -> jax.Array:
        q = q[0]

        def step(carry, block):
            top, total, out = carry
            keys, values, seen = block
            scores = jnp.where(seen, _scores(q, keys), -jnp.inf)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            p, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            out = out * shrink.T[..., None] + _weighted(p, values)
            return (new_top, total * shrink + p.sum(axis=-1), out), None

        heads = q.shape[1]
        start = (jnp.full((heads, q.shape[0]), -jnp.inf), jnp.zeros((heads, q.shape[0])), jnp.zeros(q.shape))
        (_, total, out), _ = jax.lax.scan(step, start, (k, v, seen))
        return round_to_bf16(out / total.T[..., None])[None]

    return tile
