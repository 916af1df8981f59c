"""Compiles TPU kernels for chips that are not there, with the real compiler, and collects what it says about them.

The compiler is libtpu's: Mosaic kernels, VMEM and HBM limits included. A failed check inside it ends the process, so
`compile_specs` runs it in a child process, this module as a script, and survives it.
"""

import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels import compat
from pallas_kernels.arg_spec import ArgSpec
from pallas_kernels.registry import arg_specs

TAG = "aot"

_TOPOLOGY = re.compile(r"(v4|v5e|v5p|v6e|tpu7x):\d+x\d+(x\d+)?")
_VMEM = "1"  # memory space in the compiler's records
OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Rr]an out of memory|exceeded (scoped )?vmem limit", re.IGNORECASE)
ENVIRONMENT = {  # of a process that compiles
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked which machine this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One Pallas kernel of a compiled program.

    Attributes:
      name: of its `pl.pallas_call`, numbered by the compiler.
      vmem_bytes: scratch, blocks and spills, as the compiler allocated them.
      flops, bytes: the kernel's own `pl.CostEstimate`, 0 where it gives none.
    """

    name: str
    vmem_bytes: int
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler said about one call of an op.

    Attributes:
      op, spec, topology: what was compiled for what.
      seconds: tracing, lowering and compiling.
      device: kind of the chip.
      argument_bytes, output_bytes, temp_bytes, alias_bytes: HBM; alias counts outputs that lie in an argument's memory.
      flops, bytes_accessed: of the whole program by the compiler's model, kernels by their own estimates.
      must_move: `ArgSpec.bytes`, what any implementation has to move.
      kernels: the Pallas kernels in it.
      fits: False if VMEM or HBM did not suffice; None if it failed for another reason.
      error: why it failed; None if it compiled.
    """

    op: str
    spec: str
    topology: str
    seconds: float = 0.0
    device: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    alias_bytes: int = 0
    flops: float = 0.0
    bytes_accessed: float = 0.0
    must_move: int = 0
    kernels: tuple[Kernel, ...] = ()
    fits: bool | None = None
    error: str | None = None

    @property
    def vmem_bytes(self) -> int:
        """Of the kernel that needs most."""
        return max((k.vmem_bytes for k in self.kernels), default=0)


def libtpu_problem() -> str | None:
    """Why nothing can be compiled for a TPU here; None if it can."""
    if importlib.util.find_spec("libtpu") is None:
        return "compiling for TPUs needs libtpu, which is not installed: pip install 'dsv41[tpu]'"
    return None


def topology_problem(name: str) -> str | None:
    """What is wrong with the form of a topology's name; None if nothing is."""
    if _TOPOLOGY.fullmatch(name) is None:
        return f"{name!r} is no TPU topology; known forms are v5e:2x2, v6e:2x2, v5p:2x2x1, tpu7x:2x2x1"
    return None


def kernels_of(hlo: str) -> tuple[Kernel, ...]:
    """The Pallas kernels in the text of a compiled TPU program."""
    found = []
    for line in hlo.splitlines():
        call = re.search(r'%(\S+) = .* custom-call\(.*custom_call_target="tpu_custom_call"', line)
        if call is None:
            continue
        used = re.search(r'"used_scoped_memory_configs":\[(.*?)\]', line)
        spaces = re.findall(r'"memory_space":"(\d+)","offset":"\d+","size":"(\d+)"', used[1] if used else "")
        cost = {key: int(value) for key, value in re.findall(r'"(flops|bytes_accessed)":"(\d+)"', line)}
        found.append(
            Kernel(
                name=call[1],
                vmem_bytes=sum(int(size) for space, size in spaces if space == _VMEM),
                flops=cost.get("flops", 0),
                bytes=cost.get("bytes_accessed", 0),
            )
        )
    return tuple(found)


def compile_spec(op: str, spec: ArgSpec, topology: str) -> Compiled:
    """Compiles one call in this process, which needs the settings that `compile_specs` gives its child."""
    start = time.perf_counter()
    result = Compiled(op=op, spec=spec.name, topology=topology, must_move=spec.bytes)
    try:
        device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
        sharding = SingleDeviceSharding(device)
        arrays = spec.abstract()
        pool = spec.donated
        placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), dict(arrays))

        def call(donated: dict[str, jax.Array], others: dict[str, jax.Array]):
            return spec.bind("tpu")(donated | others)

        donated = {pool: placed.pop(pool)} if pool is not None else {}
        with compat.lowering_for("tpu", device.device_kind):
            compiled = jax.jit(call, donate_argnums=0).lower(donated, placed).compile()
    except Exception as e:
        text = str(e)
        return dataclasses.replace(
            result,
            seconds=time.perf_counter() - start,
            fits=False if OUT_OF_MEMORY.search(text) else None,
            error=f"{type(e).__name__}: {' '.join(text.split())[:600]}",
        )
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return dataclasses.replace(
        result,
        seconds=time.perf_counter() - start,
        device=device.device_kind,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        flops=cost.get("flops", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        kernels=kernels_of(compiled.as_text()),
        fits=True,
    )


def _from_json(row: dict[str, Any]) -> Compiled:
    return Compiled(**row | {"kernels": tuple(Kernel(**k) for k in row["kernels"])})


def why_it_ended(returncode: int, log: str) -> str:
    """The last words of a process that compiled and did not come to an end."""
    words = [line.strip() for line in log.splitlines() if re.search(r"[Cc]heck failed|^F\d{4} |Error", line)]
    how = f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"status {returncode}"
    return f"the compiling process ended with {how}" + (f": {words[-1][:400]}" if words else "")


def compile_specs(op: str, specs: Sequence[str], topology: str) -> list[Compiled]:
    """Compiles named shapes of an op (tagged "aot") for a topology such as "v6e:2x2", in child processes.

    One child compiles them in turn; if it dies, the shape at which it did is a failed one and another child goes on.
    """
    done: list[Compiled] = []
    while len(done) < len(specs):
        command = [sys.executable, "-m", "pallas_kernels.ahead_of_time", op, topology, *specs[len(done) :]]
        child = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
        rows = [line for line in child.stdout.splitlines() if line.startswith("{")]
        done += [_from_json(json.loads(row)) for row in rows]
        if len(done) < len(specs):
            error = why_it_ended(child.returncode, child.stderr)
            done.append(Compiled(op=op, spec=specs[len(done)], topology=topology, error=error))
    return done


def _child(op: str, topology: str, *names: str) -> None:
    """Prints one JSON object a shape."""
    specs = {spec.name: spec for spec in arg_specs(op, TAG)}
    for name in names:
        print(json.dumps(dataclasses.asdict(compile_spec(op, specs[name], topology))), flush=True)


if __name__ == "__main__":
    _child(*sys.argv[1:])
