"""What the block formats mean, in plain jnp (architecture.md section 6). Every backend must give these bits.

Groups run along the last axis. `values` are what the tensor stores, `scales` one byte a group.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from pallas_kernels.norms import rms_norm
from pallas_kernels.page_layout import PAGE_ENTRIES, IndexPageLayout, MainPageLayout, WindowLayout, drop_index
from pallas_kernels.rope import apply_rope
from pallas_kernels.rounding import round_to_bf16

FP8_GROUP = 32
MXFP4_GROUP = 32
KV_FP4_GROUP = 16
WEIGHT_BLOCK = 32

_FP8_AMAX_FLOOR = 1e-4
_MXFP4_AMAX_FLOOR = 6.0 * 2.0**-126
_KV_FP4_AMAX_FLOOR = 6.0 * 2.0**-9
# Of stored weights: only so small that every code times its scale is a normal bfloat16.
_WEIGHT_FP8_AMAX_FLOOR = 448.0 * 2.0**-117


def _grouped(x: jax.Array, group: int) -> jax.Array:
    return x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group)


def _amax(grouped: jax.Array, floor: float) -> jax.Array:
    """Largest magnitude of each group, at least `floor`; NaN if there is one, so that a NaN shows up in the scale.

    Taken over the bits: magnitudes are ordered as integers, NaN above infinity, and a float maximum may skip NaN.
    """
    bits = jax.lax.bitcast_convert_type(grouped, jnp.uint32) & 0x7FFFFFFF
    largest = jnp.maximum(jnp.max(bits, axis=-1), jnp.uint32(np.float32(floor).view(np.uint32)))
    return jax.lax.bitcast_convert_type(largest, jnp.float32)


def _flushed(x: jax.Array) -> jax.Array:
    """float32 with subnormal numbers replaced by zeros of their sign, as some backends do in any multiplication."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    small = (bits & 0x7FFFFFFF) < 0x00800000
    return jax.lax.bitcast_convert_type(jnp.where(small, bits & jnp.uint32(0x80000000), bits), jnp.float32)


def _spread(scales: jax.Array, group: int) -> jax.Array:
    """One scale a group [..., G] -> one a channel [..., G * group]."""
    return jnp.repeat(scales, group, axis=-1)


def quantize_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., C] -> E4M3 [..., C] and E8M0 uint8 [..., C/32]; scale = 2^ceil(log2(max(amax, 1e-4) / 448)).

    A group with a NaN or an infinity has scale 255 and NaN codes.
    """
    grouped = _grouped(x, FP8_GROUP)
    scales = formats.ceil_log2_ratio_exponent(_amax(grouped, _FP8_AMAX_FLOOR), formats.E4M3_MAX)
    codes = formats.f32_to_e4m3(grouped * formats.e8m0_reciprocal_to_f32(scales)[..., None])
    return codes.reshape(x.shape), scales


def dequantize_fp8(values: jax.Array, scales: jax.Array) -> jax.Array:
    """E4M3 [..., C], E8M0 uint8 [..., C/32] -> bfloat16 [..., C]."""
    return round_to_bf16(formats.e4m3_to_f32(values) * _spread(formats.e8m0_to_f32(scales), FP8_GROUP))


def quantize_mxfp4(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., C] -> E2M1 codes, adjacent pairs a byte [..., C/2], and E8M0 uint8 [..., C/32].

    scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)). Subnormal inputs count as zeros of their sign; a group with a NaN
    or an infinity has scale 255 and codes 0.
    """
    grouped = _flushed(_grouped(x, MXFP4_GROUP))
    scales = formats.ceil_log2_ratio_exponent(_amax(grouped, _MXFP4_AMAX_FLOOR), formats.E2M1_MAX)
    codes = formats.f32_to_e2m1(grouped * formats.e8m0_reciprocal_to_f32(scales)[..., None])
    codes = jnp.where(scales[..., None] == 255, jnp.uint8(0), codes)
    return formats.pack_adjacent(codes.reshape(x.shape)), scales


