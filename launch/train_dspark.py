"""Trains the drafter of a model, behind its frozen backbone or alongside it, and goes on where an earlier run was left.

    python -m launch.train_dspark --checkpoint=DIR --out=RUN
    python -m launch.train_dspark --checkpoint=TRAINING_RUN --corpus=FILE --minutes=5 --out=RUN
    python -m launch.train_dspark --checkpoint=DIR --from=released --peak=4e-4 --text='my/**/*.py' --out=RUN
    python -m launch.export_checkpoint --checkpoint=DIR --drafter_run=RUN --out=NEW_DIR

--checkpoint is a directory in the released layout, or one of launch.train, whose last checkpoint is taken. What the
drafter reads of the backbone is computed in every step; nothing is learnt through it. From every row --anchors blocks
are drawn, and the drafter learns to propose what the backbone would say next at each of their positions.

--from says where the drafter begins: scratch, or released, as the checkpoint has it; its routing biases then stay as
they are. A checkpoint that was exported without a drafter needs --stages. With --alongside the backbone is trained in
the same pass, as launch.train does it; the drafter's loss does not reach it.

--out becomes the directory of the run: config.json, tokenizer.json, run.json (what it is), curves.csv, held_out.csv,
curves.png where matplotlib is installed, and checkpoints/. The same command continues a run that was stopped or killed;
a run with other flags is refused. Its columns:

  loss, ce, l1, confidence_loss     weighted means over drafts; l1 is twice the probability of a rejection
  accept_k, agree_k                 draft k is accepted at temperature 1; it is the target's best token
  expected_tokens, agreed_tokens    tokens a round, with the target's own, by these
  confidence_error, _bias, _cumulative_bias   of what the drafter says of its acceptance

All of them are measured with the true tokens before each draft; launch.evaluate measures generation. Then
confidence_temperatures.json is fitted on held-out text, with acceptance drawn by its probability, for schedules of
launch.generate; launch.calibrate_confidence fits them on generated text, which is better where there is time.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from tokenizers import Tokenizer

import dsv41
from dsv41.checkpoint.load import read_tokenizer
from dsv41.config import DSV41Error, ModelConfig, config_to_dict
from dsv41.engine.confidence_calibration import fit_temperatures, save_temperatures
from dsv41.models import Params
from dsv41.train import make_optimizer, training_params_abstract
from dsv41.train.attention import AttentionOptions
from dsv41.train.checkpoints import CHECKPOINTS
from dsv41.train.data import BatchOptions, TrainingBatches
from dsv41.train.drafter_forward import DrafterOptions
from dsv41.train.drafter_loss import drafter_metrics
from dsv41.train.drafter_optimizer import DrafterRule, make_drafter_optimizer
from dsv41.train.drafter_step import (
    Outcome,
    make_alongside_step,
    make_drafter_evaluation,
    make_drafter_step,
    split_masters,
)
from dsv41.train.forward import ForwardOptions
from dsv41.train.initial import initial_drafter_masters
from dsv41.train.loop import RunParts, resume
from dsv41.train.master_weights import masters_from
from dsv41.train.pack import PackedBatch, rope_tables
from dsv41.train.saved_masters import saved_masters
from dsv41.train.step import TrainState, init_state
from dsv41.train.texts import TextOptions, held_out_rows, training_rows
from dsv41.train.tokenizer import tokenizer_hash
from launch.cli import new_flags, overrides, run
from launch.load_model import ModelFlags
from launch.training_flags import QATS, RunFlags, TextFlags, write_run
from launch.training_progress import train_and_report

_SCRATCH, _RELEASED = "scratch", "released"
_TEMPERATURES = "confidence_temperatures.json"
_BIAS_SPEED = 1e-3

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS)
_TEXT = TextFlags(FLAGS, length=2048, rows=16)
_RUN = RunFlags(FLAGS, peak=4e-3, tokens=50_000_000, decay_from=0.0)
_STEP = flags.DEFINE_integer(
    "checkpoint_step", None, "Of a directory of launch.train: which checkpoint; by default the last.", flag_values=FLAGS
)
_FROM = flags.DEFINE_enum("from", _SCRATCH, [_SCRATCH, _RELEASED], "Where the drafter begins.", flag_values=FLAGS)
_STAGES = flags.DEFINE_integer(
    "stages", None, "Stages of a drafter from scratch; by default as many as the config says.", lower_bound=1,
    flag_values=FLAGS,
)  # fmt: skip
_ANCHORS = flags.DEFINE_integer("anchors", 256, "Blocks of a row.", lower_bound=1, flag_values=FLAGS)
_DECAY = flags.DEFINE_float(
    "decay", 4.0, "Draft k, from 0 on, weighs exp(-k / decay) in the losses.", lower_bound=1e-3, flag_values=FLAGS
)
_RULE = flags.DEFINE_enum_class(
    "optimizer",
    DrafterRule.MUON,
    DrafterRule,
    "muon: the backbone's groups; adamw: everything by AdamW, with --peak=6e-4 as in DeepSpec.",
    flag_values=FLAGS,
)
_CONFIDENCE_APART = flags.DEFINE_bool(
    "confidence_apart", False, "The loss of the confidences trains their head alone.", flag_values=FLAGS
)
_ALONGSIDE = flags.DEFINE_bool("alongside", False, "Train the backbone too.", flag_values=FLAGS)
_BACKBONE_PEAK = flags.DEFINE_float(
    "backbone_peak", 1e-3, "With --alongside: the backbone's learning rate where the drafter's is --peak.",
    flag_values=FLAGS,
)  # fmt: skip
_QAT = flags.DEFINE_enum(
    "qat", "full", list(QATS), "What is rounded as when served, as of launch.train.", flag_values=FLAGS
)


class _Trained(NamedTuple):
    """The functions of a run that know which masters are where."""

    step: Callable[..., tuple[Any, dict[str, jax.Array]]]  # (state, pack, rate)
    state: TrainState
    # state -> masters of drafter and backbone
    masters: Callable[[TrainState], tuple[Params, Params]]


def main() -> None:
    folder = _RUN.folder()
    config, schedule = _config(), _RUN.schedule()
    options = _check()
    tokenizer, token_map = _tokenizer(config)
    _MODEL.start_device()
    corpus = _TEXT.corpus()
    print(f"{len(corpus.documents):,} documents of {corpus.source}", file=sys.stderr)
    text = TextOptions(length=FLAGS.length, seed=FLAGS.seed, tokens=schedule.total)
    source = training_rows(corpus, tokenizer, config, text)
    backbone, drafter, found = _masters(config)
    rope = jax.tree.map(jnp.asarray, rope_tables(config, FLAGS.length + config.text_config.dspark_block_size))
    trained = _trained(config, backbone, drafter, rope, options)
    held_out = _HeldOut(config, corpus, tokenizer, token_map, rope, options)
    identity = _identity(config, tokenizer, source.fingerprint, schedule, found)
    parts = RunParts(
        step=trained.step,
        place=jax.device_put,
        evaluate=None if held_out.count == 0 else lambda state: held_out.numbers(*trained.masters(state)),
        schedule=schedule,
        batches=TrainingBatches(source, BatchOptions(rows=FLAGS.rows), token_map=token_map),
        identity=identity,
        **_RUN.outputs(),
    )
    state, begin = resume(parts, trained.state)
    more = {"corpus": corpus.describe(), "options": dataclasses.asdict(options)}
    write_run(folder, config, tokenizer, identity, more)
    state, at = train_and_report(folder, parts, state, begin, _RUN.loop(), verbose=FLAGS.verbose)
    if at.step and held_out.count:
        _fit_temperatures(folder, held_out.last or held_out.outcomes(*trained.masters(state)))


def _config() -> ModelConfig:
    """The checkpoint's, without its vision tower and with the stages that the flag says."""
    config = dataclasses.replace(_MODEL.config(), vision_config=None)
    text, stages = config.text_config, _STAGES.value
    if stages is not None:
        if _FROM.value == _RELEASED:
            raise DSV41Error("--stages: the checkpoint says how many stages there are with --from=released")
        ratios = (*text.compress_ratios[: text.num_hidden_layers], *[0] * stages)
        text = dataclasses.replace(text, num_nextn_predict_layers=stages, compress_ratios=ratios)
    if not text.num_nextn_predict_layers:
        raise DSV41Error(f"{_MODEL.checkpoint}: the config says that there is no drafter; give --stages")
    return dataclasses.replace(config, text_config=text)


