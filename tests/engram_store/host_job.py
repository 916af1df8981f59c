"""One of two processes with two devices each: joins rows of tables of which it has half. Arguments: port, index."""

import sys

import jax
import numpy as np

from dsv41.engram_store import EngramStore, HostShard, join_rows
from dsv41.sharding import ShardingRules
from tests.models_for_tests import tiny_model


def main(port: str, index: int) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    tables = tiny_model().engram.tables
    store = HostShard(tables, shard=index, shards=2)
    assert [t.rows for t in store.tables] == [417, 510] and not store.mapped
    ids = np.random.default_rng(0).integers(0, 834, (4, 3, 2, 6))
    expected = EngramStore(tables).lookup(ids)
    rules = ShardingRules(batch=("data",), heads=("tensor",))
    # The processes along the rows of a step, across them, and both at once.
    orders = (((2, 2), [0, 1, 2, 3]), ((2, 2), [0, 2, 1, 3]), ((4, 1), [0, 1, 2, 3]))
    for shape, order in orders:
        devices = np.array(jax.devices())[order].reshape(shape)
        mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
        joined = join_rows(store.lookup(ids), mesh, rules.spec("batch"))
        for whole, part in zip(expected, joined, strict=True):
            assert part.sharding.spec == rules.spec("batch") and part.dtype == whole.dtype
            for shard in part.addressable_shards:
                assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
