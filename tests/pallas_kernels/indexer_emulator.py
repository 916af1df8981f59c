"""Runs the GPU programs of the index scores on a CPU, one block after the other."""

import dataclasses

import ml_dtypes
import numpy as np

from pallas_kernels.indexer import block_sizes
from pallas_kernels.indexer.gpu_entries import EntryScores
from pallas_kernels.indexer.gpu_maxima import BlockMaxima
from pallas_kernels.indexer.gpu_scores import Queries
from tests.pallas_kernels.simt_emulator import Emulator

_U32 = np.uint32


def _f32(x: np.ndarray) -> np.ndarray:
    return x.view(np.float32)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(_U32)


def _bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, as its bits."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(_U32)


def _halves(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _f32(word << 16), _f32(word & _U32(0xFFFF0000))


class IndexerEmulator(Emulator):
    """`pallas_kernels.indexer.gpu_program.Program` in numpy; wgmma reads what the program wrote to shared memory."""

    def __init__(self, threads: int, block: int, shared_words: int):
        super().__init__(threads, block, shared_words)
        self.groups = np.zeros(threads, np.int64)  # closed groups of copies of each thread
        self.copies: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    # Bytes and floats

    def permute(self, a, b, selector):
        return self._bytes_of(a, b, [self.const(selector >> 4 * i & 15) for i in range(4)])

    def lookup(self, table, indices):
        return self._bytes_of(*table, [indices >> 4 * i & 7 for i in range(4)])

    @staticmethod
    def _bytes_of(a, b, places):
        """Eight and a place stand for its highest bit, eight times."""
        data = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        parts = []
        for place in places:
            byte = (data >> (place & 7).astype(np.uint64) * np.uint64(8) & np.uint64(255)).astype(_U32)
            parts.append(np.where(place & 8, (byte >> 7) * _U32(255), byte))
        return parts[0] | parts[1] << 8 | parts[2] << 16 | parts[3] << 24

    def merge(self, a, mask, b):
        return (a & _U32(mask)) | b

    def times(self, a, b):
        with np.errstate(all="ignore"):
            return _bits(_f32(a) * _f32(b))

    def times_plus(self, a, b, c):
        with np.errstate(all="ignore"):
            return _bits((_f32(a).astype(np.float64) * _f32(b) + _f32(c)).astype(np.float32))

    def positive_zero(self, x):
        return np.where(x == 0x80000000, _U32(0), x)

    def pack_bf16(self, low, high):
        with np.errstate(all="ignore"):
            return _bf16(_f32(low)) | _bf16(_f32(high)) << 16

    def pack_e4m3(self, values):
        codes = [np.clip(_f32(x), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for x in values]
        return np.stack(codes, axis=1).reshape(-1).view(_U32).copy()

    def weighted_relu(self, low, high, weights):
        with np.errstate(all="ignore"):
            return sum(
                _bf16(_f32(_bf16(np.maximum(_f32(x), 0)) << 16) * w) << shift
                for x, w, shift in zip((low, high), _halves(weights), (0, 16), strict=True)
            )

    # Warp and warpgroup

    def exchange(self, x, mask):
        self._whole_warps()
        return x.reshape(-1, 32)[:, np.arange(32) ^ mask].reshape(-1)

    def _shared_bytes(self, address, count):
        """uint8 [threads, count] at each thread's address; threads that are masked out read address 0."""
        address = np.where(self.mask, address, 0).astype(np.int64)
        live = address[self.mask]
        assert (live % 16 == 0).all() and (live + count <= 4 * len(self.memory)).all(), "address"
        return self.memory.view(np.uint8)[address[:, None] + np.arange(count)]

    def load_matrices_transposed(self, address, displacement=0):
        self._whole_warps()
        for i in range(4):
            self._touch(self._words(address, displacement + 4 * i), "read")
        rows = self._shared_bytes(address + _U32(displacement), 16).reshape(-1, 4, 8, 8, 2)  # warp, matrix, row, column
        lane = np.arange(32)
        out = []
        for i in range(4):
            low, high = (rows[:, i, 2 * (lane % 4) + odd, lane // 4] for odd in (0, 1))
            out.append(np.concatenate([low, high], axis=-1).reshape(-1, 4).view(_U32).reshape(-1).copy())
        return out

    def warpgroup_barrier(self, warpgroup):
        del warpgroup
        groups = self.mask.reshape(-1, 128)
        assert (groups.all(1) | ~groups.any(1)).all(), "a warpgroup has diverged"
        self.epoch += 1

    def shared_to_async(self):
        pass

    def _matrix(self, registers, columns):
        """[warpgroups, 64, columns] of the bytes (as uint8 pairs or quads) that four registers a step hold."""
        steps = [np.stack(x, axis=1).reshape(-1, 4, 8, 4, 2, 2, 4) for x in registers]
        # warpgroup, warp, row, quad, [column half, row half], byte of the register's word
        rows = [np.moveaxis(x, (1, 5, 2, 4, 3), (1, 2, 3, 4, 5)) for x in steps]
        return np.concatenate([x.reshape(x.shape[0], 64, -1) for x in rows], axis=2)[:, :, :columns]

    def start_dots(self, a, codes, *, first=0, columns=32):
        groups = self.mask.reshape(-1, 128)
        assert (groups.all(1) | ~groups.any(1)).all(), "a warpgroup has diverged"
        address = int(codes[self.mask][0])
        assert address % 1024 == 0 and (codes[self.mask] == address).all()
        lines = self.memory.view(np.uint8)[address : address + 128 * columns].reshape(columns, 8, 16)
        b = np.stack([lines[n, np.arange(8) ^ n % 8].reshape(128) for n in range(columns)])
        b = b.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        out = []
        for g, registers in enumerate(a, first):
            words = [np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4) for x in registers]
            keys = self._matrix([words], 32).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
            with np.errstate(all="ignore"):
                dots = (keys @ b[:, 32 * g : 32 * g + 32].T).astype(np.float32)  # warpgroup, row, head
            parts = dots.reshape(-1, 4, 2, 8, columns // 8, 4, 2)  # warpgroup, warp, half, row, i / 4, quad, odd
            parts = np.moveaxis(parts, (3, 5, 4, 2, 6), (2, 3, 4, 5, 6)).reshape(self.threads, columns // 2)
            out.append([_bits(parts[:, i]) for i in range(columns // 2)])
        return out

    def wait_dots(self, dots, pending):
        del pending
        return dots

    def row_sums(self, tiles, ones):
        address = int(ones[self.mask][0])
        assert (self.memory[address // 4 : address // 4 + 64] == 0x3F803F80).all()
        out = []
        for registers in tiles:
            steps = [
                [np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4) for x in registers[h : h + 4]] for h in (0, 4)
            ]
            terms = self._matrix(steps, 64).astype(np.uint8)
            with np.errstate(all="ignore"):
                terms = np.ascontiguousarray(terms).view(ml_dtypes.bfloat16).astype(np.float32)
                sums = terms.astype(np.float64).sum(axis=2).astype(np.float32) + np.float32(0)
            halves = np.moveaxis(sums.reshape(-1, 4, 2, 8), 2, 3).reshape(-1, 2)  # row of a warp, half
            out.append([_bits(np.repeat(halves[:, i], 4)) for i in range(2)])
        return out

    # Memory

    def offset(self, row, offset):
        return type(row)(row.data, row.offset + offset.astype(np.int64))

    def _at(self, row, count, displacement=0):
        at = np.where(self.mask, row.offset, 0) + displacement
        live = at[self.mask]
        assert ((live >= 0) & (live % count == 0) & (live + count <= len(row.data))).all(), "a global address"
        return row.data[np.minimum(at[:, None] + np.arange(count), len(row.data) - 1)]

    def load_words(self, row, count, displacement=0):
        data = np.ascontiguousarray(self._at(row, 4 * count, displacement)).view(_U32)
        return [data[:, i].copy() for i in range(count)]

    def load_half(self, row):
        return np.ascontiguousarray(self._at(row, 2)).view(np.uint16)[:, 0].astype(_U32)

    def load_byte(self, row):
        return self._at(row, 1)[:, 0].astype(_U32)

    def store_words(self, row, offset, values):
        at = (row.offset + offset.astype(np.int64))[self.mask]
        assert (at % (4 * len(values)) == 0).all()
        for i, value in enumerate(values):
            self.store(row, offset + _U32(4 * i), value)

    def copy_16_bytes(self, shared, source, displacement):
        data = self._at(source, 16, displacement)
        for i in range(4):
            word = self._words(shared, displacement + 4 * i)
            self._touch(word, "write")
            self.memory[word[self.mask]] = 0xDEADBEEF
        words = self._words(shared, displacement, 16)
        who = np.flatnonzero(self.mask)
        self.copies.append((who, self.groups[who], words[who], np.ascontiguousarray(data[who]).view(_U32)))

    def commit_copies(self):
        self.groups[self.mask] += 1

    def wait_copies(self, pending):
        kept = []
        for who, group, words, data in self.copies:
            done = self.mask[who] & (group < self.groups[who] - pending)
            for i in range(4):
                self.memory[words[done] + i] = data[done, i]
            if not done.all():
                kept.append(tuple(x[~done] for x in (who, group, words, data)))
        self.copies = kept


def _arrays(case: dict) -> tuple[dict[str, np.ndarray], Queries, tuple[int, ...]]:
    a = {name: np.array(x) for name, x in case.items()}
    batch, tokens, heads, half = a["q_values"].shape
    queries = Queries(a["q_values"], a["q_scales"], a["weights"], a["visible"], heads, 2 * half)
    return a, queries, (batch, tokens, a["pages"].shape[1], 2 * half)


def emulated_block_maxima(case: dict, block_size: int, **changes: int) -> np.ndarray:
    """`gpu.block_maxima` with `changes` of its plan; what is not written stays NaN."""
    a, queries, sizes = _arrays(case)
    plan = dataclasses.replace(block_sizes.maxima_plan(*sizes, block_size), **changes)
    out = np.full((plan.batch, plan.tokens, plan.table * plan.page_maxima), np.nan, np.float32)
    for block in range(plan.blocks):
        s = IndexerEmulator(128 * plan.warpgroups, block, -(-plan.shared_bytes // 4))
        BlockMaxima(s, plan, queries, a["pool"], a["pages"], out, None).run()
    return out


def emulated_entry_scores(case: dict, block_size: int, **changes: int) -> np.ndarray:
    """`gpu.entry_scores` likewise."""
    a, queries, sizes = _arrays(case)
    plan = dataclasses.replace(block_sizes.entries_plan(*sizes, block_size, a["blocks"].shape[2]), **changes)
    out = np.full((*a["blocks"].shape[:2], plan.entries), np.nan, np.float32)
    for block in range(plan.blocks):
        s = IndexerEmulator(128 * plan.warpgroups, block, -(-plan.shared_bytes // 4))
        EntryScores(s, plan, queries, a["pool"], a["pages"], a["blocks"], out, None).run()
    return out
