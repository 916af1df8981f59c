"""Case G8: a table cut by row gives every row of the whole one and never its padding."""

import ml_dtypes
import numpy as np
import pytest

from dsv41.config import DSV41Error
from dsv41.engram_store import EngramTable, RowShards, take_shard


@pytest.mark.parametrize("count", [5, 7])
@pytest.mark.parametrize("rows", [384_006_168, 384_016_682])
def test_case_g8_released_tables(rows, count):
    shards = RowShards(rows=rows, shards=count)
    ids = np.concatenate([[0, rows - 1], np.random.default_rng(0).integers(0, rows, 10_000)])
    shard, local = shards.locate(ids)
    np.testing.assert_array_equal(shard * shards.rows_per_shard + local, ids)
    assert shard.min() == 0
    assert shard.max() == count - 1
    begin, end = np.array([shards.bounds(s) for s in range(count)]).T
    assert (begin[shard] + local < end[shard]).all()
    assert (end - begin).sum() == rows
    assert (end - begin).max() == shards.rows_per_shard


@pytest.mark.parametrize("count", [1, 5, 7, 23, 30])
@pytest.mark.parametrize("quantised", [True, False])
def test_rows_of_shards_are_the_rows_of_the_table(count, quantised):
    rng = np.random.default_rng(0)
    dtype = ml_dtypes.float8_e4m3fn if quantised else ml_dtypes.bfloat16
    values = rng.normal(size=(23, 64)).astype(dtype)
    scales = rng.integers(100, 140, (23, 2)).astype(np.uint8) if quantised else None
    table, shards = EngramTable(layer=1, values=values, scales=scales), RowShards(rows=23, shards=count)
    parts = [take_shard(table, shards, s) for s in range(count)]
    assert {p.rows for p in parts} == {shards.rows_per_shard}
    shard, local = shards.locate(np.arange(23))
    for row in range(23):
        part = parts[shard[row]]
        assert part.values[local[row]].tobytes() == values[row].tobytes()
        assert not quantised or (part.scales[local[row]] == scales[row]).all()
    full = [s for s in range(count) if shards.bounds(s)[1] - shards.bounds(s)[0] == shards.rows_per_shard]
    assert all(np.shares_memory(parts[s].values, values) for s in full)


@pytest.mark.parametrize("row", [-1, 23])
def test_rows_outside_the_table_are_refused(row):
    with pytest.raises(DSV41Error, match=r"not all in \[0, 23\)"):
        RowShards(rows=23, shards=5).locate(np.array([3, row]))
    with pytest.raises(DSV41Error, match="positive counts"):
        RowShards(rows=23, shards=0)
