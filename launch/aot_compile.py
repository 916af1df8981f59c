"""Compiles every TPU kernel for chips that are not there, and prints what the compiler says about memory and work.

    python -m launch.aot_compile
    python -m launch.aot_compile --op=topk --topology=v5p:2x2x1 --spec=decode --json

The compiler is the real one, from libtpu (pip install 'dsv41[tpu]'); no TPU is needed. Topologies are named
v5e:2x2, v6e:2x2, v5p:2x2x1, tpu7x:2x2x1 and so on; the kernels run on one device of it. Each op and topology is
compiled in a process of its own, which a fault of the compiler may end without harm to the others.

VMEM is what the compiler allocated for the hungriest kernel of a call. Work is the compiler's count, in which a kernel
counts by its own estimate; "must move" is what any implementation has to read and write. With --json, stdout is exactly
one JSON object. Exit status 1 if something does not compile.
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import json
import logging
import sys
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from dsv41.config import DSV41Error
from launch.cli import new_flags, run
from pallas_kernels import ahead_of_time
from pallas_kernels.ahead_of_time import Compiled
from pallas_kernels.registry import OPS, arg_specs

_log = logging.getLogger(__name__)

FLAGS = new_flags()
_OP = flags.DEFINE_multi_enum(
    "op", ["all"], ["all", *OPS], "Ops to compile; may be given several times.", flag_values=FLAGS
)
_TOPOLOGY = flags.DEFINE_list(
    "topology", ["v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"], "TPU topologies, separated by commas.", flag_values=FLAGS
)
_SPEC = flags.DEFINE_string("spec", "", "Only shapes whose name contains this text.", flag_values=FLAGS)
_JOBS = flags.DEFINE_integer("jobs", 2, "Processes that compile at a time.", lower_bound=1, flag_values=FLAGS)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.", flag_values=FLAGS)


def _specs() -> dict[str, list[str]]:
    """Names of the shapes to compile, by op."""
    ops = OPS if "all" in _OP.value else [op for op in OPS if op in _OP.value]
    names = {op: [s.name for s in arg_specs(op, ahead_of_time.TAG) if _SPEC.value in s.name] for op in ops}
    if not any(names.values()):
        raise DSV41Error(f"--spec={_SPEC.value!r}: no shape of {', '.join(ops)} to compile has such a name")
    return {op: specs for op, specs in names.items() if specs}


def _topologies() -> list[str]:
    if not _TOPOLOGY.value:
        raise DSV41Error("--topology: name at least one")
    for name in _TOPOLOGY.value:
        if (why := ahead_of_time.topology_problem(name)) is not None:
            raise DSV41Error(f"--topology: {why}")
    return _TOPOLOGY.value


def _compile(specs: dict[str, list[str]], topologies: list[str]) -> list[Compiled]:
    with concurrent.futures.ThreadPoolExecutor(_JOBS.value) as pool:
        jobs = [
            pool.submit(ahead_of_time.compile_specs, op, names, topology)
            for op, names in specs.items()
            for topology in topologies
        ]
        results = []
        for job in jobs:
            results += job.result()
            _log.info("%s for %s: done", results[-1].op, results[-1].topology)
    return results


def _mib(size: float) -> str:
    return f"{size / 2**20:,.2f}"


def _table(results: list[Compiled], versions: str) -> Table:
    table = Table(title=f"{versions}, sizes in MiB", title_justify="left", box=None, header_style="bold")
    for name in ("op", "shape", "topology", "compile s", "VMEM", "arguments", "results", "in place", "temporary"):
        table.add_column(name, justify="left" if name in ("op", "shape", "topology") else "right", no_wrap=True)
    for name in ("GFLOP", "moved", "must move", "kernels", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        head = [r.op, r.spec, r.topology, f"{r.seconds:.1f}"]
        if r.error is not None:
            table.add_row(*head, *["–"] * 9, "no" if r.fits is False else "failed")
            continue
        sizes = (r.vmem_bytes, r.argument_bytes, r.output_bytes, r.alias_bytes, r.temp_bytes)
        work = [f"{r.flops / 1e9:,.2f}", _mib(r.bytes_accessed), _mib(r.must_move)]
        table.add_row(*head, *map(_mib, sizes), *work, str(len(r.kernels)), "yes")
    return table


def _as_json(result: Compiled) -> dict[str, Any]:
    return dataclasses.asdict(result) | {"vmem_bytes": result.vmem_bytes}


def main() -> None:
    topologies, specs = _topologies(), _specs()
    if (why := ahead_of_time.libtpu_problem()) is not None:
        raise DSV41Error(why)
    results = _compile(specs, topologies)
    versions = {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}
    if _JSON.value:
        print(json.dumps(versions | {"rows": [_as_json(r) for r in results]}))
    else:
        # Without a terminal rich assumes 80 columns and would fold cells.
        console = Console(file=sys.stdout, width=200, markup=False, highlight=False, emoji=False)
        console.print(_table(results, ", ".join(f"{name} {version}" for name, version in versions.items())))
    failed = [r for r in results if r.error is not None]
    for r in failed:
        print(f"aot_compile: {r.op} {r.spec} for {r.topology}: {r.error}", file=sys.stderr)
    if failed:
        sys.exit(1)


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
