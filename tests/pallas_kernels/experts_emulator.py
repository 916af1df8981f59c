"""Runs the GPU programs of the experts' product on a CPU, one block after the other."""

import dataclasses

import ml_dtypes
import numpy as np

from pallas_kernels.experts import block_sizes
from pallas_kernels.experts.gpu_blocks import Half
from pallas_kernels.experts.gpu_few import FewRows
from pallas_kernels.experts.gpu_many import ManyRows
from tests.pallas_kernels.indexer_emulator import IndexerEmulator

_U32 = np.uint32


def _f32(x: np.ndarray) -> np.ndarray:
    return x.view(np.float32)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(_U32)


class ExpertsEmulator(IndexerEmulator):
    """`pallas_kernels.experts.gpu_program.Program` in numpy.

    Warpgroups run apart between barriers of the block: what one of them copies must not be what products of another one
    may still read, which are those under way at the last barrier and all since. Products read what was copied and
    fenced before the last barrier.
    """

    def __init__(self, threads: int, block: int, shared_words: int):
        super().__init__(threads, block, shared_words)
        self.under_way: list[np.ndarray] = []  # words that each call of `add_products` reads, until it is waited for
        self.may_read: list[np.ndarray] = []
        self.fenced_at = np.zeros(shared_words, np.int64)  # how often the block met before a copy was seen by products
        self.meetings = 0

    def barrier(self):
        super().barrier()
        self.meetings += 1
        self.may_read = list(self.under_way)

    def shared_to_async(self):
        self.fenced_at = np.where(self.fenced_at < 0, self.meetings, self.fenced_at)

    def float_const(self, value):
        return self.const(np.float32(value).view(_U32))

    def permute_by(self, a, b, selector):
        return self._bytes_of(a, b, [selector >> 4 * i & 15 for i in range(4)])

    def _calculated(self, fn, *words):
        with np.errstate(all="ignore"):
            return _bits(fn(*(_f32(x) for x in words)))

    def plus(self, a, b):
        return self._calculated(np.add, a, b)

    def smaller(self, a, b):
        return self._calculated(np.minimum, a, b)

    def larger(self, a, b):
        return self._calculated(np.maximum, a, b)

    def power_of_two(self, x):
        return self._calculated(np.exp2, x)

    def reciprocal(self, x):
        return self._calculated(np.reciprocal, x)

    def load_matrices(self, address, displacement=0):
        self._whole_warps()
        for i in range(4):
            self._touch(self._words(address, displacement + 4 * i), "read")
        rows = self._shared_bytes(address + _U32(displacement), 16).reshape(-1, 4, 8, 16)  # warp, matrix, row
        words = np.ascontiguousarray(rows).view(_U32)
        return [words[:, i].reshape(-1).copy() for i in range(4)]

    def copy_16_bytes_from(self, shared, source, displacement):
        self._copy(shared, self._at(source, 16, displacement))

    def copy_bytes(self, shared, source, size, displacement=0, to=0):
        self._copy(shared + _U32(to), self._at(source, size, displacement))

    def _copy(self, shared, data):
        words = self._words(shared, 0, data.shape[1])
        written = words[self.mask, None] + np.arange(data.shape[1] // 4)
        for read in self.may_read:
            assert not np.isin(written, read).any(), "a copy over what products may still read"
        self.fenced_at[written] = -1
        for i in range(data.shape[1] // 4):
            self._touch(words + i, "write")
            self.memory[words[self.mask] + i] = 0xDEADBEEF
        who = np.flatnonzero(self.mask)
        data = np.ascontiguousarray(data[who]).view(_U32)
        self.copies.append((who, self.groups[who], words[who], data))

    def start_dots(self, a, codes, *, first=0, columns=32):
        """Every warpgroup has an operand of its own."""
        before, out = self.mask, None
        for group in np.flatnonzero(before.reshape(-1, 128).all(1)):
            self.mask = before & (np.arange(self.threads) // 128 == group)
            mine = super().start_dots(a, codes, first=first, columns=columns)
            out = mine if out is None else self._merged(mine, out)
        self.mask = before
        return out

    def _merged(self, new, old):
        return [[np.where(self.mask, x, y) for x, y in zip(*pair, strict=True)] for pair in zip(new, old, strict=True)]

    def wait_copies(self, pending):
        kept = []
        for who, group, words, data in self.copies:
            done = self.mask[who] & (group < self.groups[who] - pending)
            for i in range(data.shape[1]):
                self.memory[words[done] + i] = data[done, i]
            if not done.all():
                kept.append(tuple(x[~done] for x in (who, group, words, data)))
        self.copies = kept

    def arrive(self, number, threads):
        """Barriers of whole warpgroups: as many must have met as arrived, which the end of the block tells."""
        del number
        assert (
            threads == self.threads and (self.mask.reshape(-1, 128).all(1) == self.mask.reshape(-1, 128).any(1)).all()
        )
        self.epoch += 1

    meet = arrive

    def times_pairs(self, a, b):
        """Subnormal results are exact where the product is."""
        with np.errstate(all="ignore"):
            halves = [x.view(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32) for x in (a, b)]
            return (halves[0] * halves[1]).astype(ml_dtypes.bfloat16).view(np.uint16).view(_U32)

    def through_e4m3(self, a, b):
        with np.errstate(all="ignore"):
            return [_bits(np.clip(_f32(x), -448, 448).astype(ml_dtypes.float8_e4m3fn)) for x in (a, b)]

    def add_products(self, sums, a, tile, first, fresh):
        assert self.mask.all(), "the block has diverged"
        columns, (address,), (new,) = 2 * len(sums), np.unique(tile), np.unique(fresh)
        assert address % 1024 == 0
        read = np.arange(address // 4, (address + 128 * columns) // 4)
        assert ((self.fenced_at[read] >= 0) & (self.fenced_at[read] < self.meetings)).all(), "products before a fence"
        self.under_way.append(read)
        self.may_read.append(read)
        lines = self.memory.view(np.uint8)[address : address + 128 * columns].reshape(columns, 8, 16)
        b = np.stack([lines[n, np.arange(8) ^ n % 8].reshape(128) for n in range(columns)])
        b = np.ascontiguousarray(b).view(ml_dtypes.bfloat16).astype(np.float64)[:, 16 * first :][:, : 16 * len(a)]
        words = [[np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4) for x in registers] for registers in a]
        left = np.ascontiguousarray(self._matrix(words, 32 * len(a)).astype(np.uint8)).view(ml_dtypes.bfloat16)
        with np.errstate(all="ignore"):
            products = left.astype(np.float64) @ b.T  # warpgroup, row, column
            parts = products.reshape(-1, 4, 2, 8, columns // 8, 4, 2)  # warpgroup, warp, half, row, i / 4, quad, odd
            parts = np.moveaxis(parts, (3, 5, 4, 2, 6), (2, 3, 4, 5, 6)).reshape(self.threads, columns // 2)
            old = [np.zeros(self.threads) if new else _f32(x) for x in sums]
            return [_bits(parts[:, i] + x) for i, x in enumerate(old)]

    def wait_products(self, pending):
        self.under_way = self.under_way[max(len(self.under_way) - pending, 0) :]

    def wait_sums(self, sums):
        self.under_way = []
        return sums


def _run(plan, x, block_expert, halves, row_weight, limit):
    out = np.full((plan.blocks, plan.rows, plan.out), np.nan, ml_dtypes.bfloat16)
    kind = FewRows if isinstance(plan, block_sizes.FewPlan) else ManyRows
    for block in range(plan.grid):
        s = ExpertsEmulator(128 * plan.warpgroups, block, -(-plan.shared_bytes // 4))
        kind(s, plan, x, block_expert, halves, row_weight, out, None, limit).run()
    return out


def emulated_expert_blocks(case: dict, limit: float, **changes: int) -> np.ndarray:
    """`gpu.expert_blocks` with `changes` of its plans; what is not written stays NaN."""
    x, row_weight, block_expert = (np.array(case[name]) for name in ("x", "row_weight", "block_expert"))
    w1, w3, w2 = ([np.array(part) for part in case[name]] for name in ("w1", "w3", "w2"))
    blocks, rows, d = x.shape
    plans = block_sizes.plans(blocks, rows, w1[0].shape[0], d, w1[0].shape[1])
    inner, outer = (dataclasses.replace(plan, **changes) for plan in plans)
    inner = _run(inner, x, block_expert, (Half(*w1, 0), Half(*w3, 0)), row_weight, limit)
    return _run(outer, inner, block_expert, (Half(*w2, 0), Half(*w2, 32)), None, limit)
