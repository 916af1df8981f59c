"""Engram tables in host memory or on a mapped file, and the batched look-up of their rows.

A table of the release has 384 million rows: only the rows that a call names are read, each once, in ascending order. A
cold row on a mapped file costs a page fault, so the reads of one call are spread over threads. Where the memory is
there, `in_memory` copies whole tables.

Axis letters: B sequences, T tokens, L Engram layers, K rows a token and layer (orders * heads), D row width.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import ml_dtypes
import numpy as np

from dsv41.config import DSV41Error
from dsv41.engram_store.mapped import PAGE_BYTES, advise_random, copy_to_memory, mapping_of, pages_touched

GROUP = 32
"""Columns that share one scale."""

_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_BF16 = np.dtype(ml_dtypes.bfloat16)
_SCALE_NAN = 255
# Below this many rows a thread costs more than it saves.
_ROWS_PER_TASK = 8


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class EngramTable:
    """The rows of one layer, as stored. The arrays may be read-only views of a mapped file.

    Attributes:
      layer: layer number, for messages.
      values: float8_e4m3fn or bfloat16 [rows, D].
      scales: uint8 E8M0 [rows, D / 32] of float8_e4m3fn values, None of bfloat16.
      first: number of the first row in the whole table, for messages.

    Raises:
      DSV41Error: dtypes or shapes do not fit together.
    """

    layer: int
    values: np.ndarray
    scales: np.ndarray | None
    first: int = 0

    def __post_init__(self):
        where = f"engram table of layer {self.layer}"
        values, scales = self.values, self.scales
        if values.ndim != 2 or values.dtype not in (_FP8, _BF16):
            raise DSV41Error(
                f"{where}: expected float8_e4m3fn or bfloat16 [rows, D], got {values.dtype} {values.shape}"
            )
        if (values.dtype == _FP8) != (scales is not None):
            raise DSV41Error(f"{where}: {values.dtype} values {'need' if scales is None else 'have no'} scales")
        if scales is not None:
            expected = (values.shape[0], values.shape[1] // GROUP)
            if values.shape[1] % GROUP or scales.dtype != np.uint8 or scales.shape != expected:
                raise DSV41Error(f"{where}: expected scales uint8 {expected}, got {scales.dtype} {scales.shape}")

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Values, and scales if there are any."""
        return (self.values,) if self.scales is None else (self.values, self.scales)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: 264 in the release."""
        return sum(a.shape[1] * a.itemsize for a in self.arrays)

    def in_memory(self, *, threads: int = 1) -> EngramTable:
        """The table copied from its mapped file; itself if it has none.

        Raises:
          DSV41Error: there is too little memory; names the layer.
        """
        if not any(mapping_of(a) for a in self.arrays):
            return self
        what = f"engram table of layer {self.layer}"
        values, *scales = (copy_to_memory(a, what=what, threads=threads) for a in self.arrays)
        return dataclasses.replace(self, values=values, scales=scales[0] if scales else None)


class EngramRows(NamedTuple):
    """Looked-up rows, ready to be put on a device.

    values: float8_e4m3fn or bfloat16 [B, T, L, K, D]; scales: uint8 E8M0 [B, T, L, K, D / 32], or None with bfloat16.
    Of a single layer both lack the axis L.
    """

    values: np.ndarray
    scales: np.ndarray | None


@dataclasses.dataclass(kw_only=True)
class StoreStats:
    """Counts since the store was made; the difference of two of them is what happened in between.

    Attributes:
      lookups: calls.
      rows: rows asked for.
      unique_rows: rows read from the tables: each once a call.
      physical_reads: of a table on a mapped file, distinct pages of 4 KiB that a call touched, scales included; whether
        the system had them in memory is not known. Of a table in memory, the unique rows.
      read_bytes: bytes of these pages, or of these rows.
      read_s: seconds spent in look-ups, on whatever thread.
    """

    lookups: int = 0
    rows: int = 0
    unique_rows: int = 0
    physical_reads: int = 0
    read_bytes: int = 0
    read_s: float = 0.0

    def __sub__(self, before: StoreStats) -> StoreStats:
        names = [field.name for field in dataclasses.fields(self)]
        return StoreStats(**{name: getattr(self, name) - getattr(before, name) for name in names})


class EngramStore:
    """Looks rows up in one table per Engram layer. Several threads may do so at once.

    Args:
      tables: at least one, in the order of `engram_layer_ids`, all of one width and format.
      readers: threads that read one call's rows. Worth it for cold rows on a mapped file; 1 for tables in memory.

    Raises:
      DSV41Error: there is no table, or the tables differ in width or format.
    """

    def __init__(self, tables: Sequence[EngramTable], *, readers: int = 1):
        self._tables = tuple(tables)
        if not self._tables:
            raise DSV41Error("engram: a store needs at least one table")
        for table in self._tables[1:]:
            first = self._tables[0]
            if (table.values.dtype, table.values.shape[1]) != (first.values.dtype, first.values.shape[1]):
                raise DSV41Error(
                    f"engram table of layer {table.layer}: rows are {table.values.dtype} x {table.values.shape[1]}, "
                    f"those of layer {first.layer} {first.values.dtype} x {first.values.shape[1]}"
                )
        self._readers = readers
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="engram") if readers > 1 else None
        self._mapped = tuple(any(mapping_of(a) for a in table.arrays) for table in self._tables)
        for table in self._tables:
            for array in table.arrays:
                advise_random(array)
        self._stats, self._lock = StoreStats(), threading.Lock()

    @property
    def tables(self) -> tuple[EngramTable, ...]:
        return self._tables

    @property
    def whole(self) -> bool:
        """Whether look-ups give every row; False: rows of other hosts come as zeros (`HostShard`)."""
        return True

    @property
    def mapped(self) -> bool:
        """Whether a table lies on a mapped file."""
        return any(self._mapped)

    @property
    def stats(self) -> StoreStats:
        """Counts up to now; a copy."""
        with self._lock:
            return dataclasses.replace(self._stats)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables, scales included."""
        return sum(a.nbytes for table in self._tables for a in table.arrays)

    @property
    def row_format(self) -> tuple[np.dtype, int, int]:
        """dtype of a row's values, how many there are, and how many scale bytes (0 with bfloat16)."""
        first = self._tables[0]
        return first.values.dtype, first.values.shape[1], 0 if first.scales is None else first.scales.shape[1]

    @property
    def rows_per_layer(self) -> tuple[int, ...]:
        return tuple(table.rows for table in self._tables)

    def in_memory(self) -> EngramStore:
        """A store of the same rows in memory; itself if they are there already.

        Raises:
          DSV41Error: there is too little memory; names the layer.
        """
        if not self.mapped:
            return self
        return EngramStore([table.in_memory(threads=self._readers) for table in self._tables])

    def _take(self, array: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
        """Copies rows `ids` (ascending, within bounds) of a table into `out`."""
        # numpy lets go of the interpreter while it copies plain integers, so that the threads' page faults overlap.
        array, out = array.view(f"u{array.itemsize}"), out.view(f"u{out.itemsize}")
        tasks = min(self._readers, len(ids) // _ROWS_PER_TASK)
        if tasks <= 1:
            array.take(ids, axis=0, out=out, mode="clip")
            return

        def read(part: slice) -> None:
            array.take(ids[part], axis=0, out=out[part], mode="clip")

        ends = [len(ids) * i // tasks for i in range(tasks + 1)]
        list(self._pool.map(read, [slice(*pair) for pair in itertools.pairwise(ends)]))

    def _read(
        self, table: EngramTable, ids: np.ndarray, values: np.ndarray, scales: np.ndarray | None, refuse_broken: bool
    ) -> None:
        """Copies rows `ids` (ascending) of a table into `values` and `scales`."""
        # Ascending: the ends bound them all. A negative id would otherwise wrap to the table's end.
        for row in ids[[0, -1]] if len(ids) else ():
            if not 0 <= row < table.rows:
                raise DSV41Error(f"engram table of layer {table.layer}: row {row} is outside [0, {table.rows})")
        self._take(table.values, ids, values)
        if scales is not None:
            self._take(table.scales, ids, scales)
            if refuse_broken and (scales == _SCALE_NAN).any():
                row = table.first + ids[(scales == _SCALE_NAN).any(axis=1).argmax()]
                raise DSV41Error(f"engram table of layer {table.layer}: row {row} has a NaN scale (byte {_SCALE_NAN})")

    def lookup(self, row_ids: np.ndarray, *, valid: np.ndarray | None = None, refuse_broken: bool = True) -> EngramRows:
        """Reads the rows of a batch of tokens; a row asked for many times is read once.

        Args:
          row_ids: integers [B, T, L, K].
          valid: bool [B, T]; rows of other tokens are not read, and come as zeros. None: all are valid.
          refuse_broken: False: hand on a row with a NaN scale, which makes its token's logits NaN.

        Returns:
          The rows, freshly allocated.

        Raises:
          DSV41Error: the shape does not fit, an id is outside its table, or a row's scale is NaN; names layer and row.
        """
        row_ids, layers = np.asarray(row_ids), len(self._tables)
        if row_ids.ndim != 4 or row_ids.shape[2] != layers or not np.issubdtype(row_ids.dtype, np.integer):
            raise DSV41Error(
                f"engram: expected integer row ids [B, T, {layers}, K], got {row_ids.dtype} {row_ids.shape}"
            )
        return self._look_up(range(layers), row_ids, valid, refuse_broken)

    def lookup_layer(
        self, ordinal: int, row_ids: np.ndarray, *, valid: np.ndarray | None = None, refuse_broken: bool = True
    ) -> EngramRows:
        """As `lookup`, from the table `ordinal` alone: integers [B, T, K] -> rows [B, T, K, D]."""
        row_ids = np.asarray(row_ids)
        if row_ids.ndim != 3 or not np.issubdtype(row_ids.dtype, np.integer):
            raise DSV41Error(f"engram: expected integer row ids [B, T, K], got {row_ids.dtype} {row_ids.shape}")
        values, scales = self._look_up(range(ordinal, ordinal + 1), row_ids[:, :, None], valid, refuse_broken)
        return EngramRows(values[:, :, 0], None if scales is None else scales[:, :, 0])

    def _look_up(
        self, ordinals: range, row_ids: np.ndarray, valid: np.ndarray | None, refuse_broken: bool
    ) -> EngramRows:
        started = time.perf_counter()
        # Distinct rows of all layers in one array, then one copy into the order that was asked for.
        asked = row_ids if valid is None else row_ids[valid][:, None]
        uniques, places, ends = [], np.empty(asked.shape, np.int64), [0]
        for i in range(len(ordinals)):
            unique, inverse = np.unique(asked[:, :, i], return_inverse=True)
            places[:, :, i] = inverse.reshape(places[:, :, i].shape) + ends[-1]
            uniques.append(unique)
            ends.append(ends[-1] + len(unique))
        if valid is not None:  # the others get the row of zeros behind the last
            wanted, places = places[:, 0], np.full(row_ids.shape, ends[-1])
            places[valid] = wanted
        dtype, width, groups = self.row_format
        values = np.empty((ends[-1] + 1, width), dtype)
        scales = np.empty((ends[-1] + 1, groups), np.uint8) if groups else None
        for array in (values, scales):
            if array is not None:
                array[-1] = 0
        for ordinal, unique, part in zip(ordinals, uniques, itertools.pairwise(ends), strict=True):
            rows = slice(*part)
            into = values[rows], None if scales is None else scales[rows]
            self._read(self._tables[ordinal], unique, *into, refuse_broken)
        found = EngramRows(_spread(values, places), None if scales is None else _spread(scales, places))
        self._count(ordinals, asked.size, uniques, time.perf_counter() - started)
        return found

    def _count(self, ordinals: range, asked: int, uniques: list[np.ndarray], seconds: float) -> None:
        reads = read_bytes = 0
        for ordinal, unique in zip(ordinals, uniques, strict=True):
            table = self._tables[ordinal]
            if self._mapped[ordinal]:
                pages = sum(pages_touched(array, unique) for array in table.arrays)
                reads, read_bytes = reads + pages, read_bytes + pages * PAGE_BYTES
            else:
                reads, read_bytes = reads + len(unique), read_bytes + len(unique) * table.row_bytes
        with self._lock:
            total = self._stats
            total.lookups += 1
            total.rows += asked
            total.unique_rows += sum(map(len, uniques))
            total.physical_reads += reads
            total.read_bytes += read_bytes
            total.read_s += seconds

    def close(self) -> None:
        """Ends the reader threads. The store can no longer look rows up if it had any."""
        if self._pool is not None:
            self._pool.shutdown()


def _spread(rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """rows [n, C] and places [...] -> [..., C], copied as plain integers, which does not hold the interpreter."""
    return rows.view(f"u{rows.itemsize}").take(places, axis=0).view(rows.dtype)
