"""Measures what Engram look-ups cost: token rates without Engram, with blocking reads, with overlap, on the device.

    python -m launch.bench_engram --config=configs/flash_engram.json --table_rows=40000000 --rows=64 --trace
    python -m launch.bench_engram --config=configs/flash_engram.json --table_rows=4000000 --table_dir=/mnt/nvme

The layers of --config get random weights, and its tables --table_rows random rows each: in memory, or with --table_dir
on files that are mapped and not cached, which is what a checkpoint on NVMe is. Decoding starts from prompts of one
token, so that attention is short and hides little; prefill runs one prompt of --prompt tokens in chunks. "none" is the
same model without its Engram, to which the others are compared; "device" runs if the tables fit --device_bytes.

stall: time a step in which the host saw the device wait for rows. With --trace (NVIDIA GPUs), a second, shorter run is
traced: idle is the time a step without a kernel, and "for rows" the part of it in front of programs that get rows from
the host. XLA_FLAGS=--xla_gpu_enable_command_buffer= gives every kernel its program's name in the trace.

With --json, stdout is exactly one JSON object.
"""

import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from dsv41.checkpoint.random_model import random_model
from dsv41.checkpoint.random_tables import random_store, with_table_rows
from dsv41.config import DSV41Error
from dsv41.engine.engram_bench import BenchPlan, Rate, cases, decode_rate, prefill_rate, transfer_rates, warm_up
from dsv41.models import Model
from launch.cli import new_flags, run
from launch.engram import engram_report
from launch.load_model import ModelFlags

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS, config=True)
_TABLE_ROWS = flags.DEFINE_integer(
    "table_rows", None, "Rows of each table. Default: as the config says.", lower_bound=1, flag_values=FLAGS
)
_TABLE_DIR = flags.DEFINE_string(
    "table_dir", None, "Directory to write the tables to, and map them; files are left there.", flag_values=FLAGS
)
_ROWS = flags.DEFINE_integer("rows", 64, "Sequences decoded together.", lower_bound=1, flag_values=FLAGS)
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 64, "Decode steps, and one.", lower_bound=2, flag_values=FLAGS)
_PROMPT = flags.DEFINE_integer("prompt", 32768, "Tokens that are prefilled; 0: none.", lower_bound=0, flag_values=FLAGS)
_CHUNK = flags.DEFINE_integer("chunk", 4096, "Of them a step.", lower_bound=1, flag_values=FLAGS)
_DEVICE_BYTES = flags.DEFINE_integer(
    "device_bytes", 64 << 30, "Tables of at most this size are also tried on the device.", flag_values=FLAGS
)
_MODES = flags.DEFINE_list(
    "modes", ["none", "blocking", "overlap", "device"], "Which of them to run.", flag_values=FLAGS
)
_PARALLEL = flags.DEFINE_bool("parallel", False, "Compile independent programs at once.", flag_values=FLAGS)
_TRACE = flags.DEFINE_bool("trace", False, "Also trace some steps.", flag_values=FLAGS)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.", flag_values=FLAGS)

_TRACED_STEPS = 8


def _model() -> Model:
    config = _MODEL.config()
    if not config.text_config.engram_layer_ids:
        raise DSV41Error("--config: this model has no Engram")
    directory = None if _TABLE_DIR.value is None else pathlib.Path(_TABLE_DIR.value)
    if directory is not None and not directory.is_dir():
        raise DSV41Error(f"--table_dir: {directory} is no directory")
    _MODEL.start_device()
    # Weights do not depend on the tables' sizes; the tables of the config itself are dropped again.
    model = random_model(with_table_rows(config, 10_000), drafter=False)
    if _TABLE_ROWS.value is not None:
        config = with_table_rows(config, _TABLE_ROWS.value)
    return dataclasses.replace(model, config=config, engram=random_store(config, directory=directory))


def _waiting_us(rate: Rate) -> float | None:
    """Idle time a step in front of programs that take rows from the host."""
    if rate.gaps is None:
        return None
    programs = [p for p in rate.gaps.idle_us if p.startswith(("jit_forward", "jit_step_segment"))]
    return sum(rate.gaps.idle_us[p] for p in programs if p != "jit_step_segment_0") / rate.traced


