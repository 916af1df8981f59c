"""One process of a small job, started by the tests: `python process_job.py MODE PORT COUNT INDEX`."""

import logging
import os
import sys
import time

import jax
import numpy as np
from jax.sharding import PartitionSpec

from dsv41.config import DSV41Error
from dsv41.sharding import fetch, make_mesh, place
from dsv41.sharding.agreement import check_same_input
from dsv41.sharding.identity import resolve_identity
from dsv41.sharding.processes import fail_processes, finish_processes, is_first_process, start_processes
from dsv41.sharding.watch import Limits

jax.config.update("jax_num_cpu_devices", 2)


def total(mesh, value):
    """The sum over all devices of all processes, twice: as a replicated result and fetched from its parts."""
    x = place(np.full(mesh.size, value, np.float32), mesh, PartitionSpec("data"))
    summed = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
        )
    )
    return float(fetch(summed(x))[0]), float(fetch(x).sum())


def main(mode, port, count, index):
    identity = resolve_identity(coordinator=f"127.0.0.1:{port}", num_processes=count, process_id=index)
    limits = Limits(start=60, silence=5 if mode.startswith("stop") else 30)
    start_processes(identity, limits=limits, agree={"--mode": mode})
    logging.getLogger().warning("started")
    check_same_input(config=b"the same", tokens=bytes([index if mode == "input" else 0]))
    mesh = make_mesh({"data": jax.device_count()})
    sums = total(mesh, 1.0)
    print(f"sum {sums}, first {is_first_process()}", flush=True)
    if mode[-1] == str(index):
        print("ready", file=sys.stderr, flush=True)
        time.sleep(0.5)  # the other one is blocked in the sum by then
        if mode.startswith("raise"):
            raise ValueError("the disk\nis full")
        if mode.startswith("refuse"):
            raise DSV41Error("a.json: no such file")
        if mode.startswith("abort"):
            os.abort()
        time.sleep(1000)  # until the test kills it
    if mode != "plain":
        total(mesh, 2.0)
        raise AssertionError("unreachable: the sum needs the other process")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    mode, port, count, index = sys.argv[1], *map(int, sys.argv[2:])
    try:
        main(mode, port, count, index)
        finish_processes()
    except DSV41Error as e:
        fail_processes(e, 2, f"job: {e}")
    except Exception as e:
        fail_processes(e, 1)
