"""Rotary position embedding over adjacent pairs, from a table of cosines and sines."""

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to_bf16


def apply_rope(x: jax.Array, table: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Rotates the last `2 * table.shape[-1]` channels, pairs (2i, 2i+1) as complex numbers; the rest passes through.

    Args:
      x: bfloat16 [..., C].
      table: float32 [..., 2, r], cosine then sine, broadcastable over the leading axes of x.
      inverse: rotate backwards.

    Returns:
      bfloat16 [..., C]; float32 arithmetic, one rounding (architecture.md section 3).
    """
    r = table.shape[-1]
    plain, rotated = x[..., : x.shape[-1] - 2 * r], x[..., x.shape[-1] - 2 * r :]
    pairs = rotated.astype(jnp.float32).reshape(*rotated.shape[:-1], r, 2)
    real, imag = pairs[..., 0], pairs[..., 1]
    cos, sin = table[..., 0, :], table[..., 1, :]
    if inverse:
        sin = -sin
    out = jnp.stack([real * cos - imag * sin, real * sin + imag * cos], axis=-1)
    return jnp.concatenate([plain, round_to_bf16(out.reshape(rotated.shape))], axis=-1)