def _check() -> DrafterOptions:
    """Finds out what the flags alone decide."""
    if _STEP.value is not None and not _is_run():
        raise DSV41Error(f"--checkpoint_step: {_MODEL.checkpoint} is no directory of launch.train")
    if not _BACKBONE_PEAK.value > 0:
        raise DSV41Error(f"--backbone_peak: expected a positive number, got {_BACKBONE_PEAK.value}")
    return DrafterOptions(
        anchors=_ANCHORS.value,
        decay=_DECAY.value,
        qat=QATS[_QAT.value],
        confidence_reaches_stages=not _CONFIDENCE_APART.value,
    )


def _is_run() -> bool:
    return (pathlib.Path(_MODEL.checkpoint) / CHECKPOINTS).is_dir()


def _tokenizer(config: ModelConfig) -> tuple[Tokenizer, np.ndarray | None]:
    tokenizer, token_map = read_tokenizer(pathlib.Path(_MODEL.checkpoint), config)
    if tokenizer is None:
        raise DSV41Error(f"{_MODEL.checkpoint}/tokenizer.json: no such tokenizer file; texts are to be tokenised")
    return tokenizer, token_map


def _masters(config: ModelConfig) -> tuple[Params, Params, dict[str, Any]]:
    """Masters of backbone and drafter to begin with, and what identifies them."""
    released, drafter, step = _FROM.value == _RELEASED, None, None
    if _is_run():
        wanted = training_params_abstract(config, drafter=released)
        masters, step = saved_masters(_MODEL.checkpoint, wanted, _STEP.value)
        backbone, drafter = split_masters(masters) if released else (masters, None)
    else:
        model = dsv41.load(_MODEL.checkpoint, overrides=overrides(FLAGS.set), vision=False, drafter=released)
        backbone = masters_from(model.params, config, () if model.engram is None else model.engram.tables)
        drafter = masters_from(model.drafter, config) if released else None
    if drafter is None:
        drafter = jax.jit(functools.partial(initial_drafter_masters, config, FLAGS.seed))()
    return backbone, drafter, {"checkpoint": str(_MODEL.checkpoint), "checkpoint_step": step}


