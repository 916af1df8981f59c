"""What a thread block does for blocks of few rows: it streams weights once and multiplies them in FP8.

E2M1 codes are exact E4M3 values, and so are the rows after their FP8 round trip in groups of 32: one FP8 `wgmma` step
is one scale group of both sides, and both scales multiply the group's sum in float32. Weights are the A operand, in
registers, the rows are the columns of B. Lane q of a quad has channels 8q .. 8q + 7 of a group, first the even ones:

| operand | rows |
|---|---|
| A, weights x 2^-6 | of a warp 8 of a tile's first half, then 8 of its second half |
| B, x | magnitudes from 16 on of the block's rows, then the smaller ones |

The matrix units add FP8 products with 13 bits or so below the largest one of a step. So x goes in as two columns a row:
products of magnitudes from 16 to 448 lie within 11 bits, and of the smaller ones only those below 2^-3 can lose bits,
which are then less than 2^-16 of the group's largest.

The halves of a tile are 32 channels of gate and of up, so that a thread has both of a channel, or 64 rows of down. Each
warpgroup has its own ring of chunks in shared memory: 256 channels of a tile's 64 rows with their scales, of every W-th
chunk of the tile. At the end of a tile the last warpgroup, which may have one chunk less, adds up all
warpgroups' sums in a fixed order.

Scale bytes of 0 (2^-127, which the quantiser never writes) count as 0. Sums that are infinite count as NaN, so that
scale bytes of 255 (NaN) give NaN.
"""

from typing import Any

from pallas_kernels.experts import gpu_blocks
from pallas_kernels.experts.block_sizes import CHUNK, GROUP, TILE_ROWS, FewPlan
from pallas_kernels.experts.gpu_blocks import INFINITY, NAN, Half
from pallas_kernels.experts.gpu_program import Program
from pallas_kernels.indexer.gpu_scores import Lane, expand
from pallas_kernels.simt import Flag, Word

_ROW_BYTES = CHUNK // 2
_HALF = TILE_ROWS // 2
_GROUPS = CHUNK // GROUP  # of a chunk
_SUMS_FREE = 15  # barrier: the last tile's sums have been read
_LARGE = 0x28282828  # added to four magnitudes of E4M3 below 128 it reaches 128 from 16.0 on
_TOGETHER = 2  # groups whose products are started at once; a row of B has four


