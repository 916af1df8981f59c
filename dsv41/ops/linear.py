"""Matrix products with stored weights (architecture.md section 6, "Which product runs in which precision").

Weights stay in their stored bytes and are dequantised where they are used. Every value times its scale is exact in
bfloat16, so a bfloat16 product with float32 accumulation equals the block-scaled product up to summation order.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax

from dsv41.ops.straight_through import activation_fp8, group_product_bf16, product_bf16
from pallas_kernels.fixed_order import contract, contract_groups
from pallas_kernels.fp8_linear.ops import fp8_linear
from pallas_kernels.quantize import ops as quantize
from pallas_kernels.rounding import round_to_bf16


class WeightFormat(enum.Enum):
    """How a weight matrix is stored."""

    BF16 = "bf16"
    FP8_BLOCK = "fp8_block"  # E4M3, one E8M0 scale per 32x32 tile
    FP4_ROW = "fp4_row"  # packed E2M1, one E8M0 scale per 32 input columns of a row
    # bfloat16 values of one of the two formats above, taken as these are: what training sees of a quantised weight
    QAT = "qat"

    @property
    def has_scales(self) -> bool:
        return self in (WeightFormat.FP8_BLOCK, WeightFormat.FP4_ROW)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A stored weight [..., out, in]: bytes, scales and what they mean."""

    # BF16, QAT: bfloat16 [..., out, in]; FP8_BLOCK: float8_e4m3fn [..., out, in]; FP4_ROW: uint8 [..., out, in/2]
    values: Any
    scales: Any  # None; uint8 [..., ceil(out/32), ceil(in/32)]; uint8 [..., out, in/32]
    format: WeightFormat = dataclasses.field(metadata={"static": True})

    def dequantize(self) -> jax.Array:
        """bfloat16 [..., out, in], exact."""
        if self.format is WeightFormat.FP8_BLOCK:
            return quantize.dequantize_weight_fp8(self.values, self.scales)
        if self.format is WeightFormat.FP4_ROW:
            return quantize.dequantize_weight_fp4(self.values, self.scales)
        return self.values

    def at_row(self, index: jax.Array) -> QuantizedArray:
        """Entry `index` of the leading (expert) axis."""
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), self)


def fake_quantize_fp8(x: jax.Array) -> jax.Array:
    """What a matrix unit sees of an activation: bfloat16 [..., C] after the round trip through FP8 groups of 32.

    The gradient passes straight through.
    """
    return activation_fp8(x)


def linear(x: jax.Array, weight: QuantizedArray) -> jax.Array:
    """bfloat16 [..., in] -> bfloat16 [..., out]; activations enter FP8 and FP4 weights' products through FP8."""
    return round_to_bf16(linear_sum(x, weight))


def linear_sum(x: jax.Array, weight: QuantizedArray) -> jax.Array:
    """`linear` before its result is rounded: float32 [..., out]."""
    if weight.format is not WeightFormat.BF16:
        x = fake_quantize_fp8(x)
    return product(x, weight)


def product(x: jax.Array, weight: QuantizedArray) -> jax.Array:
    """bfloat16 [..., in], taken as it is -> float32 [..., out]."""
    if not weight.format.has_scales:
        return product_bf16(x, weight.values)
    if weight.format is WeightFormat.FP4_ROW:
        return contract(x, weight.dequantize())
    y = fp8_linear(x.reshape(-1, 1, x.shape[-1]), weight.values, weight.scales)
    return y.reshape(*x.shape[:-1], -1)


def grouped_linear(x: jax.Array, weight: QuantizedArray) -> jax.Array:
    """Each group of inputs times its own rows of a weight [G * out, in], activations not quantised.

    x bfloat16 [..., G, in] -> bfloat16 [..., G, out].
    """
    groups, width = x.shape[-2:]
    if not weight.format.has_scales:
        return round_to_bf16(group_product_bf16(x, weight.values.reshape(groups, -1, width)))
    if weight.format is WeightFormat.FP4_ROW:
        return round_to_bf16(contract_groups(x, weight.dequantize().reshape(groups, -1, width)))
    y = fp8_linear(x.reshape(-1, groups, width), weight.values, weight.scales)
    return round_to_bf16(y.reshape(*x.shape[:-1], -1))
