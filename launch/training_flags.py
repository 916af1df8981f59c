"""Flags that scripts which train share: the text, the run's directory, when it saves and stops."""

import pathlib
import platform
import sys
import time
from typing import Any

import jax
from absl import flags
from tokenizers import Tokenizer

from dsv41.config import DSV41Error, ModelConfig, config_to_dict
from dsv41.config.atomic_file import write_file, write_json
from dsv41.sharding.processes import is_first_process
from dsv41.train.checkpoints import CHECKPOINTS, Checkpoints
from dsv41.train.corpus import Corpus, standard_library
from dsv41.train.corpus_file import read_corpus, text_corpus
from dsv41.train.curves import Curves
from dsv41.train.guards import GuardLimits
from dsv41.train.loop import LoopOptions
from dsv41.train.master_weights import FULL_QAT, NO_QAT, QAT
from dsv41.train.package_corpus import with_packages
from dsv41.train.schedule import TrainingSchedule
from dsv41.train.tokenizer import tokenizer_json
from launch.cli import make_directory

HELD_OUT_CURVES = "held_out.csv"
# What is rounded as when served, by the values of --qat.
QATS = {"full": FULL_QAT, "weights": QAT(main=False), "none": NO_QAT}


class SourceFlags:
    """--text and --packages: what a corpus is made of."""

    def __init__(self, values: flags.FlagValues):
        """Defines the flags in `values`."""
        self._values = values
        flags.DEFINE_multi_string(
            "text",
            [],
            "Your own files instead of the standard library, as a glob; .jsonl files have an object with a string "
            "'text' in each line, others are one text each. May be given several times.",
            flag_values=values,
        )
        flags.DEFINE_bool(
            "packages",
            False,
            "Add the sources of the installed packages that dsv41 needs, for training.",
            flag_values=values,
        )

    @property
    def given(self) -> bool:
        return bool(self._values.text or self._values.packages)

    def corpus(self) -> Corpus:
        """The text.

        Raises:
          DSV41Error: it cannot be had.
        """
        corpus = text_corpus(self._values.text) if self._values.text else standard_library()
        return with_packages(corpus) if self._values.packages else corpus


class CorpusFlags:
    """--corpus, or --text and --packages."""

    NAMES = ("corpus", "text", "packages")

    def __init__(self, values: flags.FlagValues):
        """Defines the flags in `values`."""
        self._values = values
        flags.DEFINE_string(
            "corpus",
            None,
            "File of launch.make_corpus. Without it and --text: the standard library of the running interpreter.",
            flag_values=values,
        )
        self._sources = SourceFlags(values)

    def corpus(self) -> Corpus:
        """The text.

        Raises:
          DSV41Error: flags contradict each other, or the text cannot be had.
        """
        if self._values.corpus is None:
            return self._sources.corpus()
        if self._sources.given:
            raise DSV41Error("--corpus says everything about the text: give it without --text and --packages")
        return read_corpus(self._values.corpus)


class TextFlags(CorpusFlags):
    """Those of `CorpusFlags`, and --length, --rows and --seed."""

    def __init__(self, values: flags.FlagValues, *, length: int, rows: int):
        """Defines the flags in `values`, with these defaults."""
        super().__init__(values)
        flags.DEFINE_integer("length", length, "Tokens of a row.", lower_bound=1, flag_values=values)
        flags.DEFINE_integer("rows", rows, "Rows of a batch.", lower_bound=1, flag_values=values)
        flags.DEFINE_integer("seed", 0, "Of initial weights, order and everything random.", flag_values=values)


