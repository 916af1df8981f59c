"""Compiles one step of a model for TPUs that are not there: the process that `launch.aot_compile --program` starts.

    python -m launch.aot_child '{"config": …, "topology": …, "sizes": {…}, …}'

Standard output has one JSON object a line: {"stage": …} when a stage begins, and at the end {"row": …}. The settings of
`pallas_kernels.ahead_of_time.ENVIRONMENT` must be in the environment.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

from jax.experimental import topologies

from dsv41.config import DSV41Error, load_config, with_overrides
from dsv41.cost_model import StepSizes, abstract_step, chip_of, step_cost
from dsv41.sharding import make_mesh
from pallas_kernels.ahead_of_time import OUT_OF_MEMORY
from pallas_kernels.dispatch import kernels


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


@contextlib.contextmanager
def _stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    _say(stage=name)
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def _compile(job: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """The cost of the job's step.

    Args:
      job: config (a path), overrides, topology, sizes (of `StepSizes`), kernels (as `pallas_kernels.dispatch`), hlo (a
        file for the program's text, or None).
      seconds: gets the seconds of each stage.
    """
    topology = job["topology"]
    config = with_overrides(load_config(job["config"]), job["overrides"])
    sizes = StepSizes(**job["sizes"])
    mesh = make_mesh(sizes.mesh_sizes, topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    with kernels(job["kernels"]):
        with _stage("tracing", seconds):
            step = abstract_step(config, sizes, mesh)
            lowered = step.lower()
        with _stage("compiling", seconds):
            compiled = lowered.compile()
    with _stage("reading", seconds):
        if job["hlo"]:
            pathlib.Path(job["hlo"]).write_text(compiled.as_text(), encoding="utf-8")
        return step_cost(config, sizes, step, compiled, chip_of(topology)).as_json()


def main(text: str) -> None:
    job = json.loads(text)
    seconds: dict[str, float] = {}
    row: dict[str, Any] = {"cost": None, "error": None, "fits": None, "bad_input": False}
    try:
        row["cost"] = _compile(job, seconds)
        row["fits"] = row["cost"]["footprint"]["fits"]
    except DSV41Error as e:
        row |= {"error": str(e), "bad_input": True}
    except Exception as e:
        # What does not fit is told by the compiler's words alone.
        message = f"{type(e).__name__}: {' '.join(str(e).split())[:600]}"
        row |= {"error": message, "fits": False if OUT_OF_MEMORY.search(str(e)) else None}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    _say(row=row | {"seconds": seconds, "host_peak_bytes": peak})


if __name__ == "__main__":
    main(sys.argv[1])
