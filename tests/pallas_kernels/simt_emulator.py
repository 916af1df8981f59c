"""Runs programs written for `pallas_kernels.simt.Simt` on a CPU: one block, all its threads in step.

Threads that a condition excludes are masked. Addresses outside an array and accesses to shared memory that a barrier
should separate but does not (a word written by one thread and touched by another between two barriers) are errors.
"""

import contextlib
import threading

import numpy as np

_U32 = np.uint32


class _Global:
    """A flat array of bytes and an address in it for each thread."""

    def __init__(self, data: np.ndarray, offset: np.ndarray):
        self.data, self.offset = data, offset


class Cluster:
    """Blocks that run at the same time, each on a thread of this process."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=60)
        self.lock = threading.Lock()
        self.blocks: list[Emulator] = []

    def run(self, programs) -> None:
        """Runs one function a block, and raises the first error of them."""
        errors = []

        def guarded(program):
            try:
                program()
            except BaseException as e:
                errors.append(e)
                self.barrier.abort()

        threads = [threading.Thread(target=guarded, args=(p,)) for p in programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class Emulator:
    """One block; `memory` is its shared memory in words, poisoned at the start."""

    def __init__(self, threads: int, block: int, shared_words: int, cluster: Cluster | None = None):
        self.threads, self.block_number = threads, block
        self.cluster = cluster
        if cluster is not None:
            cluster.blocks.append(self)
        self.memory = np.full(shared_words, 0xDEADBEEF, _U32)
        self.mask = np.ones(threads, bool)
        self.epoch = 1
        # per word: epoch of the last write, read and atomic, and the thread (-1: several)
        self.seen = {kind: np.zeros((2, shared_words), np.int64) for kind in ("write", "read", "atomic")}

    # Values

    def const(self, value):
        return np.full(self.threads, value, _U32)

    def thread(self):
        return np.arange(self.threads, dtype=_U32)

    def block(self):
        return self.const(self.block_number)

    def select(self, flag, a, b):
        return np.where(flag, self._word(a), self._word(b))

    def _word(self, x):
        return x if isinstance(x, np.ndarray) else self.const(x)

    def min(self, a, b):
        return np.minimum(a, self._word(b))

    def max(self, a, b):
        return np.maximum(a, self._word(b))

    def popcount(self, x):
        return np.bitwise_count(x).astype(_U32)

    def leading_zeros(self, x):
        return _U32(32) - np.frexp(x.astype(np.float64))[1].astype(_U32)

    def trailing_zeros(self, x):
        return self.popcount(~x & (x - _U32(1)))

    def shift_right(self, x, count):
        return np.where(count < 32, x >> (count & 31), _U32(0))

    def sign_mask(self, x):
        return (x.view(np.int32) >> 31).view(_U32)

    # Floats

    def float_max(self, a, b):
        return np.fmax(a.view(np.float32), b.view(np.float32)).view(_U32)

    def positive_zero(self, x):
        return np.where(x == 0x80000000, _U32(0), x)

    def float_subtract(self, a, b):
        with np.errstate(invalid="ignore", over="ignore"):
            difference = a.view(np.float32) - b.view(np.float32)
        return np.where(np.isnan(difference), _U32(0x7FFFFFFF), difference.view(_U32))

    def push_sign(self, mask, x):
        return mask << 1 | x >> 31

    def pair_max(self, a, b):
        upper = self.float_max(a & 0xFFFF0000, b & 0xFFFF0000)
        return upper & 0xFFFF0000 | self.float_max(a << 16, b << 16) >> 16

    def pair_greater(self, a, b):
        upper = (a & 0xFFFF0000).view(np.float32) > (b & 0xFFFF0000).view(np.float32)
        lower = (a << 16).view(np.float32) > (b << 16).view(np.float32)
        return self.select(upper, 0x3F800000, 0) | self.select(lower, 0x3F80, 0)

    # Warp

    def _warps(self, x):
        return x.reshape(-1, 32)

    def _whole_warps(self):
        active = self._warps(self.mask)
        assert (active.all(1) | ~active.any(1)).all(), "a warp operation where the warp has diverged"

    def ballot(self, flag):
        self._whole_warps()
        bits = (self._warps(flag).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1)
        return np.repeat(bits.astype(_U32), 32)

    def lanes_below(self):
        return np.tile((np.uint64(1) << np.arange(32, dtype=np.uint64)) - np.uint64(1), self.threads // 32).astype(_U32)

    def warp_reduce(self, x, operation):
        self._whole_warps()
        combine = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or}[operation]
        return np.repeat(combine.reduce(self._warps(x), axis=1).astype(_U32), 32)

    def from_lane(self, x, lane):
        self._whole_warps()
        return np.repeat(self._warps(x)[:, lane], 32)

    def running_sum(self, x):
        self._whole_warps()
        return self._warps(x).cumsum(1).astype(_U32).reshape(-1)

    def barrier(self):
        if not self.mask.any():
            return
        assert self.mask.all(), "a barrier that not all threads reach"
        self.epoch += 1

    # Shared memory

    def shared(self, ref):
        del ref
        return self.const(0)

    def _touch(self, word, kind):
        """Checks and records an access by the active threads, each to its own `word`."""
        who, word = np.flatnonzero(self.mask), word[self.mask]
        for other, (epoch, thread) in self.seen.items():
            if kind == other and kind != "write":
                continue
            if kind == "read" and other == "read":
                continue
            clash = (epoch[word] == self.epoch) & (thread[word] != who)
            assert not clash.any(), f"{kind} of words {np.unique(word[clash])[:8]} after {other}: no barrier between"
        epoch, thread = self.seen[kind]
        if kind == "write":
            assert len(np.unique(word)) == len(word), "two threads write one word"
        again = epoch[word] == self.epoch
        thread[word] = np.where(again & (thread[word] != who), -1, who)
        epoch[word] = self.epoch
        order = np.sort(word)
        thread[order[1:][order[1:] == order[:-1]]] = -1

    def _words(self, address, displacement, size=4):
        address = address.astype(np.int64) + displacement
        live = address[self.mask]
        assert (live % size == 0).all() and (live >= 0).all() and (live + size <= 4 * len(self.memory)).all(), "address"
        return np.where(self.mask, address, 0) // 4

    def load_shared(self, address, displacement=0):
        word = self._words(address, displacement)
        self._touch(word, "read")
        return self.memory[word]

    def load_shared_4(self, address, displacement=0):
        self._words(address, displacement, 16)
        return [self.load_shared(address, displacement + 4 * i) for i in range(4)]

    def store_shared(self, address, value, displacement=0):
        word = self._words(address, displacement)
        self._touch(word, "write")
        self.memory[word[self.mask]] = self._word(value)[self.mask]

    def store_shared_4(self, address, values, displacement=0):
        self._words(address, displacement, 16)
        for i, value in enumerate(values):
            self.store_shared(address, value, displacement + 4 * i)

    def load_shared_u16(self, address):
        self._words(address, 0, 2)
        return self.memory.view(np.uint16)[np.where(self.mask, address, 0) // 2].astype(_U32)

    def store_shared_u16(self, address, value):
        self._words(address, 0, 2)
        self.memory.view(np.uint16)[address[self.mask] // 2] = value[self.mask].astype(np.uint16)

    def fetch_add_shared(self, address, value, displacement=0):
        word, old = self._words(address, displacement), self.const(0)
        self._touch(word, "atomic")
        # a fixed but unnatural order, so that nothing leans on lower threads being first
        for i in np.flatnonzero(self.mask)[::-1]:
            old[i] = self.memory[word[i]]
            self.memory[word[i]] += value[i]
        return old

    def reduce_shared(self, address, value, operation, displacement=0, flag=None):
        with self.when(np.ones(self.threads, bool) if flag is None else flag):
            word = self._words(address, displacement)
            self._touch(word, "atomic")
            combine = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or}[operation]
            combine.at(self.memory, word[self.mask], self._word(value)[self.mask])

    # Cluster

    def cluster_barrier(self):
        assert self.mask.all(), "a barrier that not all threads reach"
        self.cluster.barrier.wait()
        self.epoch += 1

    def store_first_block(self, address, value):
        if self.mask.any():
            word = self._words(address, 0)[self.mask]
            assert len(np.unique(word)) == len(word)
            self.cluster.blocks[0].memory[word] = value[self.mask]

    def fetch_add_first_block(self, address, value, displacement=0):
        old = self.const(0)
        with self.cluster.lock:
            memory = self.cluster.blocks[0].memory
            word = self._words(address, displacement)
            for i in np.flatnonzero(self.mask):
                old[i] = memory[word[i]]
                memory[word[i]] += value[i]
        return old

    # Global memory

    def row(self, array, row, pitch):
        data = array.reshape(-1).view(np.uint8)
        return _Global(data, row.astype(np.int64) * pitch)

    def _bytes(self, row, offset, dtype, count=1):
        size = np.dtype(dtype).itemsize
        at = row.offset + offset.astype(np.int64)
        live = at[self.mask]
        fits = (live % (size * count) == 0) & (live >= 0) & (live + size * count <= len(row.data))
        assert fits.all(), "a global address"
        return row.data.view(dtype), np.where(self.mask, at, 0) // size

    def load(self, row, offset):
        data, at = self._bytes(row, offset, _U32)
        return data[at]

    def load_4(self, row, offset):
        data, at = self._bytes(row, offset, _U32, 4)
        return [data[at + i] for i in range(4)]

    def store(self, row, offset, value):
        data, at = self._bytes(row, offset, _U32)
        data[at[self.mask]] = self._word(value)[self.mask]

    # Copies: they happen when they are waited for

    def copies_begin(self, barrier, count):
        assert self.mask.sum() == 1
        at = int(barrier[self.mask][0])
        assert at % 8 == 0 and at + 8 * count <= 4 * len(self.memory)
        self.copies = {at + 8 * i: [0, None] for i in range(count)}  # phase, copy under way

    def copy_start(self, target, row, offset, size, barrier):
        if not self.mask.any():
            return
        assert self.mask.sum() == 1
        who = int(np.flatnonzero(self.mask)[0])
        target, size, barrier = int(target[who]), int(size[who]), int(barrier[who])
        source = int(row.offset[who] + offset[who])
        assert target % 16 == source % 16 == size % 16 == 0 and size > 0 and source + size <= len(row.data)
        words = np.arange(target // 4, (target + size) // 4)
        for epoch, thread in self.seen.values():
            assert not ((epoch[words] == self.epoch) & (thread[words] != who)).any(), "a copy over words in use"
        copy = self.copies[barrier]
        assert copy[1] is None, "a copy before the last one was waited for"
        copy[1] = (words, row.data[source : source + size].view(_U32))

    def copy_wait(self, barrier, phase):
        assert self.mask.all() and len(np.unique(barrier)) == len(np.unique(phase)) == 1
        copy = self.copies[int(barrier[0])]
        assert copy[1] is not None, "waiting for a copy that was not started"
        assert copy[0] & 1 == int(phase[0]) & 1, "waiting for the wrong phase"
        words, data = copy[1]
        self.memory[words] = data
        self.copies[int(barrier[0])] = [copy[0] + 1, None]

    # Control

    @contextlib.contextmanager
    def when(self, flag):
        before = self.mask
        self.mask = before & flag
        yield
        self.mask = before

    def if_else(self, flag, count, then, otherwise):
        results = []
        for taken, branch in ((flag, then), (~flag, otherwise)):
            if (self.mask & taken).any():
                with self.when(taken):
                    results.append([self._word(x) for x in branch()])
            else:
                results.append([self.const(0)] * count)
            assert len(results[-1]) == count
        return [np.where(flag, a, b) for a, b in zip(*results, strict=True)]

    def for_range(self, start, stop, step, carry, body):
        i, stop = self._word(start), self._word(stop)
        before, carry = self.mask, list(carry)
        while (before & (i < stop)).any():
            self.mask = before & (i < stop)
            carry = self._step(body(i, *carry), carry)
            i = i + _U32(step)
        self.mask = before
        return carry

    def while_loop(self, carry, condition, body):
        before, carry, running = self.mask, list(carry), self.mask
        while (running := running & condition(*carry)).any():
            self.mask = running
            carry = self._step(body(*carry), carry)
        self.mask = before
        return carry

    def _step(self, new, old):
        return [np.where(self.mask, self._word(a), b) for a, b in zip(new, old, strict=True)]
