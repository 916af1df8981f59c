"""Compiles TPU kernels, or whole steps of a model on a pod, for chips that are not there.

    python -m launch.aot_compile
    python -m launch.aot_compile --op=topk --topology=v5p:2x2x1 --spec=decode --json
    python -m launch.aot_compile --preset=v5p_decode
    python -m launch.aot_compile --program=decode --topology=v6e:8x8 --mesh=data=64 --rows=64 --context=131072

The compiler is the real one, from libtpu (pip install 'dsv41[tpu]'); no TPU is needed. Topologies are named
v5e:2x2, v6e:2x2, v5p:2x2x1, tpu7x:2x2x1 and so on.

Kernels run on one device of the topology. Each op and topology is compiled in a process of its own, which a fault of
the compiler may end without harm to the others. VMEM is what the compiler allocated for the hungriest kernel of a call.
Work is the compiler's count, in which a kernel counts by its own estimate; "must move" is what any implementation has
to read and write.

With --program or --preset it is one step of the whole model with the real shardings: a decoded token, a token and its
drafts to verify, or a chunk of a prompt. Weights are shapes only. Presets lie in configs/pods; what is also given as a
flag is taken from there. The report says what a device holds, what it has to do, which collectives there are, and what
the chip's data sheet makes of it.

With --json, stdout is exactly one JSON object. Exit status 1 if something does not compile or does not fit.
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
from dsv41.cost_model import PROGRAMS
from launch import aot_program, aot_report
from launch.cli import new_flags, overrides, run
from pallas_kernels import ahead_of_time
from pallas_kernels.ahead_of_time import Compiled
from pallas_kernels.registry import OPS, arg_specs

_log = logging.getLogger(__name__)

_OF_KERNELS = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")

FLAGS = new_flags()
_OP = flags.DEFINE_multi_enum(
    "op", ["all"], ["all", *OPS], "Ops to compile; may be given several times.", flag_values=FLAGS
)
_TOPOLOGY = flags.DEFINE_list(
    "topology",
    None,
    f"TPU topologies, separated by commas; {','.join(_OF_KERNELS)} for kernels. One for a step.",
    flag_values=FLAGS,
)
_SPEC = flags.DEFINE_string("spec", "", "Only shapes whose name contains this text.", flag_values=FLAGS)
_JOBS = flags.DEFINE_integer("jobs", 2, "Processes that compile at a time.", lower_bound=1, flag_values=FLAGS)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.", flag_values=FLAGS)
_PROGRAM = flags.DEFINE_enum("program", None, PROGRAMS, "A step of the whole model to compile.", flag_values=FLAGS)
_PRESET = flags.DEFINE_string("preset", None, "Values of a step: a file, or a name in configs/pods.", flag_values=FLAGS)
_CONFIG = flags.DEFINE_string("config", None, "A config.json of the step's model; the released one.", flag_values=FLAGS)
_SET = flags.DEFINE_multi_string("set", [], "key=value: changes one field of the config.", flag_values=FLAGS)
_MESH = flags.DEFINE_string("mesh", None, "Sizes of the mesh axes, as in data=8,tensor=8.", flag_values=FLAGS)
_RULES = flags.DEFINE_string("rules", None, "Sharding preset, if not the program's own.", flag_values=FLAGS)
_ROWS = flags.DEFINE_integer("rows", None, "Sequences of a step, of all devices.", flag_values=FLAGS)
_CONTEXT = flags.DEFINE_integer("context", None, "Tokens that a sequence may have.", flag_values=FLAGS)
_TOKENS = flags.DEFINE_integer("tokens", None, "New tokens of each sequence, for prefill.", flag_values=FLAGS)
_KERNELS = flags.DEFINE_enum("kernels", "tpu", ["tpu", "xla"], "What ops of the step use.", flag_values=FLAGS)
_HLO = flags.DEFINE_string("hlo", None, "File for the text of the step's program.", flag_values=FLAGS)


def _specs() -> dict[str, list[str]]:
    """Names of the shapes to compile, by op."""
    ops = OPS if "all" in _OP.value else [op for op in OPS if op in _OP.value]
    names = {op: [s.name for s in arg_specs(op, ahead_of_time.TAG) if _SPEC.value in s.name] for op in ops}
    if not any(names.values()):
        raise DSV41Error(f"--spec={_SPEC.value!r}: no shape of {', '.join(ops)} to compile has such a name")
    return {op: specs for op, specs in names.items() if specs}


def _topologies() -> list[str]:
    names = list(_OF_KERNELS) if _TOPOLOGY.value is None else _TOPOLOGY.value
    if not names:
        raise DSV41Error("--topology: name at least one")
    for name in names:
        if (why := ahead_of_time.topology_problem(name)) is not None:
            raise DSV41Error(f"--topology: {why}")
    return names


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


def _console() -> Console:
    # Without a terminal rich assumes 80 columns and would fold cells.
    return Console(file=sys.stdout, width=200, markup=False, highlight=False, emoji=False)


def _need_compiler() -> dict[str, str]:
    """Versions that results depend on."""
    if (why := ahead_of_time.libtpu_problem()) is not None:
        raise DSV41Error(why)
    return {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}


def _main_kernels() -> None:
    topologies, specs = _topologies(), _specs()
    versions = _need_compiler()
    results = _compile(specs, topologies)
    if _JSON.value:
        print(json.dumps(versions | {"rows": [_as_json(r) for r in results]}))
    else:
        _console().print(_table(results, ", ".join(f"{name} {version}" for name, version in versions.items())))
    failed = [r for r in results if r.error is not None]
    for r in failed:
        print(f"aot_compile: {r.op} {r.spec} for {r.topology}: {r.error}", file=sys.stderr)
    if failed:
        sys.exit(1)


def _step_job() -> dict[str, Any]:
    values = {} if _PRESET.value is None else aot_program.preset(_PRESET.value)
    if _TOPOLOGY.value is not None:
        if len(_TOPOLOGY.value) != 1:
            raise DSV41Error("--topology: a step is compiled for one topology")
        values["topology"] = _TOPOLOGY.value[0]
    for flag in (_PROGRAM, _CONFIG, _MESH, _RULES, _ROWS, _CONTEXT, _TOKENS):
        if flag.value is not None:
            values[flag.name] = flag.value
    values["overrides"] = values.get("overrides", {}) | overrides(_SET.value)
    return aot_program.job_of(values, kernels=_KERNELS.value, hlo=_HLO.value)


def _main_step() -> None:
    job = _step_job()
    versions = _need_compiler()
    name = f"{job['sizes']['program']} for {job['topology']}"
    row = aot_program.compile_step(job, lambda line: print(f"aot_compile: {name}: {line}", file=sys.stderr, flush=True))
    if _JSON.value:
        print(json.dumps(versions | job | row))
    elif row["error"] is None:
        console = _console()
        console.print(f"{name}, {job['sizes']}, jax {versions['jax']}, libtpu {versions['libtpu']}")
        for part in aot_report.tables(row):
            console.print(part)
    if row["error"] is not None:
        print(f"aot_compile: {name}: {'does not fit: ' if row['fits'] is False else ''}{row['error']}", file=sys.stderr)
    if not row["fits"]:
        sys.exit(1)


def main() -> None:
    if _PROGRAM.value is None and _PRESET.value is None:
        _main_kernels()
    else:
        _main_step()


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
