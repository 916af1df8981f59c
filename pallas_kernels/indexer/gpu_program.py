"""What the index-score kernels need beyond `Simt`: float32, byte permutes, cp.async, ldmatrix and wgmma.

float32 values and packed pairs of bfloat16 are `Word`s. A warpgroup's threads run the products together.
"""

from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic.gpu import utils

from pallas_kernels import ptx
from pallas_kernels.simt import Simt, Word

_FIRST_BARRIER = 8  # lower ones are Mosaic's


def _word(text: str, *operands: Word) -> Word:
    return Word(ptx.asm(text, *(x.value for x in operands)))


def _together(text: str, *operands: Any, results: int, kind: Any) -> list[Any]:
    """Inline PTX that the threads of a warp or warpgroup run at the same time."""
    types = (kind,) * results
    return list(utils.inline_ptx(text, *operands, result_types=types, has_side_effects=True, convergent=True))


class Program(Simt):
    """Builds a block's program."""

    # Bytes and floats

    def permute(self, a: Word, b: Word, selector: int) -> Word:
        """Bytes of two words, the lowest nibble of the selector for the lowest byte; eight more for the byte's highest
        bit, eight times."""
        return _word(f"prmt.b32 $0, $1, $2, {selector};", a, b)

    def lookup(self, table: tuple[Word, Word], indices: Word) -> Word:
        """Four of the table's eight bytes, by the low three bits of the low four nibbles."""
        return _word("prmt.b32 $0, $1, $2, $3;", *table, indices & 0x7777)

    def merge(self, a: Word, mask: int, b: Word) -> Word:
        """(a & mask) | b in one instruction."""
        return _word(f"lop3.b32 $0, $1, {mask}, $2, 0xEA;", a, b)

    def times(self, a: Word, b: Word) -> Word:
        """float32 a * b."""
        return _word("mul.rn.f32 $0, $1, $2;", a, b)

    def times_plus(self, a: Word, b: Word, c: Word) -> Word:
        """float32 a * b + c, rounded once."""
        return _word("fma.rn.f32 $0, $1, $2, $3;", a, b, c)

    def positive_zero(self, x: Word) -> Word:
        """The same float32, +0 for -0."""
        return _word("add.rn.f32 $0, $1, 0f00000000;", x)

    def pack_bf16(self, low: Word, high: Word) -> Word:
        """Two float32 rounded to bfloat16."""
        return _word("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high)

    def pack_e4m3(self, values: Sequence[Word]) -> Word:
        """Four float32 rounded to E4M3, the first one in the low byte."""
        text = (
            "{.reg .b16 a,b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
            " mov.b32 $0, {a,b};}"
        )
        return _word(text, *values)

    def weighted_relu(self, low: Word, high: Word, weights: Word) -> Word:
        """bf16(bf16(relu(x)) * w) of two float32 and a pair of weights."""
        return _word("{.reg .b32 t; cvt.rn.relu.bf16x2.f32 t, $2, $1; mul.rn.bf16x2 $0, t, $3;}", low, high, weights)

    # Warp

    def exchange(self, x: Word, mask: int) -> Word:
        """The word of the lane whose number differs in these bits."""
        text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;"
        return Word(_together(text, x.value, results=1, kind=ptx.i32())[0])

    def load_matrices_transposed(self, address: Word, displacement: int = 0) -> list[Word]:
        """ldmatrix.x4.trans; lane 8 i + j has the address of row j of the 8 x 8 matrix i of 16-bit elements."""
        text = f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$0,$1,$2,$3}}, [$4+{displacement}];"
        return [Word(x) for x in _together(text, address.value, results=4, kind=ptx.i32())]

    # Warpgroup

    def warpgroup_barrier(self, warpgroup: Word) -> None:
        """Like `barrier`, for the 128 threads of a warpgroup."""
        ptx.barrier((warpgroup + _FIRST_BARRIER).value, 128)

    def shared_to_async(self) -> None:
        """The thread's stores to shared memory before this are seen by products after the next barrier."""
        utils.inline_ptx("fence.proxy.async.shared::cta;")

    def start_dots(
        self, a: Sequence[Sequence[Word]], codes: Word, *, first: int = 0, columns: int = 32
    ) -> list[list[Word]]:
        """Starts E4M3 products of 64 rows with 32 or 64 columns over some groups of 32 channels.

        a: for each group from number `first` on four registers; codes: address of `columns` rows of 128 bytes in the
        128-byte swizzle. Returns columns / 2 float32 a thread and group, which only `wait_dots` may read. In number i
        the thread has row `row + 8 (i / 2 % 2)` of its warp and column `8 (i / 4) + 2 quad + i % 2`.
        """
        groups, size = len(a), columns // 2
        lines = ["{.reg .pred p; .reg .b64 d;", "setp.ne.b32 p, 0, 0;", "wgmma.fence.sync.aligned;"]
        for g in range(groups):
            acc = ",".join(f"${size * g + i}" for i in range(size))
            regs = ",".join(f"${size * groups + 4 * g + i}" for i in range(4))
            lines.append(f"add.s64 d, ${(size + 4) * groups}, {2 * (first + g)};")
            shape = f"m64n{columns}k32.f32.e4m3.e4m3"
            lines.append(f"wgmma.mma_async.sync.aligned.{shape} {{{acc}}}, {{{regs}}}, d, p, 1, 1;")
        lines += ["wgmma.commit_group.sync.aligned;", "}"]
        operands = [x.value for regs in a for x in regs]
        # K-major rows of 128 bytes: the next eight rows lie 1,024 bytes further.
        low, high = ((codes >> 4) & 0x3FFF) | (1 << 16), self.const(1024 // 16 | 1 << 30)
        descriptor = ptx.asm("mov.b64 $0, {$1,$2};", low.value, high.value, type=ptx.i64())
        out = _together("\n".join(lines), *operands, descriptor, results=size * groups, kind=ptx.i32())
        return [[Word(x) for x in out[size * g : size * (g + 1)]] for g in range(groups)]

    def wait_dots(self, dots: Sequence[Sequence[Word]], pending: int) -> list[list[Word]]:
        """The results of `start_dots`, once at most this many later ones are under way."""
        values = [x.value for group in dots for x in group]
        count = len(values)
        constraints = ",".join(["=r"] * count + [str(i) for i in range(count)])
        kind = llvm.StructType.get_literal([ptx.i32()] * count)
        text = f"wgmma.wait_group.sync.aligned {pending};"
        out = llvm.inline_asm(kind, values, text, constraints, has_side_effects=True, convergent=True)
        words = iter([Word(llvm.extractvalue(ptx.i32(), out, [i])) for i in range(count)])
        return [[next(words) for _ in group] for group in dots]

    def row_sums(self, tiles: Sequence[Sequence[Word]], ones: Word) -> list[list[Word]]:
        """For each tile of 64 rows and 32 columns of bfloat16 the float32 sums of the thread's two rows.

        tiles: for each tile eight registers, columns as in `start_dots`; ones: address of 256 bytes of bfloat16 ones.
        Waits for the result, and for all products started before.
        """
        count = len(tiles)
        lines = ["{.reg .pred p, q;", "setp.ne.b32 p, 0, 0;", "setp.ne.b32 q, 1, 0;", "wgmma.fence.sync.aligned;"]
        for half, more in ((0, "p"), (4, "q")):
            for i in range(count):
                acc = ",".join(f"${4 * i + j}" for j in range(4))
                regs = ",".join(f"${4 * count + 8 * i + half + j}" for j in range(4))
                operands = f"{{{acc}}}, {{{regs}}}, ${12 * count}, {more}, 1, 1, 0"
                lines.append(f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {operands};")
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
        words = [x.value for registers in tiles for x in registers]
        # Two matrices of 8 rows of 16 bytes, 128 bytes apart, without swizzle.
        low, high = ((ones >> 4) & 0x3FFF) | (8 << 16), self.const(16)
        descriptor = ptx.asm("mov.b64 $0, {$1,$2};", low.value, high.value, type=ptx.i64())
        out = _together("\n".join(lines), *words, descriptor, results=4 * count, kind=ptx.i32())
        return [[Word(out[4 * i]), Word(out[4 * i + 2])] for i in range(count)]

    # Memory

    def offset(self, row: Any, offset: Word) -> Any:
        """A place behind the row's start."""
        return ptx.offset(row, offset.value)

    def load_words(self, row: Any, count: int, displacement: int = 0) -> list[Word]:
        """1, 2 or 4 words of global memory, not kept in L1."""
        return [Word(x) for x in ptx.load_words(row, count, displacement)]

    def load_half(self, row: Any) -> Word:
        return Word(ptx.load_u16(row))

    def load_byte(self, row: Any) -> Word:
        return Word(ptx.load_u8(row))

    def store_words(self, row: Any, offset: Word, values: Sequence[Word]) -> None:
        """2 or 4 words to global memory, aligned to their size."""
        ptx.store_words(ptx.offset(row, offset.value), [x.value for x in values])

    def copy_16_bytes(self, shared: Word, source: Any, displacement: int) -> None:
        """Starts a copy from global to shared memory, both displaced."""
        text = f"cp.async.cg.shared.global.L2::128B [$0+{displacement}], [$1+{displacement}], 16;"
        utils.inline_ptx(text, shared.value, source)

    def commit_copies(self) -> None:
        """Closes a group of the thread's copies."""
        ptx.commit_copies()

    def wait_copies(self, pending: int) -> None:
        """Until at most this many of the thread's groups are under way."""
        ptx.wait_copies(pending)