def dequantize_mxfp4(packed: jax.Array, scales: jax.Array) -> jax.Array:
    """Bytes [..., C/2] in adjacent order, E8M0 uint8 [..., C/32] -> bfloat16 [..., C]."""
    codes = formats.unpack_adjacent(packed)
    return round_to_bf16(formats.e2m1_to_f32(codes) * _spread(formats.e8m0_to_f32(scales), MXFP4_GROUP))


def quantize_kv_fp4(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., C] -> E2M1 codes, half-split [..., C/2], and E4M3 scale bytes uint8 [..., C/16].

    scale = E4M3(max(amax, 6 * 2^-9) / 6), saturating; there is no second-level scale. Exact for inputs that hold
    bfloat16 values.
    """
    grouped = _grouped(x, KV_FP4_GROUP)
    # Compilers divide by a constant through its rounded reciprocal, which would move ties of the E4M3 rounding. A
    # bfloat16 amax over 6 is on a tie or 2^-8 away from it, so dropping the last 8 bits restores exact ties and moves
    # nothing else.
    ratio = jax.lax.reduce_precision(_amax(grouped, _KV_FP4_AMAX_FLOOR) / 6.0, exponent_bits=8, mantissa_bits=15)
    scales = formats.f32_to_e4m3(ratio)
    codes = formats.f32_to_e2m1(grouped, formats.e4m3_to_f32(scales)[..., None])
    return formats.pack_halves(codes.reshape(x.shape)), formats.e4m3_to_byte(scales)


def dequantize_kv_fp4(packed: jax.Array, scales: jax.Array) -> jax.Array:
    """Bytes [..., C/2] in half-split order, E4M3 scale bytes [..., C/16] -> bfloat16 [..., C]."""
    scale = formats.e4m3_to_f32(formats.byte_to_e4m3(scales))
    return round_to_bf16(formats.e2m1_to_f32(formats.unpack_halves(packed)) * _spread(scale, KV_FP4_GROUP))


def dequantize_weight_fp8(values: jax.Array, scales: jax.Array) -> jax.Array:
    """E4M3 [..., out, in], E8M0 uint8 [..., ceil(out/32), ceil(in/32)] -> bfloat16 [..., out, in]."""
    out_dim, in_dim = values.shape[-2:]
    scale = formats.e8m0_to_f32(scales)
    scale = jnp.repeat(jnp.repeat(scale, WEIGHT_BLOCK, axis=-2), WEIGHT_BLOCK, axis=-1)
    return round_to_bf16(formats.e4m3_to_f32(values) * scale[..., :out_dim, :in_dim])


def dequantize_weight_fp4(packed: jax.Array, scales: jax.Array) -> jax.Array:
    """Bytes [..., out, in/2] in adjacent order, E8M0 uint8 [..., out, in/32] -> bfloat16 [..., out, in]."""
    return dequantize_mxfp4(packed, scales)


def quantize_rows_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Stored rows (Engram tables): [..., C] -> E4M3 [..., C] and E8M0 uint8 [..., C/32].

    As `quantize_fp8`, but small groups keep their precision.
    """
    grouped = _grouped(x, FP8_GROUP)
    scales = formats.ceil_log2_ratio_exponent(_amax(grouped, _WEIGHT_FP8_AMAX_FLOOR), formats.E4M3_MAX)
    codes = formats.f32_to_e4m3(grouped * formats.e8m0_reciprocal_to_f32(scales)[..., None])
    return codes.reshape(x.shape), scales


