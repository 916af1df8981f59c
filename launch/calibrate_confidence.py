"""Fits the temperatures that turn the drafter's confidences into probabilities.

    python -m launch.calibrate_confidence --checkpoint=DIR --prompts=FILE.jsonl --out=temperatures.json
    python -m launch.calibrate_confidence --tokens=FILE.safetensors --max_new_tokens=64 --out=t.json --plot=t.png --json

Continues the prompts by speculative decoding in which every draft is verified, and records what the drafter expected
and what was accepted. Schedules that decide how much to verify (--verify=budget or greedy of launch.generate, with
--confidence_temperatures) need the expectations to be right on average; temperatures never change what is generated,
only how fast. Prompts, sampling and --acceptance should be those that are served.

Only rounds count in which a whole block was verified, so the last tokens of a request do not. The file is written whole
or not at all. The error of a position is the expected calibration error of the probability that all drafts up to it are
accepted, on the rounds that the temperatures were fitted on: 0 if what is expected is what happens.

With --json, stdout is exactly one JSON object with out, prompts, rounds, samples (the rounds that count), temperatures,
ece_before, ece_after (by position), acceptance_length (tokens a round, by the samples) and timings.
"""

import json
import sys
import time
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from dsv41.config import DSV41Error
from dsv41.config.atomic_file import check_target
from dsv41.engine import PREFILL_CHUNK, ConfidenceTemperatures, fit_temperatures, save_temperatures
from dsv41.engine.calibration_rounds import check_calibration, full_rounds, record_rounds
from dsv41.engine.confidence_calibration import calibrated_survival, reliability
from dsv41.ops.sampling import SamplingParams
from dsv41.ops.verification import AcceptanceRule
from launch.cli import new_flags, run
from launch.load_model import ModelFlags, progress_bar
from launch.plots import PlotFlag
from launch.prompts import PromptFlags
from launch.sampling import SamplingFlags

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS)
_PROMPTS = PromptFlags(FLAGS)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 256, "Tokens to generate at most for each prompt.", flag_values=FLAGS
)
_BATCH = flags.DEFINE_integer("batch", 8, "Prompts that run together.", flag_values=FLAGS)
_SAMPLING = SamplingFlags(FLAGS, "Of the first prompt; each has one more.", temperature=SamplingParams.temperature)
_ACCEPTANCE = flags.DEFINE_enum_class(
    "acceptance", AcceptanceRule.BLOCK, AcceptanceRule, "How drafts are accepted.", flag_values=FLAGS
)
_PREFILL_CHUNK = flags.DEFINE_integer(
    "prefill_chunk", PREFILL_CHUNK, "Prompt tokens a step; memory grows with it.", flag_values=FLAGS
)
_OUT = flags.DEFINE_string("out", None, "JSON file to write; replaced if it exists.", flag_values=FLAGS)
_PLOT = PlotFlag(FLAGS, "what was expected against what happened")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.", flag_values=FLAGS)

# About 70 rounds for each bin of the error; with fewer the error is mostly noise.
_FEW_ROUNDS = 1000


def _print(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['samples']:,} of {report['rounds']:,} rounds", title_justify="left")
    for column in ("draft", "temperature", "error before", "error after"):
        table.add_column(column, justify="right")
    columns = (report["temperatures"], report["ece_before"], report["ece_after"])
    for k, (temperature, before, after) in enumerate(zip(*columns, strict=True), 1):
        table.add_row(str(k), f"{temperature:.3f}", f"{before:.2%}", f"{after:.2%}")
    width = None if sys.stdout.isatty() else 120
    Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False).print(table)
    print(f"{report['acceptance_length']:.3f} tokens a round if all drafts are verified")
    print(f"{report['out']}: {len(report['temperatures'])} temperatures; record {report['timings']['record_s']:.1f} s, "
          f"load {report['timings']['load_s']:.1f} s", file=sys.stderr)  # fmt: skip


def _draw(logits: np.ndarray, accepted: np.ndarray, temperatures: ConfidenceTemperatures) -> None:
    block = temperatures.block_size
    figure = _PLOT.figure(figsize=(2.6 * block, 3))
    laws = {"as trained": calibrated_survival(logits), "fitted": calibrated_survival(logits, temperatures.values)}
    for k, axes in enumerate(figure.subplots(1, block, sharey=True, squeeze=False)[0]):
        axes.plot([0, 1], [0, 1], color="0.8")
        for label, law in laws.items():
            said, happened, samples = reliability(law[:, k], accepted > k)
            axes.plot(said[samples > 0], happened[samples > 0], marker="o", markersize=3, label=label)
        axes.set(title=f"drafts 1 to {k + 1}" if k else "draft 1", xlabel="expected", xlim=(0, 1), ylim=(0, 1))
    figure.axes[0].set(ylabel="accepted")
    figure.axes[0].legend()
    _PLOT.save(figure)


def main() -> None:
    if _OUT.value is None:
        raise DSV41Error("--out=FILE.json is required")
    check_target(_OUT.value)
    _PLOT.check(_OUT.value)
    config = _MODEL.config()
    sampling = _SAMPLING.read()
    if _PREFILL_CHUNK.value < 1:
        raise DSV41Error(f"prefill_chunk: expected 1 or more, got {_PREFILL_CHUNK.value}")
    prompts = _PROMPTS.read(_MODEL, config)
    check_calibration(config, prompts, max_new_tokens=_MAX_NEW_TOKENS.value, batch=_BATCH.value)
    model, load_s = _MODEL.load(drafter=True)
    started = time.perf_counter()
    with progress_bar(FLAGS.verbose) as bar:
        task = bar.add_task("recording", total=None)
        records = record_rounds(
            model,
            prompts,
            max_new_tokens=_MAX_NEW_TOKENS.value,
            batch=_BATCH.value,
            sampling=sampling,
            rule=_ACCEPTANCE.value,
            prefill_chunk=_PREFILL_CHUNK.value,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    record_s = time.perf_counter() - started
    logits, accepted = full_rounds(records)
    temperatures = fit_temperatures(logits, accepted)
    save_temperatures(temperatures, _OUT.value)
    if temperatures.samples < _FEW_ROUNDS:
        print(f"warning: only {temperatures.samples} rounds; {_FEW_ROUNDS:,} or more make temperatures that can be "
              f"relied on", file=sys.stderr)  # fmt: skip
    report = {
        "out": _OUT.value,
        "prompts": len(prompts),
        "rounds": sum(r.rounds for r in records),
        "samples": temperatures.samples,
        "temperatures": list(temperatures.values),
        "ece_before": list(temperatures.ece_before),
        "ece_after": list(temperatures.ece_after),
        "acceptance_length": 1 + float(accepted.mean()),
        "timings": {"load_s": load_s, "record_s": record_s},
    }
    if _JSON.value:
        print(json.dumps(report))
    else:
        _print(report)
    if _PLOT.given:
        _draw(logits, accepted, temperatures)


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
