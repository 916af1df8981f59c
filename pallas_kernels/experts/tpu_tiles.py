"""Pieces of the TPU kernels of the experts' product: dequantised tiles, channel order, the FP8 round trip.

Byte j of a packed row holds channels 2j and 2j + 1, and four rows lie in one 32-bit word of VMEM. So nibbles come out of
words as (even or odd rows) x (even or odd columns) in natural order each, and nothing is interleaved on the way: what is
multiplied by columns has its even channels in front of its odd ones ("split" order), and what comes out of rows, too.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_formats import as_f32, e2m1, e2m1_pairs, with_sign

LANES = 128
PAIRS = 2 * LANES  # channels that are put in order together
GROUP_BYTES = 16  # bytes of a row that share a scale: 32 channels
_WORD_ROWS = 32  # rows of one register of bytes

# How codes become bfloat16: in float32, or two bfloat16 in a word where the vector unit calculates with those.
FORMS = ("float32", "pairs")
_WAYS = {"float32": 4, "pairs": 2}  # rows with the same number modulo this share an array of scales


def scale_type(form: str) -> jax.typing.DTypeLike:
    return jnp.float32 if form == "float32" else jnp.bfloat16


def ways(form: str) -> int:
    return _WAYS[form]


def split_matrix(count: int = 2) -> jax.Array:
    """bfloat16 [256, 256] of ones and zeros: row vectors times it are sorted by their channel's number modulo count."""
    channel, place = jnp.arange(PAIRS)[:, None], jnp.arange(PAIRS)[None]
    size = PAIRS // count
    return (channel == place % size * count + place // size).astype(jnp.bfloat16)


def spread_matrix(num_bytes: int) -> jax.Array:
    """bfloat16 [num_bytes / 16, num_bytes]: gives every byte of a row its group's scale."""
    group, byte = jnp.arange(num_bytes // GROUP_BYTES)[:, None], jnp.arange(num_bytes)[None]
    return (group == byte // GROUP_BYTES).astype(jnp.bfloat16)


def _by_pieces(x: jax.Array, matrix: jax.Array) -> list[jax.Array]:
    """bfloat16 [rows, 256 n] as n pieces [rows, 256], each times [256, 256] of one one a column: exact, float32."""
    rows = x.shape[0]
    # In float32, because eight rows of bfloat16 fill half of a register.
    pieces = [x[:, at : at + PAIRS].astype(jnp.float32) for at in range(0, x.shape[1], PAIRS)]
    stacked = jnp.concatenate(pieces, axis=0).astype(jnp.bfloat16)
    moved = jnp.dot(stacked, matrix, preferred_element_type=jnp.float32)
    return [moved[i * rows : (i + 1) * rows] for i in range(len(pieces))]


def split(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """bfloat16 [rows, n] in natural order -> even channels, then odd ones. `matrix`: `split_matrix()`."""
    pieces = _by_pieces(x, matrix)
    return jnp.concatenate([p[:, h * LANES : (h + 1) * LANES] for h in (0, 1) for p in pieces], 1).astype(jnp.bfloat16)


def joined(even: jax.Array, odd: jax.Array, matrix: jax.Array) -> jax.Array:
    """The inverse of `split`, for float32 [rows, n] that hold bfloat16 values. `matrix`: `split_matrix()` transposed."""
    pieces = [x[:, at : at + LANES] for at in range(0, even.shape[1], LANES) for x in (even, odd)]
    return jnp.concatenate(_by_pieces(jnp.concatenate(pieces, axis=1), matrix), axis=1).astype(jnp.bfloat16)


def _scale_values(code: jax.Array) -> jax.Array:
    """E8M0 codes in float32 -> powers of two; 0 gives 0 (2^-127 is a subnormal), 255 NaN."""
    code = code.astype(jnp.int32)
    return as_f32(jnp.where(code == 255, 0x7FC00000, code << 23))


def _factors(scales_ref, order_ref, factors, form: str) -> None:
    """Scale codes, ref uint8 [groups, out] -> their values, scratch bfloat16 [ways, out / ways, groups]."""
    count = ways(form)
    size = PAIRS // count
    for i in range(scales_ref.shape[1] // PAIRS):
        codes = scales_ref[:, i * PAIRS : (i + 1) * PAIRS].astype(jnp.int32).astype(jnp.float32).astype(jnp.bfloat16)
        # order [place, channel] times codes [groups, channel]: a transposition as well.
        moved = jax.lax.dot_general(order_ref[...], codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        values = _scale_values(moved).astype(jnp.bfloat16)
        for way in range(count):
            factors[way, i * size : (i + 1) * size] = values[way * size : (way + 1) * size]


def _planes_float32(words: jax.Array, scale: Callable[[int], jax.Array], shift: int, odd_row: int) -> jax.Array:
    """bfloat16 [2r, n] of the nibbles `shift` below the top of both halves of int32 [r, n]."""
    low = e2m1(words << (16 + shift)) * scale(odd_row)
    high = e2m1(words << shift) * scale(odd_row + 2)
    low, high = (jax.lax.bitcast_convert_type(x, jnp.int32) for x in (low, high))
    return pltpu.bitcast(jax.lax.shift_right_logical(low, 16) | high, jnp.bfloat16)


def dequantize(values_ref, scales_ref, order_ref, spread_ref, weights, factors, spread_scales, *, form: str) -> None:
    """Packed rows -> bfloat16, exact.

    Args:
      values_ref: uint8 [out, bytes], out a multiple of 256, bytes of 128.
      scales_ref: uint8 [bytes / 16, out], one code a group of 32 columns.
      order_ref: `split_matrix(ways(form))` transposed.
      spread_ref: `spread_matrix(bytes)`.
      weights: ref bfloat16 [2, out / 2, 2 * bytes]: even rows, odd rows; columns in split order.
      factors: scratch bfloat16 [ways, out / ways, bytes / 16].
      spread_scales: scratch `scale_type(form)` [ways, out / ways, chunk], chunk bytes of a row at a time.
    """
    out, num_bytes = values_ref.shape
    count, chunk = ways(form), spread_scales.shape[2]
    _factors(scales_ref, order_ref, factors, form)

    def columns(c, _):
        at = pl.ds(pl.multiple_of(c * chunk, LANES), chunk)
        for way in range(count):
            moved = jnp.dot(factors[way], spread_ref[:, at], preferred_element_type=jnp.float32)
            spread_scales[way] = moved.astype(spread_scales.dtype)

        def rows(r, _):
            words = pltpu.bitcast(
                values_ref[pl.ds(pl.multiple_of(r * _WORD_ROWS, _WORD_ROWS), _WORD_ROWS), at], jnp.int32
            )
            size = _WORD_ROWS // count
            here = pl.ds(pl.multiple_of(r * size, size), size)
            half = pl.ds(pl.multiple_of(r * _WORD_ROWS // 2, _WORD_ROWS // 2), _WORD_ROWS // 2)
            for odd_row in (0, 1):
                for odd_column in (0, 1):
                    # A half word is, from its top: odd row odd column, odd row even column, even row odd column, ...
                    shift = 8 * (1 - odd_row) + 4 * (1 - odd_column)
                    if form == "pairs":
                        plane = e2m1_pairs(words << shift) * spread_scales[odd_row, here]
                    else:
                        plane = _planes_float32(words, lambda way: spread_scales[way, here], shift, odd_row)
                    to = pl.ds(pl.multiple_of(odd_column * num_bytes + c * chunk, LANES), chunk)
                    weights[odd_row, half, to] = plane
            return 0

        jax.lax.fori_loop(0, out // _WORD_ROWS, rows, 0)
        return 0

    jax.lax.fori_loop(0, num_bytes // chunk, columns, 0)


def _largest_of_group(bits: jax.Array) -> jax.Array:
    """The largest int32 of every 16 lanes, on all of them."""
    parts = []
    for first in range(0, bits.shape[1], LANES):
        part = bits[:, first : first + LANES]
        lane = jax.lax.broadcasted_iota(jnp.int32, part.shape, 1)
        for step in (1, 2, 4, 8):
            # The lane whose number differs in this bit.
            other = jnp.where((lane & step) != 0, pltpu.roll(part, step, 1), pltpu.roll(part, LANES - step, 1))
            part = jnp.maximum(part, other)
        parts.append(part)
    return jnp.concatenate(parts, axis=1)


def through_fp8(even: jax.Array, odd: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 [rows, n] in split order after the round trip through E4M3 in groups of 32 channels, by its bits.

    As `quantize.ref.quantize_fp8` and `dequantize_fp8`, for values of bfloat16.
    """
    magnitudes = [jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF for x in (even, odd)]
    # Magnitudes order as integers, NaN above infinity. At least 1e-4.
    amax = _largest_of_group(jnp.maximum(jnp.maximum(*magnitudes), 0x38D1B717))
    exponent = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000).astype(jnp.int32)  # over 448 = 1.75 * 2^8, rounded up
    down, up = as_f32((254 - exponent) << 23), as_f32(exponent << 23)

    def one(x: jax.Array, magnitude: jax.Array) -> jax.Array:
        scaled = as_f32(magnitude) * down
        bits = jax.lax.bitcast_convert_type(scaled, jnp.int32)
        normal = as_f32((bits + 0x7FFFF + ((bits >> 20) & 1)) & -(1 << 20))
        # 2^14 has a last place of 2^-9, the smallest subnormal.
        steps = jax.lax.bitcast_convert_type(scaled + 2.0**14, jnp.int32) - ((127 + 14) << 23)
        rounded = jnp.where(scaled < 2.0**-6, steps.astype(jnp.float32) * 2.0**-9, normal) * up
        signed = with_sign(rounded, jax.lax.bitcast_convert_type(x, jnp.int32))
        return jnp.where(amax >= 0x7F800000, jnp.float32(jnp.nan), signed)

    return one(even, magnitudes[0]), one(odd, magnitudes[1])
