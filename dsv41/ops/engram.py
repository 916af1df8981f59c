"""Engram on the device: the gate that mixes a looked-up value into the residual streams (architecture.md section 5).

Axis letters: B sequences, T tokens, R residual streams, D model width.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to_bf16

_SMALLEST_DOT = 1e-6


def gate_from_dot(dot: jax.Array) -> jax.Array:
    """float32 -> float32: the sigmoid of the signed square root, |dot| floored at 1e-6.

    A zero counts with its own sign, so that a dot of 0 gives slightly more than one half.
    """
    root = jnp.sqrt(jnp.maximum(jnp.abs(dot), _SMALLEST_DOT))
    return jax.nn.sigmoid(jnp.copysign(root, dot))


def _inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)


def engram_gate(
    streams: jax.Array,
    keys: jax.Array,
    value: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    image_mask: jax.Array,
    eps: float,
) -> jax.Array:
    """Adds `gate * value` to each stream, the gate measuring how well the normalised stream and key agree.

    All arithmetic is float32 with one cast at the end.

    Args:
      streams: bfloat16 [B, T, R, D].
      keys: bfloat16 [B, T, R, D], one per stream.
      value: bfloat16 [B, T, D], shared by the streams.
      q_weight: bfloat16 [R, D], gain of the normalised stream.
      k_weight: bfloat16 [R, D], gain of the normalised key.
      image_mask: bool [B, T]; true rows come back bit for bit unchanged.
      eps: of both RMS norms.

    Returns:
      bfloat16 [B, T, R, D].
    """
    with jax.named_scope("engram_gate"):
        x, k = streams.astype(jnp.float32), keys.astype(jnp.float32)
        weight = q_weight.astype(jnp.float32) * k_weight.astype(jnp.float32)
        dot = jnp.sum(x * weight * k, axis=-1)
        dot = dot * _inverse_rms(x, eps) * _inverse_rms(k, eps) * x.shape[-1] ** -0.5
        gate = gate_from_dot(dot)
        mixed = x + gate[..., None] * value.astype(jnp.float32)[:, :, None, :]
        return jnp.where(image_mask[..., None, None], streams, round_to_bf16(mixed))
