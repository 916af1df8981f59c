"""Trains a model on text, from random weights or from a checkpoint, and goes on where an earlier run was left.

    python -m launch.train --config=configs/nano.json --tokenizer=configs/nano_tokenizer.json --out=RUN
    python -m launch.train --checkpoint=DIR --text='my/**/*.py' --out=RUN

--out becomes the directory of the run: config.json, tokenizer.json, run.json (what it is), curves.csv and held_out.csv
(loss, learning rate, balance, recall of the indexers), curves.png where matplotlib is installed, and checkpoints/ with
weights, optimiser, routing biases, position in the data and random key. The same command continues a run that was
stopped or killed, bit for bit as if it had not been; a run with other flags is refused. Loss or gradients that are no
numbers stop it, and the batch is saved. launch.export_checkpoint writes the released layout.

Without --corpus and --text it trains on the sources of the Python standard library.
"""

import dataclasses
import functools
import importlib.util
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from absl import flags
from tokenizers import Tokenizer

import dsv41
from dsv41.checkpoint.token_map import check_token_map, engram_token_map, load_tokenizer
from dsv41.config import DSV41Error, ModelConfig, config_to_dict
from dsv41.config.atomic_file import write_file
from dsv41.models import Params
from dsv41.train import make_optimizer
from dsv41.train.attention import AttentionOptions
from dsv41.train.data import BatchOptions, TrainingBatches
from dsv41.train.forward import ForwardOptions, train_forward
from dsv41.train.initial import initial_masters
from dsv41.train.loop import Progress, RunParts, held_out_means, resume, run_steps
from dsv41.train.master_weights import FULL_QAT, NO_QAT, QAT, masters_from
from dsv41.train.optimizer import OptimizerConfig
from dsv41.train.pack import rope_tables
from dsv41.train.step import StepOptions, check_rows, init_state, make_train_step
from dsv41.train.texts import TextOptions, held_out_rows, training_rows
from dsv41.train.tokenizer import tokenizer_hash, tokenizer_json
from launch.cli import new_flags, run
from launch.load_model import ModelFlags, progress_bar
from launch.plots import plot_curves
from launch.training_flags import RunFlags, TextFlags, write_record

_QATS = {"full": FULL_QAT, "weights": QAT(main=False), "none": NO_QAT}

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS, config=True)
_TEXT = TextFlags(FLAGS, length=4096, rows=8)
_RUN = RunFlags(FLAGS, peak=4e-3, tokens=100_000_000, decay_from=0.3)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "The tokenizer.json of --config; a checkpoint has its own.", flag_values=FLAGS
)
_MICRO_BATCHES = flags.DEFINE_integer(
    "micro_batches", 1, "Parts of a batch that are worked on one after the other, to save memory.", flag_values=FLAGS
)
_QAT = flags.DEFINE_enum(
    "qat",
    "full",
    list(_QATS),
    "full: weights, window KV, compressed KV and index vectors are rounded as when served; weights: not the last two; "
    "none: nothing is.",
    flag_values=FLAGS,
)
_EXPLORED = flags.DEFINE_integer(
    "explored", 16, "Entries drawn at random that each query attends to besides those selected.", flag_values=FLAGS
)
_NEEDLES = flags.DEFINE_float(
    "needles", 0.0, "Share of tokens in documents that ask at their end for facts stated before.", flag_values=FLAGS
)
_REPEAT = flags.DEFINE_integer(
    "repeat", 1, "How often an epoch has each document that is not of a package.", flag_values=FLAGS
)
_OPTIMIZER = flags.DEFINE_string(
    "optimizer", None, 'JSON object of fields of OptimizerConfig, such as {"clip_norm": null}.', flag_values=FLAGS
)


def main() -> None:
    folder = _RUN.folder()
    config, schedule, options = _MODEL.config(), _RUN.schedule(), StepOptions(micro_batches=_MICRO_BATCHES.value)
    if config.vision_config is not None:
        config = dataclasses.replace(config, vision_config=None)  # the tower is trained by itself
    tokenizer = _tokenizer()
    token_map = _token_map(config, tokenizer)
    check_rows(FLAGS.rows, options)
    optimizer_config = _optimizer_config()
    _MODEL.start_device()
    corpus = _TEXT.corpus()
    print(f"{len(corpus.documents):,} documents of {corpus.source}", file=sys.stderr)
    text = TextOptions(
        length=FLAGS.length, seed=FLAGS.seed, repeat=_REPEAT.value, needles=_NEEDLES.value, tokens=schedule.total
    )
    source = training_rows(corpus, tokenizer, config, text)
    batches = TrainingBatches(source, BatchOptions(rows=FLAGS.rows), token_map=token_map)
    masters = _masters(config)
    optimizer = make_optimizer(config, masters, optimizer_config)
    forward = ForwardOptions(attention=AttentionOptions(qat=_QATS[_QAT.value], explored=_EXPLORED.value))
    rope = jax.tree.map(jax.numpy.asarray, rope_tables(config, FLAGS.length))
    step = jax.jit(make_train_step(config, optimizer, forward, options), donate_argnums=0)
    identity = _identity(config, tokenizer, source.fingerprint, optimizer_config, schedule)
    parts = RunParts(
        step=lambda state, pack, rate: step(state, pack, rope, rate),
        place=jax.device_put,
        evaluate=_evaluation(config, corpus, tokenizer, token_map, rope),
        schedule=schedule,
        batches=batches,
        checkpoints=_RUN.checkpoints(),
        **dict(zip(("curves", "held_out"), _RUN.curves(), strict=True)),
        identity=identity,
    )
    state = jax.jit(lambda masters: init_state(masters, optimizer, FLAGS.seed), donate_argnums=0)(masters)
    state, begin = resume(parts, state)
    write_file(folder / "config.json", f"{json.dumps(config_to_dict(config), indent=1)}\n".encode())
    write_file(folder / "tokenizer.json", tokenizer_json(tokenizer))
    epoch_tokens = len(source.epoch(0)) * FLAGS.length
    write_record(folder, config, identity, {"corpus": corpus.describe(), "epoch_tokens": epoch_tokens})
    _train(folder, parts, state, begin)


