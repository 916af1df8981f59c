"""What a block of the GPU kernel does: exact top-k of one part of one row, reading it once.

The part is read in tiles. A threshold, always a lower bound of the k-th best score, keeps most of a tile away; the
positions of the scores above it are appended to a list in shared memory.

- The first tile's threshold: the k-th largest of the maxima of small groups of its scores (k groups have a maximum
  that large, so k scores are), rounded down to an edge of a histogram.
- A tile that does not fit into the list any more is appended vector by vector; whenever the list is nearly full it is
  cut down to its k best, and their smallest becomes the threshold. So nothing depends on the scores being random:
  a row in ascending order costs more passes over the list and no other answer.
- At the end the k best of the list are taken.

Keys: the bits of a float32 mapped to unsigned integers in the same order. The k-th largest key of a list is found by
histograms of 2,048 bins over the range that still contains it, at most three of them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

BINS = 2048
NEGATIVE_INFINITY = 0xFF800000  # bits
LOWEST_KEY = 0x007FFFFF  # of -inf
NOTHING = 0xFFFFFFFF

# Words of shared memory behind the lists
(COUNT, TAKEN, TIES, HOLES, MOVERS, LOW, HIGH, BITS, BIN, ABOVE, INSIDE) = range(11)
WARP_SUMS = 16
STATE_WORDS = 48


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One launch.

    Attributes:
      k: positions to take.
      width: elements of a row of scores, a multiple of 16 bytes.
      itemsize: 4 (float32) or 2 (bfloat16).
      threads: of a block.
      vectors: 16-byte pieces of a tile that a thread reads, at most 32 elements.
      group: words whose maximum is one sample of the first threshold; 0: no first threshold.
      capacity: positions that the list holds.
      splits: parts of a row.
      part: elements of a part, a multiple of 16 bytes.
      slots: results of a part. More than k: a part whose list is that short is written as it is.
      values: the results' scores are written too.
      mapped: the results are looked up in a row of ids.
    """

    k: int
    width: int
    itemsize: int
    threads: int
    vectors: int
    group: int
    capacity: int
    splits: int
    part: int
    slots: int
    values: bool
    mapped: bool

    @property
    def per_vector(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.itemsize

    @property
    def tile(self) -> int:
        return self.threads * self.vectors * self.per_vector

    @property
    def piece(self) -> int:
        """Elements of a tile that are appended at once when it does not fit as a whole."""
        return self.threads * self.per_vector

    @property
    def shared_words(self) -> int:
        return BINS + 2 * self.capacity + STATE_WORDS


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
        self.s, self.plan, self.arrays = simt, plan, arrays
        self.bins = simt.shared(shared)  # at a 16-byte boundary
        self.ids = self.bins + 4 * BINS
        self.keys = self.ids + 4 * plan.capacity
        self.state = self.keys + 4 * plan.capacity
        self.thread = simt.thread()
        self.lane = self.thread & 31
        self.warp = self.thread >> 5

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
        self.end = s.min(start + plan.part, length)
        self._clear()
        threshold, count = s.for_range(
            start, self.end, plan.tile, (s.const(LOWEST_KEY), s.const(0)), lambda at, *c: self._tile(start, at, *c)
        )
        del threshold
        self._write(block, count)

    def _clear(self) -> None:
        s = self.s
        self._clear_bins()
        with s.when(self.thread < STATE_WORDS):
            initial = s.select((self.thread == LOW) | (self.thread == BIN), NOTHING, 0)
            s.store_shared(self.state + self.thread * 4, initial)
        s.barrier()

    def _clear_bins(self) -> None:
        s, own = self.s, BINS // self.plan.threads
        zero = s.const(0)
        for i in range(0, own, 4):
            if own >= 4:
                s.store_shared_4(self.bins + self.thread * (4 * own), [zero] * 4, 4 * i)
        if own < 4:
            for i in range(own):
                s.store_shared(self.bins + self.thread * (4 * own), 0, 4 * i)

    # Reading

    def _position(self, at, vector: int):
        """Of a vector's first element."""
        return at + (self.thread + vector * self.plan.threads) * self.plan.per_vector

    def _read_tile(self, at) -> list:
        s, plan = self.s, self.plan

        def whole():
            return [
                word
                for v in range(plan.vectors)
                for word in s.load_4(self.scores, self._position(at, v) * plan.itemsize)
            ]

        def last():
            words = []
            for v in range(plan.vectors):
                position = self._position(at, v)
                lowest = s.const(NEGATIVE_INFINITY if plan.itemsize == 4 else 0xFF80FF80)
                absent = [lowest] * 4
                vector = s.if_else(
                    position < self.end,
                    4,
                    lambda p=position: s.load_4(self.scores, p * plan.itemsize),
                    lambda a=absent: a,
                )
                words += [self._hide(position, i, word, lowest) for i, word in enumerate(vector)]
            return words

        return s.if_else(at + plan.tile <= self.end, 4 * plan.vectors, whole, last)

    def _hide(self, position, i: int, word, lowest):
        """Word i of a vector, with -inf for elements at and after the end."""
        s = self.s
        if self.plan.itemsize == 4:
            return s.select(position + i < self.end, word, lowest)
        half = s.select(position + 2 * i < self.end, (word & 0xFFFF) | (lowest & 0xFFFF0000), lowest)
        return s.select(position + (2 * i + 1) < self.end, word, half)

    def _element(self, position):
        """Bits of one element as a float32, -0 as +0."""
        s = self.s
        if self.plan.itemsize == 4:
            return s.positive_zero(s.load(self.scores, position * 4))
        return s.positive_zero(s.load_u16(self.scores, position * 2) << 16)

    def _key(self, bits):
        return bits ^ (self.s.sign_mask(bits) | 0x80000000)

    def _bits(self, key):
        """The float32 of a key."""
        return self.s.select(key >= 0x80000000, key ^ 0x80000000, key ^ NOTHING)

    def _below(self, key):
        """A threshold that lets this key and all above it pass: scores are compared as floats, where -0 equals +0."""
        s = self.s
        below = s.select(key == 0x80000000, s.const(0x7FFFFFFE), key - 1)
        return s.max(below, LOWEST_KEY)

    # Appending a tile

    def _tile(self, start, at, threshold, count):
        s, plan = self.s, self.plan
        words = self._read_tile(at)
        if plan.group:
            (threshold,) = s.if_else(at == start, 1, lambda: [self._first_threshold(words)], lambda: [threshold])
        mask = self._above(words, threshold)
        place = self._reserve(mask)
        s.barrier()
        total = s.load_shared(self.state, 4 * COUNT)

        def fits():
            self._append(at, mask, place)
            return threshold, total

        out = s.if_else(
            total <= plan.capacity, 2, fits, lambda: self._append_in_pieces(at, words, mask, threshold, count)
        )
        s.barrier()
        return out

    def _above(self, words, threshold):
        """A bit for each element that is above the threshold. Bit b of a float32 tile: word b. Of a bfloat16 tile:
        bit b < 16 the lower element of word b, bit 16 + b the upper one."""
        s = self.s
        mask = s.const(0)
        if self.plan.itemsize == 4:
            limit = self._bits(threshold)
            for b, word in enumerate(words):
                mask = mask | s.select(s.float_greater(word, limit), 1 << b, 0)
            return mask
        # the largest bfloat16 that is not above the threshold bounds bfloat16 scores in the same way
        negative = ((threshold + 1) & 0xFFFF0000) - 1
        limit = self._bits(s.select(threshold >= 0x80000000, threshold & 0xFFFF0000, negative))
        limit = limit | limit >> 16
        for b, word in enumerate(words):
            above = s.pair_greater(word, limit)
            mask = mask | ((above >> (7 - b) if b < 8 else above << (b - 7)) & (0x00010001 << b))
        return mask

    def _element_of_bit(self, at, bit):
        """Position of the element that a bit of the mask stands for."""
        plan = self.plan
        word = bit & 15 if plan.itemsize == 2 else bit
        within = (word & 3) * 2 + (bit >> 4) if plan.itemsize == 2 else word & 3
        return at + (self.thread + (word >> 2) * plan.threads) * plan.per_vector + within

    def _reserve(self, mask):
        """Room in the list for the bits of a warp: the place of its first one."""
        s = self.s
        found = s.warp_reduce(s.popcount(mask), "add")
        return self._fetch_add(COUNT, found)

    def _fetch_add(self, which: int, amount):
        """One lane adds for its warp; what was there goes to all lanes."""
        s = self.s
        (old,) = s.if_else(
            (self.lane == 0) & (amount != 0),
            1,
            lambda: [s.fetch_add_shared(self.state, amount, 4 * which)],
            lambda: [s.const(0)],
        )
        return s.from_lane(old, 0)

    def _append(self, at, mask, place) -> None:
        """Writes the positions of a warp's bits to the list from `place` on, which the warp has reserved."""
        s = self.s
        below = s.lanes_below()

        def some(left, place, lanes):
            del left, place
            return lanes != 0

        def body(left, place, lanes):
            with s.when(left != 0):
                slot = place + s.popcount(lanes & below)
                s.store_shared(self.ids + slot * 4, self._element_of_bit(at, s.trailing_zeros(left)))
            left = left & (left - 1)
            return left, place + s.popcount(lanes), s.ballot(left != 0)

        s.while_loop((mask, place, s.ballot(mask != 0)), some, body)

    def _append_in_pieces(self, at, words, mask, threshold, count):
        s, plan = self.s, self.plan
        bits = 0xF if plan.itemsize == 4 else 0x000F000F
        s.barrier()
        self._set(COUNT, count)
        s.barrier()

        def piece(i, threshold, count, mask):
            def cut():
                new = self._cut(count)
                return new, s.const(plan.k), mask & self._above(words, new)

            full = count > plan.capacity - plan.piece
            threshold, count, mask = s.if_else(full, 3, cut, lambda: (threshold, count, mask))
            now = mask & (s.const(bits) << (i * 4))
            self._append(at, now, self._reserve(now))
            s.barrier()
            count = s.load_shared(self.state, 4 * COUNT)
            s.barrier()
            return threshold, count, mask

        threshold, count, _ = s.for_range(0, plan.vectors, 1, (threshold, count, mask), piece)
        return threshold, count

    def _set(self, which: int, value) -> None:
        with self.s.when(self.thread == 0):
            self.s.store_shared(self.state, value, 4 * which)

    # Thresholds

    def _first_threshold(self, words):
        """A lower bound of the k-th best score of a tile, from the maxima of groups of its scores."""
        s, plan = self.s, self.plan
        maxima = []
        for i in range(0, len(words), plan.group):
            group = words[i : i + plan.group]
            if plan.itemsize == 4:
                maxima.append(_fold(s.float_max, group))
            else:
                pair = _fold(s.pair_max, group)
                maxima += [pair << 16, pair & 0xFFFF0000]
        lowest = s.const(NEGATIVE_INFINITY)
        keys = []
        for x in maxima:
            keys.append(s.select(s.float_greater(x, lowest), self._key(s.positive_zero(x)), 0))
        low = _fold(s.min, [s.select(key == 0, NOTHING, key) for key in keys])
        low, high, _ = self._range(low, _fold(s.max, keys), None)
        shift = self._shift(high - low)
        for key in keys:
            with s.when(key >= low):
                s.reduce_shared(self.bins + ((high - key) >> shift) * 4, 1, "add")
        found, _, _ = self._find_bin(s.const(plan.k))
        edge, _ = self._edges(low, high, shift, found)
        return s.select(found == NOTHING, s.const(LOWEST_KEY), self._below(edge))

    def _range(self, low, high, bits):
        """The block's smallest and largest key, and all bits that are set somewhere."""
        s = self.s
        low, high = s.warp_reduce(low, "min"), s.warp_reduce(high, "max")
        bits = None if bits is None else s.warp_reduce(bits, "or")
        with s.when(self.lane == 0):
            s.reduce_shared(self.state, low, "min", 4 * LOW)
            s.reduce_shared(self.state, high, "max", 4 * HIGH)
            if bits is not None:
                s.reduce_shared(self.state, bits, "or", 4 * BITS)
        s.barrier()
        return tuple(s.load_shared(self.state, 4 * which) for which in (LOW, HIGH, BITS))

    def _shift(self, span):
        """Bits to drop so that a span has at most BINS values."""
        zeros = self.s.min(self.s.leading_zeros(span), 21)
        return self.s.const(21) - zeros

    def _edges(self, low, high, shift, found):
        """Smallest and largest key of a bin; bin 0 ends at `high`."""
        s = self.s
        top = high - (found << shift)
        return top - s.min(top - low, (s.const(1) << shift) - 1), top

    def _find_bin(self, need):
        """The bin that holds the key of rank `need`, how many keys are in the bins before it, and how many in it.

        Bins count from the largest keys. If there are fewer than `need` keys, the bin is NOTHING. Leaves the bins
        empty and the range reset.
        """
        s, own = self.s, BINS // self.plan.threads
        s.barrier()
        base = self.bins + self.thread * (4 * own)
        if own >= 4:
            counts = [x for i in range(0, own, 4) for x in s.load_shared_4(base, 4 * i)]
        else:
            counts = [s.load_shared(base, 4 * i) for i in range(own)]
        self._clear_bins()
        total = _fold(lambda a, b: a + b, counts)
        through = s.running_sum(total)
        with s.when(self.lane == 31):
            s.store_shared(self.state + (self.warp + WARP_SUMS) * 4, through)
        with s.when(self.thread == 0):
            s.store_shared(self.state, NOTHING, 4 * LOW)
            s.store_shared(self.state, NOTHING, 4 * BIN)
            s.store_shared(self.state, 0, 4 * HIGH)
            s.store_shared(self.state, 0, 4 * BITS)
        s.barrier()
        lower = s.select(self.lane < self.warp, s.load_shared(self.state + (self.lane + WARP_SUMS) * 4), 0)
        through = through + s.warp_reduce(lower, "add")
        before = through - total
        with s.when((before < need) & (need <= through)):
            passed, above, inside = s.const(0), before, counts[0]
            for i in range(1, own):
                further = above + inside < need
                passed = s.select(further, s.const(i), passed)
                above = s.select(further, above + inside, above)
                inside = s.select(further, counts[i], inside)
            s.store_shared(self.state, self.thread * own + passed, 4 * BIN)
            s.store_shared(self.state, above, 4 * ABOVE)
            s.store_shared(self.state, inside, 4 * INSIDE)
        s.barrier()
        return tuple(s.load_shared(self.state, 4 * which) for which in (BIN, ABOVE, INSIDE))

    # The k best of the list

    def _find_kth(self, count):
        """Where the k-th best of more than k listed scores lies, by keys without the low bits that no score uses.

        Returns (low, high, need, unused bits): all keys above `high` are among the k best, and `need` of those from
        low to high, any of them.
        """
        s, plan = self.s, self.plan

        def read(i, low, high, bits):
            x = self._element(s.load_shared(self.ids + i * 4))
            key = self._key(x)
            s.store_shared(self.keys + i * 4, key)
            return s.min(low, key), s.max(high, key), bits | x

        start = (s.const(NOTHING), s.const(0), s.const(0))
        low, high, bits = self._range(*s.for_range(self.thread, count, plan.threads, start, read))
        unused = s.min(s.trailing_zeros(bits), 31)
        low, high = low >> unused, high >> unused

        def narrow(low, high, need, done):
            del done
            shift = self._shift(high - low)

            def tally(i):
                key = s.load_shared(self.keys + i * 4) >> unused
                with s.when((key >= low) & (key <= high)):
                    s.reduce_shared(self.bins + ((high - key) >> shift) * 4, 1, "add")
                return ()

            s.for_range(self.thread, count, plan.threads, (), tally)
            found, above, inside = self._find_bin(need)
            low, high = self._edges(low, high, shift, found)
            need = need - above
            return low, high, need, s.select((inside == need) | (shift == 0), s.const(1), 0)

        done = s.select(low == high, s.const(1), 0)
        low, high, need, _ = s.while_loop(
            (low, high, s.const(plan.k), done), lambda low, high, need, done: done == 0, narrow
        )
        return low, high, need, unused

    def _for_listed(self, count, kth, body: Callable) -> None:
        """body(i, is it there, is it one of the k best) for the entries of the list, whole warps at a time."""
        s, plan = self.s, self.plan
        low, high, need, unused = kth
        below = s.lanes_below()

        def step(first):
            i = first + self.thread
            there = i < count
            key = s.load_shared(self.keys + s.min(i, count - 1) * 4) >> unused
            tie = there & (key >= low) & (key <= high)
            ties = s.ballot(tie)
            rank = self._fetch_add(TIES, s.popcount(ties)) + s.popcount(ties & below)
            body(i, there, there & (key > high) | tie & (rank < need))
            return ()

        s.for_range(0, count, plan.threads, (), step)

    def _place(self, which: int, flag):
        """Numbers the threads of the block whose flag is set."""
        s = self.s
        lanes = s.ballot(flag)
        return self._fetch_add(which, s.popcount(lanes)) + s.popcount(lanes & s.lanes_below())

    def _cut(self, count):
        """Cuts the list down to its k best; returns the threshold for scores to come."""
        s, plan = self.s, self.plan
        kth = low, high, _, unused = self._find_kth(count)
        holes, movers = self.bins, self.bins + 2 * BINS  # 16-bit numbers, in the memory of the empty histogram

        def sort_out(i, there, best):
            hole = there & (i < plan.k) & ~best
            mover = best & (i >= plan.k)
            for which, flag, numbers in ((HOLES, hole, holes), (MOVERS, mover, movers)):
                place = self._place(which, flag)
                with s.when(flag):
                    s.store_shared_u16(numbers + place * 2, i)

        self._for_listed(count, kth, sort_out)
        s.barrier()

        def move(j):
            source = s.load_shared_u16(movers + j * 2)
            target = s.load_shared_u16(holes + j * 2)
            s.store_shared(self.ids + target * 4, s.load_shared(self.ids + source * 4))
            return ()

        s.for_range(self.thread, s.load_shared(self.state, 4 * HOLES), plan.threads, (), move)
        s.barrier()
        self._clear_bins()
        self._set(COUNT, s.const(plan.k))
        for which in (TIES, HOLES, MOVERS):
            self._set(which, s.const(0))
        s.barrier()
        low = low << unused
        exact = low | s.select(low >= 0x80000000, s.const(0), (s.const(1) << unused) - 1)
        return s.select(low == high << unused, exact, self._below(low))

    # Results

    def _write(self, block, count) -> None:
        s, plan = self.s, self.plan
        out_ids = s.row(self.arrays.ids, block, 4 * plan.slots)
        out_values = s.row(self.arrays.values, block, 4 * plan.slots) if plan.values else None
        mapping = s.row(self.arrays.mapping, self.row, 4 * plan.width) if plan.mapped else None

        def put(place, i):
            position = s.load_shared(self.ids + i * 4)
            if plan.values:
                s.store(out_values, place * 4, self._element(position))
            s.store(out_ids, place * 4, s.load(mapping, position * 4) if plan.mapped else position)

        def best():
            def take(i, there, best):
                del there
                place = self._place(TAKEN, best)
                with s.when(best):
                    put(place, i)

            self._for_listed(count, self._find_kth(count), take)
            return [s.const(plan.k)]

        def everything():
            def each(i):
                put(i, i)
                return ()

            s.for_range(self.thread, count, plan.threads, (), each)
            return [count]

        def pad(i):
            s.store(out_ids, i * 4, NOTHING)
            if plan.values:
                s.store(out_values, i * 4, NEGATIVE_INFINITY)
            return ()

        (written,) = s.if_else(count > plan.slots, 1, best, everything)
        s.for_range(written + self.thread, plan.slots, plan.threads, (), pad)


def _fold(combine: Callable, items: list):
    """Combines neighbours until one is left."""
    while len(items) > 1:
        items = [combine(*items[i : i + 2]) if i + 1 < len(items) else items[i] for i in range(0, len(items), 2)]
    return items[0]
