"""Runs thread-level GPU code written with `pallas_kernels.ptx` on a CPU: all threads of a block in step, in numpy.

It finds wrong indices and wrong arithmetic, not missing barriers. Shared memory starts as NaN, and so should the arrays
that the code has to write.
"""

import contextlib
import types
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

_SPACE = 1 << 40  # addresses between arrays
POISON = 0x7FC07FC1  # NaN as float32 and as two bfloat16; what is not written yet


def _i32(x):
    return np.asarray(x).astype(np.int64).astype(np.uint32).view(np.int32)


class Block:
    """One thread block; `ptx`, `arith` and `utils` take the places of the modules of these names."""

    def __init__(self, threads: int, arrays: Sequence[np.ndarray], shared_bytes: int):
        self.threads = threads
        self.mask = np.ones(threads, bool)
        self.shared = np.full(shared_bytes // 4, POISON, np.uint32)
        self.memory = [a.view(np.uint32).reshape(-1) for a in arrays]
        self.refs = [*range(len(arrays)), "shared"]
        self.ptx, self.arith, self.utils = _ptx(self), _arith(), _utils(self)

    def thread(self):
        return np.arange(self.threads, dtype=np.int32)

    def _words(self, address, words: int):
        """(array, index) of each word; those of idle threads are not looked at."""
        address = np.broadcast_to(np.asarray(address, np.int64), self.threads)
        assert (address[self.mask] % (4 * words) == 0).all(), "unaligned access"
        return address // 4

    def load(self, address, displacement: int, words: int, shared: bool):
        first = self._words(np.asarray(address, np.int64) + displacement, words)
        out = [np.zeros(self.threads, np.uint32) for _ in range(words)]
        for i in range(words):
            for memory, at, lanes in self._places(first + i, shared):
                out[i][lanes] = memory[at]
        return out

    def store(self, address, displacement: int, values, shared: bool) -> None:
        first = self._words(np.asarray(address, np.int64) + displacement, len(values))
        for i, value in enumerate(values):
            value = np.broadcast_to(np.asarray(value), self.threads)
            for memory, at, lanes in self._places(first + i, shared):
                memory[at] = np.ascontiguousarray(value[lanes]).view(np.uint32)

    def _places(self, index, shared: bool):
        lanes = np.flatnonzero(self.mask)
        if shared:
            if lanes.size:
                assert index[lanes].min() >= 0 and index[lanes].max() < self.shared.size, "outside shared memory"
                yield self.shared, index[lanes], lanes
            return
        which, at = index // (_SPACE // 4), index % (_SPACE // 4)
        for array in np.unique(which[lanes]):
            mine = lanes[which[lanes] == array]
            memory = self.memory[array]
            assert at[mine].max() < memory.size, f"outside array {array}"
            yield memory, at[mine], mine

    @contextlib.contextmanager
    def when(self, condition):
        before = self.mask
        self.mask = before & np.broadcast_to(condition, self.threads)
        yield
        self.mask = before


def _f32(x):
    return np.asarray(x).view(np.float32) if np.asarray(x).dtype != np.float32 else np.asarray(x)


def _bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)


def _typed(values, type_):
    values = [v.view(np.float32) if type_ == "f32" else v.view(np.int32) for v in values]
    return values[0] if len(values) == 1 else values


def _mma(acc, a, b):
    """m16n8k16 of every warp: lane (g, t) has rows g and 8 + g of a and acc, column g of b."""

    def halves(words):
        pairs = np.stack([np.broadcast_to(w, a[0].shape).view(np.uint32) for w in words])
        low, high = (pairs << 16).view(np.float32), (pairs & np.uint32(0xFFFF0000)).view(np.float32)
        return np.stack([low, high], axis=-1).reshape(len(words), -1, 8, 4, 2)

    left, right = halves(a), halves(b)
    # k = 2 t + pair for the first words, 8 more for the others
    rows = np.concatenate([left[:2], left[2:]], axis=-1).transpose(1, 0, 2, 3, 4)
    columns = np.concatenate([right[:1], right[1:]], axis=-1)[0]
    products = np.einsum("whgtk,wntk->whgn", rows.astype(np.float64), columns.astype(np.float64))
    products = products.reshape(*products.shape[:3], 4, 2)
    out = [products[:, h, :, :, i].reshape(-1) for h in range(2) for i in range(2)]
    return [(np.broadcast_to(c, o.shape) + o).astype(np.float32) for c, o in zip(acc, out, strict=True)]


