"""Quantisation and the fused cache writes on Hopper GPUs (Mosaic GPU). Same signatures as `ops`."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.compat import gpu_problem
from pallas_kernels.formats import byte_to_e4m3, e4m3_to_byte
from pallas_kernels.page_layout import IndexPageLayout, MainPageLayout, WindowLayout

# Independent 16-byte accesses of a thread.
_UNROLL = 4


def problem(channels: int, count: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> str | None:
    """What keeps quantise and dequantise from rows of `channels`, `count` channels in all; None: nothing."""
    if dtype != jnp.bfloat16:
        return f"the kernel quantises bfloat16, not {jnp.dtype(dtype).name}"
    if channels % 32:
        return f"the kernel takes multiples of 32 channels, not {channels}"
    if count >= 1 << 33:
        return f"the kernel takes arrays of fewer than 2^33 values, not {count}"
    return gpu_problem()


def write_problem(channels: int, rope_dim: int) -> str | None:
    """What keeps the fused writes from rows of `channels`, the last `rope_dim` of them rotated; None: nothing."""
    if channels < 64:
        return f"the kernel takes rows of 64 channels or more, not {channels}"
    if rope_dim < 8 or rope_dim % 8:
        return f"the kernel rotates multiples of 8 channels, not {rope_dim}"
    return gpu_problem()


def quantize_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bfloat16 [..., C] -> E4M3 [..., C], E8M0 uint8 [..., C/32]."""
    values, scales = _quantize("fp8", x, 1, 32)
    return byte_to_e4m3(values), scales


def quantize_mxfp4(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bfloat16 [..., C] -> E2M1 codes in adjacent order [..., C/2], E8M0 uint8 [..., C/32]."""
    return _quantize("mxfp4", x, 2, 32)


def quantize_kv_fp4(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bfloat16 [..., C] -> E2M1 codes in half-split order [..., C/2], E4M3 bytes uint8 [..., C/16]."""
    return _quantize("kv_fp4", x, 2, 16)


def dequantize_fp8(values: jax.Array, scales: jax.Array) -> jax.Array:
    """E4M3 [..., C], E8M0 uint8 [..., C/32] -> bfloat16 [..., C]."""
    return _dequantize("fp8", e4m3_to_byte(values), scales, 1)


def dequantize_mxfp4(packed: jax.Array, scales: jax.Array) -> jax.Array:
    """Bytes [..., C/2] in adjacent order, E8M0 uint8 [..., C/32] -> bfloat16 [..., C]."""
    return _dequantize("mxfp4", packed, scales, 2)


def dequantize_kv_fp4(packed: jax.Array, scales: jax.Array) -> jax.Array:
    """Bytes [..., C/2] in half-split order, E4M3 bytes uint8 [..., C/16] -> bfloat16 [..., C]."""
    return _dequantize("kv_fp4", packed, scales, 2)


def _quantize(name: str, x: jax.Array, pack: int, group: int) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.quantize import gpu_stream

    shapes = [(*x.shape[:-1], x.shape[-1] // d) for d in (pack, group)]
    if not x.size:
        return tuple(jnp.zeros(shape, jnp.uint8) for shape in shapes)
    if name == "kv_fp4":
        made = gpu_stream.quantize_kv_fp4(x, unroll=_UNROLL // 2)
    else:
        made = gpu_stream.quantize(name, x, unroll=_UNROLL)
    return tuple(a.reshape(shape) for a, shape in zip(made, shapes, strict=True))


def _dequantize(name: str, values: jax.Array, scales: jax.Array, pack: int) -> jax.Array:
    from pallas_kernels.quantize import gpu_stream

    shape = (*values.shape[:-1], values.shape[-1] * pack)
    if not math.prod(shape):
        return jnp.zeros(shape, jnp.bfloat16)
    if name == "kv_fp4":
        made = gpu_stream.dequantize_kv_fp4(values, scales, unroll=_UNROLL)
    else:
        made = gpu_stream.dequantize(name, values, scales, unroll=_UNROLL)
    return made.reshape(shape)


def write_window(x, gain, rope, rings, slot, index, *, eps: float, layout: WindowLayout) -> jax.Array:
    """RMSNorm, RoPE, FP8 quantisation and the write into window rings, one launch, in place."""
    from pallas_kernels.quantize import gpu_write

    return gpu_write.write_window(x, gain, rope, rings, slot, index, eps=eps, layout=layout)


def write_main(latent, rope, pool, page, entry, *, layout: MainPageLayout) -> jax.Array:
    """RoPE, FP4 quantisation and the write into pages of main KV, one launch, in place."""
    from pallas_kernels.quantize import gpu_write

    return gpu_write.write_main(latent, rope, pool, page, entry, layout=layout)


def write_index(key, gain, rope, pool, page, entry, *, eps: float, layout: IndexPageLayout) -> jax.Array:
    """RMSNorm, RoPE, MXFP4 quantisation and the write into pages of index keys, one launch, in place."""
    from pallas_kernels.quantize import gpu_write

    return gpu_write.write_index(key, gain, rope, pool, page, entry, eps=eps, layout=layout)
