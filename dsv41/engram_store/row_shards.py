"""Engram tables cut by row for several hosts or devices."""

from __future__ import annotations

import dataclasses

import numpy as np

from dsv41.config import DSV41Error
from dsv41.engram_store.store import EngramTable

_SCALE_ONE = 127  # E8M0 byte of 2^0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShards:
    """Equal runs of rows, the last padded: shard s holds rows s * rows_per_shard and up (checkpoint.md, convert.py)."""

    rows: int
    shards: int

    def __post_init__(self):
        if self.rows < 1 or self.shards < 1:
            raise DSV41Error(
                f"engram row shards: expected positive counts, got {self.rows} rows over {self.shards} shards"
            )

    @property
    def rows_per_shard(self) -> int:
        return -(-self.rows // self.shards)

    def bounds(self, shard: int) -> tuple[int, int]:
        """First row of a shard and the one after its last real row; equal for a shard of padding only."""
        begin = min(shard * self.rows_per_shard, self.rows)
        return begin, min(begin + self.rows_per_shard, self.rows)

    def locate(self, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 rows of the whole table -> their shard and their row inside it; padding is never named.

        Raises:
          DSV41Error: a row is outside the table.
        """
        row_ids = np.asarray(row_ids, np.int64)
        if row_ids.size and (row_ids.min() < 0 or row_ids.max() >= self.rows):
            raise DSV41Error(
                f"engram row shards: rows {row_ids.min()} to {row_ids.max()} are not all in [0, {self.rows})"
            )
        return row_ids // self.rows_per_shard, row_ids % self.rows_per_shard


def take_shard(table: EngramTable, shards: RowShards, shard: int) -> EngramTable:
    """The rows of one shard: a view of the table where the shard is full, else a copy padded by value 0 and scale 1."""
    begin, end = shards.bounds(shard)
    values, scales = table.values[begin:end], None if table.scales is None else table.scales[begin:end]
    missing = shards.rows_per_shard - (end - begin)
    if missing:
        values = np.concatenate([values, np.zeros((missing, values.shape[1]), values.dtype)])
        if scales is not None:
            scales = np.concatenate([scales, np.full((missing, scales.shape[1]), _SCALE_ONE, np.uint8)])
    return EngramTable(layer=table.layer, values=values, scales=scales, first=table.first + begin)
