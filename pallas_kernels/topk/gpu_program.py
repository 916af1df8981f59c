"""What a block of the GPU kernel does: exact top-k of one part of one row, reading it once.

The part comes in tiles, copied to shared memory ahead of time. A threshold, always a lower bound of the k-th best
score, keeps most of a tile away; positions and keys of the scores above it are appended to a list in shared memory.

- The first tile's threshold: the k-th largest of the maxima of small groups of its scores (k groups have a maximum
  that large, so k scores are), rounded down to an edge of a histogram.
- A tile that does not fit into the list any more is appended vector by vector; whenever the list is nearly full it is
  cut down to its k best, and their smallest becomes the threshold. So nothing depends on the scores being random:
  a row in ascending order costs more passes over the list and gives the same answer.
- At the end the k best of the list are taken. Before that the blocks of a cluster may join their lists.
"""

import dataclasses
from typing import Any

from pallas_kernels.topk.gpu_list import LOWEST_KEY, NOTHING, Keys, ScoreList, fold
from pallas_kernels.topk.gpu_plan import COPIES, COUNT, TAKEN, TIES, Plan

NEGATIVE_INFINITY = 0xFF800000  # bits
SPAN = 1 << 27  # between the keys of x and 2^16 x, for x > 0


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Arrays in global memory.

    Attributes:
      scores: [rows, width].
      lengths: int32 [rows], or None.
      mapping: int32 [rows, width], or None.
      ids: int32 [rows, splits / cluster * slots], written.
      values: float32 [rows, splits / cluster * slots], written, or None.
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
        state = (s.const(LOWEST_KEY), s.const(0), s.const(0), s.const(0), s.const(0))
        threshold, count, _, high, bits = s.for_range(start, self.end, plan.tile, state, self._tile)
        known = self._known(threshold, high, bits)
        if plan.cluster == 1:
            self._write(block, count, known)
        else:
            self._merge(block, count, known)

    def _known(self, threshold, high, bits):
        """What there is to know about listed keys without reading them."""
        return (threshold + 1, high, bits) if self.plan.one_tile and self.plan.group else None

    def _merge(self, block, count, known) -> None:
        """The first block of a cluster gathers the lists of all."""
        s, plan = self.s, self.plan

        def cut():
            self.list.cut(count, known)
            return [s.const(plan.k)]

        (count,) = s.if_else(count > plan.share, 1, cut, lambda: [count])
        rank = block & (plan.cluster - 1)
        s.cluster_barrier()
        with s.when(rank != 0):
            self.list.join_first_block(count, rank * plan.part)
        s.cluster_barrier()
        with s.when(rank == 0):
            self._write(block // plan.cluster, self.list.get(COUNT), None)

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

    def _tile(self, at, threshold, count, number, high, bits):
        s, plan = self.s, self.plan
        buffer = number & (plan.buffers - 1)
        base = self.buffers + buffer * self.tile_bytes
        s.copy_wait(self.copies + buffer * 8, number >> (plan.buffers - 1))
        with s.when(at + plan.tile > self.end):
            self._hide_rest(base, self.end - at)
            s.barrier()
        if plan.group:
            threshold, high, bits = s.if_else(
                at == self.start, 3, lambda: self._first_threshold(base), lambda: (threshold, high, bits)
            )
        masks = self._above(base, threshold)
        place = self._reserve(masks)
        s.barrier()
        total = self.list.get(COUNT)

        def fits():
            after = place
            for m, mask in enumerate(masks):
                after = self._append(at, base, m, mask, after)
            return threshold, total

        def does_not():
            return self._append_in_pieces(at, base, masks, threshold, count, high, bits)

        threshold, count = s.if_else(total <= plan.capacity, 2, fits, does_not)
        s.barrier()
        self._copy(at + plan.buffers * plan.tile, number)
        return threshold, count, number + 1, high, bits

    def _read(self, base) -> list:
        """A thread's words of a tile: neighbours, but beginning at a vector that depends on the lane. So the threads
        that read together meet different banks."""
        s, plan = self.s, self.plan
        thread = base + self.thread * (16 * plan.vectors)
        words = []
        for v in range(plan.vectors):
            vector = (self._rotation() + v) & (plan.vectors - 1)
            words += s.load_shared_4(thread + vector * 16)
        return words

    def _rotation(self):
        """The number of the vector that a thread reads first."""
        shift = {1: 3, 2: 2, 4: 1, 8: 0}[self.plan.vectors]
        return (self.thread & 31) >> shift & (self.plan.vectors - 1)

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

    def _above(self, base, threshold) -> list:
        """Masks of a thread's elements that are above the threshold: bit b is element b of a float32 tile; of a
        bfloat16 tile, whose masks are two, element 2 b and 2 b + 1."""
        # read again rather than kept: registers decide how many blocks run at once
        s, words, bits = self.s, self._read(base), []
        if self.plan.itemsize == 4:
            limit = self.keys.bits(threshold)
            for i in range(0, len(words), 8):
                mask = s.const(0)
                for word in reversed(words[i : i + 8]):
                    mask = s.push_sign(mask, s.float_subtract(limit, word))
                bits.append(mask << i)
            return [self._in_order(_any(bits))]
        # the largest bfloat16 that is not above the threshold bounds bfloat16 scores in the same way
        negative = ((threshold + 1) & 0xFFFF0000) - 1
        limit = self.keys.bits(s.select(threshold >= 0x80000000, threshold & 0xFFFF0000, negative))
        limit = limit | limit >> 16
        for i, word in enumerate(words):
            above, b = s.pair_greater(word, limit), i % 16
            bits.append((above >> (7 - b) if b < 8 else above << (b - 7)) & (0x00010001 << b))
        pairs = [_any(bits[i : i + 16]) for i in range(0, len(bits), 16)]
        lower, upper = pairs[0] & 0xFFFF, pairs[0] >> 16
        if len(pairs) == 2:
            lower, upper = lower | pairs[1] << 16, upper | pairs[1] & 0xFFFF0000
        return [self._in_order(lower), self._in_order(upper)]

    def _in_order(self, mask):
        """Bit b for a thread's word b, from bits in the order of reading."""
        size, turn = 4 * self.plan.vectors, self._rotation() * 4
        turned = mask << turn | self.s.shift_right(mask, self.s.const(size) - turn)
        return turned if size == 32 else turned & ((1 << size) - 1)

    # Appending

    def _reserve(self, masks):
        """Room in the list for the bits of a thread's masks: the place of the first one."""
        s = self.s
        found = fold(lambda a, b: a + b, [s.popcount(mask) for mask in masks])
        through = s.running_sum(found)
        return self.list.fetch_add(COUNT, s.from_lane(through, 31)) + through - found

    def _append(self, at, base, m: int, mask, place):
        """Lists the elements of a thread's mask number m from `place` on; the place behind."""
        s, plan = self.s, self.plan
        per_word = 4 // plan.itemsize
        first = self.thread * (plan.vectors * plan.per_vector) + m
        first_id, first_value = at - self.start + first, base + first * plan.itemsize

        def body(left, place):
            bit = s.trailing_zeros(left)
            if plan.itemsize == 4:
                value = s.load_shared(first_value + bit * 4)
            else:
                value = s.load_shared_u16(first_value + bit * 4) << 16
            self.list.set_id(place, first_id + bit * per_word)
            s.store_shared(self.list.keys + place * 4, self.keys.of(value))
            return left & (left - 1), place + 1

        _, place = s.while_loop((mask, place), lambda left, place: left != 0, body)
        return place

    def _append_in_pieces(self, at, base, masks, threshold, count, high, bits):
        """For a tile that the list may have no room for; returns the new threshold and count."""
        s, plan = self.s, self.plan
        s.barrier()
        self.list.put(COUNT, count)
        s.barrier()

        def piece(m, i, threshold, count, *masks):
            def cut():
                new = self.list.cut(count, self._known(threshold, high, bits))
                return new, s.const(plan.k), *(a & b for a, b in zip(masks, self._above(base, new), strict=True))

            full = count > plan.capacity - plan.piece
            threshold, count, *masks = s.if_else(full, 2 + len(masks), cut, lambda: (threshold, count, *masks))
            now = masks[m] & (s.const(0xF) << (i * 4))
            self._append(at, base, m, now, self._reserve([now]))
            s.barrier()
            count = self.list.get(COUNT)
            s.barrier()
            return threshold, count, *masks

        state = (threshold, count, *masks)
        for m in range(len(masks)):
            state = s.for_range(0, plan.vectors, 1, state, lambda i, *state, m=m: piece(m, i, *state))
        return state[:2]

    # The first threshold

    def _first_threshold(self, base):
        """A lower bound of the k-th best score of a tile, from the maxima of groups of its scores.

        Returns it, the tile's largest key and the bits that some score uses.
        """
        s, plan = self.s, self.plan
        words, lowest, maxima = self._read(base), s.const(NEGATIVE_INFINITY), []
        for i in range(0, len(words), plan.group):
            group = words[i : i + plan.group]
            if plan.itemsize == 4:
                maxima.append(fold(s.float_max, group))
            else:
                pair = fold(s.pair_max, group)
                maxima += [pair << 16, pair & 0xFFFF0000]
        keys = [self.keys.of(s.float_max(x, lowest)) for x in maxima]  # not NaN
        # the smallest key of a number: taking off one more than that of -inf makes that one the largest
        low = fold(s.min, [key - (LOWEST_KEY + 1) for key in keys])
        used = s.const(0x00010000) if plan.itemsize == 2 else _any(words)
        low, high, used = self.list.range(low, fold(s.max, keys), used)
        low = low + (LOWEST_KEY + 1)
        # Maxima below 0 would make the range, and so the bins, too wide to be of use; those that are 2^16 times
        # smaller than the largest share one bin
        floor = s.max(low, s.max(high, SPAN) - SPAN)
        shift = self.list.shift(high - floor)
        for key in keys:
            self.list.tally(s.max(key, floor), floor, shift, key > LOWEST_KEY)
        found, _, _ = self.list.find_bin(s.const(plan.k))
        edge, _ = self.list.edges(floor, high, shift, found)
        edge = s.select(found == plan.bins - 1, low, edge)
        return s.select(found == NOTHING, s.const(LOWEST_KEY), self.keys.below(edge)), high, used

    # Results

    def _write(self, block, count, known) -> None:
        s, plan = self.s, self.plan
        out_ids = s.row(self.arrays.ids, block, 4 * plan.slots)
        out_values = s.row(self.arrays.values, block, 4 * plan.slots) if plan.values else None
        mapping = s.row(self.arrays.mapping, self.row, 4 * plan.width) if plan.mapped else None

        def put(place, i, key):
            position = self.start + self.list.id(i)
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

        (written,) = s.if_else(count > plan.slots, 1, lambda: self._write_best(count, known, put), everything)
        s.for_range(written + self.thread, plan.slots, plan.threads, (), pad)

    def _write_best(self, count, known, put):
        """Writes the k best of more than k: those certainly taken from place 0 on, ties behind them."""
        s, plan = self.s, self.plan
        low, high, need, _ = self.list.find_kth(count, known)
        below = s.lanes_below()

        def tell(first, found):
            return [found + s.select(self.list.key(first + self.thread) > high, s.const(1), 0)]

        (found,) = s.for_range(0, count, plan.threads, [s.const(0)], tell)
        place = self.list.fetch_add(TAKEN, s.warp_reduce(found, "add"))

        def take(first, place):
            i = first + self.thread
            key = self.list.key(i)
            best = key > high
            lanes = s.ballot(best)
            with s.when(best):
                put(place + s.popcount(lanes & below), i, key)
            # Behind the list lie keys 0, which the lowest bound does not tell from the list's own.
            with s.when(~best & (key >= low) & (i < count)):
                rank = s.fetch_add_shared(self.list.state, s.const(1), 4 * TIES)
                with s.when(rank < need):
                    put(rank - need + plan.k, i, key)
            return [place + s.popcount(lanes)]

        s.for_range(0, count, plan.threads, [place], take)
        return [s.const(plan.k)]


def _any(bits: list):
    return fold(lambda a, b: a | b, bits)
