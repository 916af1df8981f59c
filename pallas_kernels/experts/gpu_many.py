"""What a thread block does for blocks of many rows: 256 weight rows times the rows of a block, in bfloat16.

Weights are the A operand again, dequantised in registers while the products of the channels before them run; the
block's rows are the columns of B and come as they are. Warpgroups have 64 weight rows each and share the rows of B.

A chunk is 128 channels. Lane q of a quad loads channels 8q .. 8q + 7 of a group of 32, a word, but a product's step
takes its pairs q and 4 + q of 16 channels: the lanes of a quad transpose bytes before they dequantise.

E2M1 codes moved to the right place of a bfloat16 are the value times 2^-126. One product, with 2^126 times the scale,
is exact where that is a bfloat16, otherwise two are. Scale bytes of 0 and 255 and infinite sums are as in `gpu_few`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.experts import gpu_blocks
from pallas_kernels.experts.block_sizes import GROUP, MANY_CHUNK, TILE_ROWS, ManyPlan
from pallas_kernels.experts.gpu_blocks import INFINITY, NAN, Half
from pallas_kernels.experts.gpu_program import Program
from pallas_kernels.indexer.gpu_scores import Lane
from pallas_kernels.simt import Flag, Word

_UNIT_PAIR = 0x7E807E80  # two bfloat16 of 2^126
_SHIFT_PAIR = 0x3F003F00  # added to two bfloat16 multiplies them by 2^126
_HALF = TILE_ROWS // 2
_WARPGROUPS = 4
_PAIRS = range(0, MANY_CHUNK // GROUP, 2)  # of groups
_LINE = 128  # bytes of a row of B: 64 channels


class ManyRows:
    """The program; `run` is called once.

    x bf16 [blocks, rows, width]; block_expert int32 [blocks]; halves: two; row_weight f32 [blocks, rows] if the plan is
    gated; out bf16 [blocks, rows, out], which has gone through FP8 in groups of 32 if the plan is gated.
    """

    def __init__(
        self, s: Program, plan: ManyPlan, x: Any, block_expert: Any, halves: tuple[Half, Half], row_weight: Any,
        out: Any, shared: Any, limit: float,
    ):  # fmt: skip
        self.s, self.plan, self.x, self.block_expert, self.halves = s, plan, x, block_expert, halves
        self.row_weight, self.out, self.limit = row_weight, out, limit
        self.ring = s.shared(shared)  # at a 1,024-byte boundary
        self.staged = self.ring + plan.staged_offset
        self.list = self.ring + plan.list_offset
        self.thread, self.lane = s.thread(), Lane(s)
        self.warpgroup = self.thread >> 7
        self.halves_order = s.select(self.lane.quad < 2, 0x5410, 0x3276)
        self.bytes_order = s.select((self.lane.quad & 1) == 0, 0x6240, 0x3715)

    def run(self) -> None:
        s, plan = self.s, self.plan
        with s.when(self.thread < 32):
            gpu_blocks.list_blocks(s, self.block_expert, plan.blocks, plan.experts, self.list)
        s.barrier()
        stop = s.load_shared(self.list) * plan.tiles
        first = s.block()
        ahead = [first, s.const(0), *self._place(first, stop, [s.const(0)] * 2)]
        for i in range(plan.ahead):
            ahead = self._copy_chunk(*ahead, self.ring + i * plan.slot_bytes, stop)

        def item(number, slot, free, *ahead):
            position = number // plan.tiles
            block, _ = gpu_blocks.listed(s, self.list, position)
            weight = None
            if plan.gated:
                row = s.min(self.lane.thread, plan.rows - 1)
                weight = s.load_words(s.row(self.row_weight, block * plan.rows + row, 4), 1)[0]
            *state, sums = self._tile(slot, free, ahead, stop)
            self._finish(block, number - position * plan.tiles, weight, sums)
            return state

        free = self.ring + plan.ahead * plan.slot_bytes
        s.for_range(s.block(), stop, plan.grid, (self.ring, free, *ahead), item)
        s.wait_copies(0)

    # Copies

    def _place(self, item: Word, stop: Word, otherwise: list[Word]) -> list[Word]:
        """The first row of an item's block in x and the first channel of its tile in the stack."""
        s, plan = self.s, self.plan

        def find():
            position = item // plan.tiles
            block, expert = gpu_blocks.listed(s, self.list, position)
            return block * plan.rows, expert * plan.out + (item - position * plan.tiles) * plan.tile_out

        return s.if_else(item < stop, 2, find, lambda: otherwise)

    def _copy_chunk(self, item: Word, chunk: Word, row: Word, channel: Word, slot: Word, stop: Word) -> list[Word]:
        """Starts copying a chunk of an item, which is at `_place`, into a slot; nothing from `stop` on.

        Returns item, chunk and place of the next one.
        """
        s, plan = self.s, self.plan
        with s.when(item < stop):
            self._copy_rows(row, chunk, slot)
            self._copy_weights(channel, chunk, slot)
        s.commit_copies()
        ended = chunk + 1 == plan.chunks
        item, chunk = s.select(ended, item + plan.grid, item), s.select(ended, 0, chunk + 1)
        place = [row, channel]
        return [item, chunk, *s.if_else(ended, 2, lambda: self._place(item, stop, place), lambda: place)]

    def _copy_rows(self, first_row: Word, chunk: Word, slot: Word) -> None:
        """Rows of 128 bytes, 64 channels, 16-byte pieces swizzled by row: first all rows' lower half of the chunk."""
        s, plan, thread = self.s, self.plan, self.thread
        row, piece = thread >> 4, thread & 15
        source = s.offset(s.row(self.x, first_row + row, 2 * plan.width), (chunk << 8) + (piece << 4))
        target = slot + (piece >> 3) * (plan.rows * _LINE) + (row << 7) + (((piece & 7) ^ (row & 7)) << 4)
        together = 128 * _WARPGROUPS >> 4
        if plan.rows < together:
            with s.when(row < plan.rows):
                s.copy_16_bytes_from(target, source, 0)
            return
        for first in range(0, plan.rows, together):
            s.copy_16_bytes_from(target + first * _LINE, source, first * 2 * plan.width)

    def _copy_weights(self, channel: Word, chunk: Word, slot: Word) -> None:
        """channel: the tile's first one in the stack."""
        s, plan, thread = self.s, self.plan, self.thread
        # Two rows of 64 bytes lie in 128; a row is 64 w + 32 half + r.
        row, piece = thread >> 2, thread & 3
        place = (((row & 1) << 2) + piece) ^ ((row >> 1) & 7)
        target = slot + plan.weights_offset + ((row >> 1) << 7) + (place << 4)
        for i, half in enumerate(self.halves):
            with s.when(((row >> 5) & 1) == i):
                first = channel + (row >> 6) * plan.warpgroup_out + (row & 31) + half.first
                source = s.offset(s.row(half.values, first, plan.width // 2), (chunk << 6) + (piece << 4))
                s.copy_16_bytes_from(target, source, 0)
                further = 32 * _WARPGROUPS  # rows, half of them
                s.copy_16_bytes_from(target + further * MANY_CHUNK // 2, source, plan.warpgroup_out * plan.width)
            with s.when(((thread >> 5) & 1) == i):
                first = channel + (thread >> 6) * plan.warpgroup_out + (thread & 31) + half.first
                with s.when(thread < TILE_ROWS * _WARPGROUPS):
                    source = s.offset(s.row(half.scales, first, plan.width // GROUP), chunk << 2)
                    s.copy_bytes(slot + (thread << 2), source, 4, 0, plan.scales_offset)

    # Products

    def _tile(self, slot: Word, free: Word, ahead: Sequence[Word], stop: Word) -> list:
        """Sums of a tile. Returns (slot, free slot, what to copy next, sums)."""
        s, plan = self.s, self.plan
        first_sum = -plan.rows // 2

        def following(place):
            place = place + plan.slot_bytes
            return s.select(place == self.ring + plan.stages * plan.slot_bytes, self.ring, place)

        def step(number, slot, *carry):
            (free, *ahead), sums = carry[:first_sum], carry[first_sum:]

            def copy():
                nonlocal free, ahead
                ahead, free = self._copy_chunk(*ahead, free, stop), following(free)

            s.wait_copies(plan.ahead - plan.together)
            s.shared_to_async()
            s.barrier()  # the slots are full; all are done with every chunk but the last one
            sums = self._add_chunk(slot, sums, s.select(number == 0, 1, 0), [copy] * plan.together)
            for _ in range(1, plan.together):
                slot = following(slot)
                sums = self._add_chunk(slot, sums, s.const(0), [])
            return following(slot), free, *ahead, *sums

        carry = (slot, free, *ahead, *[s.const(0)] * (plan.rows // 2))
        out = s.for_range(0, plan.chunks // plan.together, 1, carry, step)
        sums = s.wait_sums(out[first_sum:])
        return [*out[:first_sum], [gpu_blocks.finite_or_nan(s, x) for x in sums]]

    def _add_chunk(self, slot: Word, sums: Sequence[Word], fresh: Word, then: list[Callable[[], None]]) -> list[Word]:
        """Adds a chunk's products; `then` holds what to do after those of the first groups were started, one each."""
        s, plan = self.s, self.plan
        at = slot + plan.scales_offset + (((self.warpgroup << 6) + (self.lane.warp << 3) + self.lane.row) << 2)
        scales = [s.load_shared(at), s.load_shared(at, _HALF * 4)]
        large = [((x & 0x7F7F7F7F) + 0x7F7F7F7F) & x for x in scales]  # bit 7 of bytes above 128
        usual = s.ballot(((large[0] | large[1]) & 0x80808080) != 0) == 0
        # Both pairs at once take registers that 128 rows do not leave.
        early = [self._load_pair(slot, pair) for pair in _PAIRS] if plan.rows < 128 else []
        for pair in _PAIRS:
            words = early[pair // 2] if early else self._load_pair(slot, pair)
            line = slot + pair // 2 * plan.rows * _LINE
            for i in (0, 1):
                operand = self._operand(words[2 * i : 2 * i + 2], scales, pair + i, usual)
                sums = s.add_products(sums, operand, line, 2 * i, fresh if pair + i == 0 else s.const(0))
                s.wait_products(1)
                if pair + i < len(then):
                    then[pair + i]()
        return sums

    def _load_pair(self, slot: Word, group: int) -> list[Word]:
        """Words of two groups: of each one that of the first half's row and of the second one's."""
        s, lane = self.s, self.lane
        matrix, j = lane.lane >> 3, lane.lane & 7
        row = (self.warpgroup << 6) + ((matrix & 1) << 5) + (lane.warp << 3) + j
        piece = ((row & 1) << 2) + (matrix >> 1)
        place = (piece ^ ((row >> 1) & 7)) ^ group
        words = s.load_matrices(slot + self.plan.weights_offset + ((row >> 1) << 7) + (place << 4))
        # Afterwards lane q of a quad has byte q of every lane.
        for mask, order in ((2, self.halves_order), (1, self.bytes_order)):
            others = [s.exchange(x, mask) for x in words]
            words = [s.permute_by(x, other, order) for x, other in zip(words, others, strict=True)]
        return words

    def _operand(self, words: list[Word], scales: list[Word], group: int, usual: Flag) -> list[list[Word]]:
        """A group's registers for two steps; words, scales: of the thread's two rows.

        usual: the warp's scales are at most 2, so that the scale times 2^126 is a bfloat16.
        """
        s = self.s

        def pairs(one_product: bool):
            found = []
            for word, scale in zip(words, scales, strict=True):
                factor = s.permute(scale, s.const(0), 0x4040 | group << 8 | group) << 7
                factor = factor + _SHIFT_PAIR if one_product else factor
                shifted = word << 4
                for byte in range(4):
                    # In each half the lower byte has a code at its top, the low one from the shifted word, and the
                    # upper byte that code's sign eight times.
                    code = s.permute(shifted, word, 0xC480 + byte * 0x1111)
                    value = (code << 2) & 0x81C081C0
                    value = value if one_product else s.times_pairs(value, s.const(_UNIT_PAIR))
                    found.append(s.times_pairs(value, factor))
            return found

        # The branch has a second use: where operands are made in straight-line code ptxas lets products run one by one.
        found = s.if_else(usual, 8, lambda: pairs(True), lambda: pairs(False))
        return [[found[4 * half + 2 * t + h] for h in (0, 1) for half in (0, 1)] for t in (0, 1)]

    # Results

    def _finish(self, block: Word, tile: Word, weight: Word | None, sums: list[Word]) -> None:
        """Writes a tile's results of a block's rows; weight: of the row that has the thread's number."""
        s, plan = self.s, self.plan
        channel = tile * plan.tile_out + self.warpgroup * plan.warpgroup_out
        staged = self.staged + self.warpgroup * plan.staged_bytes
        weights = staged + plan.staged_rows * plan.staged_pitch
        if plan.gated:
            with s.when(self.lane.thread < plan.rows):
                s.store_shared(weights + (self.lane.thread << 2), weight)
            s.warpgroup_barrier(self.warpgroup)
        for first in range(0, plan.rows, plan.staged_rows):
            mine = sums[first // 2 :][: plan.staged_rows // 2]
            if plan.gated:
                self._stage_activation(staged, weights + 4 * first, mine)
            else:
                self._stage(staged, mine)
            s.warpgroup_barrier(self.warpgroup)
            if plan.gated:
                self._store_through_fp8(staged, block * plan.rows + first, channel)
            else:
                self._store(staged, block * plan.rows + first, channel)
            s.warpgroup_barrier(self.warpgroup)

    def _stage_activation(self, staged: Word, weights: Word, sums: list[Word]) -> None:
        s, plan, lane = self.s, self.plan, self.lane
        odd = lane.row & 1
        for i in range(0, len(sums), 4):
            mine = (lane.quad << 1) + 2 * i
            values = [
                gpu_blocks.activation(
                    s, sums[i + j], sums[i + 2 + j], s.load_shared(weights + (mine << 2), 4 * j), self.limit
                )
                for j in (0, 1)
            ]
            at = staged + (mine + odd) * plan.staged_pitch + (((lane.warp << 3) + lane.row - odd) << 1)
            s.store_shared(at, gpu_blocks.pair_of_channels(s, lane, values))

    def _stage(self, staged: Word, sums: list[Word]) -> None:
        s, plan, lane = self.s, self.plan, self.lane
        odd = lane.row & 1
        for i in range(0, len(sums), 4):
            row = (lane.quad << 1) + 2 * i + odd
            at = staged + row * plan.staged_pitch + (((lane.warp << 3) + lane.row - odd) << 1)
            for half in (0, 1):
                pair = gpu_blocks.pair_of_channels(s, lane, sums[i + 2 * half :][:2])
                s.store_shared(at, pair, half * _HALF * 2)

    def _store_through_fp8(self, staged: Word, rows: Word, channel: Word) -> None:
        """Two threads a row, which is a group."""
        s, plan, lane = self.s, self.plan, self.lane
        with s.when(lane.thread < 2 * plan.staged_rows):
            row, part = lane.thread >> 1, lane.thread & 1
            at = staged + row * plan.staged_pitch + (part << 5)
            values = gpu_blocks.unpacked([x for i in (0, 16) for x in s.load_shared_4(at, i)])
            amax = gpu_blocks.largest(s, values, 2)
            exponent = gpu_blocks.fp8_exponent(s, amax)
            inverse = (s.const(254) - exponent) << 23
            factor = s.select(amax < INFINITY, exponent << 23, NAN)
            words = []
            for i in range(0, 16, 2):
                rounded = s.through_e4m3(*(s.times(x, inverse) for x in values[i : i + 2]))
                words.append(s.pack_bf16(*(s.times(x, factor) for x in rounded)))
            out = s.row(self.out, rows + row, 2 * plan.out)
            for i in (0, 4):
                s.store_words(out, (channel << 1) + (part << 5) + 4 * i, words[i : i + 4])

    def _store(self, staged: Word, rows: Word, channel: Word) -> None:
        """Eight threads a row of 128 bytes."""
        s, plan, thread = self.s, self.plan, self.lane.thread
        row, part = thread >> 3, thread & 7
        for first in range(0, plan.staged_rows, 16):
            words = s.load_shared_4(staged + row * plan.staged_pitch + (part << 4), first * plan.staged_pitch)
            out = s.row(self.out, rows + first + row, 2 * plan.out)
            s.store_words(out, (channel << 1) + (part << 4), words)
