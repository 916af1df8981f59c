"""The list of the GPU top-k: positions and keys in a block's shared memory, and how its k best are found.

Keys are the bits of a float32 mapped to unsigned integers in the same order, -0 below +0: which of two equal scores is
taken does not matter. The k-th largest is found by histograms over the range that still contains it, four at most.
"""

from collections.abc import Callable

from pallas_kernels.topk.gpu_plan import (
    ABOVE,
    BIN,
    BITS,
    COUNT,
    HIGH,
    HOLES,
    INSIDE,
    LOW,
    MOVERS,
    STATE_WORDS,
    TAKEN,
    TIES,
    WARP_SUMS,
    Plan,
)

LOWEST_KEY = 0x007FFFFF  # of -inf
NOTHING = 0xFFFFFFFF


class Keys:
    """Arithmetic of keys."""

    def __init__(self, simt):
        self.s = simt

    def of(self, bits):
        """Key of a float32."""
        return bits ^ (self.s.sign_mask(bits) | 0x80000000)

    def bits(self, key):
        """The float32 of a key."""
        return self.s.select(key >= 0x80000000, key ^ 0x80000000, key ^ NOTHING)

    def below(self, key):
        """A threshold that lets this key and all above it pass: scores are compared as floats, where -0 equals +0."""
        s = self.s
        below = s.select(key == 0x80000000, s.const(0x7FFFFFFE), key - 1)
        return s.max(below, LOWEST_KEY)


