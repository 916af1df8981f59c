"""The meaning of the index score in plain jnp (architecture.md section 3)."""

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_order import contract
from pallas_kernels.rounding import round_bf16


def index_scores(q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """sum over heads of relu(q_h . k) * w_h, rounded to bfloat16 after the product, the weighting and the sum.

    Args:
      q: bfloat16 [B, T, N, C] dequantised index queries.
      weights: bfloat16 [B, T, N] head weights, their scale included.
      keys: bfloat16 [B, S, C] shared by the queries of a sequence, or [B, T, S, C] a query's own.

    Returns:
      float32 [B, T, S] holding bfloat16 values; never -0, so that equal scores compare equal.
    """
    b, t, n, c = q.shape
    if keys.ndim == 3:
        dots = jax.vmap(contract)(q.reshape(b, t * n, c), keys).reshape(b, t, n, -1)
    else:
        dots = jnp.einsum("btnc,btsc->btns", q, keys, preferred_element_type=jnp.float32)
    weighted = round_bf16(jax.nn.relu(round_bf16(dots)) * weights.astype(jnp.float32)[..., None])
    return round_bf16(weighted.sum(axis=-2)) + 0.0


def block_maxima(scores: jax.Array, block_size: int) -> jax.Array:
    """float [..., S] -> [..., S / block_size]: the largest score of each run of consecutive positions."""
    return scores.reshape(*scores.shape[:-1], -1, block_size).max(axis=-1)
