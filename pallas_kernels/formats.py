"""The number formats of the checkpoint and the caches, one definition each (architecture.md section 6).

| format | code | values |
|---|---|---|
| E2M1 ("FP4") | 4 bits in uint8, bit 3 the sign | 0, .5, 1, 1.5, 2, 3, 4, 6 |
| E4M3 ("FP8") | `float8_e4m3fn` | largest 448; 0x7F and 0xFF are NaN |
| E8M0 scale | uint8 `e` | 2^(e - 127); 255 is NaN |

Casts into E2M1 and E4M3 round to nearest, ties to even, and saturate. NaN inputs become NaN in E4M3 and E8M0; E2M1 has
no NaN, so there the group's scale carries it. All functions are elementwise on any shape, use integer operations on
float32 bits, and keep float32 subnormals (2^-127 is one) on backends that flush them.
"""

import jax
import jax.numpy as jnp
import numpy as np

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def ceil_log2_ratio_exponent(x: jax.Array, divisor: float) -> jax.Array:
    """E8M0 byte of the smallest power of two that is not below `x / divisor`, for normal positive float32 values.

    Exact, without dividing: the difference of the exponents, plus one if x has the larger mantissa. Infinity and NaN
    give 255.
    """
    divisor_bits = int(np.float32(divisor).view(np.uint32))
    bits = _bits(x)
    exponent = ((bits >> 23) & 0xFF).astype(jnp.int32)
    carry = (bits & 0x7FFFFF) > (divisor_bits & 0x7FFFFF)
    rounded_up = jnp.clip(exponent - ((divisor_bits >> 23) - 127) + carry, 0, 255)
    return jnp.where(exponent == 255, 255, rounded_up).astype(jnp.uint8)


def e8m0_to_f32(e: jax.Array) -> jax.Array:
    """uint8 E8M0 -> float32 powers of two; 0 -> 2^-127 (a subnormal), 255 -> NaN."""
    exponent = e.astype(jnp.uint32)
    bits = jnp.where(exponent == 0, jnp.uint32(0x00400000), exponent << 23)
    bits = jnp.where(exponent == 255, jnp.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def e8m0_reciprocal_to_f32(e: jax.Array) -> jax.Array:
    """uint8 E8M0 -> float32 2^(127 - e), exact; 254 -> 2^-127, 255 -> NaN."""
    exponent = e.astype(jnp.uint32)
    return jnp.where(exponent == 255, jnp.float32(jnp.nan), e8m0_to_f32(254 - jnp.minimum(exponent, 254)))


def f32_to_e4m3(x: jax.Array) -> jax.Array:
    """float32 -> `float8_e4m3fn`, to nearest even, saturating at +-448; NaN of either sign gives 0x7F.

    Rounded with integers on the bits: a cast that is cast back in the same program may be dropped as excess precision.
    """
    bits = _bits(x)
    sign = (bits >> 24) & 0x80
    magnitude = jnp.abs(x.astype(jnp.float32))
    # Normal numbers from 2^-6 up keep 3 mantissa bits; a carry moves into the exponent, whose bias drops from 127 to 7.
    low = bits & 0x7FFFFFFF
    normal = ((low + 0x7FFFF + ((low >> 20) & 1)) >> 20) - jnp.uint32(120 << 3)
    subnormal = jnp.round(magnitude * 2.0**9).astype(jnp.uint32)
    code = jnp.where(magnitude < 2.0**-6, subnormal, normal)
    code = jnp.where(magnitude >= E4M3_MAX, jnp.uint32(0x7E), code)
    # The sign of a NaN that was computed differs between machines.
    return byte_to_e4m3(jnp.where(jnp.isnan(x), jnp.uint32(0x7F), sign | code).astype(jnp.uint8))


def e4m3_to_f32(code: jax.Array) -> jax.Array:
    """`float8_e4m3fn` -> float32, exact."""
    return code.astype(jnp.float32)


def e4m3_to_byte(code: jax.Array) -> jax.Array:
    """`float8_e4m3fn` -> its uint8 bits."""
    return jax.lax.bitcast_convert_type(code, jnp.uint8)


def byte_to_e4m3(byte: jax.Array) -> jax.Array:
    """uint8 bits -> `float8_e4m3fn`."""
    return jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn)


def f32_to_e2m1(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    """float32 `x / scale` -> E2M1 code 0..15 in uint8, to nearest even, saturating at +-6.

    Nothing is divided (a compiler may divide by a broadcast scale through its rounded reciprocal, which moves ties):
    |x| is compared with midpoint * scale, exact for scales of up to 20 significant bits. The sign of zero is kept. NaN
    has no code: it gives 0 or 8, and the scale of its group must carry it.
    """
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    # Midpoints between neighbours; a tie goes to the neighbour whose code is even.
    for midpoint, to_even_below in (
        (0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True),
    ):  # fmt: skip
        boundary = jnp.float32(midpoint) * scale
        above = magnitude > boundary if to_even_below else magnitude >= boundary
        code = code + above.astype(jnp.uint8)
    sign = (_bits(x) >> 31).astype(jnp.uint8) << 3
    return code | sign


def e2m1_to_f32(code: jax.Array) -> jax.Array:
    """E2M1 code 0..15 (uint8) -> float32, exact; code 8 is -0."""
    c = code.astype(jnp.uint32)
    mantissa, exponent = c & 1, (c >> 1) & 3
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    subnormal = mantissa * jnp.uint32(0x3F000000)  # 0 or 0.5
    bits = jnp.where(exponent == 0, subnormal, normal) | ((c >> 3) << 31)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def pack_adjacent(codes: jax.Array) -> jax.Array:
    """E2M1 codes [..., C] -> bytes [..., C/2]: channel 2j in the low nibble, 2j+1 in the high."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_adjacent(packed: jax.Array) -> jax.Array:
    """Bytes [..., C/2] -> E2M1 codes [..., C]; the inverse of `pack_adjacent`."""
    pairs = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def pack_halves(codes: jax.Array) -> jax.Array:
    """E2M1 codes [..., C] -> bytes [..., C/2]: channel j low, channel j + C/2 high (main KV in the cache)."""
    low, high = jnp.split(codes, 2, axis=-1)
    return low | (high << 4)


def unpack_halves(packed: jax.Array) -> jax.Array:
    """Bytes [..., C/2] -> E2M1 codes [..., C]; the inverse of `pack_halves`."""
    return jnp.concatenate([packed & 0xF, packed >> 4], axis=-1)