def _train(folder: pathlib.Path, parts: RunParts, state: Any, begin: Progress) -> None:
    """Runs, shows how it goes, and draws the curves."""
    steps = parts.schedule.steps
    if begin.step:
        print(f"{folder}: goes on behind step {begin.step:,}", file=sys.stderr)
    with progress_bar(FLAGS.verbose) as bar:
        task = bar.add_task("training", total=steps, completed=begin.step)

        def report(at: Progress, numbers: dict[str, float]) -> None:
            bar.update(task, completed=at.step)
            shown = " ".join(f"{name}={value:.4g}" for name, value in numbers.items())
            bar.console.print(f"step {at.step} tokens {at.tokens:,} {shown}", highlight=False, soft_wrap=True)

        state, at = run_steps(parts, state, begin, _RUN.loop(), report=report)
    parts.checkpoints.close()
    for curves in (parts.curves, parts.held_out):
        curves.close()
    if at.step and importlib.util.find_spec("matplotlib") is not None:
        plot_curves(parts.curves.path, folder / "curves.png")
    end = "complete" if at.step >= steps else "stopped; the same command goes on"
    print(f"{folder}: step {at.step:,} of {steps:,}, {at.tokens:,} tokens, {end}")


def _tokenizer() -> Tokenizer:
    if FLAGS.config is None:
        if _TOKENIZER.value is not None:
            raise DSV41Error("--tokenizer goes with --config: a checkpoint has its own")
        return _MODEL.tokenizer()
    if _TOKENIZER.value is None:
        raise DSV41Error("--config needs --tokenizer: a tokenizer.json, which launch.make_tokenizer makes")
    return load_tokenizer(_TOKENIZER.value)


def _token_map(config: ModelConfig, tokenizer: Tokenizer) -> np.ndarray | None:
    """Engram classes of the tokens; None: the model has no Engram."""
    text = config.text_config
    token_map = engram_token_map(tokenizer, text.vocab_size)
    if not text.engram_layer_ids:
        return None
    check_token_map(token_map, text, _TOKENIZER.value or _MODEL.checkpoint)
    return token_map


def _masters(config: ModelConfig) -> Params:
    """To begin with."""
    if FLAGS.config is not None:
        return jax.jit(functools.partial(initial_masters, config, FLAGS.seed))()
    model = dsv41.load(_MODEL.checkpoint, vision=False, drafter=False)
    return masters_from(model.params, config, model.engram.tables if model.engram is not None else ())


def _optimizer_config() -> OptimizerConfig:
    if _OPTIMIZER.value is None:
        return OptimizerConfig()
    try:
        return OptimizerConfig(**json.loads(_OPTIMIZER.value))
    except (ValueError, TypeError) as e:
        raise DSV41Error(f"--optimizer: expected a JSON object of fields of OptimizerConfig ({e})") from e


def _identity(config, tokenizer, rows: str, optimizer: OptimizerConfig, schedule) -> dict[str, Any]:
    """What must be the same for a run to be continued."""
    values = {name: FLAGS[name].value for name in ("checkpoint", "length", "rows", "seed", "micro_batches")}
    values |= {name: FLAGS[name].value for name in ("qat", "explored", "needles", "repeat")}
    values |= {"schedule": dataclasses.asdict(schedule), "optimizer": dataclasses.asdict(optimizer)}
    values |= {"config": config_to_dict(config), "tokenizer": tokenizer_hash(tokenizer), "text": rows}
    return json.loads(json.dumps(values))


def _evaluation(config: ModelConfig, corpus, tokenizer: Tokenizer, token_map, rope):
    """State -> loss and recall on held-out rows."""
    rows = FLAGS.evaluate_rows
    if not rows or not corpus.held_out:
        return None
    source = held_out_rows(corpus, tokenizer, config, FLAGS.length)
    count, batch = min(rows, len(source.epoch(0))), min(rows, FLAGS.rows, len(source.epoch(0)))
    options = ForwardOptions(attention=AttentionOptions(qat=_QATS[_QAT.value], recall=True), rematerialize=False)

    @jax.jit
    def evaluate(masters, pack):
        _, aux = train_forward(masters, pack, rope, jax.random.key(0), config=config, options=options)
        numbers = {name: aux[name] for name in ("lm_loss", "indexer_loss", "tokens")}
        recall = aux.get("recall", ())
        return numbers | {f"recall_{n}": value for n, value in enumerate(recall)}

    def of_state(state):
        batches = TrainingBatches(source, BatchOptions(rows=batch), token_map=token_map)
        packs = (jax.device_put(next(batches)) for _ in range(count // batch))
        return held_out_means(evaluate, state.masters, packs)

    return of_state


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
