"""Tables on mapped files: what reading them touches, and copies of them in memory.

A row is a few hundred bytes, but a file comes in pages of 4 KiB: single rows of the release cost 15 times their bytes,
and so much more if the system reads ahead. Rows are therefore read sorted, each page once, and readahead is turned off.
"""

from __future__ import annotations

import mmap
import pathlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dsv41.config import DSV41Error

PAGE_BYTES = 4096
_COPY_BYTES = 1 << 26
_MEMORY = pathlib.Path("/proc/meminfo")


def mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """The mapped file that an array is a view of; None if it lies in memory."""
    base = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.obj if isinstance(base, memoryview) else base.base
    return base if isinstance(base, mmap.mmap) else None


def advise_random(array: np.ndarray) -> bool:
    """Tells the system that rows of a mapped array are read at random, so that it reads no neighbours along.

    Only the array's own pages are advised: other tensors of the file are read from end to end. False: the array is in
    memory, or the system takes no advice.
    """
    mapping = mapping_of(array)
    if mapping is None or not array.size or not hasattr(mmap, "MADV_RANDOM"):
        return False
    begin = _address(array) - _address(np.frombuffer(mapping, np.uint8))
    first = begin - begin % mmap.PAGESIZE
    mapping.madvise(mmap.MADV_RANDOM, first, begin + _extent(array) - first)
    return True


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _extent(array: np.ndarray) -> int:
    return (len(array) - 1) * array.strides[0] + array.shape[1] * array.itemsize


def pages_touched(array: np.ndarray, rows: np.ndarray) -> int:
    """Distinct pages of 4 KiB that `rows` (ascending int [n], each once) of an array [rows, D] lie on."""
    if not len(rows):
        return 0
    begin = _address(array) + rows.astype(np.int64) * array.strides[0]
    first, last = begin // PAGE_BYTES, (begin + array.shape[1] * array.itemsize - 1) // PAGE_BYTES
    # A page shared with the row before has been counted with that row.
    first[1:] = np.maximum(first[1:], last[:-1] + 1)
    return int(np.maximum(last - first + 1, 0).sum())


def available_bytes() -> int | None:
    """Memory that can be taken without swapping; None where the system does not say."""
    if not _MEMORY.exists():
        return None
    for line in _MEMORY.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def copy_to_memory(array: np.ndarray, *, what: str, threads: int) -> np.ndarray:
    """A copy [rows, D] in memory, made by several threads.

    Raises:
      DSV41Error: there is not that much memory; starts with `what`.
    """
    free = available_bytes()
    if free is not None and array.nbytes > free:
        raise DSV41Error(f"{what}: takes {array.nbytes:,} bytes of memory, {free:,} are available")
    # As plain integers: numpy lets go of the interpreter while it copies them.
    out = np.empty(array.shape, array.dtype)
    source, target = array.view(f"u{array.itemsize}"), out.view(f"u{out.itemsize}")
    step = max(_COPY_BYTES // max(array.strides[0], 1), 1)

    def copy(row: int) -> None:
        target[row : row + step] = source[row : row + step]

    with ThreadPoolExecutor(max(threads, 1)) as pool:
        list(pool.map(copy, range(0, len(array), step)))
    return out
