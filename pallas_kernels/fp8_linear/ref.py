"""The meaning of the FP8 product in plain jnp."""

import jax

from pallas_kernels.fixed_order import contract, contract_groups
from pallas_kernels.quantize.ref import dequantize_weight_fp8


def fp8_linear(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    """As `ops.fp8_linear`."""
    weight = dequantize_weight_fp8(values, scales)
    groups = x.shape[1]
    if groups == 1:
        return contract(x[:, 0], weight)
    return contract_groups(x, weight.reshape(groups, -1, weight.shape[1])).reshape(x.shape[0], -1)
