"""The fused cache writes: norm, rotation, quantisation and the store, one launch, in place.

Only imported where a GPU kernel is traced. Up to 32 lanes share a row; a lane holds 8 channels of the lower half and
the 8 that are C/2 further, which are the two nibbles of the same bytes of main KV. The norm is summed in float32 by the
lanes; XLA sums in another order, so its last float32 bit may differ.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir.dialects import arith
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx
from pallas_kernels.page_layout import PAGE_ENTRIES, ROW_BYTES, IndexPageLayout, MainPageLayout, WindowLayout
from pallas_kernels.ptx import Value
from pallas_kernels.quantize import gpu_codes as codes
from pallas_kernels.quantize.gpu_stream import launch

_WARPS = 4
# Rows of index keys that a block turns around in shared memory, at most, and the blocks below which it takes fewer:
# scattered bytes are stored faster by more multiprocessors.
_INDEX_ROWS = 16
_FULL_GRID = 132


def _f32(value: float) -> Value:
    return ptx.const(int(np.float32(value).view(np.int32)))


def _below(a: Value, b: int) -> Value:
    """Unsigned a < b: also false for negative a."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, ptx.const(b))


@dataclasses.dataclass(frozen=True)
class _Rows:
    """How the lanes of a warp share rows of `width` channels, `count` rows in all."""

    width: int
    rope_dim: int
    count: int

    @property
    def pairs(self) -> int:
        """Pieces of 8 channels in the lower half of a row, each with its partner in the upper half."""
        return self.width // (2 * codes.CHANNELS)

    @property
    def lanes(self) -> int:
        return min(32, self.pairs)

    @property
    def per_lane(self) -> int:
        return self.pairs // self.lanes

    @property
    def per_block(self) -> int:
        return _WARPS * 32 // self.lanes

    def place(self, block: Value) -> tuple[Value, Value]:
        """This thread's row and lane within it."""
        thread = ptx.thread_in_warpgroup()
        row = ptx.add(ptx.mul(block, self.per_block), arith.divui(thread, ptx.const(self.lanes)))
        return row, ptx.and_(thread, self.lanes - 1)


@dataclasses.dataclass(frozen=True)
class _Address:
    """Where a row goes; `exists` is false for rows that are dropped."""

    outer: Value
    inner: Value
    exists: Value


def _address(rows: _Rows, row: Value, loaded: Value, outer: Value, inner: Value, sizes: tuple[int, int]) -> _Address:
    outer = ptx.load_word(ptx.row_address(outer, loaded, 4))
    inner = ptx.load_word(ptx.row_address(inner, loaded, 4))
    exists = arith.andi(_below(outer, sizes[0]), _below(inner, sizes[1]))
    return _Address(outer, inner, arith.andi(exists, _below(row, rows.count)))


Pieces = list[list[Value]]  # by pair, then half: 4 words of bfloat16 each


def _starts(rows: _Rows) -> list[int]:
    """Byte offsets of a lane's pieces in a row of bfloat16."""
    return [512 * k + half * rows.width for k in range(rows.per_lane) for half in range(2)]


def _load(rows: _Rows, x: Value, row: Value, lane: Value) -> Pieces:
    source = ptx.offset(ptx.row_address(x, row, 2 * rows.width), ptx.mul(lane, 16))
    return [ptx.load_16_bytes(source, start) for start in _starts(rows)]


def _load_gain(rows: _Rows, gain: Value, lane: Value) -> Pieces:
    """The gain by lane, kept in L1 for the other warps."""
    source = ptx.offset(gain, ptx.mul(lane, 16))
    text = "ld.global.nc.v4.u32 {{$0,$1,$2,$3}}, [$4+{}];"
    return [ptx.asm(text.format(start), source, results=4, side_effects=True) for start in _starts(rows)]


