"""RMS normalisation."""

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to_bf16


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps) * gain in float32, one cast at the end (architecture.md section 2).

    x any float [..., C]; gain [C] -> bfloat16 [..., C]. A zero row gives zeros.
    """
    x = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return round_to_bf16(x * inverse_rms * gain.astype(jnp.float32))
