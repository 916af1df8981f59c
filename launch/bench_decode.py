"""Serves a stream of requests that arrive at their own pace, and says how long they waited for their tokens.

    python -m launch.bench_decode --checkpoint=DIR --rate=4 --requests=200 --text=FILE --shared_prefix=512
    python -m launch.bench_decode --config=FILE --rate=0 --requests=32 --prompt_tokens=64:256 --new_tokens=64 --json

Requests arrive as a Poisson process of --rate a second, whether or not the engine keeps up (an open loop): a latency is
counted from the arrival, so that it contains the time in the queue. --rate=0 has all of them arrive at once, which
measures throughput. Loading and compiling are not counted; nothing is compiled while requests are served.

Prompts are BOS, --shared_prefix tokens that all have in common, and --prompt_tokens of their own. With --text they are
pieces of a file, without it random ids. Take a text to measure a model with Engram: repeated or random filler meets the
n-gram tables in another way than text does, and a drafter's guesses too. Answers have no stop ids, so that each has the
length that was drawn for it.

A law of lengths is N (always that), LOW:HIGH (uniform) or lognormal:MEDIAN:SIGMA.

--config=FILE measures a config without a checkpoint, with random weights of up to 8 GiB and random ids. Without either
the bundled tiny model is measured.

Printed are percentiles over requests of the time to the first token and of the time per token behind it (a request's
mean), tokens a second, the share of prompt tokens whose KV was there, and with --speculate=on accepted drafts a round
and one. With --json, stdout is exactly one JSON object with these figures, the stream's parameters, counts and tiers.
"""

import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from dsv41.checkpoint.random_model import random_model
from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine import Engine
from dsv41.engine.request_stream import Arrival, Lengths, Served, StreamPlan, make_stream, percentiles, run_stream
from dsv41.models import Model
from launch.cli import new_flags, run
from launch.load_model import ModelFlags, progress_bar
from launch.plots import PlotFlag
from launch.sampling import SamplingFlags
from launch.serving import ServingFlags, usage_table
from launch.speculation import SpeculationFlags
from launch.text import encode_plain

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS, config=True)
_RATE = flags.DEFINE_float("rate", 1.0, "Arrivals a second on average; 0: all at once.", flag_values=FLAGS)
_REQUESTS = flags.DEFINE_integer("requests", 32, "Requests of the stream.", flag_values=FLAGS)
_PROMPT_TOKENS = flags.DEFINE_string(
    "prompt_tokens", "128", "Law of the tokens of each prompt's own.", flag_values=FLAGS
)
_NEW_TOKENS = flags.DEFINE_string("new_tokens", "64", "Law of the tokens of each answer.", flag_values=FLAGS)
_SHARED_PREFIX = flags.DEFINE_integer("shared_prefix", 0, "Tokens that all prompts begin with.", flag_values=FLAGS)
_TEXT = flags.DEFINE_string(
    "text", None, "Text file that prompts are cut from. Default: random ids.", flag_values=FLAGS
)
_MAX_REQUESTS = flags.DEFINE_integer(
    "max_requests", 8, "Requests that are decoded at once; others wait.", flag_values=FLAGS
)
_SAMPLING = SamplingFlags(FLAGS, "Of the stream and of the draws.")
_SERVING = ServingFlags(FLAGS, longest="what the longest request needs")
_SPECULATION = SpeculationFlags(FLAGS)
_PLOT = PlotFlag(FLAGS, "the distributions of both times")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.", flag_values=FLAGS)


def _lengths(flag: str) -> Lengths:
    try:
        return Lengths.parse(FLAGS[flag].value)
    except DSV41Error as e:
        raise DSV41Error(f"--{flag}: {e}") from e


def _plan() -> StreamPlan:
    return StreamPlan(
        requests=_REQUESTS.value,
        rate=_RATE.value,
        prompt_tokens=_lengths("prompt_tokens"),
        new_tokens=_lengths("new_tokens"),
        shared_prefix=_SHARED_PREFIX.value,
        seed=FLAGS.seed,
    )


def _text() -> list[int] | None:
    """Token ids of --text."""
    if _TEXT.value is None:
        return None
    if _MODEL.checkpoint is None:
        raise DSV41Error("--text: needs --checkpoint=DIR, whose tokenizer it takes")
    try:
        text = pathlib.Path(_TEXT.value).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise DSV41Error(f"{_TEXT.value}: not a readable text file ({e})") from e
    return encode_plain(_MODEL.tokenizer(), text, _TEXT.value)


def _load(config: ModelConfig) -> tuple[Model, float]:
    drafter = FLAGS.speculate == "on"
    if _MODEL.checkpoint is not None:
        return _MODEL.load(drafter=drafter)
    started = time.perf_counter()
    _MODEL.start_device()
    return random_model(config, seed=FLAGS.seed, drafter=drafter), time.perf_counter() - started


