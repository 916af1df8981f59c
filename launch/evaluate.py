"""Measures a model: perplexity on held-out files, recall at a distance, and what speculative decoding saves.

    python -m launch.evaluate --checkpoint=DIR --out=OUT
    python -m launch.evaluate --checkpoint=DIR --out=OUT --parts=needle --documents=16 --plot=OUT/needle.png
    python -m launch.evaluate --checkpoint=DIR --out=OUT --run=RUN --run=DRAFTER_RUN --files=0 --json

OUT, which is made if it is missing, gets results.json, written anew after every part, and model_card.md. The card tells
of each --run how the model was trained: its run.json, the command in it first, and the last rows of its curves.

Parts:
  perplexity   Each held-out file by itself: nats a token, perplexity, bits a byte. A file longer than --context is cut.
  needle       Documents of --lengths tokens of held-out code with facts at five depths that are asked for at the end.
               An answer is right if decoding at temperature 0 would give all of it.
  acceptance   Of a model with a drafter: continues --prompts places of held-out files with drafts, at temperatures 0
               and 1, and at 0 without drafts too: accepted drafts a round, backbone passes saved, and whether the same
               tokens came out.

The files are those that training leaves out: of the running interpreter's standard library, or of --corpus.

With --json, stdout is exactly one JSON object, that of results.json: command, model, corpus, machine, seconds, and of
each part that was run perplexity, needle and acceptance (one object a temperature).
"""

import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from dsv41.checkpoint import parameter_counts
from dsv41.config import DSV41Error, ModelConfig
from dsv41.config.atomic_file import write_file, write_json
from dsv41.engine import Speculation, check_prompts
from dsv41.evals import CHUNK
from dsv41.evals.acceptance import code_prompts, measure_acceptance
from dsv41.evals.model_card import model_card
from dsv41.evals.needle import LENGTHS, needle_accuracy
from dsv41.evals.padded_rows import BATCH, Progress
from dsv41.evals.perplexity import all_files, file_losses
from dsv41.models import Model
from dsv41.train.corpus import Corpus, standard_library
from dsv41.train.corpus_file import read_corpus
from dsv41.train.curves import FILE as CURVES
from dsv41.train.curves import read_curves
from launch.cli import make_directory, new_flags, run
from launch.load_model import ModelFlags, progress_bar
from launch.plots import PlotFlag
from launch.training_flags import HELD_OUT_CURVES

PARTS = ("perplexity", "needle", "acceptance")
TEMPERATURES = (0.0, 1.0)
RESULTS, CARD, RECORD = "results.json", "model_card.md", "run.json"

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS)
_OUT = flags.DEFINE_string("out", None, "Directory for results.json and model_card.md.", flag_values=FLAGS)
_PARTS = flags.DEFINE_list(
    "parts", None, f"What to measure, of {', '.join(PARTS)}; by default all that the model has.", flag_values=FLAGS
)
_CORPUS = flags.DEFINE_string(
    "corpus",
    None,
    "File of launch.make_corpus, or folder of a Python library, instead of the running interpreter's.",
    flag_values=FLAGS,
)
_RUN = flags.DEFINE_multi_string(
    "run", [], "Directory of launch.train or launch.train_dspark that the model comes from.", flag_values=FLAGS
)
_NAME = flags.DEFINE_string("name", None, "Of the model; by default its directory's.", flag_values=FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Of needle documents, prompts and draws.", flag_values=FLAGS)
_FILES = flags.DEFINE_integer(
    "files", 12, "perplexity: held-out files, spread over all of them; 0: every one.", flag_values=FLAGS
)
_CONTEXT = flags.DEFINE_integer(
    "context", None, "perplexity: tokens of a part of a file; by default the longest.", flag_values=FLAGS
)
_BATCH = flags.DEFINE_integer("batch", BATCH, "perplexity, needle: rows that run together.", flag_values=FLAGS)
_CHUNK = flags.DEFINE_integer("chunk", CHUNK, "perplexity, needle: tokens a row in one step.", flag_values=FLAGS)
_LENGTHS = flags.DEFINE_list(
    "lengths",
    None,
    f"needle: tokens of documents; by default those of {','.join(map(str, LENGTHS))} that fit.",
    flag_values=FLAGS,
)
_DOCUMENTS = flags.DEFINE_integer(
    "documents", 4, "needle: documents of each length; each asks for five facts.", flag_values=FLAGS
)
_PROMPTS = flags.DEFINE_integer("prompts", 16, "acceptance: prompts, which run together.", flag_values=FLAGS)
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 256, "acceptance: tokens of a prompt.", flag_values=FLAGS)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 128, "acceptance: tokens to generate at most for each prompt.", flag_values=FLAGS
)
_PLOT = PlotFlag(FLAGS, "recall and acceptance")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.", flag_values=FLAGS)


