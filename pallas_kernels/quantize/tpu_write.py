"""The fused cache writes on TPU: norm, RoPE, quantisation and the change of the 512-byte rows, in place.

A TPU copies nothing finer than 512 bytes, so a row of the pool that an entry shares with others is copied in, changed
and copied out. All rows of a tile of up to 128 entries are under way together; entries of one tile may share a row.
Therefore each entry's copy of a row gets the bytes of every entry of the tile that goes there (a product with a matrix
that says which do), so that copies of one row are equal, and only the last of a run of them is copied out. The tiles
follow one another.

`write_window` and `write_main` change rows of linear memory; an index key is one lane of a whole page.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.page_layout import PAGE_ENTRIES, ROW_BYTES, IndexPageLayout, MainPageLayout, WindowLayout
from pallas_kernels.quantize.tpu_codes import (
    GROUPS,
    LANES,
    as_bf16,
    encode,
    lanes,
    moved,
    round_to_bf16_value,
    selection,
    swap_lanes,
    where_equal,
)
from pallas_kernels.tpu_formats import cache_operand, words_of

_GROUP = 16  # entries quantised together; a bfloat16 register has 16 rows
_TILE = 128
_SUBLANES = 8
_VMEM_LIMIT = 32 << 20


@dataclasses.dataclass(frozen=True)
class _Rows:
    """How the rows before quantisation lie.

    Attributes:
      name: format.
      channels: real ones; lanes up to a multiple of 128 hold zeros.
      rope_dim: channels rotated, the last ones.
      eps: of the norm; None: there is no norm.
    """

    name: str
    channels: int
    rope_dim: int
    eps: float | None

    @property
    def width(self) -> int:
        return pl.cdiv(self.channels, LANES) * LANES

    @property
    def first_rotated(self) -> int:
        """Lane of the first rotated channel in the last register."""
        return self.channels - self.rope_dim - (self.width - LANES)


def write_problem(channels: int, rope_dim: int) -> str | None:
    """What keeps the fused writes from rows of `channels`, the last `rope_dim` of them rotated; None: nothing."""
    if channels > 2048:
        return f"the kernel takes rows of up to 2048 channels, not {channels}"
    if not 2 <= rope_dim <= LANES:
        return f"the kernel rotates 2 to {LANES} channels, not {rope_dim}"
    return None


def _rotated(rows: _Rows, x, rope):
    """The last register x float32 [n, 128] with its last channels rotated; rope float32 [n, 2r], cosines then sines."""
    lane, first = lanes(x.shape), rows.first_rotated
    pair = jnp.clip(lane - first, 0, rows.rope_dim - 1) // 2
    if rope.shape[1] < LANES:
        rope = jnp.concatenate([rope, jnp.zeros((rope.shape[0], LANES - rope.shape[1]), rope.dtype)], axis=1)
    cos = jnp.take_along_axis(rope, pair, axis=1, mode="promise_in_bounds")
    sin = jnp.take_along_axis(rope, pair + rows.rope_dim // 2, axis=1, mode="promise_in_bounds")
    sin = jnp.where((lane - first) % 2 == 0, -sin, sin)
    turned = round_to_bf16_value(x * cos + swap_lanes(x, 1) * sin)
    return jnp.where((lane >= first) & (lane < first + rows.rope_dim), turned, x)


def _codes(rows: _Rows, x, gain, rope) -> tuple[jax.Array, jax.Array]:
    """Norm, RoPE and encoding: x bfloat16 [n, width] -> codes and scale bytes int32 [n, width], a group's on each lane.

    gain: bfloat16 [1, width] or None; rope: float32 [n, 2r].
    """
    x = x.astype(jnp.float32)
    if gain is not None:
        inverse_rms = jax.lax.rsqrt((x * x).sum(axis=1, keepdims=True) / rows.channels + rows.eps)
        x = round_to_bf16_value(x * inverse_rms * gain.astype(jnp.float32))
    tail = _rotated(rows, x[:, -LANES:], rope)
    return encode(rows.name, jnp.concatenate([x[:, :-LANES], tail], axis=1) if rows.width > LANES else tail)


def _value_bytes(rows: _Rows, codes: jax.Array) -> list[jax.Array]:
    """Stored bytes of linear layouts, int32 [n, 128] each; fewer than 128 bytes repeat along the lanes."""
    channels, half = rows.channels, rows.channels // 2
    parts = [codes[:, c : c + LANES] for c in range(0, rows.width, LANES)]
    if rows.name == "fp8":
        if channels >= LANES:
            return parts
        return [moved(parts[0], selection(LANES, LANES, lambda c, b: where_equal(c, b % channels)))]
    if half >= LANES:
        return [low | (high << 4) for low, high in zip(parts, parts[len(parts) // 2 :])]
    pairs = selection(rows.width, LANES, lambda c, b: where_equal(c, b % half) + 16 * where_equal(c, b % half + half))
    return [moved(codes, pairs)]


def _scale_bytes(rows: _Rows, scales: jax.Array) -> list[jax.Array]:
    """The row's scale bytes, int32 [n, 128] each, repeated along the lanes if they are fewer."""
    group = GROUPS[rows.name]
    count = rows.channels // group
    return [
        moved(scales, selection(rows.width, LANES, lambda c, b, p=p: where_equal(c, (b + p * LANES) % count * group)))
        for p in range(pl.cdiv(count, LANES))
    ]


