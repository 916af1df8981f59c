"""Pages of index keys to scores, inside the TPU kernels of the indexer: the arithmetic that both of them share.

A page lies in VMEM as int32 words [rows, 128], an entry a lane: nibble k of the word in row r is channel 8 r + k, so a
dequantised page is the transposed operand of the product with the queries without any shuffle, its channels permuted.
The queries are permuted alike.

Two forms of dequantisation give the same numbers. "float32" runs everywhere; "pairs" works on two bfloat16 in a word
and needs half of the operations where the vector unit has bfloat16.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_formats as formats
from pallas_kernels.indexer.tpu_plans import LANES
from pallas_kernels.page_layout import IndexPageLayout
from pallas_kernels.rounding import round_bf16

_CHANNELS_PER_WORD = 8
_WORDS_PER_GROUP = 4
FORMS = ("float32", "pairs")


def channel_order(layout: IndexPageLayout, form: str) -> np.ndarray:
    """int [C]: the channel in each row of a dequantised page."""
    row = np.arange(layout.dim // _CHANNELS_PER_WORD)
    if form == "pairs":
        halves = 4 * np.arange(2)
        return (8 * row[None, :, None] + np.arange(4)[:, None, None] + halves).reshape(-1)
    return (8 * row[None] + np.arange(8)[:, None]).reshape(-1)


def _scale_rows(scales: jax.Array, layout: IndexPageLayout) -> list[jax.Array]:
    """int32 [scale rows, 128] -> the E8M0 codes int32 [1, 128] of each group."""
    return [formats.byte_of(scales[g // 4 : g // 4 + 1], g % 4) for g in range(layout.scale_bytes)]


def keys_of(words: jax.Array, scales: jax.Array, layout: IndexPageLayout, form: str) -> jax.Array:
    """A page's keys, transposed: bfloat16 [C, 128], channels in `channel_order`; NaN where the group's scale is.

    words int32 [C/8, 128], scales int32 [scale rows, 128].
    """
    spread = (_WORDS_PER_GROUP, LANES)
    codes = _scale_rows(scales, layout)
    if form == "pairs":
        # A bfloat16 is the upper half of a float32: the code stands above 7 bits of mantissa. 0x7FFF is a NaN.
        halves = [jnp.where(c == 0xFF, 0x7FFF, c << 7) for c in codes]
        scale = jnp.concatenate([jnp.broadcast_to(h | (h << 16), spread) for h in halves], axis=0)
        scale = pltpu.bitcast(scale, jnp.bfloat16)
        return jnp.concatenate([formats.e2m1_pairs(words << (12 - 4 * k)) * scale for k in range(4)], axis=0)
    factors = [jnp.where(c == 0xFF, jnp.nan, formats.e8m0(c)) for c in codes]
    scale = jnp.concatenate([jnp.broadcast_to(f, spread) for f in factors], axis=0)
    planes = [formats.e2m1(words << (28 - 4 * k)) * scale for k in range(8)]
    return jnp.concatenate(planes, axis=0).astype(jnp.bfloat16)


def raw_scores(q: jax.Array, weights: jax.Array, keys: jax.Array, heads: int, interpret: bool) -> jax.Array:
    """sum over heads of bf16(relu(bf16(q . k)) * w), not rounded yet: float32 [T, 128].

    q bfloat16 [T * N, C]; weights [T * N, 128], a head's on all lanes, bfloat16, or float32 if interpreted; keys
    bfloat16 [C, 128]. N is a multiple of 8.
    """
    dots = jax.lax.dot_general(q, keys, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    # Not a maximum, which may drop a NaN.
    dots = jnp.where(dots < 0, 0.0, dots)
    if interpret:
        # There the casts would be removed as excess precision.
        terms = round_bf16(round_bf16(dots) * weights)
    else:
        terms = (dots.astype(jnp.bfloat16) * weights).astype(jnp.float32)
    terms = terms.reshape(-1, heads, LANES)
    groups = [terms[:, h : h + 8] for h in range(0, heads, 8)]
    return jnp.sum(sum(groups[1:], groups[0]), axis=1)


def finished_scores(raw: jax.Array, usable: jax.Array | bool = True) -> jax.Array:
    """Rounds raw scores to bfloat16 values, never -0; -inf for what is not usable or NaN. float32 of any shape."""
    raw = jnp.where(usable & (raw == raw), raw, -jnp.inf)
    bits = jax.lax.bitcast_convert_type(raw, jnp.int32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & jnp.int32(-0x10000)
    rounded = formats.as_f32(even)
    return jnp.where(rounded == 0, 0.0, rounded)


def weights_on_lanes(row: jax.Array, count: int, dtype) -> jax.Array:
    """float32 [1, n] (a multiple of 128) -> the first `count` of them [count, 128], each on all lanes."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))[:count].astype(dtype)