def _report(
    engine: Engine, plan: StreamPlan, served: list[Served], elapsed_s: float, timings: dict[str, float]
) -> dict[str, Any]:
    m = engine.metrics
    prompt, new = sum(s.prompt_tokens for s in served), sum(s.new_tokens for s in served)
    return {
        "model": FLAGS.config or FLAGS.checkpoint or "bundled",
        "device": jax.devices()[0].device_kind,
        "requests": plan.requests,
        "rate": plan.rate,
        "seed": plan.seed,
        "max_requests": _MAX_REQUESTS.value,
        "prefill": FLAGS.prefill,
        "prompts": "random ids" if _TEXT.value is None else _TEXT.value,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "time_to_first_token_s": percentiles([s.first_token_s for s in served]),
        "time_per_token_s": percentiles([s.time_per_token_s for s in served]),
        "elapsed_s": elapsed_s,
        "requests_per_s": len(served) / elapsed_s,
        "new_tokens_per_s": new / elapsed_s,
        "hit_rate": m.hit_rate,
        "cached_tokens": dict(m.cached_tokens),
        "replayed_tokens": m.replayed_tokens,
        "fresh_tokens": m.fresh_tokens,
        "window_hits": m.window_hits,
        "acceptance_length": m.acceptance_length if FLAGS.speculate == "on" else None,
        "preemptions": m.preemptions,
        "evicted_pages": m.evicted_pages,
        "timings": timings,
    }


def _print(report: dict[str, Any]) -> None:
    width = None if sys.stdout.isatty() else 120
    console = Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)
    rate = f"{report['rate']:g} a second" if report["rate"] else "all at once"
    table = Table(title=f"{report['requests']:,} requests, {rate}, {report['device']}", title_justify="left")
    for i, column in enumerate(("milliseconds", "p50", "p90", "p99")):
        table.add_column(column, justify="right" if i else "left")
    for label, name in (("to the first token", "time_to_first_token_s"), ("per token behind it", "time_per_token_s")):
        table.add_row(label, *("-" if v is None else f"{1000 * v:,.1f}" for v in report[name].values()))
    console.print(table)
    cached = ", ".join(f"{tier} {n:,}" for tier, n in report["cached_tokens"].items() if n)
    length = report["acceptance_length"]
    lines = [
        f"{report['new_tokens_per_s']:,.1f} tokens/s, {report['requests_per_s']:,.2f} requests/s over "
        f"{report['elapsed_s']:,.1f} s; {report['prompt_tokens']:,} prompt and {report['new_tokens']:,} new tokens",
        f"{report['hit_rate']:.1%} of the prompt tokens reused{f' ({cached})' if cached else ''}, "
        f"{report['replayed_tokens']:,} replayed, {report['window_hits']} windows from snapshots",
    ]
    if FLAGS.speculate == "on":
        lines.append("no rounds" if length is None else f"acceptance length {length:.2f}")
    for line in lines:
        console.print(line)
    console.print(usage_table(report["tiers"]))


def _draw(served: list[Served]) -> None:
    figure = _PLOT.figure(figsize=(9, 3.5))
    first = [s.first_token_s for s in served]
    later = [s.time_per_token_s for s in served if s.time_per_token_s is not None]
    for axes, name, values in zip(
        figure.subplots(1, 2), ("first token", "token behind it"), (first, later), strict=True
    ):
        ordered = np.sort(values)
        axes.step(1000 * ordered, np.arange(1, len(ordered) + 1) / max(len(ordered), 1), where="post")
        axes.set(title=name, xlabel="milliseconds", ylabel="share of requests", ylim=(0, 1))
    _PLOT.save(figure)


def _longest(arrivals: list[Arrival]) -> int:
    return max(len(a.prompt) + a.new_tokens for a in arrivals)


def main() -> None:
    _PLOT.check()
    config = _MODEL.config()
    sampling, speculation, plan = _SAMPLING.read(), _SPECULATION.read(config), _plan()
    arrivals = make_stream(plan, config, _text())
    longest = _longest(arrivals)
    options = _SERVING.options(config, speculation, max_requests=_MAX_REQUESTS.value, tokens=longest)
    if longest > options.max_tokens:
        raise DSV41Error(
            f"--max_tokens={options.max_tokens}: the longest request has {longest} tokens, answer included"
        )
    with _SERVING.open(config, _MODEL.checkpoint) as stores:
        model, load_s = _load(config)
        engine = stores.engine(model, options)
        started = time.perf_counter()
        with progress_bar(FLAGS.verbose) as bar:
            task = bar.add_task("compiling", total=None)
            engine.warm_up()
            compile_s = time.perf_counter() - started
            bar.update(task, description="requests", completed=0, total=len(arrivals))
            served, elapsed_s = run_stream(
                engine, arrivals, sampling=sampling, on_progress=lambda done, _: bar.update(task, completed=done)
            )
        report = _report(engine, plan, served, elapsed_s, {"load_s": load_s, "compile_s": compile_s})
        report["tiers"] = stores.usage(engine)
    if _JSON.value:
        print(json.dumps(report))
    else:
        _print(report)
        print(f"loaded in {load_s:.1f} s, compiled in {compile_s:.1f} s", file=sys.stderr)
    if _PLOT.given:
        _draw(served)


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
