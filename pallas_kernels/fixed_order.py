"""Bits of a row that do not depend on how many rows are computed beside it.

Decoding one token, verifying six and one long pass must agree, so the plain-jnp references fix the order of summation
where a CPU would choose another one by size and by its number of threads: products run on a fixed number of rows at a
time, and whole steps are compiled with `compiler_options`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Rows of one product on CPU. Its library splits the inner dimension, and so the order of summation, by the shape.
_ROWS = 16


def contract(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in] transposed, both bfloat16 or both float32 -> float32 [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    y = jax.lax.platform_dependent(rows, weight, cpu=_contract_by_tiles, default=_product)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def contract_groups(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Each group's x [..., G, in] times its own weight [G, out, in] transposed -> float32 [..., G, out]."""

    def one_by_one(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.stack([contract(x[..., g, :], weight[g]) for g in range(weight.shape[0])], axis=-2)

    def at_once(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum(
            "...gi,goi->...go", x, weight, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )

    return jax.lax.platform_dependent(x, weight, cpu=one_by_one, default=at_once)


def _product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        rows, weight, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _contract_by_tiles(rows: jax.Array, weight: jax.Array) -> jax.Array:
    count = rows.shape[0]
    tiles = jnp.pad(rows, ((0, -count % _ROWS), (0, 0))).reshape(-1, _ROWS, rows.shape[1])
    if tiles.shape[0] == 1:
        return _product(tiles[0], weight)[:count]
    return jax.lax.map(lambda tile: _product(tile, weight), tiles).reshape(-1, weight.shape[0])[:count]


def with_fixed_rows(fn: Callable[[jax.Array], Any], x: jax.Array) -> Any:
    """`fn(x)` for a function of independent rows x [rows, ...], computed on a multiple of 16 rows on CPU.

    There, exponentials of a few values take a scalar path whose last bit differs from the vector one. The barriers keep
    the compiler from computing only the rows that are used.
    """

    def padded(x: jax.Array) -> Any:
        rows = x.shape[0]
        x = jnp.pad(x, ((0, -rows % _ROWS),) + ((0, 0),) * (x.ndim - 1))
        out = jax.lax.optimization_barrier(fn(jax.lax.optimization_barrier(x)))
        return jax.tree.map(lambda y: y[:rows], out)

    return jax.lax.platform_dependent(x, cpu=padded, default=fn)


@functools.cache
def compiler_options() -> dict[str, str]:
    """For `jax.jit(compiler_options=...)` of a whole step; empty except on CPU.

    XLA's CPU backend hands reductions above some size to a library that sums in another order. Releases without that
    library do not know the option and need none.
    """
    if jax.default_backend() != "cpu":
        return {}
    options = {"xla_cpu_experimental_ynn_fusion_type": ""}
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(jax.ShapeDtypeStruct((), jnp.float32)).compile()
    except jax.errors.JaxRuntimeError as e:
        if "No such compile option" not in str(e):
            raise
        return {}
    return options
