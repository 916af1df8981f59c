"""Measures block sizes of the kernels on the device at hand and keeps the best ones.

    python -m launch.tune_kernels --out=pallas_kernels/data
    python -m launch.tune_kernels --op=topk --spec=rows64 --out=sizes

Every op says which sizes of its kernel are free at a shape. All choices are timed; the fastest is written, if it beats
the heuristic's by --margin, to one JSON file for this kind of device in the directory --out. Kernels read the files of
pallas_kernels/data. What such a file holds for other shapes stays.
"""

import importlib
import json
import pathlib
import sys
import types

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from dsv41.config import DSV41Error
from dsv41.config.atomic_file import write_file
from launch.cli import new_flags, run
from pallas_kernels.bench import FAILURES, time_spec
from pallas_kernels.dispatch import backend
from pallas_kernels.registry import OPS, arg_specs
from pallas_kernels.tuning import HEURISTIC, combinations, data_file, trial

FLAGS = new_flags()
_OP = flags.DEFINE_multi_enum(
    "op", ["all"], ["all", *OPS], "Ops to tune; may be given several times.", flag_values=FLAGS
)
_SPEC = flags.DEFINE_string("spec", "", "Only shapes whose name contains this text.", flag_values=FLAGS)
_OUT = flags.DEFINE_string("out", None, "Directory for the JSON file; made if only it is missing.", flag_values=FLAGS)
_MARGIN = flags.DEFINE_float(
    "margin", 0.03, "Share of the heuristic's time that a choice must save.", lower_bound=0.0, flag_values=FLAGS
)


def _kernel() -> str:
    if backend() != "gpu":
        raise DSV41Error(
            f"the {jax.default_backend()} backend has no kernels to tune: only sizes of GPU kernels are free"
        )
    return "gpu"


def _read(path: pathlib.Path, device_kind: str) -> dict:
    if not path.exists():
        return {"device_kind": device_kind, "jax": jax.__version__, "ops": {}}
    try:
        sizes = json.loads(path.read_text())
        if sizes["device_kind"] != device_kind or not isinstance(sizes["ops"], dict):
            raise ValueError("it belongs to another device")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DSV41Error(f"{path}: not a file of block sizes for {device_kind} ({e})") from e
    return sizes | {"jax": jax.__version__}


def _block_sizes(op: str) -> types.ModuleType:
    return importlib.import_module(f"pallas_kernels.{op}.block_sizes")


def _tune(op: str, spec, kernel: str) -> tuple[str, dict[str, int], float, float] | None:
    """The shape's key, the best choice ({}: the heuristic's), and microseconds of both; None if nothing is free."""
    key, knobs = _block_sizes(op).knobs(**spec.abstract(), **spec.static)
    if not knobs:
        return None
    with trial(HEURISTIC):
        try:
            baseline = best_us = time_spec(spec, kernel)
        except FAILURES as e:
            raise DSV41Error(f"{op} {spec.name}: the kernel does not run ({e})") from e
    best: dict[str, int] = {}
    for choice in combinations(knobs):
        with trial(tuple((op, name, value) for name, value in choice.items())):
            try:
                us = time_spec(spec, kernel)
            except FAILURES:
                continue  # not every combination fits the device
        if us < best_us and us < baseline * (1 - _MARGIN.value):
            best, best_us = choice, us
    return key, best, baseline, best_us


def main() -> None:
    if _OUT.value is None:
        raise DSV41Error("give --out=DIR, where the sizes are written")
    out = pathlib.Path(_OUT.value)
    if not out.parent.is_dir():
        raise DSV41Error(f"--out: no such directory {out.parent}")
    kernel = _kernel()
    ops = OPS if "all" in _OP.value else _OP.value
    specs = [(op, spec) for op in ops for spec in arg_specs(op, "tune") if _SPEC.value in spec.name]
    if not specs:
        raise DSV41Error(f"--spec={_SPEC.value!r}: no shape of {', '.join(ops)} to tune has such a name")
    out.mkdir(exist_ok=True)
    path = out / data_file(jax.devices()[0].device_kind).name
    sizes = _read(path, jax.devices()[0].device_kind)
    table = Table(box=None, header_style="bold")
    for name in ("op", "shape", "heuristic us", "best us", "choice"):
        table.add_column(name)
    for op, spec in specs:
        found = _tune(op, spec, kernel)
        if found is None:
            continue
        key, best, baseline, us = found
        shapes = sizes["ops"].setdefault(op, {})
        shapes.pop(key, None)
        if best:
            shapes[key] = best
        write_file(path, json.dumps(sizes, indent=1, sort_keys=True).encode())
        table.add_row(op, spec.name, f"{baseline:.1f}", f"{us:.1f}", str(best) if best else "the heuristic's")
    Console(width=160).print(table)


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
