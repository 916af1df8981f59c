"""Mixture of experts: routing and the dense-exact expert product (architecture.md section 4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv41.ops.expert_exchange import exchanged_experts
from dsv41.ops.expert_layout import block_rows, layout_by_expert, sum_in_order
from dsv41.ops.linear import QuantizedArray, WeightFormat, fake_quantize_fp8, product
from dsv41.sharding import LOCAL, ExpertPlacement, ShardingRules
from pallas_kernels.experts.ops import expert_blocks
from pallas_kernels.fixed_order import contract, with_fixed_rows
from pallas_kernels.rounding import round_bf16, round_to_bf16


def route(
    x: jax.Array,
    gate: jax.Array,
    bias: jax.Array,
    bias_vl: jax.Array,
    image_mask: jax.Array,
    *,
    top_k: int,
    scale: float,
    forced: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts by sqrt(softplus(logit)) plus bias; the bias does not enter the weights.

    Args:
      x: bfloat16 [T, D].
      gate: bfloat16 [E, D].
      bias, bias_vl: float32 [E], for text tokens and for tokens inside an image span.
      image_mask: bool [T].
      top_k: experts a token.
      scale: what a token's weights sum to.
      forced: int32 [T, top_k] experts to use instead; weights still follow the scores.

    Returns:
      experts int32 [T, top_k] in ascending order, weights float32 [T, top_k].
    """
    score = with_fixed_rows(lambda rows: jnp.sqrt(jax.nn.softplus(contract(rows, gate))), x)
    biased = score + jnp.where(image_mask[:, None], bias_vl, bias)
    chosen = jax.lax.top_k(biased, top_k)[1] if forced is None else forced
    # Ascending, so that the sum over a token's experts has one order however they were found.
    chosen = jnp.sort(chosen.astype(jnp.int32), axis=-1)
    weights = jnp.take_along_axis(score, chosen, axis=-1)
    return chosen, weights / (weights.sum(-1, keepdims=True) + 1e-20) * scale


def expert(
    x: jax.Array, w1: QuantizedArray, w3: QuantizedArray, w2: QuantizedArray, weight: jax.Array | None, limit: float
) -> jax.Array:
    """One SwiGLU expert: w2(silu(min(w1 x, limit)) * clip(w3 x, -limit, limit) * weight).

    x bfloat16 [T, D]; weight float32 [T, 1] or None -> bfloat16 [T, D]. The routing weight multiplies the activation
    before w2's input is quantised.
    """
    fp8_input = w1.format is not WeightFormat.BF16
    x = fake_quantize_fp8(x) if fp8_input else x
    gate = round_bf16(product(x, w1))
    up = round_bf16(product(x, w3))
    inner = swiglu(gate, up, limit)
    if weight is not None:
        inner = inner * weight
    inner = round_to_bf16(inner)
    inner = fake_quantize_fp8(inner) if fp8_input else inner
    return round_to_bf16(product(inner, w2))


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(gate) * up in float32, the gate clamped from above only, up on both sides."""
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def routed_experts(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    w1: QuantizedArray,
    w3: QuantizedArray,
    w2: QuantizedArray,
    limit: float,
    rules: ShardingRules = LOCAL,
    placement: ExpertPlacement | None = None,
) -> jax.Array:
    """Sum of each token's experts, every token served whatever the skew.

    Rows are sorted by expert and laid out in blocks of one expert each. Memory is that of one expert and the rows.

    Args:
      x: bfloat16 [T, D].
      chosen, weights: int32 and float32 [T, K].
      valid: bool [T]; padding rows are given to no expert and return 0.
      w1, w3, w2: stacked over experts, [E, F, D], [E, F, D], [E, D, F].
      limit: of SwiGLU.
      rules: with `rules.experts`, inside `jax.shard_map`, tokens are this device's own and so are the experts of the
        stacks; see `dsv41.ops.expert_exchange`.
      placement: copies of experts in the stacks, see `dsv41.sharding.expert_placement`.

    Returns:
      float32 [T, D].
    """
    if rules.experts:
        return exchanged_experts(x, chosen, weights, valid, (w1, w3, w2), limit, rules=rules, placement=placement)
    if not x.shape[0]:
        return jnp.zeros(x.shape, jnp.float32)
    num_experts = w1.values.shape[0]
    chosen = jnp.where(valid[:, None], chosen, num_experts)
    layout = layout_by_expert(chosen, weights, num_experts, block=block_rows(chosen.size, num_experts))
    x = x if w1.format is WeightFormat.BF16 else fake_quantize_fp8(x)
    gathered = x.at[layout.source].get(mode="fill", fill_value=0)
    stacks = ((w.values, w.scales) for w in (w1, w3, w2))
    y = expert_blocks(gathered, layout.row_weight, layout.block_expert, *stacks, limit=limit)
    return sum_in_order(y.reshape(-1, x.shape[-1]).at[layout.place].get(mode="fill", fill_value=0))
