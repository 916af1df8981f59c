"""Encoding and decoding of the block formats inside TPU kernels: float32 and int32 arrays [rows, lanes].

Channels lie on lanes, a multiple of 128 of them. Bytes change places by products with matrices of ones (and sixteens):
integers up to 256 are exact in bfloat16, each sum has few terms, and the matrix unit has nothing else to do.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_formats import as_f32, e2m1, e4m3, e4m3_magnitude

LANES = 128
GROUPS = {"fp8": 32, "mxfp4": 32, "kv_fp4": 16}

_INFINITY = 0x7F800000
_NAN = 0x7FC00000
# Bits of the least amax of a group: 1e-4, 6 * 2^-126, 6 * 2^-9.
_FLOOR = {"fp8": 0x38D1B717, "mxfp4": (3 << 23) | 0x400000, "kv_fp4": (120 << 23) | 0x400000}


def lanes(shape: tuple[int, ...]) -> jax.Array:
    """int32: the lane number of every element."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)


def swap_lanes(x: jax.Array, distance: int) -> jax.Array:
    """Lane l gets the value of lane l XOR distance, a power of two."""
    width = x.shape[1]
    return jnp.where((lanes(x.shape) & distance) != 0, pltpu.roll(x, distance, 1), pltpu.roll(x, width - distance, 1))


def round_to_bf16_value(x: jax.Array) -> jax.Array:
    """float32 rounded to a bfloat16 value by its bits; a cast forth and back may be taken for the identity.

    NaN stays NaN, with its sign.
    """
    bits = bits_of(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & jnp.int32(-65536)
    return as_f32(jnp.where((bits & 0x7FFFFFFF) > _INFINITY, bits | 0x400000, rounded))


def bits_of(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def selection(rows: int, columns: int, weight: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """bfloat16 [rows, columns] of `weight` of the row and column numbers."""
    row = jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    return weight(row, column).astype(jnp.float32).astype(jnp.bfloat16)


def where_equal(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(a == b, 1.0, 0.0)


def moved(values: jax.Array, matrix: jax.Array) -> jax.Array:
    """int32 [rows, n] of 0..256 times bfloat16 [n, m] -> int32 [rows, m]."""
    return jnp.dot(as_bf16(values), matrix, preferred_element_type=jnp.float32).astype(jnp.int32)


def as_bf16(values: jax.Array) -> jax.Array:
    """int32 0..256 -> bfloat16."""
    return values.astype(jnp.float32).astype(jnp.bfloat16)


def _group_max(x: jax.Array, group: int) -> jax.Array:
    """The largest int32 of each group of lanes, on all of its lanes."""
    parts = []
    for first in range(0, x.shape[1], LANES):
        part = x[:, first : first + LANES]
        for step in range(group.bit_length() - 1):
            part = jnp.maximum(part, pltpu.roll(part, LANES - (1 << step), 1))
        # The first lane of a group has its maximum.
        start = lanes(part.shape) & -group
        parts.append(jnp.take_along_axis(part, start, axis=1, mode="promise_in_bounds"))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _e4m3_codes(magnitude_bits: jax.Array) -> jax.Array:
    """Bits of float32 >= 0 -> E4M3 codes, to nearest even, saturating at 448; NaN 0x7F."""
    normal = ((magnitude_bits + 0x7FFFF + ((magnitude_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2^14, whose last place is 2^-9, rounds to multiples of the smallest subnormal.
    subnormal = bits_of(as_f32(magnitude_bits) + 2.0**14) - bits_of(jnp.float32(2.0**14))
    code = jnp.where(magnitude_bits < (121 << 23), subnormal, jnp.minimum(normal, 0x7E))
    return jnp.where(magnitude_bits > _INFINITY, 0x7F, code)


def _e2m1_codes(magnitude: jax.Array) -> jax.Array:
    """float32 in [0, 8) -> E2M1 codes 0..7, to nearest even."""
    bits = bits_of(magnitude)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - (126 << 1)
    subnormal = bits_of(magnitude + 2.0**22) - bits_of(jnp.float32(2.0**22))
    return jnp.minimum(jnp.where(bits < (127 << 23), subnormal, normal), 7)


def _e2m1_codes_over(magnitude: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 >= 0 over a scale of few significant bits -> E2M1 codes 0..7, to nearest even; 0 where NaN."""
    code = jnp.zeros(magnitude.shape, jnp.int32)
    for midpoint, tie_is_above in (
        (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False),
    ):  # fmt: skip
        above = magnitude >= midpoint * scale if tie_is_above else magnitude > midpoint * scale
        code = code + above.astype(jnp.int32)
    return code


def encode(name: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 [rows, n] -> codes and scale bytes of a format, both int32 [rows, n]: every lane has its group's scale.

    The bits of `ref.quantize_*`; for "kv_fp4" x must hold bfloat16 values.
    """
    bits = bits_of(x)
    magnitude = bits & 0x7FFFFFFF
    if name == "mxfp4":
        magnitude = jnp.where(magnitude < (1 << 23), 0, magnitude)
    # Magnitudes order as integers, NaN above infinity.
    amax = jnp.maximum(_group_max(magnitude, GROUPS[name]), _FLOOR[name])
    if name == "kv_fp4":
        # A quotient that lies on a tie must not leave it by the rounding of the reciprocal: the last 8 bits go.
        ratio = bits_of(as_f32(amax) * (1 / 6.0))
        ratio = jnp.where(amax >= _INFINITY, amax, (ratio + 0x7F + ((ratio >> 8) & 1)) & jnp.int32(-256))
        scale = _e4m3_codes(ratio)
        decoded = jnp.where(scale == 0x7F, jnp.float32(jnp.nan), e4m3_magnitude(scale))
        codes = _e2m1_codes_over(as_f32(magnitude), decoded) | ((bits >> 28) & 8)
        return codes, scale
    # amax / 448 or amax / 6, both 1.75 or 1.5 times a power of two, up to the next power of two.
    power, mantissa = (8, 0x600000) if name == "fp8" else (2, 0x400000)
    scale = (amax >> 23) - power + ((amax & 0x7FFFFF) > mantissa).astype(jnp.int32)
    scale = jnp.where(amax >= _INFINITY, 255, scale)
    scaled = as_f32(magnitude) * as_f32((254 - jnp.minimum(scale, 253)) << 23)
    if name == "fp8":
        return jnp.where(scale == 255, 0x7F, _e4m3_codes(bits_of(scaled)) | ((bits >> 24) & 0x80)), scale
    return jnp.where(scale == 255, 0, _e2m1_codes(scaled) | ((bits >> 28) & 8)), scale


def decode(name: str, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """int32 codes and scale bytes, [rows, n] each -> float32 values, as `ref.dequantize_*` before its rounding.

    2^-127 is a subnormal factor: a device that flushes subnormals gives 0 for products below 2^-126.
    """
    if name == "kv_fp4":
        return e2m1(codes << 28) * _e4m3_or_nan(scale)
    values = _e4m3_or_nan(codes) if name == "fp8" else e2m1(codes << 28)
    normal = as_f32(jnp.where(scale == 255, _NAN, jnp.maximum(scale, 1) << 23))
    return jnp.where(scale == 0, values * 0.5, values) * normal


def _e4m3_or_nan(code: jax.Array) -> jax.Array:
    return jnp.where((code & 0x7F) == 0x7F, jnp.float32(jnp.nan), e4m3(code << 24))
