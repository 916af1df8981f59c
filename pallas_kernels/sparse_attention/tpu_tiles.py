"""Rows of the packed caches to bfloat16 tiles, inside the TPU kernel of sparse attention.

A row of 512 bytes arrives as 128 int32 words: byte s of the word on lane l is byte 128 s + l of the row. Scales are
spread over the channels of their entry by a product with a matrix of zeros and ones, which is exact. Widths below 128
leave several entries in one plane of bytes; such a product brings the right one's to its channels.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tpu_formats as formats
from pallas_kernels.page_layout import MainPageLayout, WindowLayout
from pallas_kernels.sparse_attention.tpu_plans import LANES

_BF16_MAX = float(jnp.finfo(jnp.bfloat16).max)


def dot(a: jax.Array, b: jax.Array, contract=((1,), (0,))) -> jax.Array:
    """bfloat16 matrix product with float32 sums."""
    return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


def _one_hot(run: int, channels_per_lane: int, first: int, width: int) -> np.ndarray:
    """[128, width]: lane l goes to the channels c with c // channels_per_lane == l % run + first."""
    lane, channel = np.arange(LANES)[:, None], np.arange(width)[None]
    return (lane % run + first == channel // channels_per_lane).astype(jnp.bfloat16)


def main_matrices(layout: MainPageLayout) -> np.ndarray:
    """bfloat16 [1 or 3, 128, H]: spread of the scales; for widths below 256 also the folds of low and high nibbles."""
    width, run = layout.head_dim, layout.value_bytes
    matrices = [_one_hot(layout.scale_bytes, width // layout.scale_bytes, 0, width)]
    if run < LANES:
        matrices += [_one_hot(run, 1, first, width) for first in (0, run)]
    return np.stack(matrices)


def ring_matrices(layout: WindowLayout) -> np.ndarray:
    """bfloat16 [1 or 2, 128, H]: spread of the scales; for widths below 128 also the fold of the values."""
    width = layout.head_dim
    matrices = [_one_hot(layout.scale_bytes, width // layout.scale_bytes, 0, width)]
    if width < LANES:
        matrices.append(_one_hot(width, 1, 0, width))
    return np.stack(matrices)


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _first_bit(entry: jax.Array, run_bytes: int) -> jax.Array:
    """Bits below the first byte of an entry's run in its row's words: 8 * (entry * run_bytes // 128 % 4)."""
    shift = _log2(run_bytes) - 4
    return (entry << shift if shift >= 0 else entry >> -shift) & 24


def _on_lanes(entry: jax.Array, run_bytes: int) -> jax.Array:
    """Which lanes hold an entry's run, of less than 128 bytes; none if the entry is negative."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    return lane >> _log2(run_bytes) == entry & jnp.int32(LANES // run_bytes - 1 - 2**31)


def _store(tile_ref, rows, planes, scale, finite: bool = False):
    """Writes planes of values times scale [rows, H], in channel order."""
    step = scale.shape[1] // len(planes)
    for i, plane in enumerate(planes):
        channels = slice(i * step, (i + 1) * step)
        value = plane * scale[:, channels]
        if finite:
            value = jnp.clip(value, -_BF16_MAX, _BF16_MAX)
        tile_ref[rows, channels] = value.astype(jnp.bfloat16)


def store_main(tile_ref, rows, values, scales, entry, matrices, layout: MainPageLayout) -> None:
    """128 gathered entries -> rows of tile_ref bfloat16 [.., H]; zeros for entries that are not there.

    values, scales int32 [128, 128]: each entry's rows; entry int32 [128, 128]: its number in its page on all lanes, -1
    if there is none; matrices: ref of `main_matrices`.
    """
    code = jax.lax.shift_right_logical(scales, _first_bit(entry, layout.scale_bytes)) & 0xFF
    # Scales are never negative. A NaN makes its whole entry NaN, which is what a logit does anyway.
    scale = jnp.where(code == 0x7F, jnp.nan, formats.e4m3_magnitude(code))
    scale = jnp.where(_on_lanes(entry, layout.scale_bytes), scale, 0.0).astype(jnp.bfloat16)
    scale = dot(scale, matrices[0])

    word = jax.lax.shift_right_logical(values, _first_bit(entry, layout.value_bytes))
    if layout.value_bytes >= LANES:
        lanes = range(layout.value_bytes // LANES)
        planes = [formats.e2m1(word << (28 - 4 * high - 8 * s)) for high in (0, 1) for s in lanes]
    else:
        mine = _on_lanes(entry, layout.value_bytes)
        low, high = (jnp.where(mine, formats.e2m1(word << s), 0.0).astype(jnp.bfloat16) for s in (28, 24))
        planes = [dot(low, matrices[1]) + dot(high, matrices[2])]
    _store(tile_ref, rows, planes, scale)


def store_ring(tile_ref, rows, first_entry, values, scale_rows, matrices, layout: WindowLayout) -> jax.Array:
    """n consecutive entries of a ring -> rows of tile_ref bfloat16 [.., H], finite whatever the bytes are.

    values int32 [n, 128]: each entry's row; scale_rows: those that hold the entries' scales, int32 [1, 128] each.

    Returns:
      float32 [1, n]: NaN for an entry that has a NaN scale, else 0.
    """
    count = values.shape[0]
    entry = first_entry + jax.lax.broadcasted_iota(jnp.int32, (count, LANES), 0)
    each = count // len(scale_rows)
    words = jnp.concatenate([jnp.broadcast_to(row, (each, LANES)) for row in scale_rows], axis=0)
    code = jax.lax.shift_right_logical(words, _first_bit(entry, layout.scale_bytes)) & 0xFF
    code = jnp.where(_on_lanes(entry, layout.scale_bytes), code, 0)
    is_nan = jnp.max(jnp.where(code == 0xFF, 1.0, 0.0), axis=1, keepdims=True)
    is_nan = jnp.transpose(jnp.broadcast_to(is_nan, (count, LANES)))[:1]
    scale = dot(formats.e8m0(jnp.minimum(code, 0xFE)).astype(jnp.bfloat16), matrices[0])

    if layout.head_dim >= LANES:
        word = jax.lax.shift_right_logical(values, _first_bit(entry, layout.head_dim))
        planes = [formats.e4m3(word << (24 - 8 * s)) for s in range(layout.head_dim // LANES)]
    else:
        word = values << (24 - _first_bit(entry, layout.head_dim))
        value = jnp.where(_on_lanes(entry, layout.head_dim), formats.e4m3(word), 0.0)
        planes = [dot(value.astype(jnp.bfloat16), matrices[1])]
    _store(tile_ref, rows, planes, scale, finite=True)
    return jnp.where(is_nan > 0, jnp.nan, 0.0)