def _place(parts: list[jax.Array], size: int, inner: jax.Array) -> list[jax.Array]:
    """Bytes of an entry at their places in a 512-byte row, plus 1; 0 where the row is not the entry's.

    parts: the entry's `size` < 512 bytes, int32 [n, 128]; inner: int32 [n, 1], number of the entry in its page or ring.
    Returns the four quarters of the row, bfloat16 [n, 128].
    """
    mine = inner % (ROW_BYTES // size)
    quarters = []
    for quarter in range(4):
        part = parts[quarter * LANES % size // LANES if size >= LANES else 0]
        here = (lanes(part.shape) + quarter * LANES) // size == mine
        quarters.append(as_bf16(jnp.where(here, part + 1, 0)))
    return quarters


def _words(quarters: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Bytes plus 1, int32, 0 for none -> words of four bytes, and a mask of the bytes that are there."""
    words = mask = jnp.zeros(quarters[0].shape, jnp.int32)
    for q, byte in enumerate(quarters):
        words = words | jnp.where(byte > 0, (byte - 1) << (8 * q), 0)
        mask = mask | jnp.where(byte > 0, jnp.int32(0xFF if q < 3 else -1) << (8 * q), 0)
    return words, mask


def _for_each(targets_ref, first, count: int, action) -> None:
    """`action(i, target)` for the entries of the tile that copy a row or page, the others having target -1."""

    def body(i, _):
        target = targets_ref[first + i]

        @pl.when(target >= 0)
        def _():
            action(i, target)

        return 0

    jax.lax.fori_loop(0, count, body, 0)


def _linear_kernel(value_targets, scale_targets, *refs, rows: _Rows, value_bytes: int, scale_bytes: int):
    if rows.eps is None:
        x_ref, rope_ref, places_ref, _, pool_ref, *scratch = refs
    else:
        x_ref, gain_ref, rope_ref, places_ref, _, pool_ref, *scratch = refs
    value_rows, scale_rows, value_parts, scale_parts, columns, semaphore = scratch
    pool = words_of(pool_ref)
    tile, pieces = x_ref.shape[0], value_rows.shape[0]
    first = pl.program_id(0) * tile

    def copy(i, row, buffer, piece=0):
        return pool.at[row + piece], buffer.at[piece, pl.ds(i, 1)]

    def start(source, target):
        pltpu.make_async_copy(source, target, semaphore).start()

    def wait(count: int):
        def one(i, _):
            pltpu.make_async_copy(pool.at[0], scale_rows.at[0, pl.ds(0, 1)], semaphore).wait()

        return lambda i, target: [one(i, target) for _ in range(count)]

    columns[...] = jnp.transpose(places_ref[...])
    shared = value_bytes < ROW_BYTES
    if shared:
        _for_each(value_targets, first, tile, lambda i, row: start(*copy(i, row, value_rows)))
    _for_each(scale_targets, first, tile, lambda i, row: start(*copy(i, row, scale_rows)))

    def quantize(g, _):
        at = pl.ds(pl.multiple_of(g * _GROUP, _GROUP), _GROUP)
        gain = None if rows.eps is None else gain_ref[...]
        codes, scales = _codes(rows, x_ref[at], gain, rope_ref[at])
        inner = columns[at, 2:3]
        parts = _value_bytes(rows, codes)
        if shared:
            for quarter, value in enumerate(_place(parts, value_bytes, inner)):
                value_parts[quarter, at] = value
        else:
            for piece in range(pieces):
                four = [part + 1 for part in parts[4 * piece : 4 * piece + 4]]
                value_rows[piece, at] = _words(four)[0]
        for quarter, scale in enumerate(_place(_scale_bytes(rows, scales), scale_bytes, inner)):
            scale_parts[quarter, at] = scale
        return 0

    jax.lax.fori_loop(0, tile // _GROUP, quantize, 0)

    # Entry i's copy of a row gets the bytes of all entries j that go there. Rows of the matrix: i; columns: j.
    def change(buffer, parts, column: int):
        row = jnp.broadcast_to(columns[:tile, column : column + 1], (tile, tile))
        other = jnp.broadcast_to(places_ref[column : column + 1, :tile], (tile, tile))
        together = jnp.where((row == other) & (row >= 0), 1.0, 0.0).astype(jnp.bfloat16)
        found = [jnp.dot(together, parts[q], preferred_element_type=jnp.float32).astype(jnp.int32) for q in range(4)]
        words, mask = _words(found)
        buffer[0] = (buffer[0] & ~mask) | words

    if shared:
        _for_each(value_targets, first, tile, wait(1))
    _for_each(scale_targets, first, tile, wait(1))
    if shared:
        change(value_rows, value_parts, 0)
    change(scale_rows, scale_parts, 1)

    def store(buffer, count: int):
        def action(i, row):
            for piece in range(count):
                source, target = copy(i, row, buffer, piece)
                start(target, source)

        return action

    _for_each(value_targets, first, tile, store(value_rows, pieces))
    _for_each(scale_targets, first, tile, store(scale_rows, 1))
    _for_each(value_targets, first, tile, wait(pieces))
    _for_each(scale_targets, first, tile, wait(1))


def _index_kernel(
    page_targets, x_ref, gain_ref, rope_ref, places_ref, _, pool_ref, pages, bytes_down, columns, semaphore, *, rows
):
    pool = words_of(pool_ref)
    layout = IndexPageLayout(rows.channels)
    tile, page_rows = x_ref.shape[0], layout.page_rows
    padded_rows = bytes_down.shape[0] // 4
    first = pl.program_id(0) * tile

    def read(i, page):
        pltpu.make_async_copy(pool.at[page, :, 0], pages.at[i], semaphore).start()

    def wait(i, page):
        pltpu.make_async_copy(pages.at[0], pages.at[0], semaphore).wait()

    columns[...] = jnp.transpose(places_ref[...])
    _for_each(page_targets, first, tile, read)

    # Bytes of an entry down a column, plus 1: byte s of row r at 4 quarters of padded_rows, row s * padded_rows + r.
    def quarter_byte(row):
        return row % padded_rows * 4 + row // padded_rows

    def value_weight(row, channel):
        byte = quarter_byte(row)
        inside = jnp.where((row % padded_rows < layout.value_rows) & (byte < layout.value_bytes), 1.0, 0.0)
        return inside * (where_equal(channel, 2 * byte) + 16 * where_equal(channel, 2 * byte + 1))

    def scale_number(row):
        return quarter_byte(row) - 4 * layout.value_rows

    def scale_weight(row, channel):
        inside = (scale_number(row) >= 0) & (scale_number(row) < layout.scale_bytes)
        return jnp.where(inside, where_equal(channel, scale_number(row) * GROUPS["mxfp4"]), 0.0)

    shape = (4 * padded_rows, rows.width)
    value_matrix, scale_matrix = selection(*shape, value_weight), selection(*shape, scale_weight)
    row = jax.lax.broadcasted_iota(jnp.int32, (4 * padded_rows, 1), 0)
    is_value = (row % padded_rows < layout.value_rows) & (quarter_byte(row) < layout.value_bytes)
    is_scale = (scale_number(row) >= 0) & (scale_number(row) < layout.scale_bytes)
    exists = jnp.where(is_value | is_scale, 1.0, 0.0)

    codes, scales = _codes(rows, x_ref[...], gain_ref[...], rope_ref[...])
    down = [
        jax.lax.dot_general(matrix, as_bf16(x), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        for matrix, x in ((value_matrix, codes), (scale_matrix, scales))
    ]
    bytes_down[...] = (down[0] + down[1] + exists).astype(jnp.bfloat16)

    _for_each(page_targets, first, tile, wait)

    def change(i, page):
        # Entries of this page, each on its lane.
        here = (columns[:tile, 0:1] == page) & (columns[:tile, 1:2] == lanes((tile, LANES)))
        found = jnp.dot(
            bytes_down[...], jnp.where(here, 1.0, 0.0).astype(jnp.bfloat16), preferred_element_type=jnp.float32
        ).astype(jnp.int32)
        quarters = [found[q * padded_rows : (q + 1) * padded_rows] for q in range(4)]
        words, mask = _words(quarters)
        pages[i] = (pages[i] & ~mask[:page_rows]) | words[:page_rows]
        pltpu.make_async_copy(pages.at[i], pool.at[page, :, 0], semaphore).start()

    _for_each(page_targets, first, tile, change)
    _for_each(page_targets, first, tile, wait)


def _tile_of(count: int) -> int:
    return min(_TILE, pl.cdiv(count, _GROUP) * _GROUP)


def _targets(place: jax.Array, tile: int) -> jax.Array:
    """int32 [n], n a multiple of tile: `place` of the entries that copy it out, -1 for the others.

    The last of a run of equal places in a tile does; separate runs copy the same bytes.
    """
    following = jnp.roll(place, -1)
    inside = jnp.arange(place.shape[0]) % tile != tile - 1
    return jnp.where(inside & (following == place), -1, place)


def _write(
    kernel, name: str, rows: _Rows, x, gain, rope, pool, targets: list, places: list, tile: int, scratch: list,
    read_bytes: int, interpret: bool,
):  # fmt: skip
    """Runs a write over tiles of entries; the pool [n, .., 4, 128] is changed in place."""
    count = math.prod(x.shape[:2])
    x = x.reshape(count, rows.channels)
    lanes_missing = ((0, 0), (0, rows.width - rows.channels))
    arrays = [jnp.pad(x, lanes_missing)] if rows.width != rows.channels else [x]
    specs = [pl.BlockSpec((tile, rows.width), lambda i, *_: (i, 0))]
    if gain is not None:
        arrays.append(jnp.pad(gain[None], lanes_missing))
        specs.append(pl.BlockSpec((1, rows.width), lambda i, *_: (0, 0)))
    arrays.append(rope.reshape(count, rows.rope_dim))
    specs.append(pl.BlockSpec((tile, rows.rope_dim), lambda i, *_: (i, 0)))
    # Entries on lanes: on sublanes they would take 512 bytes each.
    places = jnp.stack(places + [jnp.zeros_like(places[0])] * (_SUBLANES - len(places)))
    arrays.append(jnp.pad(places, ((0, 0), (0, -places.shape[1] % LANES))))
    specs.append(pl.BlockSpec((_SUBLANES, LANES), lambda i, *_: (0, i)))
    stored = cache_operand(pool, interpret) if interpret else pool
    out = pl.pallas_call(
        kernel,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(targets),
            grid=(pl.cdiv(count, tile),),
            in_specs=[*specs, pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[*scratch, pltpu.VMEM((LANES, _SUBLANES), jnp.int32), pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(stored.shape, stored.dtype),
        input_output_aliases={len(targets) + len(arrays): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=_VMEM_LIMIT,
            has_side_effects=True,
            # They cost more than the copies' issue; addresses that do not exist have been dropped.
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=count,
            bytes_accessed=count * (rows.width * 2 + rows.rope_dim * 4 + 4 * len(targets) + 32 + 2 * read_bytes),
        ),
        interpret=interpret,
    )(*targets, *arrays, stored)
    if not interpret:
        return out
    as_bytes = jax.lax.bitcast_convert_type(out[..., 0, :], jnp.uint8)
    return jnp.swapaxes(as_bytes, -1, -2)


def _addresses(outer: jax.Array, inner: jax.Array, num_outer: int, num_inner: int, tile: int):
    """Outer and inner numbers, int32 [n] padded to whole tiles, and which of them exist."""
    outer, inner = outer.reshape(-1), inner.reshape(-1)
    padding = (0, -outer.shape[0] % tile)
    outer, inner = jnp.pad(outer, padding, constant_values=-1), jnp.pad(inner, padding)
    return outer, inner, (outer >= 0) & (outer < num_outer) & (inner >= 0) & (inner < num_inner)


def _write_linear(name, rows, x, gain, rope, pool, outer, inner, *, length, value_bytes, scale_bytes, interpret):
    """Layouts whose memory is linear: entries' values, then, from `first_scale_row` on, their scales."""
    page_rows, first_scale_row = pool.shape[1], pl.cdiv(length * value_bytes, ROW_BYTES)
    tile = _tile_of(math.prod(x.shape[:2]))
    outer, inner, exists = _addresses(outer, inner, pool.shape[0], length, tile)
    value_row = jnp.where(exists, outer * page_rows + inner * value_bytes // ROW_BYTES, -1)
    scale_row = jnp.where(exists, outer * page_rows + first_scale_row + inner * scale_bytes // ROW_BYTES, -1)
    pieces = max(1, value_bytes // ROW_BYTES)
    scratch = [
        pltpu.VMEM((pieces, tile, LANES), jnp.int32),
        pltpu.VMEM((1, tile, LANES), jnp.int32),
        pltpu.VMEM((4, tile, LANES), jnp.bfloat16),
        pltpu.VMEM((4, tile, LANES), jnp.bfloat16),
    ]
    kernel = functools.partial(_linear_kernel, rows=rows, value_bytes=value_bytes, scale_bytes=scale_bytes)
    flat = pool.reshape(-1, *pool.shape[2:])
    targets = [_targets(value_row, tile) if value_bytes < ROW_BYTES else value_row, _targets(scale_row, tile)]
    out = _write(
        kernel, name, rows, x, gain, rope, flat, targets, [value_row, scale_row, inner], tile, scratch,
        (pieces + 1) * ROW_BYTES, interpret,
    )  # fmt: skip
    return out.reshape(pool.shape)


def write_window(
    x, gain, rope, rings, slot, index, *, eps: float, layout: WindowLayout, interpret: bool = False
) -> jax.Array:
    """RMSNorm, RoPE, FP8 quantisation and the write into window rings."""
    return _write_linear(
        "write_window", _Rows("fp8", layout.head_dim, 2 * rope.shape[-1], eps), x, gain, rope, rings, slot, index,
        length=layout.length, value_bytes=layout.head_dim, scale_bytes=layout.scale_bytes, interpret=interpret,
    )  # fmt: skip


def write_main(latent, rope, pool, page, entry, *, layout: MainPageLayout, interpret: bool = False) -> jax.Array:
    """RoPE, FP4 quantisation and the write into pages of main KV."""
    return _write_linear(
        "write_main", _Rows("kv_fp4", layout.head_dim, 2 * rope.shape[-1], None), latent, None, rope, pool, page, entry,
        length=PAGE_ENTRIES, value_bytes=layout.value_bytes, scale_bytes=layout.scale_bytes, interpret=interpret,
    )  # fmt: skip


def write_index(
    key, gain, rope, pool, page, entry, *, eps: float, layout: IndexPageLayout, interpret: bool = False
) -> jax.Array:
    """RMSNorm, RoPE, MXFP4 quantisation and the write into pages of index keys."""
    rows = _Rows("mxfp4", layout.dim, 2 * rope.shape[-1], eps)
    tile = _tile_of(math.prod(key.shape[:2]))
    page, entry, exists = _addresses(page, entry, pool.shape[0], PAGE_ENTRIES, tile)
    page = jnp.where(exists, page, -1)
    padded_rows = pl.cdiv(layout.page_rows, 2 * _SUBLANES) * 2 * _SUBLANES
    scratch = [
        pltpu.VMEM((tile, layout.page_rows, LANES), jnp.int32),
        pltpu.VMEM((4 * padded_rows, tile), jnp.bfloat16),
    ]
    return _write(
        functools.partial(_index_kernel, rows=rows), "write_index", rows, key, gain, rope, pool,
        [_targets(page, tile)], [page, entry], tile, scratch, layout.page_rows * ROW_BYTES, interpret,
    )  # fmt: skip