def _normalise(rows: _Rows, pieces: Pieces, gain: Pieces, eps: float) -> Pieces:
    """bfloat16 of x * rsqrt(mean(x^2) + eps) * gain."""
    wide = [[codes.widen(w) for w in words] for words in pieces]
    total = None
    for words in wide:
        for pair in words:
            for x in pair:
                total = _multiply(x, x) if total is None else ptx.asm("fma.rn.f32 $0, $1, $1, $2;", x, total)
    distance = 1
    while distance < rows.lanes:
        total = ptx.asm("add.rn.f32 $0, $1, $2;", total, utils.shfl_bfly(total, distance))
        distance *= 2
    mean = ptx.asm("fma.rn.f32 $0, $1, $2, $3;", total, _f32(1 / rows.width), _f32(eps))
    inverse = ptx.asm("rsqrt.approx.ftz.f32 $0, $1;", mean)
    return [
        [
            codes.narrow(*(_multiply(_multiply(x, inverse), g) for x, g in zip(pair, codes.widen(gw), strict=True)))
            for pair, gw in zip(words, gain_words, strict=True)
        ]
        for words, gain_words in zip(wide, gain, strict=True)
    ]


def _multiply(a: Value, b: Value) -> Value:
    return ptx.asm("mul.rn.f32 $0, $1, $2;", a, b)


