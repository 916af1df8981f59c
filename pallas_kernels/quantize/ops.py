"""Entry points of block quantisation.

One implementation exists so far, the plain-jnp meaning in `ref`, on every backend.
"""

from pallas_kernels.quantize.ref import (
    FP8_GROUP,
    KV_FP4_GROUP,
    MXFP4_GROUP,
    WEIGHT_BLOCK,
    dequantize_fp8,
    dequantize_kv_fp4,
    dequantize_mxfp4,
    dequantize_weight_fp4,
    dequantize_weight_fp8,
    quantize_fp8,
    quantize_kv_fp4,
    quantize_mxfp4,
)

__all__ = [
    "FP8_GROUP",
    "KV_FP4_GROUP",
    "MXFP4_GROUP",
    "WEIGHT_BLOCK",
    "dequantize_fp8",
    "dequantize_kv_fp4",
    "dequantize_mxfp4",
    "dequantize_weight_fp4",
    "dequantize_weight_fp8",
    "quantize_fp8",
    "quantize_kv_fp4",
    "quantize_mxfp4",
]
