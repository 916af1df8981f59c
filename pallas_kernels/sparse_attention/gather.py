"""The gathering warpgroup of the GPU kernel: indices, copies into a ring, dequantisation into tiles that wgmma reads.

Everything here is the code of one thread (`plgpu.inline_mgpu`). The eight lanes with the same `lane // 8` hold the rows
of one 8-row tile, so that their 16-byte stores fall on different banks of the swizzled tile; the four values of
`lane // 8` are four neighbouring 16-byte pieces of a row. A *unit* is what the warpgroup copies with one instruction:
64 bytes of 32 rows, 16 bytes a thread, and every thread reads back only what it copied itself, so a ring of units
needs no barrier.

bfloat16 values leave here as value * 2^-8: E2M1 bits moved into a bfloat16 read as value * 2^-126, E4M3 bits as value *
2^-120, and one packed product with scale * 2^118 (2^112) finishes both without ever leaving bfloat16's range.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, scf
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx
from pallas_kernels.page_layout import PAGE_ENTRIES, ROW_BYTES, MainPageLayout, WindowLayout

BLOCK = 64
THREADS = 128
UNIT_BYTES = 16 * THREADS
VALUE_SCALE = 2.0**-8
_NO_VALUE = 0xFF800000  # -inf as float32 bits
_SIGNS, _E2M1, _E4M3 = 0x80008000, 0x01C001C0, 0x07F007F0
_TWO_119 = (127 + 119) << 7 | (127 + 119) << 23


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one kernel's gathering.

    Attributes:
      width: channels of an entry, H.
      window, selected: entries of a query by source, W and K.
      blocks: blocks of 64 entries that one CTA takes at most.
      ring_units: units in flight.
      window_layout: of the rings.
    """

    width: int
    window: int
    selected: int
    blocks: int
    ring_units: int
    window_layout: WindowLayout

    @property
    def window_blocks(self) -> int:
        return -(-self.window // BLOCK)

    @property
    def total_blocks(self) -> int:
        return self.window_blocks + -(-self.selected // BLOCK)

    @property
    def window_units(self) -> int:
        """Units of eight-row tiles of a window block; a block has two such tiles a warp."""
        return self.width // 64

    @property
    def main_units(self) -> int:
        return max(1, self.width // 128)

    @property
    def scale_slots(self) -> int:
        """8-row tiles whose scales may be held at once: those the ring spans, and the one being read."""
        return -(-self.ring_units // self.main_units) + 1

    @property
    def scale_slot_bytes(self) -> int:
        """Scales of 32 rows, the larger of both formats (at least the 4 bytes that can be copied)."""
        return 32 * max(4, self.width // 16)

    @property
    def ring_bytes(self) -> int:
        return self.ring_units * UNIT_BYTES + self.scale_slots * self.scale_slot_bytes

    @property
    def load_rounds(self) -> int:
        return -(-self.blocks * BLOCK // THREADS)

    @property
    def flags_at(self) -> int:
        """First word of the table's flags, one a warp and round, behind the indices."""
        return self.load_rounds * THREADS

    @property
    def active_at(self) -> int:
        """First word of the numbers of the blocks that have entries."""
        return self.flags_at + 4 * self.load_rounds

    @property
    def count_at(self) -> int:
        return self.active_at + self.blocks

    @property
    def table_words(self) -> int:
        return self.count_at + 1


def _compare(kind: str, a, b):
    return arith.cmpi(getattr(arith.CmpIPredicate, kind), a, ptx.const(b) if isinstance(b, int) else b)


def _select(condition, a, b):
    a, b = (ptx.const(x) if isinstance(x, int) else x for x in (a, b))
    return arith.select(condition, a, b)


def _lanes():
    """warp in the warpgroup, row in its tile (0..7), piece among neighbours (0..3)."""
    thread = ptx.thread_in_warpgroup()
    lane = ptx.and_(thread, 31)
    return ptx.shr(thread, 5), ptx.and_(lane, 7), ptx.shr(lane, 3)


def _load_shared(address, displacement: int = 0):
    return ptx.asm(f"ld.shared.b32 $0, [$1+{displacement}];", address, side_effects=True)


def _load_shared_byte(address, displacement: int = 0):
    text = f"{{.reg .u16 t; ld.shared.u8 t, [$1+{displacement}]; cvt.u32.u16 $0, t;}}"
    return ptx.asm(text, address, side_effects=True)


def _store_shared(address, value, displacement: int = 0, predicate=None) -> None:
    utils.inline_ptx(f"st.shared.b32 [$0+{displacement}], $1;", address, value, predicate=predicate)


def _scalar(x):
    return x.registers.item()


SPLAT = plgpu.Layout.WG_SPLAT(())
_PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
STATE = plgpu.ShapeDtypeStruct((THREADS,), jnp.uint32, layout=_PER_THREAD)


def _from_state(array):
    register = array.registers.flat[0]
    return llvm.extractelement(register, ptx.const(0))


def _to_state(value):
    layout = _PER_THREAD.to_mgpu()
    vector = llvm.insertelement(llvm.mlir_undef(ir.VectorType.get((1,), ptx.i32())), value, ptx.const(0))
    registers = np.array([vector], dtype=object).reshape(layout.registers_shape(layout.shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=False)


def index_loader(plan: Plan):
    """(window indices of the query [W], selected of the query [K], table, first block, blocks) -> fills the table.

    The table holds the indices of the CTA's blocks (-1 behind the last), then the numbers of the blocks that have any
    entry, and how many those are.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SPLAT, SPLAT))
    def load(ctx, window_index, selected, table, first, count):
        thread = ptx.thread_in_warpgroup()
        warp, lane = ptx.shr(thread, 5), ptx.and_(thread, 31)
        first, count = _scalar(first), _scalar(count)
        base = ptx.shared_address(table)
        main_first = plan.window_blocks * BLOCK
        values = []
        for i in range(plan.load_rounds):
            entry = ptx.add(ptx.mul(first, BLOCK), ptx.add(thread, i * THREADS))
            value = ptx.const(-1)
            for ref, size, at in ((window_index, plan.window, 0), (selected, plan.selected, main_first)):
                if size:
                    place = ptx.add(entry, -at)
                    text = f"{{.reg .pred p; setp.lt.u32 p, $2, {size}; mov.b32 $0, $3; @p ld.global.nc.b32 $0, [$1];}}"
                    address = ptx.row_address(ptx.global_address(ref), place, 4)
                    value = ptx.asm(text, address, place, value, side_effects=True)
            values.append(value)
        for i, value in enumerate(values):
            _store_shared(ptx.add(base, ptx.mul(thread, 4)), value, i * THREADS * 4)
            some = ptx.asm(
                "{.reg .pred p; setp.ge.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}",
                value,
                side_effects=True,
            )
            _store_shared(
                ptx.add(base, ptx.mul(warp, 4)), some, (plan.flags_at + 4 * i) * 4, predicate=_compare("eq", lane, 0)
            )
        utils.warpgroup_barrier()
        # Each warp finds the same list; the first one writes it.
        writes = _compare("eq", warp, 0)
        found = ptx.const(0)
        for at in range(0, plan.blocks, 32):
            block = ptx.add(lane, at)
            inside = _compare("ult", block, count)
            flags = ptx.add(base, ptx.mul(_select(inside, block, 0), 8))
            either = ptx.or_(_load_shared(flags, plan.flags_at * 4), _load_shared(flags, plan.flags_at * 4 + 4))
            used = _select(inside, either, 0)
            mask = ptx.asm(
                "{.reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}", used, side_effects=True
            )
            below = ptx.asm("{.reg .b32 m; mov.u32 m, %lanemask_lt; and.b32 m, m, $1; popc.b32 $0, m;}", mask)
            rank = ptx.add(found, below)
            keep = arith.andi(writes, _compare("ne", used, 0))
            _store_shared(ptx.add(base, ptx.mul(rank, 4)), ptx.add(block, first), plan.active_at * 4, predicate=keep)
            found = ptx.add(found, ptx.asm("popc.b32 $0, $1;", mask))
        is_first = arith.andi(writes, _compare("eq", lane, 0))
        _store_shared(base, found, plan.count_at * 4, predicate=is_first)
        utils.warpgroup_barrier()

    return load


class _Sources:
    """Addresses of one CTA and the copies of one unit."""

    def __init__(self, plan: Plan, pool, ring_row, table, ring, first):
        self.plan = plan
        self.warp, self.row, self.piece = _lanes()
        self.pool = ptx.global_address(pool)
        self.window = ptx.global_address(ring_row)
        self.table = ptx.shared_address(table)
        self.first = first
        self.count = _load_shared(self.table, plan.count_at * 4)
        base = ptx.shared_address(ring)
        self.units = ptx.add(base, ptx.mul(ptx.thread_in_warpgroup(), 16))
        self.scales = ptx.add(base, plan.ring_units * UNIT_BYTES)

    def _scale_row(self, slot, bytes_: int):
        row = ptx.add(ptx.mul(self.warp, 8), self.row)
        return ptx.add(self.scales, ptx.mul(slot, self.plan.scale_slot_bytes), ptx.mul(row, bytes_))

    def index(self, block, tile):
        """Index of this thread's row in a tile (0 or 1) of a block."""
        row = ptx.add(ptx.mul(self.warp, 16), ptx.mul(tile, 8), self.row)
        place = ptx.add(ptx.mul(ptx.add(block, ptx.mul(self.first, -1)), BLOCK), row)
        return _load_shared(ptx.add(self.table, ptx.mul(place, 4)))

    def copy(self, place, unit, slot, scale_slot):
        """Copies a unit (numbered inside its block) of the place-th used block; nothing behind the last one.

        Returns the next (place, unit, scale slot).
        """
        p = self.plan
        live = _compare("ult", place, self.count)
        block = _load_shared(ptx.add(self.table, ptx.mul(_select(live, place, 0), 4)), p.active_at * 4)
        # With nothing to gather at all the list is empty, and its first word anything.
        block = _select(live, block, self.first)
        in_window = _compare("ult", block, p.window_blocks)
        units = _select(in_window, p.window_units, p.main_units)
        second = _compare("uge", unit, units)
        tile = _select(second, 1, 0)
        inside = ptx.add(unit, ptx.mul(_select(second, units, 0), -1))
        index = self.index(block, tile)
        valid = arith.andi(live, _compare("sge", index, 0))
        index = _select(valid, index, 0)
        main = MainPageLayout(p.width)
        page_bytes = main.page_rows * ROW_BYTES
        page, entry = ptx.shr(index, PAGE_ENTRIES.bit_length() - 1), ptx.and_(index, PAGE_ENTRIES - 1)
        page_at = ptx.row_address(self.pool, page, page_bytes)
        source = arith.select(
            in_window,
            ptx.row_address(self.window, index, p.width),
            ptx.offset(page_at, ptx.mul(entry, main.value_bytes)),
        )
        source = ptx.offset(source, ptx.add(ptx.mul(inside, 64), ptx.mul(self.piece, 16)))
        copies = live
        if p.width == 64:
            copies = arith.andi(live, arith.ori(in_window, _compare("ult", self.piece, 2)))
        shared = ptx.add(self.units, ptx.mul(slot, UNIT_BYTES))
        size = _select(valid, 16, 0)
        _copy(shared, source, 16, size, copies)
        begins = arith.andi(live, _compare("eq", inside, 0))
        window_scales = p.window_layout.value_rows * ROW_BYTES
        for wanted, scale_bytes, at in (
            (in_window, p.width // 32, lambda b: ptx.add(ptx.mul(index, b), window_scales)),
            (
                arith.xori(in_window, arith.constant(ir.IntegerType.get_signless(1), 1)),
                p.width // 16,
                lambda b: ptx.add(ptx.mul(entry, b), main.value_rows * ROW_BYTES),
            ),
        ):
            # The smallest copy is 4 bytes: a 2-byte scale row comes with its neighbour.
            held = max(4, scale_bytes)
            piece_bytes = min(16, held)
            lanes = held // piece_bytes
            base = self.window if wanted is in_window else page_at
            address = ptx.offset(base, ptx.and_(at(scale_bytes), -4))
            address = ptx.offset(address, ptx.mul(self.piece, piece_bytes))
            shared = ptx.add(self._scale_row(scale_slot, held), ptx.mul(self.piece, piece_bytes))
            takes = arith.andi(arith.andi(begins, wanted), _compare("ult", self.piece, lanes))
            _copy(shared, address, piece_bytes, _select(valid, piece_bytes, 0), takes)
        ptx.commit_copies()
        ends_tile = _compare("eq", ptx.add(inside, 1), units)
        ends = arith.andi(ends_tile, second)
        next_slot = ptx.add(scale_slot, 1)
        next_slot = _select(_compare("eq", next_slot, p.scale_slots), 0, next_slot)
        return (
            _select(ends, ptx.add(place, 1), place),
            _select(ends, 0, ptx.add(unit, 1)),
            _select(ends_tile, next_slot, scale_slot),
        )


def _copy(shared, address, bytes_: int, size, predicate) -> None:
    kind = "cg" if bytes_ == 16 else "ca"
    text = f"cp.async.{kind}.shared.global [$0], [$1], {bytes_}, $2;"
    utils.inline_ptx(text, shared, address, size, predicate=predicate)


def _e4m3_factors(low, high):
    """Two E4M3 bytes -> their values * 2^118, each twice in a word; the NaN code gives NaN."""
    text = f"""{{.reg .b32 a, b, m;
    and.b32 a, $2, 0x7f; shl.b32 a, a, 4; and.b32 b, $3, 0x7f; shl.b32 b, b, 20; or.b32 a, a, b;
    add.u32 b, a, 0x00100010; shr.u32 b, b, 11; and.b32 b, b, 0x00010001; mul.lo.u32 b, b, 0x7fc0;
    mov.b32 m, {_TWO_119}; mul.rn.bf16x2 a, a, m; mul.rn.bf16x2 a, a, m; or.b32 a, a, b;
    prmt.b32 $0, a, a, 0x1010; prmt.b32 $1, a, a, 0x3232;}}"""
    return ptx.asm(text, low, high, results=2)


def _e8m0_factors(byte):
    """An E8M0 byte -> two factors whose product is 2^(e - 127) * 2^112, in both halves of a word; NaN for 255."""
    text = """{.reg .b32 a, b; .reg .pred p;
    add.u32 a, $2, 112; min.u32 b, a, 254; sub.u32 a, a, b; add.u32 a, a, 127;
    setp.eq.u32 p, $2, 255; shl.b32 a, a, 7; shl.b32 b, b, 7; @p mov.b32 a, 0x7fc0;
    prmt.b32 $0, a, a, 0x1010; prmt.b32 $1, b, b, 0x1010;}"""
    return ptx.asm(text, byte, results=2)


def _e2m1_word(word, low, high):
    """8 E2M1 codes, low and high nibbles -> [2 words of the low ones * low], [2 words of the high ones * high]."""
    text = f"""{{.reg .b32 w, s, v;
    prmt.b32 w, $4, $4, 0x3120;
    shl.b32 s, w, 12; and.b32 s, s, {_SIGNS}; shl.b32 v, w, 6; and.b32 v, v, {_E2M1}; or.b32 s, s, v;
    mul.rn.bf16x2 $0, s, $5;
    shl.b32 s, w, 4; and.b32 s, s, {_SIGNS}; shr.u32 v, w, 2; and.b32 v, v, {_E2M1}; or.b32 s, s, v;
    mul.rn.bf16x2 $1, s, $5;
    shl.b32 s, w, 8; and.b32 s, s, {_SIGNS}; shl.b32 v, w, 2; and.b32 v, v, {_E2M1}; or.b32 s, s, v;
    mul.rn.bf16x2 $2, s, $6;
    and.b32 s, w, {_SIGNS}; shr.u32 v, w, 6; and.b32 v, v, {_E2M1}; or.b32 s, s, v;
    mul.rn.bf16x2 $3, s, $6;}}"""
    a, b, c, d = ptx.asm(text, word, low, high, results=4)
    return [a, b], [c, d]


def _e4m3_word(word, factors):
    """4 E4M3 codes -> 2 words of values times both factors."""
    text = "{.reg .b32 t, u;\n"
    for i, picks in enumerate((0x1100, 0x3322)):
        text += f"""prmt.b32 t, $2, $2, {picks}; shr.u32 u, t, 4; and.b32 t, t, {_SIGNS};
        and.b32 u, u, {_E4M3}; or.b32 t, t, u; mul.rn.bf16x2 t, t, $3; mul.rn.bf16x2 ${i}, t, $4;\n"""
    return ptx.asm(text + "}", word, *factors, results=2)


def producer(plan: Plan):
    """The two steps of the gathering loop: `start` fills the ring, `block` dequantises one block and refills it."""
    refs = (plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), plgpu.RefType())
    state = (STATE,) * 5
    tile_transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def advance(slot, size: int):
        following = ptx.add(slot, 1)
        return _select(_compare("eq", following, size), 0, following)

    @plgpu.inline_mgpu(arg_types=(*refs, SPLAT), return_type=state)
    def start(ctx, pool, ring_row, table, ring, first):
        sources = _Sources(plan, pool, ring_row, table, ring, _scalar(first))
        cursor = (ptx.const(0),) * 3
        for i in range(plan.ring_units):
            cursor = sources.copy(cursor[0], cursor[1], ptx.const(i), cursor[2])
        zero = ptx.const(0)
        return tuple(_to_state(x) for x in (*cursor, zero, zero))

    @plgpu.inline_mgpu(
        arg_types=(*refs, plgpu.RefType(tile_transforms), plgpu.RefType(), SPLAT, SPLAT, *(_PER_THREAD,) * 5),
        return_type=state,
    )
    def block(ctx, pool, ring_row, table, ring, tiles, bias, first, number, *cursor):
        sources = _Sources(plan, pool, ring_row, table, ring, _scalar(first))
        number = _scalar(number)
        warp, row, piece = sources.warp, sources.row, sources.piece
        column_tiles = plan.width // 64
        base = ptx.add(ptx.shared_address(tiles), ptx.mul(warp, 2 * column_tiles * 1024), ptx.mul(row, 128))
        chunk = ptx.mul(piece, 2)
        places = [ptx.mul(ptx.xor(ptx.add(chunk, j), row), 16) for j in range(2)]
        if plan.width == 64:
            upper = [ptx.mul(ptx.xor(ptx.add(chunk, 4 + j), row), 16) for j in range(2)]
        else:
            upper = [ptx.add(x, plan.width // 128 * 1024) for x in places]

        def load_piece(slot):
            ptx.wait_copies(plan.ring_units - 1)
            utils.warp_barrier()
            address = ptx.add(sources.units, ptx.mul(slot, UNIT_BYTES))
            return ptx.asm("ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", address, results=4, side_effects=True)

        def window_unit(unit, tile, slot, scale_slot):
            words = load_piece(slot)
            scale_bytes = plan.width // 32
            scale = ptx.add(
                sources._scale_row(scale_slot, max(4, scale_bytes)), ptx.add(ptx.mul(unit, 2), ptx.shr(piece, 1))
            )
            if scale_bytes == 2:
                scale = ptx.add(scale, ptx.mul(ptx.and_(sources.index(number, tile), 1), 2))
            factors = _e8m0_factors(_load_shared_byte(scale))
            out = [_e4m3_word(word, factors) for word in words]
            at = ptx.add(base, ptx.mul(tile, column_tiles * 1024), ptx.mul(unit, 1024))
            for j in range(2):
                ptx.store_shared_16_bytes(ptx.add(at, places[j]), out[2 * j] + out[2 * j + 1])

        def main_unit(unit, tile, slot, scale_slot):
            words = load_piece(slot)
            scale = ptx.add(sources._scale_row(scale_slot, plan.width // 16), ptx.add(ptx.mul(unit, 4), piece))
            low, high = _e4m3_factors(_load_shared_byte(scale), _load_shared_byte(scale, plan.width // 32))
            out = [_e2m1_word(word, low, high) for word in words]
            at = ptx.add(base, ptx.mul(tile, column_tiles * 1024), ptx.mul(unit, 1024))

            def store():
                for j in range(2):
                    for half, where in ((0, places), (1, upper)):
                        words16 = out[2 * j][half] + out[2 * j + 1][half]
                        ptx.store_shared_16_bytes(ptx.add(at, where[j]), words16)

            if plan.width == 64:
                branch = scf.IfOp(_compare("ult", piece, 2))
                with ir.InsertionPoint(branch.then_block):
                    store()
                    scf.yield_([])
            else:
                store()

        def loop(units: int, one_unit, carried):
            i32 = ptx.i32()
            # The count is hidden from the compiler, which would unroll the loop out of the instruction cache.
            count = ptx.asm(f"mov.u32 $0, {2 * units};", side_effects=True)
            op = scf.ForOp(ptx.const(0), count, ptx.const(1), carried)
            with ir.InsertionPoint(op.body):
                i = op.induction_variable
                place, unit, copy_scale, slot, scale_slot = op.inner_iter_args
                second = _compare("uge", i, units)
                tile = _select(second, 1, 0)
                inside = ptx.add(i, ptx.mul(tile, -units))
                one_unit(inside, tile, slot, scale_slot)
                place, unit, copy_scale = sources.copy(place, unit, slot, copy_scale)
                ends = _compare("eq", ptx.add(inside, 1), units)
                scale_slot = _select(ends, advance(scale_slot, plan.scale_slots), scale_slot)
                scf.yield_([place, unit, copy_scale, advance(slot, plan.ring_units), scale_slot])
            assert all(r.type == i32 for r in op.results)
            return list(op.results)

        # Rows without an entry: their values are zero, and their logits get -inf from here.
        thread = ptx.thread_in_warpgroup()
        row_index = _load_shared(
            ptx.add(
                sources.table, ptx.mul(ptx.add(ptx.mul(ptx.add(number, ptx.mul(sources.first, -1)), BLOCK), thread), 4)
            )
        )
        mask = _select(_compare("slt", row_index, 0), _NO_VALUE - (1 << 32), 0)
        _store_shared(
            ptx.add(ptx.shared_address(bias), ptx.mul(thread, 4)), mask, predicate=_compare("ult", thread, BLOCK)
        )
        carried = [_from_state(x) for x in cursor]
        if not plan.window:
            carried = loop(plan.main_units, main_unit, carried)
        elif not plan.selected:
            carried = loop(plan.window_units, window_unit, carried)
        else:
            branch = scf.IfOp(_compare("ult", number, plan.window_blocks), [ptx.i32()] * 5, has_else=True)
            with ir.InsertionPoint(branch.then_block):
                scf.yield_(loop(plan.window_units, window_unit, carried))
            with ir.InsertionPoint(branch.else_block):
                scf.yield_(loop(plan.main_units, main_unit, carried))
            carried = list(branch.results)
        return tuple(_to_state(x) for x in carried)

    return start, block
