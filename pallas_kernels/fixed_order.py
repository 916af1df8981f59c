"""Bits of a row that do not depend on how many rows are computed beside it.

Decoding one token, verifying six and one long pass must agree, so the plain-jnp references fix the order of summation
where a compiler would choose another one by size. On CPU that takes two measures: products never have a single row, and
steps are compiled with `compiler_options`.
"""

import functools

import jax
import jax.numpy as jnp


def contract(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in] transposed, both bfloat16 or both float32 -> float32 [..., out].

    A single row is computed as two: backends switch to a matrix-vector routine with another summation order there.
    """
    rows = x.reshape(-1, x.shape[-1])
    single = rows.shape[0] == 1
    rows = jnp.concatenate([rows, rows]) if single else rows
    y = jax.lax.dot_general(
        rows, weight, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return (y[:1] if single else y).reshape(*x.shape[:-1], weight.shape[0])


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
