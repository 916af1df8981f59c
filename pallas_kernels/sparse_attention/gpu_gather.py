"""The gathering warpgroups of the GPU kernel: indices, copies into a ring, dequantisation (gpu_unpack.py) into tiles.

Everything here is the code of one thread (`plgpu.inline_mgpu`). The eight lanes with the same `lane // 8` hold the rows
of one 8-row tile, so that their 16-byte stores fall on different banks of the swizzled tile; the four values of
`lane // 8` are four neighbouring 16-byte pieces of a row. A *unit* is what the warpgroup copies with one instruction:
64 bytes of 32 rows, 16 bytes a thread, and every thread reads back only what it copied itself, so a ring of units
needs no barrier.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, scf
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx
from pallas_kernels.page_layout import PAGE_ENTRIES, ROW_BYTES, MainPageLayout
from pallas_kernels.sparse_attention.gpu_plan import BLOCK, WARPGROUP, Plan, Table
from pallas_kernels.sparse_attention.gpu_unpack import TileRows

_FIRST_THREAD = 2 * WARPGROUP  # the gathering warpgroups stand behind the two consumers
_BARRIER = 8  # named barrier of the gathering threads
_COPIES, _WINDOW = 1, 2  # flags of a cursor's mode
_NO_VALUE = 0xFF800000  # -inf as float32 bits


def _compare(kind: str, a, b):
    return arith.cmpi(getattr(arith.CmpIPredicate, kind), a, ptx.const(b) if isinstance(b, int) else b)


def _select(condition, a, b):
    a, b = (ptx.const(x) if isinstance(x, int) else x for x in (a, b))
    return arith.select(condition, a, b)


def _thread():
    """Number among the gathering threads."""
    return ptx.add(utils.thread_idx(), -_FIRST_THREAD)


def _lanes():
    """warp among the gathering ones, row in its tile (0..7), piece among neighbours (0..3)."""
    thread = _thread()
    lane = ptx.and_(thread, 31)
    return ptx.shr(thread, 5), ptx.and_(lane, 7), ptx.shr(lane, 3)


def _load_shared(address, displacement: int = 0):
    return ptx.asm(f"ld.shared.b32 $0, [$1+{displacement}];", address, side_effects=True)


def _store_shared(address, value, displacement: int = 0, predicate=None) -> None:
    utils.inline_ptx(f"st.shared.b32 [$0+{displacement}], $1;", address, value, predicate=predicate)


def _scalar(x):
    return x.registers.item()


SPLAT = plgpu.Layout.WG_SPLAT(())
_PER_THREAD = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
STATE = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.uint32, layout=_PER_THREAD)


def _from_state(array):
    register = array.registers.flat[0]
    return llvm.extractelement(register, ptx.const(0))


def _to_state(value):
    layout = _PER_THREAD.to_mgpu()
    vector = llvm.insertelement(llvm.mlir_undef(ir.VectorType.get((1,), ptx.i32())), value, ptx.const(0))
    registers = np.array([vector], dtype=object).reshape(layout.registers_shape(layout.shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=False)


def index_loader(plan: Plan):
    """`load` fetches what an item needs to know into registers, `publish` writes it to one of the two tables.

    An item is a query, or one of the shares of its entries. `load` takes the whole index arrays ([queries, W],
    [queries, K] and the sequences' slots), the item's query, its sequence and its first block.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SPLAT, SPLAT, SPLAT),
        return_type=(STATE,) * (plan.load_rounds + 1),
    )
    def load(ctx, window_index, selected, slots, query, sequence, first):
        thread = _thread()
        query, first = _scalar(query), _scalar(first)
        main_first = plan.window_blocks * BLOCK
        sources = [
            (ptx.row_address(ptx.global_address(ref), query, size * 4), size, at)
            for ref, size, at in ((window_index, plan.window, 0), (selected, plan.selected, main_first))
            if size
        ]
        values = []
        for i in range(plan.load_rounds):
            entry = ptx.add(ptx.mul(first, BLOCK), ptx.add(thread, i * plan.threads))
            value = ptx.const(-1)
            for row, size, at in sources:
                place = ptx.add(entry, -at)
                text = f"{{.reg .pred p; setp.lt.u32 p, $2, {size}; mov.b32 $0, $3; @p ld.global.nc.b32 $0, [$1];}}"
                value = ptx.asm(text, ptx.row_address(row, place, 4), place, value, side_effects=True)
            values.append(value)
        slot = ptx.load_word(ptx.row_address(ptx.global_address(slots), _scalar(sequence), 4))
        return tuple(_to_state(x) for x in (slot, *values))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SPLAT, SPLAT, SPLAT, SPLAT, *(_PER_THREAD,) * (plan.load_rounds + 1))
    )
    def publish(ctx, tables, which, exists, first, count, slot, *values):
        thread = _thread()
        warp, lane = ptx.shr(thread, 5), ptx.and_(thread, 31)
        exists, first, count = _scalar(exists), _scalar(first), _scalar(count)
        words = ptx.shared_address(tables)
        base = ptx.add(words, ptx.add(ptx.mul(_scalar(which), plan.table_words * 4), plan.tables_at * 4))
        # The other warpgroup may still be reading what is overwritten.
        ptx.barrier(ptx.const(_BARRIER), plan.threads)
        for i, value in enumerate(values):
            value = _from_state(value)
            held = _compare("ult", ptx.add(thread, i * plan.threads), plan.blocks * BLOCK)
            _store_shared(ptx.add(base, ptx.mul(thread, 4)), value, (plan.indices_at + i * plan.threads) * 4, held)
            some = _ballot(_compare("sge", value, 0))
            flag = ptx.add(words, ptx.mul(warp, 4))
            _store_shared(flag, some, (plan.flags_at + plan.threads // 32 * i) * 4, predicate=_compare("eq", lane, 0))
        ptx.barrier(ptx.const(_BARRIER), plan.threads)
        # Each warp finds the same list; the first one writes it.
        writes = _compare("eq", warp, 0)
        found = ptx.const(0)
        for at in range(0, plan.blocks, 32):
            block = ptx.add(lane, at)
            inside = _compare("ult", block, count)
            flags = ptx.add(words, ptx.mul(_select(inside, block, 0), 8))
            either = ptx.or_(_load_shared(flags, plan.flags_at * 4), _load_shared(flags, plan.flags_at * 4 + 4))
            used = arith.andi(inside, _compare("ne", either, 0))
            mask = _ballot(used)
            below = ptx.asm("{.reg .b32 m; mov.u32 m, %lanemask_lt; and.b32 m, m, $1; popc.b32 $0, m;}", mask)
            place = ptx.add(base, ptx.mul(ptx.add(found, below), 4))
            _store_shared(place, block, Table.ACTIVE * 4, predicate=arith.andi(writes, used))
            found = ptx.add(found, ptx.asm("popc.b32 $0, $1;", mask))
        # An item without entries goes through its first block, all of it masked.
        is_first = arith.andi(writes, _compare("eq", lane, 0))
        _store_shared(base, ptx.const(0), Table.ACTIVE * 4, predicate=arith.andi(is_first, _compare("eq", found, 0)))
        listed = _select(_compare("ne", exists, 0), arith.maxui(found, ptx.const(1)), 0)
        for word, value in ((Table.COUNT, listed), (Table.FIRST, first), (Table.SLOT, _from_state(slot))):
            _store_shared(base, value, word * 4, predicate=is_first)
        ptx.barrier(ptx.const(_BARRIER), plan.threads)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def close(ctx, tables):
        """Says that there is no second item, where there never is one."""
        word = plan.tables_at + plan.table_words + Table.COUNT
        _store_shared(ptx.shared_address(tables), ptx.const(0), word * 4)
        ptx.barrier(ptx.const(_BARRIER), plan.threads)

    return load, publish, close


def _ballot(condition):
    text = "{.reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}"
    return ptx.asm(text, _select(condition, 1, 0), side_effects=True)


@dataclasses.dataclass(frozen=True)
class _Cursor:
    """Where the copying is: it runs `ring_groups` groups ahead of the dequantisation.

    Attributes:
      table, place: item by its table, and block by its place among the item's used blocks.
      tile, inside: 8-row tile of the warp, and unit inside it.
      scale_slot: slot of the tile's scales.
      count: the item's used blocks.
      mode: bytes of a copy (16, or 0: zeros are written), and the flags `_COPIES` and `_WINDOW`.
      address: of this thread's next piece, i64; all others are i32.
    """

    table: Any
    place: Any
    tile: Any
    inside: Any
    scale_slot: Any
    count: Any
    mode: Any
    address: Any

    WORDS = 9

    @classmethod
    def at_start(cls) -> "_Cursor":
        return cls(*(ptx.const(0),) * 7, utils.c(0, ptx.i64()))

    @classmethod
    def from_words(cls, words) -> "_Cursor":
        *rest, low, high = words
        wide = arith.shli(arith.extui(ptx.i64(), high), utils.c(32, ptx.i64()))
        return cls(*rest, arith.ori(wide, arith.extui(ptx.i64(), low)))

    def words(self) -> list:
        """The same in nine i32."""
        *rest, address = self.values()
        high = arith.shrui(address, utils.c(32, ptx.i64()))
        return [*rest, arith.trunci(ptx.i32(), address), arith.trunci(ptx.i32(), high)]

    def values(self) -> list:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


class _Sources:
    """Addresses of one CTA, and the copies of one group of units.

    A *tile* is eight rows of a block, those of one warp at a time. Behind the units of the ring lie the slots of the
    tiles' scales.
    """

    def __init__(self, plan: Plan, pool, rings, tables, ring):
        self.plan = plan
        self.warp, self.row, self.piece = _lanes()
        self.pool = ptx.global_address(pool)
        self.window = ptx.global_address(rings)
        self.words = ptx.shared_address(tables)
        base = ptx.shared_address(ring)
        self.units = ptx.add(base, ptx.mul(_thread(), 16))
        self.scales = ptx.add(base, plan.ring_groups * plan.group_bytes)

    def scale_row(self, slot, bytes_: int):
        row = ptx.add(ptx.mul(self.warp, 8), self.row)
        return ptx.add(self.scales, ptx.mul(slot, self.plan.scale_slot_bytes), ptx.mul(row, bytes_))

    def table(self, which):
        return ptx.add(self.words, ptx.add(ptx.mul(which, self.plan.table_words * 4), self.plan.tables_at * 4))

    def index(self, table, block, tile):
        """Index of this thread's row in one of its tiles of an item's block."""
        row = ptx.add(ptx.mul(ptx.add(ptx.mul(self.warp, self.plan.tiles), tile), 8), self.row)
        place = ptx.add(ptx.mul(block, BLOCK), row)
        return _load_shared(ptx.add(table, ptx.mul(place, 4)), self.plan.indices_at * 4)

    def fetch(self, cursor: _Cursor, slot) -> _Cursor:
        """Starts the copies of the next group into a slot of the ring; behind the last item nothing is copied."""
        p = self.plan
        begins = _compare("eq", cursor.inside, 0)
        branch = scf.IfOp(begins, [ptx.i32(), ptx.i32(), ptx.i64()], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_(self._begin_tile(cursor))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([cursor.count, cursor.mode, cursor.address])
        count, mode, address = branch.results
        shared = ptx.add(self.units, ptx.mul(slot, p.group_bytes))
        size, copies = ptx.and_(mode, 16), _compare("ne", ptx.and_(mode, _COPIES), 0)
        for i in range(p.group):
            _copy(shared, address, 16, size, copies, i * p.unit_bytes, i * 64)
        ptx.commit_copies()
        in_window = _compare("ne", ptx.and_(mode, _WINDOW), 0)
        inside = ptx.add(cursor.inside, p.group)
        ends_tile = _compare("eq", inside, _select(in_window, p.window_units, p.main_units))
        ends = ends_tile if p.tiles == 1 else arith.andi(ends_tile, _compare("eq", cursor.tile, 1))
        place = _select(ends, ptx.add(cursor.place, 1), cursor.place)
        ends_item = arith.andi(ends, _compare("eq", place, count))
        return _Cursor(
            table=_select(ends_item, ptx.xor(cursor.table, 1), cursor.table),
            place=_select(ends_item, 0, place),
            tile=cursor.tile if p.tiles == 1 else _select(ends_tile, ptx.xor(cursor.tile, 1), cursor.tile),
            inside=_select(ends_tile, 0, inside),
            scale_slot=_select(ends_tile, _advance(cursor.scale_slot, p.scale_slots), cursor.scale_slot),
            count=count,
            mode=mode,
            address=arith.addi(address, utils.c(64 * p.group, ptx.i64())),
        )

    def _begin_tile(self, cursor: _Cursor):
        """Copies the scales of the tile that the cursor is at; its item's blocks, how to copy, and from where."""
        p, main = self.plan, MainPageLayout(self.plan.width)
        table = self.table(cursor.table)
        text = "ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];"
        count, first, ring_slot, _ = ptx.asm(text, table, results=4, side_effects=True)
        live = _compare("ne", count, 0)
        block = _select(live, _load_shared(ptx.add(table, ptx.mul(cursor.place, 4)), Table.ACTIVE * 4), 0)
        in_window = _compare("ult", ptx.add(block, first), p.window_blocks)
        index = self.index(table, block, cursor.tile)
        valid = arith.andi(live, _compare("sge", index, 0))
        index = _select(valid, index, 0)
        page, entry = ptx.shr(index, PAGE_ENTRIES.bit_length() - 1), ptx.and_(index, PAGE_ENTRIES - 1)
        ring = ptx.row_address(self.window, ring_slot, p.window_layout.slot_bytes)
        pool = ptx.row_address(self.pool, page, main.page_rows * ROW_BYTES)
        base = arith.select(
            in_window, ptx.row_address(ring, index, p.width), ptx.offset(pool, ptx.mul(entry, main.value_bytes))
        )
        # A row that is not there may have any ring; nothing is read, but the address should exist.
        base = arith.select(valid, base, self.window)
        # From an entry's values to its scales.
        window_step = ptx.add(ptx.mul(index, p.width // 32 - p.width), p.window_layout.value_rows * ROW_BYTES)
        main_step = ptx.add(ptx.mul(entry, main.scale_bytes - main.value_bytes), main.value_rows * ROW_BYTES)
        in_main = arith.xori(in_window, arith.constant(ir.IntegerType.get_signless(1), 1))
        for wanted, scale_bytes, step in ((in_window, p.width // 32, window_step), (in_main, p.width // 16, main_step)):
            # The smallest copy is 4 bytes: a 2-byte scale row comes with its neighbour.
            held = max(4, scale_bytes)
            piece_bytes = min(16, held)
            address = arith.addi(base, arith.extsi(ptx.i64(), ptx.add(step, ptx.mul(self.piece, piece_bytes))))
            if scale_bytes < 4:
                address = arith.andi(address, utils.c(-4, ptx.i64()))
            to = ptx.add(self.scale_row(cursor.scale_slot, held), ptx.mul(self.piece, piece_bytes))
            takes = arith.andi(arith.andi(live, wanted), _compare("ult", self.piece, held // piece_bytes))
            _copy(to, address, piece_bytes, _select(valid, piece_bytes, 0), takes)
        copies = live
        if p.width == 64:
            copies = arith.andi(live, arith.ori(in_window, _compare("ult", self.piece, 2)))
        mode = ptx.or_(_select(valid, 16, 0), ptx.or_(_select(copies, _COPIES, 0), _select(in_window, _WINDOW, 0)))
        return [count, mode, ptx.offset(base, ptx.mul(self.piece, 16))]


def _advance(slot, size: int):
    following = ptx.add(slot, 1)
    return _select(_compare("eq", following, size), 0, following)


def _copy(shared, source, bytes_: int, size, predicate, to: int = 0, at: int = 0) -> None:
    """cp.async of `size` bytes, of 4, 8 or 16 that are written; the others become zero."""
    kind = "cg" if bytes_ == 16 else "ca"
    text = f"cp.async.{kind}.shared.global [$0+{to}], [$1+{at}], {bytes_}, $2;"
    utils.inline_ptx(text, shared, source, size, predicate=predicate)


def producer(plan: Plan):
    """The two steps of the gathering loop: `start` fills the ring, `block` dequantises one block and refills it."""
    refs = (plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), plgpu.RefType())
    state = (STATE,) * (_Cursor.WORDS + 2)
    tile_transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    @plgpu.inline_mgpu(arg_types=refs, return_type=state)
    def start(ctx, pool, rings, tables, ring):
        sources = _Sources(plan, pool, rings, tables, ring)
        cursor = _Cursor.at_start()
        for i in range(plan.ring_groups):
            cursor = sources.fetch(cursor, ptx.const(i))
        return tuple(_to_state(x) for x in (*cursor.words(), ptx.const(0), ptx.const(0)))

    @plgpu.inline_mgpu(
        arg_types=(*refs, plgpu.RefType(tile_transforms), SPLAT, SPLAT, SPLAT, *(_PER_THREAD,) * (_Cursor.WORDS + 2)),
        return_type=state,
    )
    def block(ctx, pool, rings, tables, ring, tiles, which, place, tile_slot, *cursor):
        sources = _Sources(plan, pool, rings, tables, ring)
        table = sources.table(_scalar(which))
        listed = ptx.add(table, ptx.mul(_scalar(place), 4))
        number = _load_shared(listed, Table.ACTIVE * 4)
        tile_rows = TileRows(plan, tiles, sources)

        def loop(units: int, read, write, carried):
            # The count is hidden from the compiler, which would unroll the loop out of the instruction cache.
            count = ptx.asm(f"mov.u32 $0, {plan.tiles * units};", side_effects=True)
            op = scf.ForOp(ptx.const(0), count, ptx.const(plan.group), carried)
            with ir.InsertionPoint(op.body):
                i = op.induction_variable
                *fields, slot, scale_slot = op.inner_iter_args
                tile, inside = ptx.const(0), i
                if plan.tiles == 2:
                    tile = _select(_compare("uge", i, units), 1, 0)
                    inside = ptx.add(i, ptx.mul(tile, -units))
                ptx.wait_copies(plan.ring_groups - 1)
                utils.warp_barrier()
                loaded = read(inside, tile, slot, scale_slot, table, number)
                write(loaded, inside, tile)
                cursor = sources.fetch(_Cursor(*fields), slot)
                ends = _compare("eq", ptx.add(inside, plan.group), units)
                scale_slot = _select(ends, _advance(scale_slot, plan.scale_slots), scale_slot)
                scf.yield_([*cursor.values(), _advance(slot, plan.ring_groups), scale_slot])
            return list(op.results)

        # Rows without an entry: their values are zero, and their logits get -inf from here.
        thread = _thread()
        row = ptx.add(ptx.mul(number, BLOCK), ptx.and_(thread, BLOCK - 1))
        row_index = _load_shared(ptx.add(table, ptx.mul(row, 4)), plan.indices_at * 4)
        mask = _select(_compare("slt", row_index, 0), _NO_VALUE - (1 << 32), 0)
        _store_shared(
            ptx.add(sources.words, ptx.mul(ptx.add(ptx.mul(_scalar(tile_slot), BLOCK), thread), 4)),
            mask,
            predicate=_compare("ult", thread, BLOCK),
        )
        count = ptx.add(sources.words, ptx.mul(_scalar(tile_slot), 4))
        _store_shared(count, _load_shared(table, Table.COUNT * 4), plan.counts_at * 4, _compare("eq", thread, 0))
        *words, slot, scale_slot = (_from_state(x) for x in cursor)
        carried = [*_Cursor.from_words(words).values(), slot, scale_slot]
        from_window = functools.partial(loop, plan.window_units, tile_rows.read_window, tile_rows.write_window)
        from_main = functools.partial(loop, plan.main_units, tile_rows.read_main, tile_rows.write_main)
        if not plan.window:
            carried = from_main(carried)
        elif not plan.selected:
            carried = from_window(carried)
        else:
            in_window = _compare("ult", ptx.add(number, _load_shared(table, Table.FIRST * 4)), plan.window_blocks)
            branch = scf.IfOp(in_window, [x.type for x in carried], has_else=True)
            with ir.InsertionPoint(branch.then_block):
                scf.yield_(from_window(carried))
            with ir.InsertionPoint(branch.else_block):
                scf.yield_(from_main(carried))
            carried = list(branch.results)
        *fields, slot, scale_slot = carried
        return tuple(_to_state(x) for x in (*_Cursor(*fields).words(), slot, scale_slot))

    return start, block