def _perplexity(model: Model, corpus: Corpus, progress: Progress) -> dict[str, Any]:
    files, context = corpus.held_out, _CONTEXT.value or model.config.text_config.max_position_embeddings
    if 0 < _FILES.value < len(files):
        files = [files[i * len(files) // _FILES.value] for i in range(_FILES.value)]
    options = {"context": context, "batch": _BATCH.value, "chunk": _CHUNK.value, "progress": progress}
    losses = file_losses(model, files, **options)
    return {
        "context": context,
        "held_out": len(corpus.held_out),
        "all": all_files(losses).describe(),
        "files": [f.describe() for f in losses],
    }


def _needle(model: Model, corpus: Corpus, progress: Progress) -> dict[str, Any]:
    found = needle_accuracy(
        model,
        [d.text for d in corpus.held_out],
        lengths=_lengths(model.config),
        documents=_DOCUMENTS.value,
        seed=_SEED.value,
        batch=_BATCH.value,
        chunk=_CHUNK.value,
        progress=progress,
    )
    text = model.config.text_config
    return found.describe() | {"window": text.sliding_window, "reach": text.num_hidden_layers * text.sliding_window}


def _acceptance(model: Model, corpus: Corpus, progress: Progress) -> list[dict[str, Any]]:
    if model.tokenizer is None:
        raise DSV41Error("acceptance: the checkpoint has no tokenizer.json, which turns files into prompts")
    shape = {"prompt_tokens": _PROMPT_TOKENS.value, "max_new_tokens": _MAX_NEW_TOKENS.value}
    prompts = code_prompts(
        corpus.held_out, model.tokenizer, model.config,
        count=_PROMPTS.value, tokens=_PROMPT_TOKENS.value, seed=_SEED.value,
    )  # fmt: skip
    found = []
    for temperature in TEMPERATURES:
        measured = measure_acceptance(
            model,
            prompts,
            temperature=temperature,
            max_new_tokens=_MAX_NEW_TOKENS.value,
            batch=len(prompts),
            seed=_SEED.value,
            compare=temperature == 0,
            progress=progress,
        )
        found.append(measured.describe() | shape)
    return found


_MEASURES: Mapping[str, Callable[[Model, Corpus, Progress], Any]] = dict(
    zip(PARTS, (_perplexity, _needle, _acceptance), strict=True)
)


def _parts(config: ModelConfig) -> list[str]:
    """In the order in which they are measured."""
    if _PARTS.value is None:
        return list(PARTS if config.text_config.num_nextn_predict_layers else PARTS[:-1])
    if unknown := [part for part in _PARTS.value if part not in PARTS]:
        raise DSV41Error(f"--parts: expected some of {','.join(PARTS)}, got {unknown[0]!r}")
    if not _PARTS.value:
        raise DSV41Error(f"--parts: expected some of {','.join(PARTS)}")
    return [part for part in PARTS if part in _PARTS.value]


def _lengths(config: ModelConfig) -> list[int]:
    most = config.text_config.max_position_embeddings - 1
    if _LENGTHS.value is None:
        return [length for length in LENGTHS if length <= most]
    given = ",".join(_LENGTHS.value)
    try:
        lengths = [int(length) for length in _LENGTHS.value]
    except ValueError as e:
        raise DSV41Error(f"--lengths: expected numbers of tokens as 256,1024, got {given}") from e
    if not lengths or not all(0 < length <= most for length in lengths):
        raise DSV41Error(f"--lengths: expected 1 to {most} tokens each, got {given!r}")
    return lengths


def _check(config: ModelConfig, parts: Sequence[str]) -> None:
    """Finds out before a long load what cannot be.

    Raises:
      DSV41Error: a flag is missing or out of range; names it.
    """
    if _OUT.value is None:
        raise DSV41Error("--out=DIR is required")
    for flag, least in ((_FILES, 0), (_BATCH, 1), (_CHUNK, 1), (_DOCUMENTS, 1), (_PROMPTS, 1), (_PROMPT_TOKENS, 2)):
        if flag.value < least:
            raise DSV41Error(f"--{flag.name}: expected {least} or more, got {flag.value}")
    if not 0 <= _SEED.value < 1 << 31:
        raise DSV41Error(f"--seed: expected a number from 0 to 2^31 - 1, got {_SEED.value}")
    most = config.text_config.max_position_embeddings
    if _CONTEXT.value is not None and not 2 <= _CONTEXT.value <= most:
        raise DSV41Error(f"--context: expected 2 to {most} tokens, got {_CONTEXT.value}")
    if "needle" in parts:
        _lengths(config)
    if "acceptance" in parts:
        if not Speculation().drafts(config):
            raise DSV41Error("acceptance: the model drafts nothing (dspark_block_size is 0)")
        check_prompts(config, [np.zeros(_PROMPT_TOKENS.value, np.int64)], _MAX_NEW_TOKENS.value)


def _record(folder: pathlib.Path) -> dict[str, Any]:
    """What a run was, as JSON values.

    Raises:
      DSV41Error: the directory holds no run, or a file of it cannot be read; names the file.
    """
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise DSV41Error(f"--run: {path}: not a readable JSON file ({e})") from e
    if not isinstance(record, dict):
        raise DSV41Error(f"--run: {path}: expected a JSON object, got {type(record).__name__}")
    if isinstance(record.get("identity"), dict):
        record["identity"].pop("config", None)  # as long as everything else, and beside the weights anyway
    for what, name in (("last step", CURVES), ("held out", HELD_OUT_CURVES)):
        if (folder / name).exists():
            record[what] = {key: values[-1].item() for key, values in read_curves(folder / name).items()}
    return record


def _corpus() -> Corpus:
    path = None if _CORPUS.value is None else pathlib.Path(_CORPUS.value)
    corpus = standard_library(path) if path is None or path.is_dir() else read_corpus(path)
    if not corpus.held_out:
        raise DSV41Error(f"--corpus: {_CORPUS.value}: no file of it is held out")
    return corpus


def _described(config: ModelConfig, corpus: Corpus) -> dict[str, Any]:
    """What the results are of."""
    given = [FLAGS[name].serialize().split("\n") for name in FLAGS if FLAGS[name].present]
    directory = _MODEL.checkpoint
    return {
        "command": " ".join(["python -m launch.evaluate", *(text for flag in given for text in flag)]),
        "model": {
            "name": _NAME.value or directory.resolve().name,
            "parameters": parameter_counts(config).total,
            "bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
            "context": config.text_config.max_position_embeddings,
        },
        "corpus": corpus.describe(),
        "machine": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
        },
        "seconds": {},
    }


def _draw(results: Mapping[str, Any]) -> None:
    """A panel for recall by length, a line a depth, and one for acceptance by draft, a line a temperature."""
    panels = [name for name in ("needle", "acceptance") if name in results]
    figure = _PLOT.figure(figsize=(5 * len(panels), 3.6))
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        found = results[name]
        if name == "needle":
            lines = [(f"depth {d:g}", v) for d, v in zip(found["depths"], np.transpose(found["accuracy"]), strict=True)]
            _lines(axes, found["lengths"], [*lines, ("all", found["by_length"])], "tokens", "answers that are right")
            axes.set_xscale("log", base=2)
            axes.set_xticks(found["lengths"], map(str, found["lengths"]))
        else:
            lines = [(f"temperature {f['temperature']:g}", np.array(f["by_position"], float)) for f in found]
            numbers = range(1, len(lines[0][1]) + 1)
            _lines(axes, numbers, lines, "draft of a block", "rounds that accept it")
            axes.set_xticks(list(numbers))
    _PLOT.save(figure)


def _lines(axes: Any, x: Sequence[float], lines: Sequence[tuple[str, Any]], below: str, beside: str) -> None:
    for label, values in lines:
        axes.plot(x, values, marker="o", label=label, color="black" if label == "all" else None)
    axes.set(xlabel=below, ylabel=beside, ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _print(results: Mapping[str, Any]) -> None:
    if found := results.get("perplexity"):
        every = found["all"]
        print(f"perplexity {every['perplexity']:.3f} ({every['loss']:.4f} nats a token, {every['bits_per_byte']:.4f} "
              f"bits a byte) on {every['tokens']:,} tokens of {len(found['files'])} held-out files")  # fmt: skip
    if found := results.get("needle"):
        shares = (f"{n:,}: {share:.0%}" for n, share in zip(found["lengths"], found["by_length"], strict=True))
        print(f"needle accuracy by tokens: {', '.join(shares)}")
    for found in results.get("acceptance", ()):
        same = found["identical_to_plain"]
        equal = "" if same is None else f"; {same} of {found['prompts']} texts as without drafts"
        print(f"acceptance length {found['acceptance_length']:.3f} at temperature {found['temperature']:g}: "
              f"{found['plain_passes']:,} passes became {found['rounds']:,} rounds, {found['fewer_passes']:.2f}x "
              f"fewer{equal}")  # fmt: skip


def main() -> None:
    config = _MODEL.config()
    parts = _parts(config)
    _check(config, parts)
    records, corpus = [_record(pathlib.Path(folder)) for folder in _RUN.value], _corpus()
    if _PLOT.given and not {"needle", "acceptance"} & set(parts):
        raise DSV41Error("--plot: shows the parts needle and acceptance, and neither is measured")
    out = make_directory("out", _OUT.value)
    _PLOT.check()
    model, load_s = _MODEL.load(drafter="acceptance" in parts)
    results = _described(config, corpus)
    results["seconds"]["load"] = load_s
    for part in parts:
        started = time.perf_counter()
        with progress_bar(FLAGS.verbose) as bar:
            task = bar.add_task(part, total=None)
            results[part] = _MEASURES[part](
                model, corpus, lambda done, total, task=task, bar=bar: bar.update(task, completed=done, total=total)
            )
        results["seconds"][part] = time.perf_counter() - started
        write_json(out / RESULTS, results)
    if _PLOT.given:
        _draw(results)
        results["picture"] = os.path.relpath(FLAGS.plot, out)
    write_file(out / CARD, model_card(results, records).encode())
    if _JSON.value:
        print(json.dumps(results))
    else:
        _print(results)
        print(f"{out / RESULTS}, {out / CARD}", file=sys.stderr)


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
