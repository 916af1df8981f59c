"""The 4- and 8-bit formats inside TPU kernels: integer operations on int32 lanes, which every generation has.

The bits of a code are moved into the exponent and mantissa of a float32; min(y, 2y - c) then mends the subnormals,
which have no hidden bit. Exact for every code but NaN (`formats.py` gives the meaning).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

_SIGN = np.int32(-(2**31))
_SIGNS_OF_HALVES = np.int32(-(2**31) | 2**15)


def cache_operand(rows: jax.Array, interpret: bool) -> jax.Array:
    """A cache of 512-byte rows, uint8 [..., 4, 128], as a kernel's operand that stays in HBM whole."""
    # Without this, one that fits VMEM may be copied there, rows that nobody asked for included.
    return _words_for_interpreter(rows) if interpret else pltpu.with_memory_space_constraint(rows, pltpu.HBM)


def words_of(rows):
    """A ref of 512-byte rows, uint8 [..., 4, 128], as int32 words [..., 1, 128]; byte s of a word is row [s]'s.

    Inside a kernel; what `cache_operand` made words of for the interpreter passes through.
    """
    return rows if rows.dtype == jnp.int32 else rows.bitcast(jnp.int32)


def _words_for_interpreter(rows: jax.Array) -> jax.Array:
    """As `words_of`, of an array outside the kernel: the interpreter of TPU kernels cannot reinterpret a ref.

    (A TPU would copy a pool for this.)
    """
    return jax.lax.bitcast_convert_type(jnp.swapaxes(rows, -1, -2), jnp.int32)[..., None, :]


def as_f32(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def with_sign(magnitude: jax.Array, sign: jax.Array) -> jax.Array:
    """float32 >= 0 with the top bit of an int32 as its sign."""
    return as_f32(jax.lax.bitcast_convert_type(magnitude, jnp.int32) | (sign & _SIGN))


def byte_of(word: jax.Array, index: jax.Array | int) -> jax.Array:
    """Byte 0 (lowest) to 3 of int32 words, as int32."""
    return jax.lax.shift_right_logical(word, jnp.int32(index) * 8) & 0xFF


def e2m1(word: jax.Array) -> jax.Array:
    """E2M1 codes in the top four bits of int32 -> float32; the other bits may be anything."""
    y = as_f32(((word >> 6) & 0x01C00000) + (126 << 23))
    return with_sign(jnp.minimum(y, y + y - 1.0), word)


def e2m1_pairs(word: jax.Array) -> jax.Array:
    """E2M1 codes in the top four bits of both halves of int32 [r, n] -> bfloat16 [2r, n]: low half, then high half."""
    y = pltpu.bitcast(((word >> 6) & 0x01C001C0) + 0x3F003F00, jnp.bfloat16)
    magnitude = pltpu.bitcast(jnp.minimum(y, y + y - jnp.bfloat16(1)), jnp.int32)
    return pltpu.bitcast(magnitude | (word & _SIGNS_OF_HALVES), jnp.bfloat16)


def e4m3_magnitude(code: jax.Array) -> jax.Array:
    """E4M3 codes 0..127 in int32 -> float32; NaN (127) gives 480."""
    y = as_f32((code << 20) + (120 << 23))
    return jnp.minimum(y, y + y - 2.0**-6)


def e4m3(word: jax.Array) -> jax.Array:
    """E4M3 codes in the top byte of int32 -> float32; NaN gives +-480. The other bits may be anything."""
    y = as_f32(((word >> 4) & 0x07F00000) + (120 << 23))
    return with_sign(jnp.minimum(y, y + y - 2.0**-6), word)


def e8m0(code: jax.Array) -> jax.Array:
    """E8M0 codes 0..255 in int32 -> float32; 0 gives 0 (2^-127 is a subnormal), NaN (255) infinity."""
    return as_f32(code << 23)
