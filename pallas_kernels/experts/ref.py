"""The meaning of the experts' product in plain jnp (architecture.md section 4)."""

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_order import contract
from pallas_kernels.quantize import ref as quantize
from pallas_kernels.rounding import round_bf16, round_to_bf16

Weight = tuple[jax.Array, jax.Array | None]


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(gate) * up in float32, the gate clamped from above only, up on both sides."""
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def expert_blocks(
    x: jax.Array, row_weight: jax.Array, block_expert: jax.Array, w1: Weight, w3: Weight, w2: Weight, *, limit: float
) -> jax.Array:
    """As `ops.expert_blocks`; unused blocks are zeros.

    A scan over blocks dequantises the block's expert and multiplies: memory is that of one expert and the rows.
    """
    num_experts = w1[0].shape[0]

    def one_block(_, inputs):
        x_block, weight_block, e = inputs
        used = (e >= 0) & (e < num_experts)

        def compute():
            at = jnp.clip(e, 0, num_experts - 1)
            return _expert(x_block, weight_block[:, None], *(_at(w, at) for w in (w1, w3, w2)), limit)

        return None, jax.lax.cond(used, compute, lambda: jnp.zeros_like(x_block))

    return jax.lax.scan(one_block, None, (x, row_weight, block_expert))[1]


def _expert(x: jax.Array, weight: jax.Array, w1: Weight, w3: Weight, w2: Weight, limit: float) -> jax.Array:
    """x bfloat16 [rows, D], weight float32 [rows, 1], one expert's matrices -> bfloat16 [rows, D]."""
    gate, up = (round_bf16(contract(x, _dequantize(w))) for w in (w1, w3))
    inner = round_to_bf16(swiglu(gate, up, limit) * weight)
    if w2[1] is not None:
        inner = quantize.dequantize_fp8(*quantize.quantize_fp8(inner))
    return round_to_bf16(contract(inner, _dequantize(w2)))


def _at(weight: Weight, index: jax.Array) -> Weight:
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, index, 0, keepdims=False), weight)


def _dequantize(weight: Weight) -> jax.Array:
    """bfloat16 [out, in], exact."""
    values, scales = weight
    if scales is None:
        return values
    if values.dtype == jnp.uint8:
        return quantize.dequantize_weight_fp4(values, scales)
    return quantize.dequantize_weight_fp8(values, scales)
