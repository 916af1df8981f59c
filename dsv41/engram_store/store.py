"""Engram tables in host memory or on a mapped file, and the batched look-up of their rows.

A table of the release has 384 million rows and is never copied: only the rows that a call names are read, each once,
in ascending order. A cold row on a mapped file costs a page fault, so the reads of one call are spread over threads.

Axis letters: B sequences, T tokens, L Engram layers, K rows a token and layer (orders * heads), D row width.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import ml_dtypes
import numpy as np

from dsv41.config import DSV41Error

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

    Raises:
      DSV41Error: dtypes or shapes do not fit together.
    """

    layer: int
    values: np.ndarray
    scales: np.ndarray | None

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


class EngramRows(NamedTuple):
    """Looked-up rows, ready to be put on a device.

    values: float8_e4m3fn or bfloat16 [B, T, L, K, D]; scales: uint8 E8M0 [B, T, L, K, D / 32], or None with bfloat16.
    """

    values: np.ndarray
    scales: np.ndarray | None


@dataclasses.dataclass
class StoreStats:
    """Counts since the store was made."""

    lookups: int = 0  # calls
    rows: int = 0  # rows asked for
    unique_rows: int = 0  # rows read from the tables


class EngramStore:
    """Looks rows up in one table per Engram layer.

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
        self.stats = StoreStats()

    @property
    def tables(self) -> tuple[EngramTable, ...]:
        return self._tables

    @property
    def nbytes(self) -> int:
        """Bytes of all tables, scales included."""
        return sum(t.values.nbytes + (0 if t.scales is None else t.scales.nbytes) for t in self._tables)

    @property
    def row_format(self) -> tuple[np.dtype, int, int]:
        """dtype of a row's values, how many there are, and how many scale bytes (0 with bfloat16)."""
        first = self._tables[0]
        return first.values.dtype, first.values.shape[1], 0 if first.scales is None else first.scales.shape[1]

    @property
    def rows_per_layer(self) -> tuple[int, ...]:
        return tuple(table.rows for table in self._tables)

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
            broken = (scales == _SCALE_NAN).any(axis=1)
            if refuse_broken and broken.any():
                row = ids[broken.argmax()]
                raise DSV41Error(f"engram table of layer {table.layer}: row {row} has a NaN scale (byte {_SCALE_NAN})")

    def lookup(self, row_ids: np.ndarray, *, refuse_broken: bool = True) -> EngramRows:
        """Reads the rows of a batch of tokens; a row asked for many times is read once.

        Args:
          row_ids: integers [B, T, L, K].
          refuse_broken: False: hand on a row with a NaN scale, which makes its token's logits NaN.

        Returns:
          The rows, freshly allocated.

        Raises:
          DSV41Error: the shape does not fit, an id is outside its table, or a row's scale is NaN; names layer and row.
        """
        row_ids = np.asarray(row_ids)
        layers = len(self._tables)
        if row_ids.ndim != 4 or row_ids.shape[2] != layers or not np.issubdtype(row_ids.dtype, np.integer):
            raise DSV41Error(
                f"engram: expected integer row ids [B, T, {layers}, K], got {row_ids.dtype} {row_ids.shape}"
            )
        # Distinct rows of all layers in one array, then one copy into the order that was asked for.
        uniques, places, ends = [], np.empty(row_ids.shape, np.int64), [0]
        for i in range(layers):
            unique, inverse = np.unique(row_ids[:, :, i], return_inverse=True)
            places[:, :, i] = inverse.reshape(places[:, :, i].shape) + ends[-1]
            uniques.append(unique)
            ends.append(ends[-1] + len(unique))
        first = self._tables[0]
        values = np.empty((ends[-1], first.values.shape[1]), first.values.dtype)
        scales = None if first.scales is None else np.empty((ends[-1], first.scales.shape[1]), np.uint8)
        for table, unique, part in zip(self._tables, uniques, itertools.pairwise(ends), strict=True):
            rows = slice(*part)
            self._read(table, unique, values[rows], None if scales is None else scales[rows], refuse_broken)
        self.stats.lookups += 1
        self.stats.rows += row_ids.size
        self.stats.unique_rows += ends[-1]
        return EngramRows(values[places], None if scales is None else scales[places])

    def close(self) -> None:
        """Ends the reader threads. The store can no longer look rows up if it had any."""
        if self._pool is not None:
            self._pool.shutdown()
