"""Thread-level programs inside `plgpu.inline_mgpu`: what one thread of a block does, written with Python operators.

Mosaic GPU describes whole tiles; selection, counting and compaction are easier to say for one thread, its warp and its
block. `Simt` builds such a program as MLIR. Values are `Word` (32 bits, unsigned) and `Flag`; a block has up to 1,024
threads, all of which run the program. The tests run the same programs on a CPU through an emulator with these methods.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, math, scf
from jax.experimental.mosaic.gpu import utils


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _constant(value: int) -> ir.Value:
    value &= 0xFFFFFFFF
    return arith.constant(_i32(), value - (1 << 32) if value >> 31 else value)


def _raw(x: "Word | Flag | int") -> ir.Value:
    return _constant(x) if isinstance(x, int) else x.value


class Flag:
    """One bit of each thread."""

    def __init__(self, value: ir.Value):
        self.value = value

    def __and__(self, other: "Flag") -> "Flag":
        return Flag(arith.andi(self.value, other.value))

    def __or__(self, other: "Flag") -> "Flag":
        return Flag(arith.ori(self.value, other.value))

    def __invert__(self) -> "Flag":
        return Flag(arith.xori(self.value, arith.constant(ir.IntegerType.get_signless(1), True)))


class Word:
    """A 32-bit unsigned value of each thread; arithmetic wraps."""

    def __init__(self, value: ir.Value):
        self.value = value

    def __add__(self, other):
        return Word(arith.addi(self.value, _raw(other)))

    def __sub__(self, other):
        return Word(arith.subi(self.value, _raw(other)))

    def __mul__(self, other):
        return Word(arith.muli(self.value, _raw(other)))

    def __floordiv__(self, other):
        return Word(arith.divui(self.value, _raw(other)))

    def __and__(self, other):
        return Word(arith.andi(self.value, _raw(other)))

    def __or__(self, other):
        return Word(arith.ori(self.value, _raw(other)))

    def __xor__(self, other):
        return Word(arith.xori(self.value, _raw(other)))

    def __lshift__(self, other):
        return Word(arith.shli(self.value, _raw(other)))

    def __rshift__(self, other):
        return Word(arith.shrui(self.value, _raw(other)))

    def _compare(self, predicate: arith.CmpIPredicate, other) -> Flag:
        return Flag(arith.cmpi(predicate, self.value, _raw(other)))

    def __eq__(self, other):
        return self._compare(arith.CmpIPredicate.eq, other)

    def __ne__(self, other):
        return self._compare(arith.CmpIPredicate.ne, other)

    def __lt__(self, other):
        return self._compare(arith.CmpIPredicate.ult, other)

    def __le__(self, other):
        return self._compare(arith.CmpIPredicate.ule, other)

    def __gt__(self, other):
        return self._compare(arith.CmpIPredicate.ugt, other)

    def __ge__(self, other):
        return self._compare(arith.CmpIPredicate.uge, other)

    __hash__ = None


Values = Sequence[Word]


def _asm(text: str, *operands: Word | ir.Value, effects: bool = False, convergent: bool = False) -> Word:
    operands = [x.value if isinstance(x, Word) else x for x in operands]
    out = utils.inline_ptx(
        text, *operands, result_types=_i32(), has_side_effects=effects or convergent, convergent=convergent
    )
    return Word(out)


def _effect(text: str, *operands: Word | ir.Value, convergent: bool = False) -> None:
    operands = [x.value if isinstance(x, Word) else x for x in operands]
    utils.inline_ptx(text, *operands, has_side_effects=True, convergent=convergent)


class Simt:
    """Builds the program at MLIR's current insertion point."""

    # Values

    def const(self, value: int) -> Word:
        return Word(_constant(value))

    def thread(self) -> Word:
        return Word(utils.thread_idx())

    def block(self) -> Word:
        """Number of the block in a one-dimensional grid."""
        return _asm("mov.u32 $0, %ctaid.x;")

    def select(self, flag: Flag, a: Word | int, b: Word | int) -> Word:
        return Word(arith.select(flag.value, _raw(a), _raw(b)))

    def min(self, a: Word, b: Word | int) -> Word:
        return Word(arith.minui(a.value, _raw(b)))

    def max(self, a: Word, b: Word | int) -> Word:
        return Word(arith.maxui(a.value, _raw(b)))

    def popcount(self, x: Word) -> Word:
        return Word(math.ctpop(x.value))

    def leading_zeros(self, x: Word) -> Word:
        """32 for 0."""
        return _asm("clz.b32 $0, $1;", x)

    def trailing_zeros(self, x: Word) -> Word:
        """32 for 0."""
        return _asm("{.reg .b32 t; brev.b32 t, $1; clz.b32 $0, t;}", x)

    def shift_right(self, x: Word, count: Word) -> Word:
        """x >> count, 0 for counts of 32 and more."""
        return _asm("shr.u32 $0, $1, $2;", x, count)

    def sign_mask(self, x: Word) -> Word:
        """All ones where bit 31 is set, else 0."""
        return Word(arith.shrsi(x.value, _constant(31)))

    # float32 in a word, and two bfloat16 in a word

    def float_max(self, a: Word, b: Word) -> Word:
        """max of float32; a number if either is one."""
        return _asm("max.f32 $0, $1, $2;", a, b)

    def positive_zero(self, x: Word) -> Word:
        """The same float32, +0 for -0."""
        return _asm("add.rn.f32 $0, $1, 0f00000000;", x)

    def float_subtract(self, a: Word, b: Word) -> Word:
        """a - b of float32; NaN has no sign."""
        return _asm("sub.rn.f32 $0, $1, $2;", a, b)

    def push_sign(self, mask: Word, x: Word) -> Word:
        """The mask shifted up by one bit, the lowest bit from bit 31 of x."""
        return _asm("shf.l.wrap.b32 $0, $2, $1, 1;", mask, x)

    def pair_max(self, a: Word, b: Word) -> Word:
        """max of two bfloat16 each; a number where either is one."""
        return _asm("max.bf16x2 $0, $1, $2;", a, b)

    def pair_greater(self, a: Word, b: Word) -> Word:
        """Two bfloat16 each: bits 7 and 23 say where a > b; the other bits are not specified. False for NaN."""
        return _asm("set.gt.bf16x2.bf16x2 $0, $1, $2;", a, b)

    # Warp

    def ballot(self, flag: Flag) -> Word:
        """Bit i is lane i's flag."""
        text = "{.reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}"
        return _asm(text, self.select(flag, 1, 0), convergent=True)

    def lanes_below(self) -> Word:
        """A bit for each lower lane."""
        return _asm("mov.u32 $0, %lanemask_lt;")

    def warp_reduce(self, x: Word, operation: str) -> Word:
        """`operation`: "add", "max", "min", "or" over the lanes, to all of them."""
        kind = {"add": "add.u32", "max": "max.u32", "min": "min.u32", "or": "or.b32"}[operation]
        return _asm(f"redux.sync.{kind} $0, $1, 0xffffffff;", x, convergent=True)

    def from_lane(self, x: Word, lane: int) -> Word:
        return _asm(f"shfl.sync.idx.b32 $0, $1, {lane}, 0x1f, 0xffffffff;", x, convergent=True)

    def running_sum(self, x: Word) -> Word:
        """Sum over this lane and the lower ones."""
        for distance in (1, 2, 4, 8, 16):
            text = (
                f"{{.reg .pred p; .reg .b32 t; shfl.sync.up.b32 t|p, $1, {distance}, 0, 0xffffffff;"
                " mov.b32 $0, $1; @p add.u32 $0, t, $1;}"
            )
            x = _asm(text, x, convergent=True)
        return x

    def barrier(self) -> None:
        """Waits for all threads of the block; shared memory written before it is seen after it."""
        _effect("bar.sync 0;", convergent=True)

    # Shared memory: byte addresses

    def shared(self, ref: Any) -> Word:
        return Word(llvm.ptrtoint(_i32(), utils.memref_ptr(ref)))

    def load_shared(self, address: Word, displacement: int = 0) -> Word:
        return _asm(f"ld.shared.b32 $0, [$1+{displacement}];", address, effects=True)

    def load_shared_4(self, address: Word, displacement: int = 0) -> list[Word]:
        text = f"ld.shared.v4.b32 {{$0,$1,$2,$3}}, [$4+{displacement}];"
        out = utils.inline_ptx(text, address.value, result_types=(_i32(),) * 4, has_side_effects=True)
        return [Word(x) for x in out]

    def load_shared_u16(self, address: Word) -> Word:
        text = "{.reg .u16 t; ld.shared.u16 t, [$1]; cvt.u32.u16 $0, t;}"
        return _asm(text, address, effects=True)

    def store_shared(self, address: Word, value: Word | int, displacement: int = 0) -> None:
        _effect(f"st.shared.b32 [$0+{displacement}], $1;", address, _raw(value))

    def store_shared_4(self, address: Word, values: Values, displacement: int = 0) -> None:
        _effect(f"st.shared.v4.b32 [$0+{displacement}], {{$1,$2,$3,$4}};", address, *values)

    def store_shared_u16(self, address: Word, value: Word) -> None:
        _effect("{.reg .u16 t; cvt.u16.u32 t, $1; st.shared.u16 [$0], t;}", address, value)

    def fetch_add_shared(self, address: Word, value: Word, displacement: int = 0) -> Word:
        """Adds and returns what was there."""
        return _asm(f"atom.shared.add.u32 $0, [$1+{displacement}], $2;", address, value, effects=True)

    def reduce_shared(
        self, address: Word, value: Word | int, operation: str, displacement: int = 0, flag: Flag | None = None
    ) -> None:
        """Atomically combines a word with a value by "add", "max", "min" or "or"; only where the flag is set."""
        kind = {"add": "add.u32", "max": "max.u32", "min": "min.u32", "or": "or.b32"}[operation]
        utils.inline_ptx(
            f"red.shared.{kind} [$0+{displacement}], $1;",
            address.value,
            _raw(value),
            predicate=None if flag is None else flag.value,
            has_side_effects=True,
        )

    # Cluster: blocks that run together and reach each other's shared memory, by addresses of their own

    def cluster_barrier(self) -> None:
        """Waits for all threads of the cluster; shared memory written before it is seen after it."""
        _effect("barrier.cluster.arrive.release;", convergent=True)
        _effect("barrier.cluster.wait.acquire;", convergent=True)

    def store_first_block(self, address: Word, value: Word) -> None:
        """To the shared memory of the cluster's first block."""
        _effect("{.reg .b32 t; mapa.shared::cluster.u32 t, $0, 0; st.shared::cluster.b32 [t], $1;}", address, value)

    def fetch_add_first_block(self, address: Word, value: Word, displacement: int = 0) -> Word:
        """Adds in the shared memory of the cluster's first block and returns what was there."""
        text = (
            "{.reg .b32 t; mapa.shared::cluster.u32 t, $1, 0;"
            f" atom.shared::cluster.add.u32 $0, [t+{displacement}], $2;}}"
        )
        return _asm(text, address, value, effects=True)

    # Global memory: a row's address and a byte offset in it below 2^32

    def row(self, ref: Any, row: Word, pitch: int) -> ir.Value:
        """Address of a row of `pitch` bytes; row * pitch may exceed 32 bits."""
        base = llvm.ptrtoint(_i64(), utils.memref_ptr(ref))
        return arith.addi(base, arith.muli(arith.extui(_i64(), row.value), arith.constant(_i64(), pitch)))

    def _at(self, row: ir.Value, offset: Word) -> ir.Value:
        return arith.addi(row, arith.extui(_i64(), offset.value))

    def load(self, row: ir.Value, offset: Word) -> Word:
        return _asm("ld.global.nc.b32 $0, [$1];", self._at(row, offset))

    def store(self, row: ir.Value, offset: Word, value: Word | int) -> None:
        _effect("st.global.b32 [$0], $1;", self._at(row, offset), _raw(value))

    # Copies of contiguous bytes from global to shared memory by the copy engine, each ending a phase of an 8-byte
    # barrier in shared memory. Phases count from 0.

    def copies_begin(self, barrier: Word, count: int) -> None:
        """Run by one thread before the first copy: prepares `count` neighbouring barriers."""
        for i in range(count):
            _effect(f"mbarrier.init.shared.b64 [$0+{8 * i}], 1;", barrier)
        _effect("fence.mbarrier_init.release.cluster;")
        _effect("fence.proxy.async.shared::cta;")

    def copy_start(self, target: Word, row: ir.Value, offset: Word, size: Word, barrier: Word) -> None:
        """Run by one thread. Addresses and size are multiples of 16 bytes; all threads are done with the target."""
        _effect("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", barrier, size)
        text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
        _effect(text, target, self._at(row, offset), size, barrier)

    def copy_wait(self, barrier: Word, phase: Word) -> None:
        """Until the phase has ended; only the lowest bit of its number matters. For all threads that read the copy."""
        text = (
            "{.reg .pred p;\n wait_${:uid}:\n mbarrier.try_wait.parity.shared.b64 p, [$0], $1;\n"
            " @!p bra wait_${:uid};\n}"
        )
        _effect(text, barrier, phase & 1, convergent=True)

    # Control

    @contextlib.contextmanager
    def when(self, flag: Flag):
        """Only threads whose flag is set run the body; no value may leave it."""
        with ir.InsertionPoint(scf.IfOp(flag.value).then_block):
            yield
            scf.yield_([])

    def if_else(
        self, flag: Flag, count: int, then: Callable[[], Values], otherwise: Callable[[], Values]
    ) -> list[Word]:
        """`count` words of one branch or of the other."""
        op = scf.IfOp(flag.value, [_i32()] * count, has_else=True)
        for block, branch in ((op.then_block, then), (op.else_block, otherwise)):
            with ir.InsertionPoint(block):
                scf.yield_([x.value for x in branch()])
        return [Word(x) for x in op.results]

    def for_range(
        self, start: Word | int, stop: Word | int, step: int, carry: Values, body: Callable[..., Values]
    ) -> list[Word]:
        """carry = body(i, *carry) for i from start, as long as i < stop (both below 2^31); returns the last carry."""
        loop = scf.ForOp(_raw(start), _raw(stop), _constant(step), [x.value for x in carry])
        with ir.InsertionPoint(loop.body):
            out = body(Word(loop.induction_variable), *(Word(x) for x in loop.inner_iter_args))
            scf.yield_([x.value for x in out])
        return [Word(x) for x in loop.results]

    def while_loop(self, carry: Values, condition: Callable[..., Flag], body: Callable[..., Values]) -> list[Word]:
        """carry = body(*carry) as long as condition(*carry)."""
        types = [x.value.type for x in carry]
        loop = scf.WhileOp(types, [x.value for x in carry])
        before = loop.before.blocks.append(*types)
        after = loop.after.blocks.append(*types)
        with ir.InsertionPoint(before):
            scf.condition(condition(*(Word(x) for x in before.arguments)).value, list(before.arguments))
        with ir.InsertionPoint(after):
            scf.yield_([x.value for x in body(*(Word(x) for x in after.arguments))])
        return [Word(x) for x in loop.results]
