"""Rounding that the compiler cannot remove.

XLA may drop a float32 -> bfloat16 -> float32 round trip inside one compiled function (`xla_allow_excess_precision`).
Where the rounding is part of the definition, it is done with `reduce_precision`, which XLA keeps.
"""

import jax
import jax.numpy as jnp


def round_bf16(x: jax.Array) -> jax.Array:
    """float32 values rounded to the nearest bfloat16 (ties to even), still as float32."""
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)


def round_to_bf16(x: jax.Array) -> jax.Array:
    """float32 -> bfloat16, rounded to nearest, ties to even."""
    return round_bf16(x).astype(jnp.bfloat16)
