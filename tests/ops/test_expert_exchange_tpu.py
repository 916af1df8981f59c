"""The exchange of tokens and experts compiled for TPUs that are not there, at released widths."""

import json
import os
import pathlib
import re
import subprocess
import sys
from collections import Counter

import pytest

from pallas_kernels.ahead_of_time import ENVIRONMENT, libtpu_problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(libtpu_problem() is not None, reason=str(libtpu_problem())),
]

EXPERTS, WIDTH, INNER, TOP_K = 384, 5120, 2304, 6
MIB = 2**20
ROOT = pathlib.Path(__file__).parents[2]


def _compile(topology: str, tokens: int) -> None:
    """Prints a JSON object about one MoE exchange with `tokens` on each device; runs in a child process."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from dsv41.ops.linear import QuantizedArray, WeightFormat
    from dsv41.ops.moe import routed_experts
    from dsv41.sharding import AXES, ShardingRules, make_mesh
    from pallas_kernels.dispatch import kernels

    kernels.set_global("tpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = make_mesh({"data": len(devices) // 2, "tensor": 2}, devices)
    rules, spread = ShardingRules(batch=("data",), heads=("tensor",), experts=AXES[::2]), PartitionSpec(AXES[::2])

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spread))

    def weight(out, columns):
        values, scales = array(jnp.uint8, EXPERTS, out, columns // 2), array(jnp.uint8, EXPERTS, out, columns // 32)
        return QuantizedArray(values, scales, WeightFormat.FP4_ROW)

    every = tokens * len(devices)
    args = (
        array(jnp.bfloat16, every, WIDTH),
        array(jnp.int32, every, TOP_K),
        array(jnp.float32, every, TOP_K),
        array(jnp.bool_, every),
        weight(INNER, WIDTH),
        weight(INNER, WIDTH),
        weight(WIDTH, INNER),
    )
    step = jax.shard_map(
        lambda *args: routed_experts(*args, 10.0, rules), mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False
    )
    compiled = jax.jit(step).lower(*args).compile()
    found = re.findall(r"= \S+ (ragged-all-to-all|all-to-all|all-reduce|all-gather)(?:-start)?\(", compiled.as_text())
    memory = compiled.memory_analysis()
    print(json.dumps({"collectives": Counter(found), "temporary": memory.temp_size_in_bytes}))


@pytest.mark.parametrize(
    "topology, tokens, agreements, mib", [("v5e:2x4", 8, 1, 16), ("v5p:4x4x4", 8, 1, 16), ("v5p:4x4x4", 2048, 2, 1024)]
)
def test_released_widths(topology, tokens, agreements, mib):
    """Two exchanges of rows, the sizes that devices tell each other, and in prefill the number of rounds.

    XLA gathers few integers by an all-reduce. There is no room for a copy of weights, 107 MiB on 64 devices.
    """
    command = [sys.executable, "-m", "tests.ops.test_expert_exchange_tpu", topology, str(tokens)]
    child = subprocess.run(command, env=os.environ | ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    told = json.loads(child.stdout.splitlines()[-1])
    assert told["collectives"].pop("ragged-all-to-all") == 2
    assert sum(told["collectives"].values()) == agreements and "all-to-all" not in told["collectives"]
    assert told["temporary"] < mib * MIB


if __name__ == "__main__":
    _compile(sys.argv[1], int(sys.argv[2]))