class ScoreList:
    """`keys` is the address of an array of `plan.capacity` words; behind it come as many positions."""

    def __init__(self, simt, plan: Plan, base):
        self.s, self.plan, self.keys_of = simt, plan, Keys(simt)
        self.bins = base
        self.state = self.bins + 4 * plan.bins
        self.keys = self.state + 4 * STATE_WORDS
        self.ids = self.keys + 4 * plan.capacity
        self.thread = simt.thread()
        self.lane = self.thread & 31
        self.warp = self.thread >> 5

    def clear(self) -> None:
        """Before anything else; a barrier must follow."""
        s = self.s
        self._clear_bins()
        with s.when(self.thread < STATE_WORDS):
            initial = s.select((self.thread == LOW) | (self.thread == BIN), NOTHING, 0)
            s.store_shared(self.state + self.thread * 4, initial)

    def key(self, i):
        return self.s.load_shared(self.keys + i * 4)

    def id(self, i):
        """A position, from the part's start."""
        if self.plan.id_bytes == 2:
            return self.s.load_shared_u16(self.ids + i * 2)
        return self.s.load_shared(self.ids + i * 4)

    def set_id(self, i, position) -> None:
        if self.plan.id_bytes == 2:
            self.s.store_shared_u16(self.ids + i * 2, position)
        else:
            self.s.store_shared(self.ids + i * 4, position)

    def get(self, which: int):
        return self.s.load_shared(self.state, 4 * which)

    def put(self, which: int, value) -> None:
        """By one thread."""
        with self.s.when(self.thread == 0):
            self.s.store_shared(self.state, value, 4 * which)

    def fetch_add(self, which: int, amount):
        """Adds a warp's amount; what was there goes to all its lanes (anything, if the amount is 0)."""
        s = self.s
        (old,) = s.if_else(
            (self.lane == 0) & (amount != 0),
            1,
            lambda: [s.fetch_add_shared(self.state, amount, 4 * which)],
            lambda: [s.const(0)],
        )
        return s.from_lane(old, 0)

    # Histograms

    def _own_bins(self, load: bool) -> list:
        """A thread's counts, or (not `load`) sets them to 0."""
        s, own = self.s, max(1, self.plan.bins // self.plan.threads)
        base, size = self.bins + self.thread * (4 * own), min(own, 4)
        counts = []
        for i in range(0, own, size):
            if load:
                counts += (
                    s.load_shared_4(base, 4 * i) if size == 4 else [s.load_shared(base, 4 * j) for j in range(own)]
                )
            elif size == 4:
                s.store_shared_4(base, [s.const(0)] * 4, 4 * i)
            else:
                for j in range(own):
                    s.store_shared(base, 0, 4 * j)
        return counts

    def _clear_bins(self) -> None:
        if self.plan.threads <= self.plan.bins:
            self._own_bins(load=False)
            return
        with self.s.when(self.thread < self.plan.bins):
            self._own_bins(load=False)

    def range(self, low, high, bits=None):
        """The block's smallest `low`, largest `high`, and all bits that are set in some thread's `bits`."""
        s = self.s
        low, high = s.warp_reduce(low, "min"), s.warp_reduce(high, "max")
        bits = None if bits is None else s.warp_reduce(bits, "or")
        with s.when(self.lane == 0):
            s.reduce_shared(self.state, low, "min", 4 * LOW)
            s.reduce_shared(self.state, high, "max", 4 * HIGH)
            if bits is not None:
                s.reduce_shared(self.state, bits, "or", 4 * BITS)
        s.barrier()
        return self.get(LOW), self.get(HIGH), self.get(BITS)

    def shift(self, span):
        """Bits to drop so that a span has at most `bins` values."""
        most = 32 - (self.plan.bins.bit_length() - 1)
        return self.s.const(most) - self.s.min(self.s.leading_zeros(span), most)

    def tally(self, key, low, shift, flag) -> None:
        """Counts a key >= low where the flag is set; the last bin takes all keys that are too large for the others."""
        s = self.s
        number = s.min((key - low) >> shift, self.plan.bins - 1)
        s.reduce_shared(self.bins + 4 * (self.plan.bins - 1) - number * 4, 1, "add", flag=flag)

    def edges(self, low, high, shift, found):
        """Smallest and largest key of bin `found`, as `find_bin` numbers them."""
        s = self.s
        bottom = low + (s.const(self.plan.bins - 1) - found << shift)
        top = bottom + s.min(high - bottom, (s.const(1) << shift) - 1)
        return bottom, s.select(found == 0, high, top)

    def find_bin(self, need):
        """The bin that holds the key of rank `need`, how many keys are in the bins before it, and how many in it.

        Bins are numbered from the one with the largest keys here. If there are fewer than `need` keys, the bin is
        NOTHING. Leaves the bins empty and the range reset.
        """
        s, own = self.s, max(1, self.plan.bins // self.plan.threads)
        s.barrier()
        if self.plan.threads <= self.plan.bins:
            counts = self._own_bins(load=True)
        else:
            has_bins = self.thread < self.plan.bins
            counts = s.if_else(has_bins, own, lambda: self._own_bins(load=True), lambda: [s.const(0)] * own)
        self._clear_bins()
        total = fold(lambda a, b: a + b, counts)
        through = s.running_sum(total)
        with s.when(self.lane == 31):
            s.store_shared(self.state + (self.warp + WARP_SUMS) * 4, through)
        for which, value in ((LOW, NOTHING), (BIN, NOTHING), (HIGH, 0), (BITS, 0)):
            self.put(which, value)
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
        return self.get(BIN), self.get(ABOVE), self.get(INSIDE)

    # The k best

    def find_kth(self, count, known=None):
        """Where the k-th best of `count` > k listed scores lies: (low, high, need, unused).

        All keys above `high` are among the k best, and `need` of those from low to high, any of them. No score uses
        the `unused` lowest bits: float32 scores may be bfloat16 values, and a bin of one of them is narrow enough.
        Puts keys 0 behind the list, up to a multiple of the threads.

        Args:
          count: of the list.
          known: a key that is not above the smallest listed, one that is not below the largest, and the bits that
            some score uses; None: they are looked up.
        """
        s, plan = self.s, self.plan
        end = (count & (NOTHING - (plan.threads - 1))) + self.thread
        with s.when((end >= count) & (end < plan.capacity)):
            s.store_shared(self.keys + end * 4, 0)

        def read(i, low, high, bits):
            key = self.key(i)
            return s.min(low, key), s.max(high, key), bits | self.keys_of.bits(key)

        # a list that the first threshold made is hardly longer than k: the lower part of its range decides
        finer = s.const(0 if known is None else 2)
        if known is None:
            start = (s.const(NOTHING), s.const(0), s.const(0))
            known = self.range(*s.for_range(self.thread, count, plan.threads, start, read))
        low, high, bits = known
        unused = s.min(s.trailing_zeros(bits), 31)
        ones = (s.const(1) << unused) - 1
        low, high = low & (ones ^ NOTHING), high | ones

        def narrow(low, high, need, done, finer):
            del done
            shift = s.max(s.max(self.shift(high - low), finer) - finer, unused)

            def tally(first):
                key = self.key(first + self.thread)
                self.tally(key, low, shift, (key >= low) & (key <= high))
                return ()

            s.for_range(0, count, plan.threads, (), tally)
            found, above, inside = self.find_bin(need)
            low, high = self.edges(low, high, shift, found)
            need = need - above
            return low, high, need, s.select((inside == need) | one_value(low, high), s.const(1), 0), s.const(0)

        def one_value(low, high):
            return (high - low) >> unused == 0

        done = s.select(one_value(low, high), s.const(1), 0)
        low, high, need, _, _ = s.while_loop(
            (low, high, s.const(plan.k), done, finer), lambda low, high, need, done, finer: done == 0, narrow
        )
        return low, high, need, unused

    def _place(self, which: int, flag):
        """Numbers the threads of the block whose flag is set."""
        s = self.s
        lanes = s.ballot(flag)
        return self.fetch_add(which, s.popcount(lanes)) + s.popcount(lanes & s.lanes_below())

    def cut(self, count, known=None):
        """Cuts the list from `count` > k down to its k best; returns the threshold for scores to come."""
        s, plan = self.s, self.plan
        low, high, need, unused = self.find_kth(count, known)
        holes, movers = self.bins, self.bins + 2 * plan.bins  # 16-bit numbers, in the memory of the empty histogram

        def sort_out(first):
            i = first + self.thread
            there = i < count
            key = self.key(i)
            tie = there & (key >= low) & (key <= high)
            best = there & (key > high) | tie & (self._place(TIES, tie) < need)
            for which, flag, numbers in (
                (HOLES, there & (i < plan.k) & ~best, holes),
                (MOVERS, best & (i >= plan.k), movers),
            ):
                place = self._place(which, flag)
                with s.when(flag):
                    s.store_shared_u16(numbers + place * 2, i)
            return ()

        def move(j):
            source, target = s.load_shared_u16(movers + j * 2), s.load_shared_u16(holes + j * 2)
            self.set_id(target, self.id(source))
            s.store_shared(self.keys + target * 4, self.key(source))
            return ()

        s.for_range(0, count, plan.threads, (), sort_out)
        s.barrier()
        s.for_range(self.thread, self.get(HOLES), plan.threads, (), move)
        s.barrier()
        self._clear_bins()
        for which, value in ((COUNT, plan.k), (TIES, 0), (HOLES, 0), (MOVERS, 0)):
            self.put(which, value)
        s.barrier()
        one_value = s.select(low >= 0x80000000, low, high)
        return s.select((high - low) >> unused == 0, one_value, self.keys_of.below(low))

    def join_first_block(self, count, shift) -> None:
        """Adds this list to that of the cluster's first block, each position plus `shift`."""
        s, plan = self.s, self.plan
        with s.when(self.thread == 0):
            s.store_shared(self.state, s.fetch_add_first_block(self.state, count, 4 * COUNT), 4 * TAKEN)
        s.barrier()
        place = self.get(TAKEN)

        def push(i):
            s.store_first_block(self.keys + (place + i) * 4, self.key(i))
            s.store_first_block(self.ids + (place + i) * 4, self.id(i) + shift)
            return ()

        s.for_range(self.thread, count, plan.threads, (), push)


def fold(combine: Callable, items: list):
    """Combines neighbours until one is left."""
    while len(items) > 1:
        items = [combine(*items[i : i + 2]) if i + 1 < len(items) else items[i] for i in range(0, len(items), 2)]
    return items[0]
