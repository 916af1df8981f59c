"""What the experts' kernels need beyond the index kernels' `Program`: copies of any size, bfloat16 products, SwiGLU."""

import struct
from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic.gpu import utils

from pallas_kernels import ptx
from pallas_kernels.indexer.gpu_program import Program as IndexProgram
from pallas_kernels.simt import Word


def _word(text: str, *operands: Word) -> Word:
    return Word(ptx.asm(text, *(x.value for x in operands)))


class Program(IndexProgram):
    """Builds a block's program; float32 values are `Word`s."""

    def float_const(self, value: float) -> Word:
        return self.const(struct.unpack("<I", struct.pack("<f", value))[0])

    def permute_by(self, a: Word, b: Word, selector: Word) -> Word:
        """As `permute`, each lane by a selector of its own."""
        return _word("prmt.b32 $0, $1, $2, $3;", a, b, selector)

    def plus(self, a: Word, b: Word) -> Word:
        """float32 a + b."""
        return _word("add.rn.f32 $0, $1, $2;", a, b)

    def smaller(self, a: Word, b: Word) -> Word:
        """float32, NaN if either is."""
        return _word("min.NaN.f32 $0, $1, $2;", a, b)

    def larger(self, a: Word, b: Word) -> Word:
        """float32, NaN if either is."""
        return _word("max.NaN.f32 $0, $1, $2;", a, b)

    def power_of_two(self, x: Word) -> Word:
        """2^x of float32 to two last places."""
        return _word("ex2.approx.f32 $0, $1;", x)

    def reciprocal(self, x: Word) -> Word:
        """1 / x of float32 to one last place."""
        return _word("rcp.approx.f32 $0, $1;", x)

    def load_matrices(self, address: Word, displacement: int = 0) -> list[Word]:
        """ldmatrix.x4: lane 8 i + j has the address of the 16 bytes of row j of matrix i; word i of a lane is word
        `quad` of row `lane / 4` of matrix i."""
        text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0,$1,$2,$3}}, [$4+{displacement}];"
        types = (ptx.i32(),) * 4
        out = utils.inline_ptx(text, address.value, result_types=types, has_side_effects=True, convergent=True)
        return [Word(x) for x in out]

    def copy_16_bytes_from(self, shared: Word, source: Any, displacement: int) -> None:
        """As `copy_16_bytes`, only the source displaced."""
        text = f"cp.async.cg.shared.global.L2::128B [$0], [$1+{displacement}], 16;"
        utils.inline_ptx(text, shared.value, source)

    def copy_bytes(self, shared: Word, source: Any, size: int, displacement: int = 0, to: int = 0) -> None:
        """Starts a copy of 4 or 8 bytes through the L1 cache, whose neighbours are wanted soon; source and target
        displaced."""
        text = f"cp.async.ca.shared.global [$0+{to}], [$1+{displacement}], {size};"
        utils.inline_ptx(text, shared.value, source)

    # Barriers at which some warpgroups only say that they have come; warpgroup w has number 8 + w, so take the last

    def arrive(self, number: int, threads: int) -> None:
        """Counts the thread as one of so many, without waiting for the others."""
        utils.inline_ptx(f"bar.arrive {number}, {threads};", has_side_effects=True, convergent=True)

    def meet(self, number: int, threads: int) -> None:
        """Waits until so many threads have come."""
        utils.inline_ptx(f"bar.sync {number}, {threads};", has_side_effects=True, convergent=True)

    # Pairs of bfloat16

    def times_pairs(self, a: Word, b: Word) -> Word:
        """a * b of two bfloat16 each."""
        return _word("mul.rn.bf16x2 $0, $1, $2;", a, b)

    def through_e4m3(self, a: Word, b: Word) -> list[Word]:
        """Two float32 rounded to E4M3, as float32."""
        text = (
            "{.reg .b16 c, l, h; .reg .b32 t; cvt.rn.satfinite.e4m3x2.f32 c, $3, $2; cvt.rn.f16x2.e4m3x2 t, c;"
            " mov.b32 {l, h}, t; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}"
        )
        out = utils.inline_ptx(text, a.value, b.value, result_types=(ptx.i32(),) * 2)
        return [Word(x) for x in out]

    # Sums of products of a warpgroup

    def add_products(
        self, sums: Sequence[Word], a: Sequence[Sequence[Word]], tile: Word, first: int, fresh: Word
    ) -> list[Word]:
        """Starts adding bfloat16 products of 64 rows with as many columns as `sums` has words, twice.

        Args:
          sums: float32 as of `start_dots`, or of an earlier call that is still under way.
          a: for each 16 channels four registers: of row `row` and `row` + 8 pairs 2 quad + {0, 1}, then 8 further.
          tile: address of rows of 128 bytes, 64 channels, in the 128-byte swizzle.
          first: which 16 of them are those of the first step.
          fresh: whether not to add (a word, 0 or 1).

        Returns the sums, which only `add_products` and `wait_sums` may take.
        """
        size, steps = len(sums), len(a)
        base = 2 * size
        lines = [
            "{.reg .pred p, q; .reg .b64 d;",
            f"setp.eq.b32 p, ${base + 4 * steps + 1}, 0;",
            "setp.eq.b32 q, 0, 0;",
        ]
        lines.append("wgmma.fence.sync.aligned;")
        acc = ",".join(f"${i}" for i in range(size))
        for i in range(steps):
            regs = ",".join(f"${base + 4 * i + j}" for j in range(4))
            lines.append(f"add.s64 d, ${base + 4 * steps}, {2 * (first + i)};")
            shape = f"m64n{2 * size}k16.f32.bf16.bf16"
            lines.append(
                f"wgmma.mma_async.sync.aligned.{shape} {{{acc}}}, {{{regs}}}, d, {'q' if i else 'p'}, 1, 1, 0;"
            )
        lines += ["wgmma.commit_group.sync.aligned;", "}"]
        # K-major rows of 128 bytes: the next eight rows lie 1,024 bytes further.
        low, high = ((tile >> 4) & 0x3FFF) | (1 << 16), self.const(1024 // 16 | 1 << 30)
        descriptor = ptx.asm("mov.b64 $0, {$1,$2};", low.value, high.value, type=ptx.i64())
        words = [x.value for registers in a for x in registers]
        ties = ",".join(str(i) for i in range(size))
        constraints = f"{','.join(['=r'] * size)},{ties},{','.join(['r'] * len(words))},l,r"
        operands = [x.value for x in sums] + words + [descriptor, fresh.value]
        return self._tied("\n".join(lines), operands, constraints, size)

    def wait_products(self, pending: int) -> None:
        """Until at most this many calls of `add_products` are under way."""
        utils.inline_ptx(f"wgmma.wait_group.sync.aligned {pending};", has_side_effects=True, convergent=True)

    def wait_sums(self, sums: Sequence[Word]) -> list[Word]:
        """The sums, once no products are under way."""
        constraints = ",".join(["=r"] * len(sums) + [str(i) for i in range(len(sums))])
        return self._tied("wgmma.wait_group.sync.aligned 0;", [x.value for x in sums], constraints, len(sums))

    @staticmethod
    def _tied(text: str, operands: list, constraints: str, size: int) -> list[Word]:
        kind = llvm.StructType.get_literal([ptx.i32()] * size)
        out = llvm.inline_asm(kind, operands, text, constraints, has_side_effects=True, convergent=True)
        return [Word(llvm.extractvalue(ptx.i32(), out, [i])) for i in range(size)]
