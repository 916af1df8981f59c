"""What a block of the GPU kernel does: exact top-k of one part of one row, reading it once.

The part comes in tiles, copied to shared memory ahead of time. A threshold, always a lower bound of the k-th best
score, keeps most of a tile away; positions and keys of the scores above it are appended to a list in shared memory.

- The first tile's threshold: the k-th largest of the maxima of small groups of its scores (k groups have a maximum
  that large, so k scores are), rounded down to an edge of a histogram.
- A tile that does not fit into the list any more is appended vector by vector; whenever the list is nearly full it is
  cut down to its k best, and their smallest becomes the threshold. So nothing depends on the scores being random:
  a row in ascending order costs more passes over the list and gives the same answer.
- At the end the k best of the list are taken.
"""

import dataclasses
from typing import Any

from pallas_kernels.topk.gpu_list import LOWEST_KEY, NOTHING, Keys, ScoreList, fold
from pallas_kernels.topk.gpu_plan import COPIES, COUNT, TAKEN, TIES, Plan

NEGATIVE_INFINITY = 0xFF800000  # bits


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Arrays in global memory.

    Attributes:
      scores: [rows, width].
      lengths: int32 [rows], or None.
      mapping: int32 [rows, width], or None.
      ids: int32 [rows, splits * slots], written.
      values: float32 [rows, splits * slots], written, or None.
    """

    scores: Any
    lengths: Any
    mapping: Any
    ids: Any
    values: Any


class TopK:
    """The program; `run` is called once."""

    def __init__(self, simt, plan: Plan, arrays: Arrays, shared: Any):
        self.s, self.plan, self.arrays, self.keys = simt, plan, arrays, Keys(simt)
        self.buffers = simt.shared(shared)  # at a 16-byte boundary
        self.tile_bytes = plan.tile * plan.itemsize
        self.list = ScoreList(simt, plan, self.buffers + plan.buffers * self.tile_bytes)
        self.copies = self.list.state + 4 * COPIES
        self.thread = simt.thread()

    def run(self) -> None:
        s, plan = self.s, self.plan
        block = s.block()
        row = block // plan.splits
        start = (block - row * plan.splits) * plan.part
        length = s.const(plan.width)
        if self.arrays.lengths is not None:
            length = s.load(s.row(self.arrays.lengths, row, 4), s.const(0))
            length = s.min(s.select(length >= 0x80000000, 0, length), plan.width)
        self.row, self.scores = row, s.row(self.arrays.scores, row, plan.width * plan.itemsize)
        self.start, self.end = start, s.min(start + plan.part, length)
        self.list.clear()
        s.barrier()
        with s.when(self.thread == 0):
            s.copies_begin(self.copies, plan.buffers)
        for i in range(plan.buffers):
            self._copy(start + i * plan.tile, s.const(i))
        s.barrier()
        state = (s.const(LOWEST_KEY), s.const(0), s.const(0))
        _, count, _ = s.for_range(start, self.end, plan.tile, state, self._tile)
        self._write(block, count)

    # Tiles

    def _copy(self, at, number) -> None:
        """Starts the copy of a tile, if there is one at this place."""
        s, plan = self.s, self.plan
        buffer = number & (plan.buffers - 1)
        elements = s.min(self.end - at, plan.tile) + (plan.per_vector - 1) & (NOTHING - (plan.per_vector - 1))
        # `at < end`, also where the difference of the two wraps
        with s.when((self.thread == 0) & (at < self.end)):
            s.copy_start(
                self.buffers + buffer * self.tile_bytes,
                self.scores,
                at * plan.itemsize,
                elements * plan.itemsize,
                self.copies + buffer * 8,
            )

    def _tile(self, at, threshold, count, number):
        s, plan = self.s, self.plan
        buffer = number & (plan.buffers - 1)
        base = self.buffers + buffer * self.tile_bytes
        s.copy_wait(self.copies + buffer * 8, number >> (plan.buffers - 1))
        with s.when(at + plan.tile > self.end):
            self._hide_rest(base, self.end - at)
            s.barrier()
        thread = base + self.thread * 16
        words = [w for v in range(plan.vectors) for w in s.load_shared_4(thread, v * plan.threads * 16)]
        if plan.group:
            (threshold,) = s.if_else(at == self.start, 1, lambda: [self._first_threshold(words)], lambda: [threshold])
        masks = self._above(words, threshold)
        place = self._reserve(masks)
        s.barrier()
        total = self.list.get(COUNT)

        def fits():
            after = place
            for m, mask in enumerate(masks):
                after = self._append(at, base, m, mask, after)
            return threshold, total

        threshold, count = s.if_else(
            total <= plan.capacity, 2, fits, lambda: self._append_in_pieces(at, base, words, masks, threshold, count)
        )
        s.barrier()
        self._copy(at + plan.buffers * plan.tile, number)
        return threshold, count, number + 1

    def _hide_rest(self, base, elements) -> None:
        """Puts -inf behind the first elements of a tile."""
        s, plan = self.s, self.plan

        def word(i):
            s.store_shared(base + i * 4, NEGATIVE_INFINITY if plan.itemsize == 4 else 0xFF80FF80)
            return ()

        if plan.itemsize == 2:
            with s.when((self.thread == 0) & (elements & 1 != 0)):
                s.store_shared_u16(base + elements * 2, s.const(0xFF80))
            elements = (elements + 1) >> 1
        s.for_range(elements + self.thread, self.tile_bytes // 4, plan.threads, (), word)

    def _above(self, words, threshold) -> list:
        """Masks with a bit for each element that is above the threshold.

        Bit b of a float32 mask: word b. Of a bfloat16 mask: bit b the lower element of word b, bit 16 + b the upper.
        """
        s, size = self.s, self.plan.mask_vectors * 4
        if self.plan.itemsize == 4:
            limit = self.keys.bits(threshold)
            bits = [s.select(s.float_greater(word, limit), 1 << i % size, 0) for i, word in enumerate(words)]
        else:
            # the largest bfloat16 that is not above the threshold bounds bfloat16 scores in the same way
            negative = ((threshold + 1) & 0xFFFF0000) - 1
            limit = self.keys.bits(s.select(threshold >= 0x80000000, threshold & 0xFFFF0000, negative))
            limit = limit | limit >> 16
            bits = []
            for i, word in enumerate(words):
                above, b = s.pair_greater(word, limit), i % size
                bits.append((above >> (7 - b) if b < 8 else above << (b - 7)) & (0x00010001 << b))
        return [fold(lambda a, b: a | b, bits[i : i + size]) for i in range(0, len(bits), size)]

    # Appending

    def _reserve(self, masks):
        """Room in the list for the bits of a warp's masks: the place of the first one."""
        s = self.s
        found = fold(lambda a, b: a + b, [s.popcount(mask) for mask in masks])
        return self.list.fetch_add(COUNT, s.warp_reduce(found, "add"))

    def _append(self, at, base, m: int, mask, place):
        """Lists the bits of a warp's mask number m from `place` on, which the warp has reserved; the place behind."""
        s, plan = self.s, self.plan
        below = s.lanes_below()
        first = (self.thread + m * plan.mask_vectors * plan.threads) * plan.per_vector

        def body(left, place, lanes):
            with s.when(left != 0):
                bit = s.trailing_zeros(left)
                word = bit & 15 if plan.itemsize == 2 else bit
                within = (word & 3) * 2 + (bit >> 4) if plan.itemsize == 2 else word & 3
                element = first + (word >> 2) * plan.piece + within
                slot = (place + s.popcount(lanes & below)) * 4
                s.store_shared(self.list.ids + slot, at + element)
                if plan.itemsize == 4:
                    value = s.load_shared(base + element * 4)
                else:
                    value = s.load_shared_u16(base + element * 2) << 16
                s.store_shared(self.list.keys + slot, self.keys.of(s.positive_zero(value)))
            left = left & (left - 1)
            return left, place + s.popcount(lanes), s.ballot(left != 0)

        start = (mask, place, s.ballot(mask != 0))
        _, place, _ = s.while_loop(start, lambda left, place, lanes: lanes != 0, body)
        return place

    def _append_in_pieces(self, at, base, words, masks, threshold, count):
        """For a tile that the list may have no room for; returns the new threshold and count."""
        s, plan = self.s, self.plan
        s.barrier()
        self.list.put(COUNT, count)
        s.barrier()
        one = 0xF if plan.itemsize == 4 else 0x000F000F

        def piece(m, i, threshold, count, *masks):
            def cut():
                new = self.list.cut(count)
                return new, s.const(plan.k), *(a & b for a, b in zip(masks, self._above(words, new), strict=True))

            full = count > plan.capacity - plan.piece
            threshold, count, *masks = s.if_else(full, 2 + len(masks), cut, lambda: (threshold, count, *masks))
            now = masks[m] & (s.const(one) << (i * 4))
            self._append(at, base, m, now, self._reserve([now]))
            s.barrier()
            count = self.list.get(COUNT)
            s.barrier()
            return threshold, count, *masks

        state = (threshold, count, *masks)
        for m in range(len(masks)):
            state = s.for_range(0, plan.mask_vectors, 1, state, lambda i, *state, m=m: piece(m, i, *state))
        return state[:2]

    # The first threshold

    def _first_threshold(self, words):
        """A lower bound of the k-th best score of a tile, from the maxima of groups of its scores."""
        s, plan = self.s, self.plan
        maxima = []
        for i in range(0, len(words), plan.group):
            group = words[i : i + plan.group]
            if plan.itemsize == 4:
                maxima.append(fold(s.float_max, group))
            else:
                pair = fold(s.pair_max, group)
                maxima += [pair << 16, pair & 0xFFFF0000]
        lowest = s.const(NEGATIVE_INFINITY)
        keys = [s.select(s.float_greater(x, lowest), self.keys.of(s.positive_zero(x)), 0) for x in maxima]
        low = fold(s.min, [s.select(key == 0, NOTHING, key) for key in keys])
        low, high, _ = self.list.range(low, fold(s.max, keys))
        shift = self.list.shift(high - low)
        for key in keys:
            with s.when(key >= low):
                self.list.tally(key, high, shift)
        found, _, _ = self.list.find_bin(s.const(plan.k))
        edge, _ = self.list.edges(low, high, shift, found)
        return s.select(found == NOTHING, s.const(LOWEST_KEY), self.keys.below(edge))

    # Results

    def _write(self, block, count) -> None:
        s, plan = self.s, self.plan
        out_ids = s.row(self.arrays.ids, block, 4 * plan.slots)
        out_values = s.row(self.arrays.values, block, 4 * plan.slots) if plan.values else None
        mapping = s.row(self.arrays.mapping, self.row, 4 * plan.width) if plan.mapped else None

        def put(place, i, key):
            position = s.load_shared(self.list.ids + i * 4)
            if plan.values:
                s.store(out_values, place * 4, self.keys.bits(key))
            s.store(out_ids, place * 4, s.load(mapping, position * 4) if plan.mapped else position)

        def everything():
            def each(i):
                put(i, i, self.list.key(i))
                return ()

            s.for_range(self.thread, count, plan.threads, (), each)
            return [count]

        def pad(i):
            s.store(out_ids, i * 4, NOTHING)
            if plan.values:
                s.store(out_values, i * 4, NEGATIVE_INFINITY)
            return ()

        (written,) = s.if_else(count > plan.slots, 1, lambda: self._write_best(count, put), everything)
        s.for_range(written + self.thread, plan.slots, plan.threads, (), pad)

    def _write_best(self, count, put):
        """Writes the k best of more than k: those certainly taken from place 0 on, ties behind them."""
        s, plan = self.s, self.plan
        low, high, need, _ = self.list.find_kth(count)
        below = s.lanes_below()

        def tell(i, found):
            return [found + s.select(self.list.key(i) > high, s.const(1), 0)]

        (found,) = s.for_range(self.thread, count, plan.threads, [s.const(0)], tell)
        place = self.list.fetch_add(TAKEN, s.warp_reduce(found, "add"))

        def take(first, place):
            i = first + self.thread
            key = s.select(i < count, self.list.key(s.min(i, count - 1)), 0)
            best = key > high
            lanes = s.ballot(best)
            with s.when(best):
                put(place + s.popcount(lanes & below), i, key)
            with s.when(~best & (key >= low)):
                rank = s.fetch_add_shared(self.list.state, s.const(1), 4 * TIES)
                with s.when(rank < need):
                    put(rank - need + plan.k, i, key)
            return [place + s.popcount(lanes)]

        s.for_range(0, count, plan.threads, [place], take)
        return [s.const(plan.k)]