def _entry(rate: Rate, base: Rate | None, steps: int) -> dict[str, Any]:
    gaps = rate.gaps
    return {
        "tokens_per_s": rate.tokens_per_s,
        "loss": None if base is None or base is rate else 1 - rate.tokens_per_s / base.tokens_per_s,
        "step_ms": rate.step_ms,
        "compile_s": rate.compile_s,
        "stall_us_per_step": 1e6 * rate.engram.stall_s / steps if rate.engram else 0.0,
        "idle_us_per_step": None if gaps is None else (gaps.span_us - gaps.busy_us) / rate.traced,
        "rows_us_per_step": _waiting_us(rate) if rate.engram else None,
        "idle_us_by_program": None if gaps is None else {k: v / rate.traced for k, v in gaps.idle_us.items()},
        "engram": engram_report(rate.engram),
    }


def measure(model: Model, plan: BenchPlan, names: list[str], device: bool) -> dict[str, dict[str, Any]]:
    """decode and prefill -> mode -> figures."""
    found: dict[str, dict[str, Any]] = {"decode": {}, "prefill": {}}
    bases: dict[str, Rate] = {}
    for kind, rate_of, steps in (
        ("decode", decode_rate, plan.new_tokens - 1),
        ("prefill", prefill_rate, -(-plan.prompt // plan.chunk)),
    ):
        if kind == "prefill" and not plan.prompt:
            continue
        for name, case, mode in cases(model, device):
            if name in names:
                rate = rate_of(case, mode, plan)
                bases.setdefault(kind, rate) if name == "none" else None
                found[kind][name] = _entry(rate, bases.get(kind), steps)
                print(f"{kind} {name}: {rate.tokens_per_s:,.1f} tokens/s, compile {rate.compile_s:.1f} s",
                      file=sys.stderr)  # fmt: skip
    return found


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _print(report: dict[str, Any]) -> None:
    out = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, markup=False, highlight=False)
    for kind, title in (("decode", "decoding"), ("prefill", "prefill")):
        if not report[kind]:
            continue
        table = Table(title=f"{title}, {report['device_kind']}", title_justify="left", box=None)
        for column in (
            "Engram",
            "tokens/s",
            "loss",
            "ms a step",
            "stall us",
            "idle us",
            "for rows us",
            "reads",
            "hits",
        ):
            table.add_column(column, justify="left" if column == "Engram" else "right")
        for name, e in report[kind].items():
            loss = "–" if e["loss"] is None else f"{e['loss']:.1%}"
            rows = e["engram"] or {}
            hits = f"{rows['prefetch_hits']}/{rows['prefetched']}" if rows.get("prefetched") else "–"
            table.add_row(
                name, f"{e['tokens_per_s']:,.1f}", loss, f"{e['step_ms']:.3f}", _us(e["stall_us_per_step"]),
                _us(e["idle_us_per_step"]), _us(e["rows_us_per_step"]), f"{rows.get('physical_reads', 0):,}", hits,
            )  # fmt: skip
        out.print(table)
    for size, rates in report["copies_gb_per_s"].items():
        out.print(f"copies of {int(size):,} bytes: " + ", ".join(f"{k} {v:.1f} GB/s" for k, v in rates.items()))


def main() -> None:
    if unknown := set(_MODES.value) - {"none", "blocking", "overlap", "device"}:
        raise DSV41Error(f"--modes: unknown {', '.join(sorted(unknown))}; expected none, blocking, overlap, device")
    started = time.perf_counter()
    model = _model()
    made = time.perf_counter()
    store, text = model.engram, model.config.text_config
    plan = BenchPlan(
        rows=_ROWS.value,
        new_tokens=_NEW_TOKENS.value,
        prompt=_PROMPT.value,
        chunk=_CHUNK.value,
        traced=_TRACED_STEPS if _TRACE.value else 0,
    )
    device = store.nbytes <= _DEVICE_BYTES.value
    if _PARALLEL.value:
        warm_up(model, plan, _MODES.value, device)
    found = measure(model, plan, _MODES.value, device)
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads * len(text.engram_layer_ids)
    token_bytes = columns * store.tables[0].row_bytes
    sizes = [n * token_bytes for n in (plan.rows, plan.chunk) if n]
    report = {
        "device_kind": jax.devices()[0].device_kind,
        "table_rows": list(store.rows_per_layer),
        "table_bytes": store.nbytes,
        "mapped": store.mapped,
        "plan": dataclasses.asdict(plan),
        **found,
        "copies_gb_per_s": {str(n): transfer_rates(n) for n in sizes},
        "timings": {"make_s": made - started, "measure_s": time.perf_counter() - made},
    }
    if _JSON.value:
        print(json.dumps(report))
    else:
        _print(report)


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
