"""Routed experts with gradients (architecture.md section 4).

Rows are sorted into blocks of one expert each, as in serving. Forward, on CPU, the bits are those of
serving. Backward, the weights of a few blocks at a time are gathered, and their gradients are
summed by expert in float32: no array as large as all weights is made for a block.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from dsv41.layers.moe import MoE
from dsv41.ops import moe
from dsv41.ops.expert_layout import block_rows, layout_by_expert, sum_in_order
from dsv41.ops.linear import WeightFormat, fake_quantize_fp8
from dsv41.ops.straight_through import bf16_einsum
from dsv41.train.row_parts import cut
from pallas_kernels.fixed_order import contract, with_fixed_rows
from pallas_kernels.rounding import round_bf16, round_to_bf16

# Bytes of gathered weights at a time.
_GATHERED_BYTES = 256 << 20


@jax.custom_jvp
def sqrt_softplus(logit: jax.Array) -> jax.Array:
    """float32 sqrt(log(1 + e^logit)). Its derivative is finite where the softplus underflows to 0."""
    return jnp.sqrt(jax.nn.softplus(logit))


@sqrt_softplus.defjvp
def _sqrt_softplus_jvp(primals, tangents):
    (logit,), (tangent,) = primals, tangents
    score = sqrt_softplus(logit)
    # For logits below -20 softplus is e^logit, and the derivative e^(logit / 2) / 2.
    exact = jax.nn.sigmoid(logit) / (2 * jnp.where(logit < -20, 1.0, score))
    return score, tangent * jnp.where(logit < -20, jnp.exp(jnp.minimum(logit, 0) / 2) / 2, exact)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(x: jax.Array, weights: jax.Array, block_expert: jax.Array, rounds: bool = True) -> jax.Array:
    """Each block of rows times the transposed weight of its expert.

    Args:
      x: bfloat16 [blocks, block, in].
      weights: bfloat16 [E, out, in].
      block_expert: int32 [blocks]; blocks of experts outside 0..E-1 give zeros, and have none of the gradient.
      rounds: static; whether results are rounded to bfloat16 values.

    Returns:
      float32 [blocks, block, out].
    """
    return _forward(x, weights, block_expert, rounds)[0]


def _forward(x, weights, block_expert, rounds):
    used = (block_expert >= 0) & (block_expert < weights.shape[0])
    at = jnp.clip(block_expert, 0, weights.shape[0] - 1)

    def by_block(x, weights, at):
        def one(args):
            return contract(args[0], jax.lax.dynamic_index_in_dim(weights, args[1], 0, keepdims=False))

        return jax.lax.map(one, (x, at))

    def gathered(x, weights, at):
        def some(args):
            return bf16_einsum("bri,boi->bro", args[0], weights[args[1]])

        return _in_chunks(some, (x, at), _chunk(weights))

    y = jax.lax.platform_dependent(x, weights, at, cpu=by_block, default=gathered)
    y = jnp.where(used[:, None, None], round_bf16(y) if rounds else y, 0.0)
    return y, (x, weights, at, used)


def _backward(rounds, residuals, g):
    x, weights, at, used = residuals
    g = jnp.where(used[:, None, None], g, 0.0).astype(jnp.bfloat16)
    experts, chunk = weights.shape[0], _chunk(weights)

    def add(total, part):
        x, g, at = part
        dx = bf16_einsum("bro,boi->bri", g, weights[at]).astype(jnp.bfloat16)
        dw = jax.ops.segment_sum(bf16_einsum("bro,bri->boi", g, x), at, num_segments=experts)
        return total + dw, dx

    parts = cut((x, g, at), chunk)
    total, dx = jax.lax.scan(add, jnp.zeros(weights.shape, jnp.float32), parts)
    return dx.reshape(-1, *x.shape[1:])[: x.shape[0]], total.astype(weights.dtype), None


grouped_product.defvjp(_forward, _backward)


def _chunk(weights: jax.Array) -> int:
    """Blocks whose weights are gathered at a time."""
    return max(_GATHERED_BYTES // (4 * weights.shape[1] * weights.shape[2]), 1)


def _in_chunks(fn, arrays, chunk: int):
    y = jax.lax.map(fn, cut(arrays, chunk))
    return y.reshape(-1, *y.shape[2:])[: arrays[0].shape[0]]


def moe_sublayer(
    layer: MoE, x: jax.Array, valid: jax.Array, image_mask: jax.Array, forced: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The MoE sublayer with weights of `WeightFormat.QAT` or `BF16`.

    Args:
      layer: on one device.
      x: bfloat16 [B, T, D].
      valid, image_mask: bool [B, T]; padding is given to no expert.
      forced: int32 [B, T, K] experts to use instead of the chosen ones.

    Returns:
      y bfloat16 [B, T, D], experts int32 [B, T, K] ascending, scores float32 [B, T, E] without bias.
    """
    b, t, d = x.shape
    rows = x.reshape(b * t, d)
    gate = layer.gate
    with jax.named_scope("route"):
        score = with_fixed_rows(lambda rows: sqrt_softplus(contract(rows, gate.weight[...])), rows)
        bias = jnp.where(image_mask.reshape(-1, 1), gate.bias_vl[...], gate.bias[...])
        chosen = jax.lax.top_k(jax.lax.stop_gradient(score + bias), layer.top_k)[1]
        chosen = jnp.sort((chosen if forced is None else forced.reshape(b * t, -1)).astype(jnp.int32), axis=-1)
        weights = jnp.take_along_axis(score, chosen, axis=-1)
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20) * layer.scale
    with jax.named_scope("experts"):
        total = _routed(layer, rows, chosen, weights, valid.reshape(-1))
    with jax.named_scope("shared_expert"):
        shared = layer.shared_experts
        common = moe.expert(rows, shared.w1.stored, shared.w3.stored, shared.w2.stored, None, layer.limit)
    y = round_to_bf16(total + common.astype(jnp.float32))
    return y.reshape(b, t, d), chosen.reshape(b, t, -1), score.reshape(b, t, -1)


def _routed(layer: MoE, rows: jax.Array, chosen: jax.Array, weights: jax.Array, valid: jax.Array) -> jax.Array:
    """float32 [T, D], as `dsv41.ops.moe.routed_experts`."""
    routed = layer.experts
    quantized = routed.w1.format is WeightFormat.QAT
    experts = routed.w1.weight[...].shape[0]
    chosen = jnp.where(valid[:, None], chosen, experts)
    block = block_rows(chosen.size, experts)
    layout = layout_by_expert(chosen, jax.lax.stop_gradient(weights), experts, block=block)
    # The same numbers as `layout.row_weight`, with a gradient.
    flat = layout.place.reshape(-1)
    row_weight = jnp.zeros(layout.row_weight.size, jnp.float32).at[flat].set(weights.reshape(-1), mode="drop")
    rows = fake_quantize_fp8(rows) if quantized else rows
    x = rows.at[layout.source].get(mode="fill", fill_value=0)
    gate = grouped_product(x, routed.w1.weight[...], layout.block_expert)
    up = grouped_product(x, routed.w3.weight[...], layout.block_expert)
    inner = moe.swiglu(gate, up, layer.limit) * row_weight.reshape(*layout.row_weight.shape, 1)
    inner = round_to_bf16(inner)
    inner = fake_quantize_fp8(inner) if quantized else inner
    y = round_to_bf16(grouped_product(inner, routed.w2.weight[...], layout.block_expert))
    return sum_in_order(y.reshape(-1, rows.shape[-1]).at[layout.place].get(mode="fill", fill_value=0))