def _ptx(block: Block) -> types.SimpleNamespace:
    def add(first, *rest):
        return _i32(sum((np.asarray(r, np.int64) for r in rest), np.asarray(first, np.int64)))

    def asm(text, *args, results=1, type=None, side_effects=False):
        args = [np.asarray(x, np.float32) for x in args]
        with np.errstate(over="ignore", divide="ignore"):
            return {
                "div.rn.f32": lambda a, b: a / b,
                "rsqrt.approx.f32": lambda a: np.float32(1) / np.sqrt(a),
                "ex2.approx.f32": np.exp2,
                "rcp.approx.ftz.f32": lambda a: np.float32(1) / a,
            }[text.split()[0]](*args)

    def unpack(word):
        word = np.asarray(word).view(np.uint32)
        return (word << 16).view(np.float32), (word & np.uint32(0xFFFF0000)).view(np.float32)

    def copy(shared, address, size, displacement=0):
        with block.when(np.asarray(size) == 16):
            values = block.load(address, 0, 4, False)
            block.store(shared, displacement, values, True)
        with block.when(np.asarray(size) != 16):
            block.store(shared, displacement, [np.zeros(block.threads, np.uint32)] * 4, True)

    def fma(a, b, c):
        return (np.asarray(a, np.float64) * b + np.asarray(c, np.float64)).astype(np.float32)

    def row_address(base, row, pitch):
        return np.asarray(base, np.int64) + np.asarray(row).view(np.uint32).astype(np.int64) * pitch

    return types.SimpleNamespace(
        const=np.int32,
        const_f32=np.float32,
        f32=lambda: "f32",
        add=add,
        sub=lambda a, b: _i32(np.asarray(a, np.int64) - b),
        mul=lambda a, b: _i32(np.asarray(a, np.int64) * b),
        div=lambda a, b: _i32(np.asarray(a).view(np.uint32) // b),
        rem=lambda a, b: _i32(np.asarray(a).view(np.uint32) % b),
        shr=lambda a, b: _i32(np.asarray(a).view(np.uint32) >> b),
        and_=np.bitwise_and,
        xor=np.bitwise_xor,
        less=np.less,
        when=block.when,
        global_address=lambda ref: np.int64(ref) * _SPACE,
        shared_address=lambda ref: np.int32(0),
        offset=lambda base, more: np.asarray(base, np.int64) + np.asarray(more, np.int64),
        row_address=row_address,
        as_f32=_f32,
        asm=asm,
        mul_f32=lambda a, b: np.asarray(a, np.float32) * np.asarray(b, np.float32),
        add_f32=lambda a, b: np.asarray(a, np.float32) + np.asarray(b, np.float32),
        sub_f32=lambda a, b: np.asarray(a, np.float32) - np.asarray(b, np.float32),
        fma=fma,
        pack_bf16=lambda low, high: (_bf16(low) | _bf16(high) << 16).view(np.int32),
        unpack_bf16=unpack,
        load_word=lambda a, displacement=0: _typed(block.load(a, displacement, 1, False), None),
        load_16_bytes=lambda a, displacement=0: _typed(block.load(a, displacement, 4, False), None),
        load_global=lambda a, words=1, type=None: _typed(block.load(a, 0, words, False), type),
        load_shared=lambda a, displacement=0, words=1, type=None: _typed(
            block.load(a, displacement, words, True), type
        ),
        store_shared=lambda a, *values, displacement=0: block.store(a, displacement, values, True),
        store_global=lambda a, *values, displacement=0: block.store(a, displacement, values, False),
        copy_16_bytes_async=copy,
        commit_copies=lambda: None,
        wait_copies=lambda pending: None,
        barrier=lambda name, threads: None,
        shuffle_xor=lambda x, mask: x[np.arange(block.threads) ^ mask],
        mma_bf16=_mma,
        thread_in_warpgroup=lambda: block.thread() % 128,
    )


def _arith() -> types.SimpleNamespace:
    return types.SimpleNamespace(
        subi=lambda a, b: _i32(np.asarray(a, np.int64) - b),
        divsi=lambda a, b: _i32(np.asarray(a) // b),
        minsi=np.minimum,
        select=np.where,
        andi=np.logical_and,
        negf=np.negative,
        maximumf=np.maximum,
        cmpi=lambda predicate, a, b: predicate(a, b),
        CmpIPredicate=types.SimpleNamespace(eq=np.equal),
    )


def _utils(block: Block) -> types.SimpleNamespace:
    def fori(bound, carry):
        def run(body: Callable):
            nonlocal carry
            for i in range(int(np.max(bound))):
                with block.when(np.less(i, bound)):
                    carry = body(np.int32(i), carry)
            return types.SimpleNamespace(results=carry)

        return run

    return types.SimpleNamespace(thread_idx=block.thread, when=block.when, fori=fori, warpgroup_barrier=lambda: None)
