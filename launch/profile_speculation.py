"""Measures how long speculative rounds take on this machine, for schedules that decide how much to verify.

    python -m launch.profile_speculation --checkpoint=DIR --out=throughput.json
    python -m launch.profile_speculation --requests=1,4,16 --context=64 --steps=8 --min_seconds=1 --out=t.json --json

A round verifies its drafts in a step of a few fixed widths. For every batch size of --requests and every width, rounds
that accept one token are run again and again at the same context length; the median time of a round makes a point of
the table. Each point compiles a program, then takes --min_seconds or --steps rounds, whichever is longer.

--out is JSON, for --throughput_table of launch.generate. It is written after every batch size, so that it holds what
was measured if a larger batch does not fit. Measure again after a change of machine, checkpoint or release.

With --json, stdout is exactly one JSON object with out, context, curves, slowdown (how many times longer the widest
step takes than the narrowest, the most of all batch sizes), flat and timings.
"""

import json
import sys
import time
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from dsv41.config import DSV41Error
from dsv41.config.atomic_file import check_target
from dsv41.engine import PREFILL_CHUNK, ThroughputTable, save_throughput_table
from dsv41.engine.profile_rounds import ProfilePlan, profile_rounds
from dsv41.ops.sampling import SamplingParams
from dsv41.ops.verification import AcceptanceRule
from launch.cli import new_flags, run
from launch.load_model import ModelFlags, progress_bar
from launch.plots import PlotFlag

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS)
_REQUESTS = flags.DEFINE_list(
    "requests", ["1", "2", "4", "8"], "Batch sizes; rounded up to powers of two, as batches are.", flag_values=FLAGS
)
_CONTEXT = flags.DEFINE_integer(
    "context", None, "Tokens in the cache of every request. Default: 4096, or what the model takes.", flag_values=FLAGS
)
_DRAFT_TOKENS = flags.DEFINE_integer(
    "draft_tokens", None, "Drafts that a round verifies at most. Default: all of a block.", flag_values=FLAGS
)
_ACCEPTANCE = flags.DEFINE_enum_class(
    "acceptance", AcceptanceRule.BLOCK, AcceptanceRule, "How drafts are accepted.", flag_values=FLAGS
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", SamplingParams.temperature, "Of the rounds; 0 spares them the random draws.", flag_values=FLAGS
)
_TOP_P = flags.DEFINE_float("top_p", SamplingParams.top_p, "Of the rounds.", flag_values=FLAGS)
_TOP_K = flags.DEFINE_integer("top_k", 0, "Of the rounds.", flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", ProfilePlan.steps, "Rounds timed at each point, at least.", flag_values=FLAGS)
_MIN_SECONDS = flags.DEFINE_float(
    "min_seconds", ProfilePlan.min_seconds, "Seconds that they take together, at least.", flag_values=FLAGS
)
_PREFILL_CHUNK = flags.DEFINE_integer(
    "prefill_chunk", PREFILL_CHUNK, "Tokens a step while contexts are filled; memory grows with it.", flag_values=FLAGS
)
_OUT = flags.DEFINE_string("out", None, "JSON file to write the table to; replaced if it exists.", flag_values=FLAGS)
_PLOT = PlotFlag(FLAGS, "the curves")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.", flag_values=FLAGS)

# Below it, verifying a draft is as good as free.
_FLAT = 1.05


def _plan() -> ProfilePlan:
    try:
        requests = tuple(int(item) for item in _REQUESTS.value)
    except ValueError as e:
        raise DSV41Error(f"--requests: expected batch sizes as 1,2,4, got {','.join(_REQUESTS.value)!r}") from e
    return ProfilePlan(
        requests=requests,
        context=_CONTEXT.value,
        draft_tokens=_DRAFT_TOKENS.value,
        rule=_ACCEPTANCE.value,
        sampling=SamplingParams(temperature=_TEMPERATURE.value, top_p=_TOP_P.value, top_k=_TOP_K.value),
        steps=_STEPS.value,
        min_seconds=_MIN_SECONDS.value,
        prefill_chunk=_PREFILL_CHUNK.value,
    )


def _command(plan: ProfilePlan) -> str:
    """What was measured, as a command line without files."""
    given = {
        "requests": ",".join(map(str, plan.requests)),
        "context": plan.context,
        "draft_tokens": plan.draft_tokens,
        "acceptance": plan.rule.name.lower(),
        "temperature": plan.sampling.temperature,
        "top_p": plan.sampling.top_p,
        "top_k": plan.sampling.top_k,
        "steps": plan.steps,
        "min_seconds": plan.min_seconds,
    }
    return " ".join(["profile_speculation", *(f"--{name}={value}" for name, value in given.items())])


def slowdown(table: ThroughputTable) -> float:
    """How many times longer the widest step takes than the narrowest, the most of all batch sizes."""
    return max(points[0][1] / points[-1][1] for points in table.curves.values())


def _report(table: ThroughputTable, plan: ProfilePlan, load_s: float, profile_s: float) -> dict[str, Any]:
    ratio = slowdown(table)
    return {
        "out": _OUT.value,
        "block_size": table.block_size,
        "device_kind": table.device_kind,
        "context": plan.context,
        "curves": [{"requests": r, "points": [list(p) for p in points]} for r, points in table.curves.items()],
        "slowdown": ratio,
        "flat": ratio < _FLAT,
        "timings": {"load_s": load_s, "profile_s": profile_s},
    }


def _print(report: dict[str, Any]) -> None:
    title = f"{report['device_kind']}, context of {report['context']:,} tokens"
    table = Table(title=title, title_justify="left")
    for column in ("requests", "batch tokens from", "rounds/s", "ms a round", "against no drafts"):
        table.add_column(column, justify="right")
    for curve in report["curves"]:
        first = curve["points"][0][1]
        for tokens, rate in curve["points"]:
            row = (curve["requests"], tokens, f"{rate:,.2f}", f"{1000 / rate:,.2f}", f"{first / rate:.2f} x")
            table.add_row(*map(str, row))
        table.add_section()
    width = None if sys.stdout.isatty() else 120
    Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False).print(table)
    if report["flat"]:
        print("The table is flat: a draft costs next to nothing to verify here, so --verify=all serves best.")
    print(f"{report['out']}: {len(report['curves'])} curves, profile {report['timings']['profile_s']:.1f} s, "
          f"load {report['timings']['load_s']:.1f} s", file=sys.stderr)  # fmt: skip