def _trained(config: ModelConfig, backbone: Params, drafter: Params, rope: Any, options: DrafterOptions) -> _Trained:
    optimizer = make_drafter_optimizer(config, drafter, _RULE.value)
    speed = None if _FROM.value == _RELEASED else _BIAS_SPEED
    forward = ForwardOptions(attention=AttentionOptions(qat=options.qat))
    if not _ALONGSIDE.value:
        step = jax.jit(
            make_drafter_step(config, optimizer, options, backbone=forward, bias_speed=speed), donate_argnums=0
        )
        state = jax.jit(lambda masters: init_state(masters, optimizer, FLAGS.seed), donate_argnums=0)(drafter)
        return _Trained(
            lambda state, pack, rate: step(state, backbone, pack, rope, rate),
            state,
            lambda state: (state.masters, backbone),
        )
    optimizers = make_optimizer(config, backbone), optimizer
    forward = dataclasses.replace(forward, attention=dataclasses.replace(forward.attention, explored=16))
    step = jax.jit(
        make_alongside_step(config, optimizers, options, backbone=forward, bias_speed=speed), donate_argnums=0
    )
    ratio = _BACKBONE_PEAK.value / FLAGS.peak

    key = jax.random.key(FLAGS.seed)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def begin(first, second):
        return TrainState(first | second, (optimizers[0].init(first), optimizers[1].init(second)), key)

    return _Trained(
        lambda state, pack, rate: step(state, pack, rope, (ratio * rate, rate)),
        begin(backbone, drafter),
        lambda state: split_masters(state.masters)[::-1],
    )