def quantize_weight_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float [..., out, in] -> E4M3 [..., out, in] and E8M0 uint8 [..., ceil(out/32), ceil(in/32)], one a tile.

    The scale is the smallest power of two with which no value saturates, so that values that such a tile stores come
    back exactly, whatever scale they were stored with. Tiles at the edges may be smaller.
    """
    out_dim, in_dim = x.shape[-2:]
    pad = [(0, 0)] * (x.ndim - 2) + [(0, -out_dim % WEIGHT_BLOCK), (0, -in_dim % WEIGHT_BLOCK)]
    tiles = jnp.pad(x.astype(jnp.float32), pad)
    shape = tiles.shape
    tiles = tiles.reshape(*shape[:-2], shape[-2] // WEIGHT_BLOCK, WEIGHT_BLOCK, shape[-1] // WEIGHT_BLOCK, WEIGHT_BLOCK)
    largest = _amax(tiles, _WEIGHT_FP8_AMAX_FLOOR).max(axis=-2)
    # The maximum of floats may skip a NaN that `_amax` kept.
    largest = jnp.where(jnp.isnan(tiles).any(axis=(-3, -1)), jnp.nan, largest)
    scales = formats.ceil_log2_ratio_exponent(largest, formats.E4M3_MAX)
    codes = formats.f32_to_e4m3(tiles * formats.e8m0_reciprocal_to_f32(scales)[..., :, None, :, None])
    return codes.reshape(shape)[..., :out_dim, :in_dim], scales


def quantize_weight_fp4(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float [..., out, in] -> bytes [..., out, in/2] in adjacent order, E8M0 uint8 [..., out, in/32]; as
    `quantize_mxfp4`. Values that such a row stores come back exactly."""
    return quantize_mxfp4(x)


def _in_range(outer: jax.Array, inner: jax.Array, num_outer: int, num_inner: int) -> jax.Array:
    """Slots or pages, those that do not exist or whose inner index does not exist replaced by one that is dropped."""
    return drop_index(outer, (outer >= 0) & (inner >= 0) & (inner < num_inner), num_outer)


def write_window(
    x: jax.Array,
    gain: jax.Array,
    rope: jax.Array,
    rings: jax.Array,
    slot: jax.Array,
    index: jax.Array,
    *,
    eps: float,
    layout: WindowLayout,
) -> jax.Array:
    """The rings with the rows of `x` after RMSNorm, RoPE and FP8 quantisation.

    x bfloat16 [B, T, H]; gain bfloat16 [H]; rope float32 [B, T, 2, r]; rings uint8, see `WindowLayout`; slot, index
    int32 [B, T]. Rows whose slot or index is out of range are dropped.
    """
    codes, scales = quantize_fp8(apply_rope(rms_norm(x, gain, eps), rope))
    slot = _in_range(slot, index, rings.shape[0], layout.length)
    return layout.write(rings, slot, index, formats.e4m3_to_byte(codes), scales)


def write_main(
    latent: jax.Array, rope: jax.Array, pool: jax.Array, page: jax.Array, entry: jax.Array, *, layout: MainPageLayout
) -> jax.Array:
    """The pool with the rows of `latent` after RoPE and FP4 quantisation.

    latent bfloat16 [B, G, H], already normed; rope float32 [B, G, 2, r]; pool uint8, see `MainPageLayout`; page, entry
    int32 [B, G]. Rows whose page or entry is out of range are dropped.
    """
    page = _in_range(page, entry, pool.shape[0], PAGE_ENTRIES)
    return layout.write(pool, page, entry, *quantize_kv_fp4(apply_rope(latent, rope)))


def write_index(
    key: jax.Array,
    gain: jax.Array,
    rope: jax.Array,
    pool: jax.Array,
    page: jax.Array,
    entry: jax.Array,
    *,
    eps: float,
    layout: IndexPageLayout,
) -> jax.Array:
    """The pool with the rows of `key` after RMSNorm, RoPE and MXFP4 quantisation.

    key bfloat16 [B, G, C]; gain bfloat16 [C]; rope float32 [B, G, 2, r]; pool uint8, see `IndexPageLayout`; page, entry
    int32 [B, G]. Rows whose page or entry is out of range are dropped.
    """
    page = _in_range(page, entry, pool.shape[0], PAGE_ENTRIES)
    return layout.write(pool, page, entry, *quantize_mxfp4(apply_rope(rms_norm(key, gain, eps), rope)))
