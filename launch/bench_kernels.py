"""Times every op at its named shapes: the kernel, plain XLA in the same run, and the limits of this device.

On a GPU, device time comes from the profiler: the sum over an op's kernels of their median durations, with argument
sets that take turns so that caches stay cold. A limit is the larger of bytes over the measured copy rate and FLOPs
over the measured bfloat16 product rate; "share" is the limit over the time. Elsewhere the numbers are wall time, and
on a CPU they mean little.

    python -m launch.bench_kernels --json=kernels.json
    python -m launch.bench_kernels --op=topk --peers
"""

import contextlib
import datetime
import fcntl
import importlib.util
import json
import sys
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from dsv41.config import DSV41Error
from dsv41.config.atomic_file import check_target, write_file
from launch.cli import new_flags, run
from pallas_kernels.arg_spec import ArgSpec
from pallas_kernels.bench import Row, bench, ceilings
from pallas_kernels.dispatch import backend
from pallas_kernels.registry import OPS, arg_specs

FLAGS = new_flags()
_OP = flags.DEFINE_multi_enum(
    "op", ["all"], ["all", *OPS], "Ops to time; may be given several times.", flag_values=FLAGS
)
_SPEC = flags.DEFINE_string("spec", "", "Only shapes whose name contains this text.", flag_values=FLAGS)
_TAG = flags.DEFINE_enum(
    "tag", "bench", ["bench", "ci", "tune"], "Which list of shapes: ci has those that tests use.", flag_values=FLAGS
)
_CALLS = flags.DEFINE_integer("calls", 20, "Timed calls of each.", lower_bound=1, flag_values=FLAGS)
_XLA = flags.DEFINE_bool("xla", True, "Also time plain XLA.", flag_values=FLAGS)
_PEERS = flags.DEFINE_bool(
    "peers", False, "Also time peers' kernels on the same work (needs torch with CUDA).", flag_values=FLAGS
)
_LOCK = flags.DEFINE_string(
    "lock", None, "File to lock while the device is used, so that several runs compile side by side but time in turn.",
    flag_values=FLAGS,
)  # fmt: skip
_JSON = flags.DEFINE_string("json", None, "File for the results as JSON.", flag_values=FLAGS)


def _kernel() -> str:
    """The implementation that this backend's kernels go by; "xla" where it has none."""
    return "xla" if backend() == "cpu" else backend()


def _specs() -> dict[str, list[ArgSpec]]:
    ops = OPS if "all" in _OP.value else [op for op in OPS if op in _OP.value]
    specs = {op: [s for s in arg_specs(op, _TAG.value) if _SPEC.value in s.name] for op in ops}
    if not any(specs.values()):
        raise DSV41Error(f"--spec={_SPEC.value!r}: no shape of {', '.join(ops)} tagged {_TAG.value!r} has such a name")
    return specs


def _peer_times(op: str, spec: ArgSpec) -> dict[str, float]:
    """Microseconds of the peers that can do this work."""
    if not _PEERS.value:
        return {}
    from pallas_kernels.bench_peers import peer_times

    return peer_times(op, spec)


@contextlib.contextmanager
def _alone():
    if _LOCK.value is None:
        yield
        return
    with open(_LOCK.value, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _as_json(row: Row, peers: dict[str, float]) -> dict[str, Any]:
    def time(t):
        if t is None:
            return None
        return {"us": t.us, "wall_us": t.wall_us, "kernels": [list(k) for k in t.kernels]}

    return {
        "op": row.op, "spec": row.spec, "implementation": row.kernel, "time": time(row.time), "xla": time(row.xla),
        "bytes": row.bytes, "flops": row.flops, "limit_us": row.limit_us, "share_of_limit": row.share,
        "speedup_over_xla": row.speedup, "peers_us": peers, "error": row.error,
    }  # fmt: skip


def _cells(row: Row, peers: dict[str, float]) -> list[str]:
    us = None if row.time is None else row.time.us
    kernels = None if row.time is None else sum(n for *_, n in row.time.kernels)
    return [
        row.op, row.spec, _number(us), _number(None if row.xla is None else row.xla.us), _number(row.speedup, 2),
        _number(row.limit_us), "–" if row.share is None else f"{row.share:.0%}",
        "–" if us is None else f"{row.bytes / us / 1e3:.0f}",
        "–" if us is None or not row.flops else f"{row.flops / us / 1e6:.0f}",
        _number(kernels, 0), ", ".join(f"{name} {time:.1f}" for name, time in peers.items()) or "–",
    ]  # fmt: skip


def _table() -> Table:
    device, rates = jax.devices()[0].device_kind, ceilings()
    table = Table(
        title=f"{device}, jax {jax.__version__}: copy {rates.bytes_per_us / 1e3:.0f} GB/s, "
        f"bfloat16 product {rates.flops_per_us / 1e6:.0f} TFLOP/s",
        box=None,
        header_style="bold",
    )
    for name in (
        "op",
        "shape",
        "us",
        "XLA us",
        "speedup",
        "limit us",
        "share",
        "GB/s",
        "TFLOP/s",
        "kernels",
        "peers us",
    ):
        table.add_column(name, justify="left" if name in ("op", "shape", "peers us") else "right", no_wrap=True)
    return table


def _command() -> str:
    given = [FLAGS[name].serialize() for name in sorted(FLAGS) if FLAGS[name].present]
    return " ".join(["python -m launch.bench_kernels", *" ".join(given).split()])


def main() -> None:
    target = None if _JSON.value is None else check_target(_JSON.value)
    if _LOCK.value is not None:
        check_target(_LOCK.value)
    if _PEERS.value and importlib.util.find_spec("torch") is None:
        raise DSV41Error("--peers: torch is not installed")
    specs, kernel = _specs(), _kernel()
    if kernel == "xla":
        print("bench_kernels: this backend has no kernels; plain XLA is timed", file=sys.stderr)
    with _alone():
        table, results = _table(), []
    progress = Console(stderr=True)
    for op, shapes in specs.items():
        rows = bench(op, shapes, kernel, calls=_CALLS.value, xla=_XLA.value or kernel == "xla", alone=_alone)
        for spec, row in zip(shapes, rows, strict=True):
            with _alone():
                peers = _peer_times(op, spec)
            results.append(_as_json(row, peers))
            table.add_row(*_cells(row, peers))
            progress.print(f"{op} {spec.name}: {row.error or _number(row.time.us) + ' us'}", highlight=False)
    Console(width=200).print(table)
    if target is not None:
        header = {
            "device": jax.devices()[0].device_kind, "jax": jax.__version__, "command": _command(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "bytes_per_us": ceilings().bytes_per_us, "flops_per_us": ceilings().flops_per_us,
        }  # fmt: skip
        write_file(target, json.dumps(header | {"rows": results}, indent=1).encode())
    failed = [f"{r['op']} {r['spec']}" for r in results if r["error"]]
    if failed:
        raise DSV41Error(f"failed: {', '.join(failed)}")


def cli() -> int:
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