def _draw(table: ThroughputTable) -> None:
    figure = _PLOT.figure(figsize=(7, 4))
    axes = figure.subplots()
    for requests, points in sorted(table.curves.items()):
        tokens, rates = zip(*points, strict=True)
        end = max(requests * (1 + table.block_size), tokens[-1])
        axes.step([*tokens, end], [1000 / r for r in (*rates, rates[-1])], where="post", label=str(requests))
    axes.set(xlabel="tokens of a step", ylabel="ms a round", title=table.device_kind, ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:g}")
    axes.legend(title="requests")
    _PLOT.save(figure)


def main() -> None:
    if _OUT.value is None:
        raise DSV41Error("--out=FILE.json is required")
    check_target(_OUT.value)
    _PLOT.check(_OUT.value)
    plan = _plan().resolved(_MODEL.config())
    model, load_s = _MODEL.load(drafter=True)
    started = time.perf_counter()
    with progress_bar(FLAGS.verbose) as bar:
        task = bar.add_task("measuring", total=None)
        table = profile_rounds(
            model,
            plan,
            model_name=_MODEL.checkpoint.resolve().name,
            command=_command(plan),
            on_point=lambda done, total: bar.update(task, completed=done, total=total),
            on_curve=lambda so_far: save_throughput_table(so_far, _OUT.value),
        )
    report = _report(table, plan, load_s, time.perf_counter() - started)
    if _JSON.value:
        print(json.dumps(report))
    else:
        _print(report)
    if _PLOT.given:
        _draw(table)


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