class RunFlags:
    """--out, the schedule of learning rates, and when a run saves, evaluates and stops."""

    def __init__(self, values: flags.FlagValues, *, peak: float, tokens: int, decay_from: float):
        """Defines the flags in `values`, with these defaults."""
        self._values = values
        flags.DEFINE_string(
            "out", None, "Directory of the run. If it holds a run already, that is continued.", flag_values=values
        )
        self._define_schedule(peak, tokens, decay_from)
        for name, default, text in (
            ("save_every", 500, "Steps between checkpoints; 0: only at the end."),
            ("evaluate_every", 0, "Steps between evaluations on held-out text; 0: only at the end."),
            ("evaluate_rows", 32, "Held-out rows of an evaluation; 0: no evaluation."),
        ):
            flags.DEFINE_integer(name, default, text, lower_bound=0, flag_values=values)
        for name, default, text in (
            ("keep", 2, "Checkpoints that are kept."),
            ("log_every", 10, "Steps between rows of curves.csv."),
        ):
            flags.DEFINE_integer(name, default, text, lower_bound=1, flag_values=values)
        flags.DEFINE_integer("steps", None, "Stop after so many steps; the same command goes on.", flag_values=values)
        flags.DEFINE_float("minutes", None, "Stop after so many minutes; the same command goes on.", flag_values=values)
        flags.DEFINE_float(
            "spike",
            None,
            "Stop if the gradient norm is so many times its median, several steps on end.",
            flag_values=values,
        )
        flags.DEFINE_bool("tensorboard", False, "Also write events for TensorBoard.", flag_values=values)

    def _define_schedule(self, peak: float, tokens: int, decay_from: float) -> None:
        values = self._values
        flags.DEFINE_float("peak", peak, "Learning rate behind the warm-up.", flag_values=values)
        flags.DEFINE_float("floor", 0.0, "Learning rate at the end.", flag_values=values)
        flags.DEFINE_integer("warmup_steps", 100, "Steps of a linear rise.", lower_bound=0, flag_values=values)
        flags.DEFINE_float(
            "decay_from", decay_from, "Share of the tokens after which the rate falls along a cosine.",
            lower_bound=0, upper_bound=1, flag_values=values,
        )  # fmt: skip
        flags.DEFINE_integer("tokens", tokens, "Tokens of the whole run.", lower_bound=1, flag_values=values)

    def folder(self) -> pathlib.Path:
        """The run's directory, made if it is missing."""
        if self._values.out is None:
            raise DSV41Error("--out is required: the directory of the run")
        return make_directory("out", self._values.out)

    def schedule(self) -> TrainingSchedule:
        """The learning rates and the length of the run."""
        values = self._values
        batch = values.rows * values.length
        warmup = values.warmup_steps * batch
        total = max(-(-values.tokens // batch) * batch, warmup)
        return TrainingSchedule(
            batch_tokens=batch, peak=values.peak, floor=values.floor, warmup_steps=values.warmup_steps,
            decay_from=max(round(values.decay_from * total), warmup), decay_to=total, total=total, vision_from=total,
            sequence=values.length, long_sequence=values.length,
        )  # fmt: skip

    def loop(self) -> LoopOptions:
        values = self._values
        return LoopOptions(
            save_every=values.save_every, evaluate_every=values.evaluate_every, log_every=values.log_every,
            seconds=None if values.minutes is None else 60 * values.minutes, steps=values.steps,
            guards=GuardLimits(spike=values.spike),
        )  # fmt: skip

    def outputs(self) -> dict[str, Any]:
        """What a run writes into, as fields of `RunParts`; curves are None where another process writes them."""
        folder, events = self.folder(), self._values.tensorboard
        curves = held_out = None
        if is_first_process():
            curves, held_out = Curves(folder, events), Curves(folder, events, file=HELD_OUT_CURVES)
        checkpoints = Checkpoints(folder / CHECKPOINTS, self._values.keep)
        return {"checkpoints": checkpoints, "curves": curves, "held_out": held_out}


def write_run(
    folder: pathlib.Path, config: ModelConfig, tokenizer: Tokenizer, identity: dict[str, Any], more: dict[str, Any]
) -> None:
    """`config.json`, `tokenizer.json`, and `run.json`: what the run is, and what it ran on."""
    write_json(folder / "config.json", config_to_dict(config))
    write_file(folder / "tokenizer.json", tokenizer_json(tokenizer))
    record = {
        "command": ["python", "-m", f"launch.{pathlib.Path(sys.argv[0]).stem}", *sys.argv[1:]],
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "vocab_size": config.text_config.vocab_size,
        **more,
        "identity": identity,
    }
    write_json(folder / "run.json", record)
