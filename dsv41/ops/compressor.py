"""From tokens to compressed latents (architecture.md section 3)."""

import jax
import jax.numpy as jnp

from pallas_kernels.norms import rms_norm
from pallas_kernels.rounding import round_to_bf16


def group_window(
    start: jax.Array, num_new: jax.Array, tokens: int, ratio: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which groups a step can complete and where their tokens lie.

    Rows are the `ratio - 1` tokens before `start` followed by the step's `tokens` new ones.

    Args:
      start: int32 [B], position of the first new token.
      num_new: int32 [B], new tokens that are real.
      tokens: new tokens including padding.
      ratio: tokens a group.

    Returns:
      group int32 [B, G]: group numbers; complete bool [B, G]: all its tokens are known now; row int32 [B, G, ratio]:
      indices into the rows.
    """
    groups = (tokens + ratio - 2) // ratio + 1
    group = (start // ratio)[:, None] + jnp.arange(groups)
    complete = (group + 1) * ratio <= (start + num_new)[:, None]
    position = group[..., None] * ratio + jnp.arange(ratio)
    row = position - start[:, None, None] + ratio - 1
    return group, complete, jnp.clip(row, 0, tokens + ratio - 2)


def pool_groups(kv: jax.Array, gate: jax.Array, row: jax.Array, norm_weight: jax.Array, eps: float) -> jax.Array:
    """Gated pooling: a softmax over the tokens of a group per channel weighs their values; then RMSNorm.

    kv, gate float32 [B, rows, C]; row int32 [B, G, ratio] -> latents bfloat16 [B, G, C], not yet rotated.
    """
    batch = jnp.arange(kv.shape[0])[:, None, None]
    weight = jax.nn.softmax(gate[batch, row], axis=2)
    return rms_norm(round_to_bf16((kv[batch, row] * weight).sum(axis=2)), norm_weight, eps)