class _HeldOut:
    """Evaluations, each of the same blocks of the same rows."""

    def __init__(self, config: ModelConfig, corpus, tokenizer: Tokenizer, token_map, rope, options: DrafterOptions):
        self.count, self._options, self._rope, self._token_map = 0, options, rope, token_map
        self.last: list[Outcome] = []  # of the latest evaluation
        if not FLAGS.evaluate_rows or not corpus.held_out:
            return
        self._source = held_out_rows(corpus, tokenizer, config, FLAGS.length)
        there = len(self._source.epoch(0))
        self._rows = min(FLAGS.evaluate_rows, FLAGS.rows, there)
        self.count = min(FLAGS.evaluate_rows, there) // self._rows
        forward = ForwardOptions(attention=AttentionOptions(qat=options.qat))
        self._evaluate = jax.jit(make_drafter_evaluation(config, options, backbone=forward))

    def _packs(self) -> Iterator[PackedBatch]:
        batches = TrainingBatches(self._source, BatchOptions(rows=self._rows), token_map=self._token_map)
        return (jax.device_put(next(batches)) for _ in range(self.count))

    def outcomes(self, drafter: Params, backbone: Params) -> list[Outcome]:
        """Of each batch, on the host."""
        self.last = [
            jax.device_get(self._evaluate(drafter, backbone, pack, self._rope, jax.random.key(i)))
            for i, pack in enumerate(self._packs())
        ]
        return self.last

    def numbers(self, drafter: Params, backbone: Params) -> dict[str, float]:
        """Over all batches."""
        sums = jax.tree.map(lambda *x: np.sum(x, axis=0), *(x.sums for x in self.outcomes(drafter, backbone)))
        return {name: float(x) for name, x in drafter_metrics(sums, self._options).items()}


def _fit_temperatures(folder: pathlib.Path, outcomes: list[Outcome]) -> None:
    """Draws by each draft's probability whether it is accepted, and fits what the confidences are divided by."""
    block = outcomes[0].valid.shape[-1]
    whole = np.concatenate([x.valid.all(axis=-1).reshape(-1) for x in outcomes])
    confidence, accepted = (
        np.concatenate([getattr(x, name).reshape(-1, block) for x in outcomes])[whole]
        for name in ("confidence", "accepted")
    )
    if not whole.any():
        return
    drawn = np.random.default_rng(FLAGS.seed).random(accepted.shape) < accepted
    found = fit_temperatures(confidence, np.cumprod(drawn, axis=1).sum(axis=1))
    save_temperatures(found, folder / _TEMPERATURES)
    values = " ".join(f"{value:.3g}" for value in found.values)
    print(f"{folder / _TEMPERATURES}: {values} on {found.samples:,} blocks; error of the survival up to the last draft "
          f"{found.ece_before[-1]:.2%} before, {found.ece_after[-1]:.2%} after")  # fmt: skip


def _identity(config: ModelConfig, tokenizer: Tokenizer, rows: str, schedule, found: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for a run to be continued."""
    names = ("length", "rows", "seed", "from", "anchors", "decay", "confidence_apart", "alongside", "qat")
    values = {name: FLAGS[name].value for name in names} | found
    values |= {"optimizer": str(_RULE.value), "backbone_peak": _BACKBONE_PEAK.value if _ALONGSIDE.value else None}
    values |= {"schedule": dataclasses.asdict(schedule)}
    values |= {"config": config_to_dict(config), "tokenizer": tokenizer_hash(tokenizer), "text": rows}
    return json.loads(json.dumps(values))


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
