"""Mixture of experts: routing and the dense-exact expert product (architecture.md section 4)."""

import jax
import jax.numpy as jnp

from dsv41.ops.linear import QuantizedArray, WeightFormat, fake_quantize_fp8
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
    gate = round_bf16(contract(x, w1.dequantize()))
    up = round_bf16(contract(x, w3.dequantize()))
    inner = swiglu(gate, up, limit)
    if weight is not None:
        inner = inner * weight
    inner = round_to_bf16(inner)
    inner = fake_quantize_fp8(inner) if fp8_input else inner
    return round_to_bf16(contract(inner, w2.dequantize()))


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
) -> jax.Array:
    """Sum of each token's experts, every token served whatever the skew.

    Rows are sorted by expert and laid out in blocks of one expert each; a scan over blocks dequantises that expert and
    multiplies. Memory is that of one expert and the rows.

    Args:
      x: bfloat16 [T, D].
      chosen, weights: int32 and float32 [T, K].
      valid: bool [T]; padding rows are given to no expert and return 0.
      w1, w3, w2: stacked over experts, [E, F, D], [E, F, D], [E, D, F].

    Returns:
      float32 [T, D].
    """
    tokens, k = chosen.shape
    num_experts = w1.values.shape[0]
    source, row_weight, block_expert, place = _blocks_by_expert(chosen, weights, valid, num_experts)
    gathered = x.at[source].get(mode="fill", fill_value=0)

    def one_block(_, inputs):
        x_block, weight_block, e = inputs

        def compute():
            experts = (w.at_row(jnp.minimum(e, num_experts - 1)) for w in (w1, w3, w2))
            return expert(x_block, *experts, weight_block[:, None], limit)

        return None, jax.lax.cond(e < num_experts, compute, lambda: jnp.zeros_like(x_block))

    _, y = jax.lax.scan(one_block, None, (gathered, row_weight, block_expert))
    y = y.reshape(-1, x.shape[-1]).at[place].get(mode="fill", fill_value=0)
    y = y.reshape(tokens, k, -1).astype(jnp.float32)
    total = y[:, 0]
    for i in range(1, k):
        total = total + y[:, i]
    return total


def _blocks_by_expert(
    chosen: jax.Array, weights: jax.Array, valid: jax.Array, num_experts: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Lays the T * K (token, expert) rows out in blocks that each belong to one expert.

    Returns:
      source int32 [blocks, block]: token of each row, T where the row is empty; row_weight float32 [blocks, block];
      block_expert int32 [blocks]: num_experts for unused blocks; place int32 [T * K]: where each token's k-th row
      went, out of range for padding tokens.
    """
    tokens, k = chosen.shape
    rows = tokens * k
    block = _block_rows(rows, num_experts)
    blocks = min(rows, rows // block + num_experts)
    expert_of_row = jnp.where(valid[:, None], chosen, num_experts).reshape(rows)
    order = jnp.argsort(expert_of_row, stable=True)
    counts = jnp.zeros(num_experts, jnp.int32).at[expert_of_row].add(1, mode="drop")
    blocks_of = -(-counts // block)
    first_block = jnp.cumsum(blocks_of) - blocks_of
    first_row = jnp.cumsum(counts) - counts

    sorted_expert = expert_of_row[order]
    safe = jnp.minimum(sorted_expert, num_experts - 1)
    place = first_block[safe] * block + jnp.arange(rows) - first_row[safe]
    place = jnp.where(sorted_expert < num_experts, place, blocks * block)
    source = jnp.full(blocks * block, tokens, jnp.int32).at[place].set(order // k, mode="drop")
    row_weight = jnp.zeros(blocks * block, jnp.float32).at[place].set(weights.reshape(rows)[order], mode="drop")
    block_expert = jnp.searchsorted(jnp.cumsum(blocks_of), jnp.arange(blocks), side="right")
    place_of_row = jnp.zeros(rows, jnp.int32).at[order].set(place)
    return source.reshape(blocks, block), row_weight.reshape(blocks, block), block_expert, place_of_row


def _block_rows(rows: int, num_experts: int) -> int:
    """Rows of a block: about an expert's fair share, a power of two from 8 to 128."""
    share = max(rows // num_experts, 1)
    return min(max(1 << (share - 1).bit_length(), 8), 128)
