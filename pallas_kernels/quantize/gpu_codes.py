"""The block formats in PTX: what one thread does with 8 channels, and a few lanes with a group.

Only imported where a GPU kernel is traced. Values are MLIR i32: words of two bfloat16 (the lower channel in the lower
half), float32 bits, or bytes. The roundings are those of `pallas_kernels.formats`, bit for bit.
"""

import numpy as np
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils

from pallas_kernels import ptx
from pallas_kernels.ptx import Value

CHANNELS = 8  # of a thread's 16 bytes of bfloat16

_INFINITY = 0x7F800000
_NAN = 0x7FC00000


def _const(value: int) -> Value:
    return ptx.const(value - (1 << 32) if value >= 1 << 31 else value)


def _and(a: Value, mask: int) -> Value:
    return ptx.and_(a, _const(mask))


def _select(condition: Value, a: Value, b: Value) -> Value:
    return arith.select(condition, a, b)


def _below(a: Value, b: Value | int) -> Value:
    """Unsigned a < b."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, _const(b) if isinstance(b, int) else b)


def _multiply(a: Value, b: Value) -> Value:
    """float32 product; subnormal operands and results become zeros of their sign."""
    return ptx.asm("mul.rn.ftz.f32 $0, $1, $2;", a, b)


def _multiply_magnitude(a: Value, b: Value) -> Value:
    """float32 |a| * b, flushed likewise; the absolute value costs nothing."""
    return ptx.asm("{.reg .f32 t; abs.ftz.f32 t, $1; mul.rn.ftz.f32 $0, t, $2;}", a, b)


def _permute(a: Value, b: Value, selector: int) -> Value:
    return ptx.asm(f"prmt.b32 $0, $1, $2, {selector:#06x};", a, b)


def widen(word: Value) -> tuple[Value, Value]:
    """Two bfloat16 -> two float32."""
    return ptx.shl(word, 16), _and(word, 0xFFFF0000)


def narrow(low: Value, high: Value) -> Value:
    """Two float32 -> two bfloat16, to nearest even."""
    return ptx.asm("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high)


def group_amax(words: list[Value], lanes: int) -> Value:
    """float32 bits of the largest magnitude in the words of `lanes` neighbouring lanes; NaN is above infinity."""

    def larger(a, b):
        return ptx.asm("max.u16x2 $0, $1, $2;", a, b)

    magnitudes = [_and(w, 0x7FFF7FFF) for w in words]
    largest = magnitudes[0]
    for m in magnitudes[1:]:
        largest = larger(largest, m)
    distance = 1
    while distance < lanes:
        largest = larger(largest, utils.shfl_bfly(largest, distance))
        distance *= 2
    return ptx.shl(larger(largest, ptx.shr(largest, 16)), 16)


def _e8m0(amax: Value, floor: float, divisor: float) -> tuple[Value, Value, Value]:
    """Scale byte, float32 bits of 1 / scale, and whether the group has none because of a NaN or an infinity.

    As `formats.ceil_log2_ratio_exponent`: the carry out of the mantissa is the comparison of the mantissas.
    """
    divisor_bits = _float_bits(divisor)
    bits = arith.maxui(amax, _const(_float_bits(floor)))
    rounded = ptx.shr(ptx.add(bits, 0x7FFFFF - (divisor_bits & 0x7FFFFF)), 23)
    byte = ptx.add(rounded, 127 - (divisor_bits >> 23))
    bad = _below(_const(_INFINITY - 1), bits)
    reciprocal = ptx.shl(arith.subi(ptx.const(254), byte), 23)
    return _select(bad, ptx.const(255), byte), reciprocal, bad


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def encode_fp8(words: list[Value], amax: Value) -> tuple[list[Value], Value]:
    """4 words of bfloat16 and the amax of their group of 32 -> 2 words of E4M3 and the E8M0 byte."""
    byte, reciprocal, bad = _e8m0(amax, 1e-4, 448.0)
    reciprocal = _select(bad, ptx.const(_NAN), reciprocal)
    scaled = [_multiply(x, reciprocal) for w in words for x in widen(w)]
    text = (
        "{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
        " mov.b32 $0, {a, b};}"
    )
    return [ptx.asm(text, *scaled[i : i + 4]) for i in range(0, len(scaled), 4)], byte


def _rounded_e2m1(low: Value, high: Value) -> Value:
    """Two float32 v >= 0 -> E2M1 codes of v, to nearest even, in the low bits of the halves of 0x64006400.

    The code of a value is min(2 v, v + 2, v / 2 + 4). Added to 1024, whose float16 unit is 1, each of the three is
    rounded to an integer by the fused multiply-add, ties to the even code; a minimum of integers is one of the bits.
    float16 keeps 11 significant bits of v, enough that it does not become a tie. v above 6 gives codes above 7.
    """
    v = ptx.asm("cvt.rn.f16x2.f32 $0, $2, $1;", low, high)
    text = (
        "{.reg .b32 a, b, c; fma.rn.f16x2 a, $1, $2, $3; add.rn.f16x2 b, $1, $4; fma.rn.f16x2 c, $1, $5, $6;"
        " min.u16x2 a, a, b; min.u16x2 $0, a, c;}"
    )
    twice, half = _const(0x40004000), _const(0x38003800)
    return ptx.asm(text, v, twice, _const(0x64006400), _const(0x64026402), half, _const(0x64046404))


def _choose_bits(mask: int, ones: Value, zeros: Value) -> Value:
    """Bits of `ones` where the mask has 1, of `zeros` where it has 0."""
    return ptx.asm("lop3.b32 $0, $1, $2, $3, 0xE4;", ones, zeros, _const(mask))


def encode_mxfp4(words: list[Value], amax: Value) -> tuple[Value, Value]:
    """4 words of bfloat16 and the amax of their group of 32 -> E2M1 codes in adjacent order and the E8M0 byte."""
    byte, reciprocal, bad = _e8m0(amax, 6.0 * 2.0**-126, 6.0)
    codes = []
    for w in words:
        code = _rounded_e2m1(*(_multiply_magnitude(x, reciprocal) for x in widen(w)))
        codes.append(_choose_bits(0x00070007, code, ptx.shr(w, 12)))
    # Codes of channels 0..3 in bits 0, 16, 8, 24: the upper ones go into the high nibbles.
    pairs = [_choose_bits(0x000F000F, codes[i], ptx.shl(codes[i + 1], 8)) for i in (0, 2)]
    pairs = [_choose_bits(0x0F0F0F0F, p, ptx.shr(p, 12)) for p in pairs]
    return _select(bad, ptx.const(0), _permute(*pairs, 0x5410)), byte


def _kv_scales(amax: tuple[Value, Value]) -> tuple[list[Value], list[Value]]:
    """E4M3 bytes of two groups, and whether each holds a NaN."""
    ratios, bad = [], []
    for a in amax:
        ratio = _multiply(arith.maxui(a, _const(_float_bits(6.0 * 2.0**-9))), _const(_float_bits(1 / 6)))
        odd = _and(ptx.shr(ratio, 8), 1)
        ratios.append(_and(ptx.add(ratio, 0x7F, odd), 0xFFFFFF00))
        bad.append(_below(_const(_INFINITY), a))
    both = ptx.asm("{.reg .b16 a; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; mov.b32 $0, {a, a};}", *ratios)
    byte = [_and(both, 0xFF), _and(ptx.shr(both, 8), 0xFF)]
    return [_select(none, ptx.const(0x7F), b) for none, b in zip(bad, byte, strict=True)], bad


def encode_kv_fp4(low: list[Value], high: list[Value], amax: tuple[Value, Value]) -> tuple[list[Value], list[Value]]:
    """Channels j.. and j + C/2.. with the amax of their groups of 16 -> 8 bytes in half-split order, 2 E4M3 bytes."""
    scales, bad = _kv_scales(amax)
    rounded = []
    for words, scale in zip((low, high), scales, strict=True):
        # Quotients that are a tie differ from it by the error of the reciprocal, less than float16 keeps; others are at
        # least 2^-8 away.
        factor = ptx.asm("rcp.approx.ftz.f32 $0, $1;", e4m3_to_f32(scale))
        for w in words:
            code = _rounded_e2m1(*(_multiply_magnitude(x, factor) for x in widen(w)))
            rounded.append(ptx.asm("min.u16x2 $0, $1, $2;", code, _const(0x64076407)))
    pairs = []
    for i in range(4):
        lower = _choose_bits(0x00070007, rounded[i], ptx.shr(low[i], 12))
        upper = _choose_bits(0x00700070, ptx.shl(rounded[4 + i], 4), ptx.shr(high[i], 8))
        pairs.append(_choose_bits(0x000F000F, lower, upper))
    # A group with a NaN keeps the signs alone.
    keep = ptx.or_(
        _select(bad[0], _const(0x08080808), _const(0x0F0F0F0F)), _select(bad[1], _const(0x80808080), _const(0xF0F0F0F0))
    )
    return [ptx.and_(_permute(pairs[i], pairs[i + 1], 0x6420), keep) for i in (0, 2)], scales


def e4m3_to_f32(byte: Value) -> Value:
    """E4M3 byte -> float32 bits."""
    text = (
        "{.reg .b16 a, b; .reg .b32 t; cvt.u16.u32 a, $1; cvt.rn.f16x2.e4m3x2 t, a; mov.b32 {a, b}, t;"
        " cvt.f32.f16 $0, a;}"
    )
    return ptx.asm(text, byte)


def e8m0_to_f32(byte: Value) -> Value:
    """E8M0 byte -> float32 bits."""
    bits = _select(_below(byte, 1), ptx.const(0x00400000), ptx.shl(byte, 23))
    return _select(_below(byte, 255), bits, ptx.const(_NAN))


def decode_fp8(words: list[Value], scale: Value) -> list[Value]:
    """2 words of E4M3 and the E8M0 byte of their group -> 4 words of bfloat16."""
    factor = e8m0_to_f32(scale)
    text = (
        "{.reg .b16 a, b, c, d; .reg .b32 t; .reg .f32 x, y; mov.b32 {a, b}, $2;"
        " cvt.rn.f16x2.e4m3x2 t, a; mov.b32 {c, d}, t; cvt.f32.f16 x, c; cvt.f32.f16 y, d;"
        " mul.rn.f32 x, x, $3; mul.rn.f32 y, y, $3; cvt.rn.bf16x2.f32 $0, y, x;"
        " cvt.rn.f16x2.e4m3x2 t, b; mov.b32 {c, d}, t; cvt.f32.f16 x, c; cvt.f32.f16 y, d;"
        " mul.rn.f32 x, x, $3; mul.rn.f32 y, y, $3; cvt.rn.bf16x2.f32 $1, y, x;}"
    )
    return [out for w in words for out in ptx.asm(text, w, factor, results=2)]


def _decode_e2m1(halves: Value, factor: Value) -> Value:
    """Codes in the top 4 bits of each half, and a bfloat16 factor in both halves -> two bfloat16 products.

    Sign and magnitude moved to a bfloat16's places read as the value * 2^-126, subnormal codes included.
    """
    small = ptx.or_(_and(halves, 0x80008000), _and(ptx.shr(halves, 6), 0x01C001C0))
    value = ptx.asm("mul.rn.bf16x2 $0, $1, $2;", small, _const(0x7E807E80))  # 2^126
    return ptx.asm("mul.rn.bf16x2 $0, $1, $2;", value, factor)


def decode_mxfp4(word: Value, scale: Value) -> list[Value]:
    """8 codes in adjacent order and the E8M0 byte of their group -> 4 words of bfloat16."""
    bits = e8m0_to_f32(scale)
    factor = _permute(bits, bits, 0x3232)
    # Byte i of the word holds channels 2i and 2i + 1; its low nibble comes to the top in the shifted word.
    shifted = ptx.shl(word, 4)
    return [_decode_e2m1(_permute(shifted, word, (4 + i) << 12 | i << 4), factor) for i in range(4)]


def decode_kv_fp4(words: list[Value], scales: tuple[Value, Value]) -> tuple[list[Value], list[Value]]:
    """8 bytes in half-split order and two E4M3 bytes -> channels j.. and j + C/2.., 4 words of bfloat16 each."""
    factors = [ptx.asm("cvt.rn.bf16x2.f32 $0, $1, $1;", e4m3_to_f32(s)) for s in scales]
    low, high = [], []
    for w in words:
        shifted = ptx.shl(w, 4)
        for selector in (0x1100, 0x3322):
            low.append(_decode_e2m1(_permute(shifted, shifted, selector), factors[0]))
            high.append(_decode_e2m1(_permute(w, w, selector), factors[1]))
    return low, high
