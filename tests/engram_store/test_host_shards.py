"""Case G8 over hosts: each has a run of rows, and the parts that they read add up to the rows of the whole tables."""

import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dsv41.config import DSV41Error
from dsv41.engram_store import EngramStore, EngramTable, HostShard
from dsv41.engram_store.host_shards import add_parts, process_axes
from tests.models_for_tests import tiny_model
from tests.sharding.jobs import Job


def bytes_of(rows):
    return [None if x is None else np.ascontiguousarray(np.asarray(x)).tobytes() for x in rows]


@pytest.mark.parametrize("hosts, batch", [(5, 10), (7, 7), (7, 4)])
def test_parts_of_all_hosts_are_the_rows_of_the_whole(hosts, batch):
    """A batch that the hosts divide comes spread over them, another one whole."""
    tables = tiny_model().engram.tables
    stores = [HostShard(tables, shard=i, shards=hosts) for i in range(hosts)]
    ids = np.stack([np.random.default_rng(i).integers(0, n, (batch, 3, 6)) for i, n in enumerate((834, 1020))], axis=2)
    ids[0, 0] = [[833] * 6, [1019] * 6]  # the last rows, before the padding
    valid = np.random.default_rng(2).random((batch, 3)) < 0.7
    mesh = Mesh(jax.devices()[:hosts], ("data",))
    spec = PartitionSpec("data") if batch % hosts == 0 else PartitionSpec()
    parts = [store.lookup(ids, valid=valid) for store in stores]
    joined = add_parts(lambda group: parts[group], mesh, ("data",), spec)
    assert bytes_of(joined) == bytes_of(EngramStore(tables).lookup(ids, valid=valid))
    assert joined[0].sharding.spec == spec
    # Each row was read by one host only, and none of the padding.
    assert sum(s.stats.rows for s in stores) == valid.sum() * 12
    assert process_axes(mesh) == ()


def test_bfloat16_tables_have_no_scales():
    values = np.arange(23 * 32, dtype=np.float32).reshape(23, 32).astype(jax.numpy.bfloat16)
    table = EngramTable(layer=1, values=values, scales=None)
    ids = np.arange(20).reshape(5, 1, 1, 4)
    parts = [HostShard([table], shard=i, shards=5).lookup(ids) for i in range(5)]
    joined = add_parts(lambda g: parts[g], Mesh(jax.devices()[:5], ("data",)), ("data",), PartitionSpec("data"))
    assert joined[1] is None
    np.testing.assert_array_equal(np.asarray(joined[0]), EngramStore([table]).lookup(ids).values)


def test_errors_name_rows_of_the_whole_table():
    table, other = tiny_model().engram.tables
    scales = np.array(table.scales)
    scales[500] = 255
    store = HostShard([EngramTable(layer=1, values=table.values, scales=scales), other], shard=2, shards=4)
    ids = np.full((1, 1, 2, 6), 500)
    with pytest.raises(DSV41Error, match="layer 1: row 500 has a NaN scale"):
        store.lookup(ids)
    with pytest.raises(DSV41Error, match=r"not all in \[0, 834\)"):
        store.lookup(ids + 400)
    assert store.rows_per_layer == (834, 1020) and not store.whole


@pytest.mark.slow
def test_two_processes(tmp_path):
    script = str(pathlib.Path(__file__).with_name("host_job.py"))
    job = Job(tmp_path, lambda port, index: [script, str(port), str(index)])
    assert job.end(120) == [0, 0], job.err(0) + job.err(1)
    assert job.out(0).splitlines()[-1] == job.out(1).splitlines()[-1] == "equal"
