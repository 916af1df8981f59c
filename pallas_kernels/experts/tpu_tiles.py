"""Pieces of the TPU kernels of the experts' product: dequantised tiles, channel order, the FP8 round trip.

Byte j of a packed row holds channels 2j and 2j + 1, and four rows lie in one 32-bit word of VMEM. So nibbles come out
of words as (even or odd rows) x (even or odd columns), in natural order each. Nothing is interleaved on the way: inside
the kernels channels are in split order, of every 256 the 128 even ones in front of the 128 odd ones.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_formats import as_f32, with_sign

LANES = 128
PAIRS = 2 * LANES  # channels that are put in order together
GROUP_BYTES = 16  # bytes of a row that share a scale: 32 channels
_SUBLANES = 8
_WORD_ROWS = 4 * _SUBLANES  # rows of one register of bytes
_HIGH = -65536  # the upper half of a word
_SIGNS = -(2**31) | 2**15  # of two bfloat16
_NAN = 0x7FC00000
_INFINITY = 0x7F800000
UNIT = 2.0**63  # what dequantised weights are too small by
_LARGEST_SCALE = 192  # 2^65; what is above counts as NaN

# How codes become bfloat16: in float32, or two bfloat16 in a word where the vector unit calculates with those.
FORMS = ("float32", "pairs")


def split_matrix() -> jax.Array:
    """bfloat16 [256, 256] of ones and zeros: row vectors times it come into split order."""
    channel, place = jnp.arange(PAIRS)[:, None], jnp.arange(PAIRS)[None]
    return (channel == place % LANES * 2 + place // LANES).astype(jnp.bfloat16)


def reordered(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """[rows, n] of bfloat16 values, every 256 channels times [256, 256] with a single one in each column: exact."""
    rows = x.shape[0]
    # In float32, because eight rows of bfloat16 fill half of a register.
    pieces = [x[:, at : at + PAIRS].astype(jnp.float32) for at in range(0, x.shape[1], PAIRS)]
    stacked = jnp.concatenate(pieces, axis=0).astype(jnp.bfloat16)
    moved = jnp.dot(stacked, matrix, preferred_element_type=jnp.float32)
    return jnp.concatenate([moved[i * rows : (i + 1) * rows] for i in range(len(pieces))], axis=1).astype(jnp.bfloat16)


def scales_shape(out: int, num_bytes: int) -> tuple[int, int]:
    """Of the scratch of `dequantize`: [out / 2, groups filled up to whole registers]."""
    return out // 2, -(-num_bytes // GROUP_BYTES // LANES) * LANES


def _spread_rows(codes_ref, join_ref, scales) -> None:
    """Scale codes, ref uint8 [groups, out] -> `scales`: times 2^62, pairs of rows as `dequantize` meets them."""
    groups = codes_ref.shape[0]
    for i in range(codes_ref.shape[1] // PAIRS):
        codes = codes_ref[:, i * PAIRS : (i + 1) * PAIRS].astype(jnp.int32).astype(jnp.float32).astype(jnp.bfloat16)
        # [place, row] times codes [groups, row]: a transposition as well. Codes are exact in bfloat16.
        moved = jax.lax.dot_general(join_ref[...], codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        code = moved.astype(jnp.int32)
        values = as_f32(jnp.where(code > _LARGEST_SCALE, _NAN, (code + 62) << 23)).astype(jnp.bfloat16)
        scales[i * LANES : (i + 1) * LANES, :groups] = pltpu.bitcast(values, jnp.int32)


def _with_exponents(words: jax.Array) -> jax.Array:
    """E2M1 magnitudes of the eight nibbles of int32 as (exponent, mantissa bit): code c becomes c + min(c, 2).

    That is 0 for 0, exponent 1 for 0.5 and exponents 2 to 4 for the others: no subnormal is left.
    """
    two_up = (words >> 1) | (words >> 2)
    ones = 0x11111111
    return (words & 0x77777777) + (two_up & ones) + ((words | two_up) & ones)


def _decode(words: jax.Array, exponents: jax.Array, scale: jax.Array, shift: int, form: str) -> jax.Array:
    """int32 words of two bfloat16: the nibbles `shift` bits below the tops of both halves, times scale, times 2^-63.

    exponents: `_with_exponents` of the words; scale: words of two bfloat16, 2^62 times the scales.
    """
    # An exponent of 1 stands for 0.5: what is made here is 2^-125 of the value.
    both = (((exponents << shift) >> 6) & 0x03C003C0) | ((words << shift) & _SIGNS)
    if form == "pairs":
        return pltpu.bitcast(pltpu.bitcast(both, jnp.bfloat16) * pltpu.bitcast(scale, jnp.bfloat16), jnp.int32)
    low, high = (
        jax.lax.bitcast_convert_type(as_f32(half) * as_f32(factor), jnp.int32)
        for half, factor in ((both << 16, scale << 16), (both & _HIGH, scale & _HIGH))
    )
    return jax.lax.shift_right_logical(low, 16) | high


def dequantize(values_ref, codes_ref, join_ref, weights, scales, *, form: str) -> None:
    """Packed rows -> bfloat16 times 1 / `UNIT`, exact for scales from 2^-62 to 2^65.

    Larger ones count as NaN; values that are smaller than 2^-63 become 0.

    Args:
      values_ref: uint8 [out, bytes], out a multiple of 256, bytes of 128.
      codes_ref: uint8 [bytes / 16, out], one scale a group of 32 columns.
      join_ref: `split_matrix()` transposed.
      weights: ref int32 [out / 2, 2 * bytes], words of two bfloat16 rows; rows and columns in split order.
      scales: scratch int32 of `scales_shape`.
    """
    out, num_bytes = values_ref.shape
    _spread_rows(codes_ref, join_ref, scales)
    in_piece = PAIRS // _WORD_ROWS

    def rows(r, _):
        stored = pl.ds(pl.multiple_of(r * _WORD_ROWS, _WORD_ROWS), _WORD_ROWS)
        lane = jax.lax.broadcasted_iota(jnp.int32, (_SUBLANES, LANES), 1)
        for first in range(0, num_bytes, LANES):
            words = pltpu.bitcast(values_ref[stored, first : first + LANES], jnp.int32)
            exponents = _with_exponents(words)
            group = first // GROUP_BYTES
            which, there = lane // GROUP_BYTES + group % LANES, pl.ds(group // LANES * LANES, LANES)
            for odd_row in (0, 1):
                row = r // in_piece * LANES + odd_row * (LANES // 2) + r % in_piece * _SUBLANES
                here = pl.ds(pl.multiple_of(row, _SUBLANES), _SUBLANES)
                scale = jnp.take_along_axis(scales[here, there], which, axis=1, mode="promise_in_bounds")
                for odd_column in (0, 1):
                    # A half word is, from its top: odd row odd column, odd row even column, even row odd column, ...
                    shift = 8 * (1 - odd_row) + 4 * (1 - odd_column)
                    to = 2 * first + odd_column * LANES
                    weights[here, to : to + LANES] = _decode(words, exponents, scale, shift, form)
        return 0

    # Two at a time: one alone leaves more of the slots to latencies.
    jax.lax.fori_loop(0, out // _WORD_ROWS, rows, 0, unroll=2)


def _largest_of_group(bits: jax.Array) -> jax.Array:
    """The largest int32 of every 16 of 128 lanes, on all of them."""
    lane = jax.lax.broadcasted_iota(jnp.int32, bits.shape, 1)
    for step in (1, 2, 4, 8):
        # The lane whose number differs in this bit.
        other = jnp.where((lane & step) != 0, pltpu.roll(bits, step, 1), pltpu.roll(bits, LANES - step, 1))
        bits = jnp.maximum(bits, other)
    return bits


def _fp8(x: jax.Array, amax: jax.Array) -> jax.Array:
    """float32 after the round trip through E4M3, given the bits of its group's largest magnitude."""
    exponent = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000).astype(jnp.int32)  # over 448 = 1.75 * 2^8, rounded up
    scaled = jnp.abs(x) * as_f32((254 - exponent) << 23)
    bits = jax.lax.bitcast_convert_type(scaled, jnp.int32)
    normal = as_f32((bits + 0x7FFFF + ((bits >> 20) & 1)) & -(1 << 20))
    # 2^14 has a last place of 2^-9, the smallest subnormal.
    steps = jax.lax.bitcast_convert_type(scaled + 2.0**14, jnp.int32) - ((127 + 14) << 23)
    rounded = jnp.where(scaled < 2.0**-6, steps.astype(jnp.float32) * 2.0**-9, normal) * as_f32(exponent << 23)
    signed = with_sign(rounded, jax.lax.bitcast_convert_type(x, jnp.int32))
    return jnp.where(amax >= _INFINITY, jnp.float32(jnp.nan), signed)


def through_fp8(x: jax.Array) -> jax.Array:
    """float32 [rows, n] of bfloat16 values in split order after the round trip through E4M3 in groups of 32 channels.

    The values of `quantize.ref.dequantize_fp8(quantize_fp8(x))`.
    """
    parts = []
    for at in range(0, x.shape[1], PAIRS):
        halves = [x[:, at : at + LANES], x[:, at + LANES : at + PAIRS]]
        # Magnitudes order as integers, NaN above infinity. At least 1e-4.
        bits = [jax.lax.bitcast_convert_type(half, jnp.int32) & 0x7FFFFFFF for half in halves]
        amax = _largest_of_group(jnp.maximum(jnp.maximum(*bits), 0x38D1B717))
        parts += [_fp8(half, amax) for half in halves]
    return jnp.concatenate(parts, axis=1)