def _rotate(rows: _Rows, pieces: Pieces, rope: Value, row: Value, lane: Value) -> Pieces:
    """Rotates the last `rope_dim` channels; pieces before them keep their bits."""
    first = rows.width - rows.rope_dim
    table = ptx.row_address(rope, row, 4 * rows.rope_dim)
    out = []
    for i, words in enumerate(pieces):
        base = 256 * (i // 2) + (i % 2) * rows.width // 2
        if base + codes.CHANNELS * rows.lanes <= first:  # no lane's piece is rotated
            out.append(words)
            continue
        channel = ptx.add(ptx.mul(lane, codes.CHANNELS), base - first)
        rotated = arith.cmpi(arith.CmpIPredicate.sge, channel, ptx.const(0))
        source = ptx.offset(table, ptx.mul(arith.maxsi(channel, ptx.const(0)), 2))
        cos, sin = ptx.load_16_bytes(source), ptx.load_16_bytes(source, 2 * rows.rope_dim)
        out.append([arith.select(rotated, _turn(w, c, s), w) for w, c, s in zip(words, cos, sin, strict=True)])
    return out


def _turn(word: Value, cos: Value, sin: Value) -> Value:
    """One complex number times cos + i sin; the products are fused as XLA fuses them."""
    real, imag = codes.widen(word)
    text = (
        "{.reg .f32 p, q; mul.rn.f32 p, $2, $4; neg.f32 p, p; fma.rn.f32 p, $1, $3, p;"
        " mul.rn.f32 q, $2, $3; fma.rn.f32 q, $1, $4, q; cvt.rn.bf16x2.f32 $0, q, p;}"
    )
    return ptx.asm(text, real, imag, cos, sin)


def _store_window(layout: WindowLayout, rows: _Rows, rings: Value, lane: Value, to: _Address, pieces: Pieces) -> None:
    slot = ptx.row_address(rings, to.outer, layout.slot_bytes)
    values = ptx.offset(slot, ptx.add(ptx.mul(to.inner, layout.head_dim), ptx.mul(lane, 8)))
    scales = ptx.offset(slot, ptx.add(ptx.mul(to.inner, layout.scale_bytes), ptx.shr(lane, 2)))
    leads = arith.andi(to.exists, arith.cmpi(arith.CmpIPredicate.eq, ptx.and_(lane, 3), ptx.const(0)))
    for i, words in enumerate(pieces):
        base = 256 * (i // 2) + (i % 2) * rows.width // 2
        out, scale = codes.encode_fp8(words, codes.group_amax(words, 4))
        ptx.store_words(values, out, base, predicate=to.exists)
        ptx.store_byte(scales, scale, layout.value_rows * ROW_BYTES + base // 32, predicate=leads)


def _store_main(layout: MainPageLayout, rows: _Rows, pool: Value, lane: Value, to: _Address, pieces: Pieces) -> None:
    page = ptx.row_address(pool, to.outer, layout.page_rows * ROW_BYTES)
    values = ptx.offset(page, ptx.add(ptx.mul(to.inner, layout.value_bytes), ptx.mul(lane, 8)))
    scales = ptx.offset(page, ptx.add(ptx.mul(to.inner, layout.scale_bytes), ptx.shr(lane, 1)))
    leads = arith.andi(to.exists, arith.cmpi(arith.CmpIPredicate.eq, ptx.and_(lane, 1), ptx.const(0)))
    for k in range(rows.per_lane):
        low, high = pieces[2 * k], pieces[2 * k + 1]
        out, scale = codes.encode_kv_fp4(low, high, (codes.group_amax(low, 2), codes.group_amax(high, 2)))
        ptx.store_words(values, out, 256 * k, predicate=to.exists)
        first = layout.value_rows * ROW_BYTES + 16 * k
        ptx.store_byte(scales, scale[0], first, predicate=leads)
        ptx.store_byte(scales, scale[1], first + rows.width // 32, predicate=leads)


def _write(
    name: str,
    layout: WindowLayout | MainPageLayout,
    sizes: tuple[int, int],
    store: Callable[..., None],
    pool: jax.Array,
    x: jax.Array,
    gain: jax.Array | None,
    rope: jax.Array,
    outer: jax.Array,
    inner: jax.Array,
    eps: float,
) -> jax.Array:
    """Rows into entries that lie in one piece. sizes: how many pages or slots there are, and entries in each."""
    rows = _Rows(x.shape[-1], 2 * rope.shape[-1], outer.size)

    def emit(block, x, rope, outer, inner, *rest):
        *gain, pool = (ptx.global_address(r) for r in rest)
        x, rope, outer, inner = (ptx.global_address(r) for r in (x, rope, outer, inner))
        row, lane = rows.place(block)
        loaded = arith.minui(row, ptx.const(rows.count - 1))
        to = _address(rows, row, loaded, outer, inner, sizes)
        pieces = _load(rows, x, loaded, lane)
        if gain:
            pieces = _normalise(rows, pieces, _load_gain(rows, gain[0], lane), eps)
        store(layout, rows, pool, lane, to, _rotate(rows, pieces, rope, loaded, lane))

    ref = jax.new_ref(pool)
    gains = () if gain is None else (gain,)
    launch(emit, name, -(-rows.count // rows.per_block), (x, rope, outer, inner, *gains, ref))
    return jax.freeze(ref)


def write_window(x, gain, rope, rings, slot, index, *, eps: float, layout: WindowLayout) -> jax.Array:
    """See `gpu.write_window`."""
    sizes = rings.shape[0], layout.length
    return _write("write_window", layout, sizes, _store_window, rings, x, gain, rope, slot, index, eps)


def write_main(latent, rope, pool, page, entry, *, layout: MainPageLayout) -> jax.Array:
    """See `gpu.write_main`."""
    sizes = pool.shape[0], PAGE_ENTRIES
    return _write("write_main", layout, sizes, _store_main, pool, latent, None, rope, page, entry, 0.0)


def write_index(key, gain, rope, pool, page, entry, *, eps: float, layout: IndexPageLayout) -> jax.Array:
    """See `gpu.write_index`.

    An entry's bytes are 128 apart. The block collects its rows in shared memory and stores them byte by byte with
    neighbouring rows on neighbouring lanes: consecutive entries, as a prefill has them, fill whole sectors.
    """
    rows = _Rows(layout.dim, 2 * rope.shape[-1], page.size)
    block_rows = min(_INDEX_ROWS, pl.next_power_of_2(-(-rows.count // _FULL_GRID)))
    # A pass may compute rows behind the block's own: those are the next block's too, and stored there.
    passes = -(-block_rows // rows.per_block)
    words = -(-(layout.value_bytes + layout.scale_bytes) // 4)
    pitch = 4 * (words | 1)  # an odd number of words: rows begin in different banks
    sizes = pool.shape[0], PAGE_ENTRIES

    def emit(block, key, rope, page, entry, gain, pool, turned):
        key, rope, page, entry, gain, pool = (ptx.global_address(r) for r in (key, rope, page, entry, gain, pool))
        turned = ptx.shared_address(turned)
        begin = ptx.mul(block, block_rows)
        for step in range(passes):
            inside, lane = rows.place(ptx.const(step))
            row = arith.minui(ptx.add(begin, inside), ptx.const(rows.count - 1))
            pieces = _normalise(rows, _load(rows, key, row, lane), _load_gain(rows, gain, lane), eps)
            pieces = _rotate(rows, pieces, rope, row, lane)
            _collect_index(layout, rows, ptx.add(turned, ptx.mul(inside, pitch)), lane, pieces)
        utils.warpgroup_barrier()
        thread = ptx.thread_in_warpgroup()
        inside = ptx.and_(thread, block_rows - 1)
        row = ptx.add(begin, inside)
        to = _address(rows, row, arith.minui(row, ptx.const(rows.count - 1)), page, entry, sizes)
        source = ptx.add(turned, ptx.mul(inside, pitch))
        _store_index(layout, pool, source, arith.divui(thread, ptx.const(block_rows)), 128 // block_rows, to)

    ref = jax.new_ref(pool)
    scratch = plgpu.SMEM((passes * rows.per_block * pitch,), jnp.uint8)
    launch(emit, "write_index", -(-rows.count // block_rows), (key, rope, page, entry, gain, ref), (), (scratch,))
    return jax.freeze(ref)


def _collect_index(layout: IndexPageLayout, rows: _Rows, target: Value, lane: Value, pieces: Pieces) -> None:
    """A row's value bytes, then its scale bytes, into shared memory."""
    word, byte = ptx.add(target, ptx.mul(lane, 4)), ptx.add(target, ptx.shr(lane, 2))
    leads = arith.cmpi(arith.CmpIPredicate.eq, ptx.and_(lane, 3), ptx.const(0))
    for i, words in enumerate(pieces):
        base = 256 * (i // 2) + (i % 2) * rows.width // 2
        out, scale = codes.encode_mxfp4(words, codes.group_amax(words, 4))
        utils.inline_ptx(f"st.shared.b32 [$0+{base // 2}], $1;", word, out)
        first = layout.value_bytes + base // 32
        utils.inline_ptx(f"st.shared.u8 [$0+{first}], $1;", byte, scale, predicate=leads)


def _store_index(layout: IndexPageLayout, pool: Value, source: Value, word: Value, step: int, to: _Address) -> None:
    """Words `word`, `word + step`.. of a row in shared memory to its column of the page, byte by byte.

    Scales begin at a whole row of 4 bytes x 128 entries of the page, as every word of values does.
    """
    column = ptx.offset(ptx.row_address(pool, to.outer, layout.page_rows * ROW_BYTES), to.inner)
    size = layout.value_bytes + layout.scale_bytes
    for begin in range(0, -(-size // 4), step):
        number = ptx.add(word, begin)
        clamped = arith.minui(number, ptx.const((size - 1) // 4))
        loaded = ptx.asm("ld.shared.b32 $0, [$1];", ptx.add(source, ptx.mul(clamped, 4)), side_effects=True)
        target = ptx.offset(column, ptx.mul(clamped, ROW_BYTES))
        for i in range(4):
            there = arith.andi(to.exists, _below(ptx.add(ptx.mul(number, 4), i), size))
            ptx.store_byte(target, ptx.shr(loaded, 8 * i), PAGE_ENTRIES * i, predicate=there)