class FewRows:
    """The program; `run` is called once.

    x bf16 [blocks, rows, width]; block_expert int32 [blocks]; halves: two; row_weight f32 [blocks, rows] if the plan is
    gated; out bf16 [blocks, rows, out].
    """

    def __init__(
        self, s: Program, plan: FewPlan, x: Any, block_expert: Any, halves: tuple[Half, Half], row_weight: Any,
        out: Any, shared: Any, limit: float,
    ):  # fmt: skip
        self.s, self.plan, self.x, self.block_expert, self.halves = s, plan, x, block_expert, halves
        self.row_weight, self.out, self.limit = row_weight, out, limit
        self.codes = s.shared(shared)  # at a 1,024-byte boundary
        self.scales = self.codes + plan.scales_offset
        self.sums = self.codes + plan.sums_offset
        self.list = self.codes + plan.list_offset
        self.thread, self.lane = s.thread(), Lane(s)
        self.warpgroup = self.thread >> 7
        self.ring = self.codes + plan.ring_offset + self.warpgroup * plan.ring_bytes
        # Of a thread's 16 bytes of a chunk's rows: row, piece.
        self.copy_row, self.copy_piece = self.lane.thread >> 3, self.lane.thread & 7

    def run(self) -> None:
        s, plan = self.s, self.plan
        with s.when(self.thread < 32):
            gpu_blocks.list_blocks(s, self.block_expert, plan.blocks, plan.experts, self.list)
        s.barrier()
        total = s.load_shared(self.list) * plan.tiles
        each = total // plan.grid
        rest = total - each * plan.grid
        start = each * s.block() + s.min(s.block(), rest)
        stop = start + each + s.select(s.block() < rest, 1, 0)
        ahead = (start, self.warpgroup)
        for i in range(plan.stages - 1):
            ahead = self._copy_chunk(*ahead, self.ring + i * plan.slot_bytes, stop)

        def item(number, *carry):
            *ring, latest = carry
            block = gpu_blocks.listed(s, self.list, number // plan.tiles)[0]
            with s.when(block != latest):
                s.barrier()  # nobody reads the last block's codes any more
                self._quantize(block)
                s.shared_to_async()
                s.barrier()
            tile = number - number // plan.tiles * plan.tiles
            ends = number == start, number + 1 == stop
            return *self._tile(block, tile, ends, ring, stop), block

        last = self.ring + (plan.stages - 1) * plan.slot_bytes
        s.for_range(start, stop, 1, (self.ring, last, *ahead, s.const(0xFFFFFFFF)), item)
        s.wait_copies(0)

    # Work

    def _copy_chunk(self, item: Word, chunk: Word, slot: Word, stop: Word) -> tuple[Word, Word]:
        """Starts copying a chunk of the warpgroup into a slot; nothing from `stop` on. Returns the chunk after it."""
        s, plan = self.s, self.plan
        with s.when(item < stop):
            position = item // plan.tiles
            _, expert = gpu_blocks.listed(s, self.list, position)
            tile = item - position * plan.tiles
            column = (chunk << 7) + (self.copy_piece << 4)
            target = slot + (self.copy_row << 7) + ((self.copy_piece ^ (self.copy_row & 7)) << 4)
            first_row = expert * plan.out
            for i, half in enumerate(self.halves):
                row = first_row + tile * plan.tile_out + half.first
                source = s.offset(s.row(half.values, row + self.copy_row, plan.width // 2), column)
                for first in range(0, _HALF, 16):
                    to = target + (i * _HALF + first) * _ROW_BYTES
                    s.copy_16_bytes_from(to, source, first * plan.width // 2)
                with s.when((self.lane.thread >> 5) == i):
                    source = s.row(half.scales, row + self.lane.lane, plan.width // GROUP)
                    to = slot + (self.lane.lane << 4) + (TILE_ROWS * _ROW_BYTES + 8 * i)
                    s.copy_bytes(to, s.offset(source, chunk << 3), 8)
        s.commit_copies()
        following = chunk + plan.warpgroups
        ended = following >= plan.chunks
        return s.select(ended, item + 1, item), s.select(ended, self.warpgroup, following)

    def _quantize(self, block: Word) -> None:
        """The thread block writes a block of x in E4M3, swizzled rows of 128 bytes, and its scales x 2^6.

        A thread has eight channels, a quad a group.
        """
        s, plan = self.s, self.plan
        in_row = plan.width // 8

        def step(i):
            n = i // in_row
            eighth = i - n * in_row
            row = s.row(self.x, block * plan.rows + n, 2 * plan.width)
            words = s.load_words(s.offset(row, eighth << 4), 4)
            values = gpu_blocks.unpacked(words)
            amax = gpu_blocks.largest(s, values, 4)
            exponent = gpu_blocks.fp8_exponent(s, amax)
            inverse = (s.const(254) - exponent) << 23
            scaled = [s.times(x, inverse) for x in values]
            group, quad = eighth >> 2, eighth & 3
            line = self.codes + (group >> 2) * (plan.columns * 128) + (n << 7) + (quad << 2)
            for odd in (0, 1):
                at = line + (((((group & 3) << 1) + odd) ^ (n & 7)) << 4)
                codes = s.pack_e4m3(scaled[odd::2])
                large = ((codes & 0x7F7F7F7F) + _LARGE) & 0x80808080
                large = large | (large - (large >> 7))
                s.store_shared(at, codes & large)
                s.store_shared(at, codes & (large ^ 0xFFFFFFFF), plan.rows * 128)
            with s.when(quad == 0):
                at = (group >> 1) * (plan.rows * 8) + ((n >> 1) << 4) + ((group & 1) << 3) + ((n & 1) << 2)
                s.store_shared(self.scales + at, s.select(amax < INFINITY, (exponent + 6) << 23, NAN))
            return ()

        s.for_range(self.thread, plan.rows * in_row, 128 * plan.warpgroups, (), step)

    # Products

    def _tile(self, block: Word, tile: Word, ends: tuple[Flag, Flag], ring: list[Word], stop: Word) -> list[Word]:
        """One tile of a block.

        ends: whether it is the thread block's first one, its last one.
        ring: slot of the next chunk, slot that is free, item and chunk to copy next; returned as they are afterwards.
        """
        s, plan = self.s, self.plan
        size = plan.rows // 2

        def step(number, slot, free, copied, chunk, *sums):
            s.wait_copies(plan.stages - 2)
            s.warpgroup_barrier(self.warpgroup)
            copied, chunk = self._copy_chunk(copied, chunk, free, stop)
            sums = self._add_chunk(number, slot, sums)
            following = slot + plan.slot_bytes
            following = s.select(following == self.ring + plan.ring_bytes, self.ring, following)
            return following, slot, copied, chunk, *sums

        carry = (*ring, *[s.const(0)] * size)
        *state, sums = _split(s.for_range(self.warpgroup, plan.chunks, plan.warpgroups, carry, step), 4)
        parts = self.sums + (self.lane.thread << 4)
        last = plan.warpgroups - 1
        with s.when(self.warpgroup != last):
            mine = parts + self.warpgroup * plan.part_bytes
            with s.when(~ends[0]):
                s.meet(_SUMS_FREE, 128 * plan.warpgroups)
            for i in range(0, size, 4):
                s.store_shared_4(mine, sums[i : i + 4], i // 4 * 2048)
        s.barrier()
        with s.when(self.warpgroup == last):
            for w in reversed(range(last)):
                for i in range(0, size, 4):
                    part = s.load_shared_4(parts, w * plan.part_bytes + i // 4 * 2048)
                    sums[i : i + 4] = [s.plus(a, b) for a, b in zip(sums[i : i + 4], part, strict=True)]
            with s.when(~ends[1]):
                s.arrive(_SUMS_FREE, 128 * plan.warpgroups)
            self._finish(block, tile, [gpu_blocks.finite_or_nan(s, x) for x in sums])
        return state

    def _add_chunk(self, chunk: Word, slot: Word, sums: list[Word]) -> list[Word]:
        """Adds a chunk's products to the thread's sums, which lie as those of `start_dots`."""
        s, plan, lane, size = self.s, self.plan, self.lane, len(sums)
        matrix, row = lane.lane >> 3, lane.lane & 7
        address = slot + ((((matrix & 1) << 5) + (lane.warp << 3) + row) << 7) + ((row ^ (matrix >> 1)) << 4)
        at = slot + (((lane.warp << 3) + lane.row) << 4)
        bytes_of = s.load_shared_4(at, TILE_ROWS * _ROW_BYTES)  # first half's eight groups, then the second one's
        columns = self.scales + chunk * (_GROUPS // 2 * plan.rows * 8) + (lane.quad << 4)

        for batch in range(_GROUPS // _TOGETHER):
            operand = []
            for g in range(batch * _TOGETHER, (batch + 1) * _TOGETHER, 2):
                words = s.load_matrices(address ^ (g << 4))
                for pair in (words[:2], words[2:]):
                    (low_a, high_a), (low_b, high_b) = (expand(s, x) for x in pair)
                    operand.append([low_a, low_b, high_a, high_b])
            line, first = divmod(batch * _TOGETHER, 4)
            codes = self.codes + (chunk * (_GROUPS // 4) + line) * (plan.columns * 128)
            dots = s.wait_dots(s.start_dots(operand, codes, first=first, columns=plan.columns), 0)
            for g in range(0, _TOGETHER, 2):
                group = batch * _TOGETHER + g
                pairs = s.load_shared_4(columns, group // 2 * plan.rows * 8)
                for odd in (0, 1):
                    byte = (group + odd) % 4
                    row_scales = [_scale(bytes_of[2 * half + (group + odd) // 4], byte) for half in (0, 1)]
                    large, small = dots[g + odd][:size], dots[g + odd][size:]
                    sums = [
                        s.times_plus(
                            s.plus(large[i], small[i]), s.times(row_scales[i // 2], pairs[2 * odd + i % 2]), total
                        )
                        for i, total in enumerate(sums)
                    ]
        return sums

    # Results

    def _finish(self, block: Word, tile: Word, sums: list[Word]) -> None:
        """Writes a tile's results of a block's rows."""
        s, plan, lane = self.s, self.plan, self.lane
        channel = tile * plan.tile_out + (lane.warp << 3) + lane.row
        for i in range(0, len(sums), 4):
            rows = block * plan.rows + (lane.quad << 1) + 2 * i
            if plan.gated:
                weights = s.load_words(s.row(self.row_weight, rows, 4), 2)
                values = [
                    gpu_blocks.activation(s, sums[i + j], sums[i + 2 + j], weights[j], self.limit) for j in (0, 1)
                ]
                self._store(rows, channel, values)
            else:
                self._store(rows, channel, sums[i : i + 2])
                self._store(rows, channel + _HALF, sums[i + 2 : i + 4])

    def _store(self, rows: Word, channel: Word, values: list[Word]) -> None:
        """A channel of rows `rows` and `rows` + 1."""
        s = self.s
        odd = self.lane.row & 1
        pair = gpu_blocks.pair_of_channels(s, self.lane, values)
        s.store(s.row(self.out, rows + odd, 2 * self.plan.out), (channel - odd) << 1, pair)


def _scale(word: Word, byte: int) -> Word:
    """float32 of one of four E8M0 bytes."""
    shifted = word >> 1 if byte == 3 else word << (23 - 8 * byte)
    return shifted & INFINITY


def _split(values: list[Word], count: int) -> list:
    return [*values[:count], list(values[count:])]
