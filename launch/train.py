"""Trains a model on text, from random weights or from a checkpoint, and goes on where an earlier run was left.

    python -m launch.train --config=configs/nano.json --tokenizer=configs/nano_tokenizer.json --out=RUN
    python -m launch.train --checkpoint=DIR --text='my/**/*.py' --out=RUN

--out becomes the directory of the run: config.json, tokenizer.json, run.json (what it is), curves.csv and held_out.csv
(loss, learning rate, balance, recall of the indexers), curves.png where matplotlib is installed, and checkpoints/ with
weights, optimiser, routing biases, position in the data and random key. The same command continues a run that was
stopped or killed, bit for bit as if it had not been; a run with other flags is refused. Loss or gradients that are no
numbers stop it, and the batch is saved. launch.export_checkpoint writes the released layout.

    python -m launch.train --config=configs/nano.json --tokenizer=configs/nano_tokenizer.json --mesh=data=8 --out=RUN

--mesh spreads the rows of each batch, and weights and optimiser with them, over devices, of several processes if they
are started so (docs/pods.md) and see one --out. A run may be continued on another number of devices.

Without --corpus and --text it trains on the sources of the Python standard library.
"""

import dataclasses
import functools
import json
import sys
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh, PartitionSpec
from tokenizers import Tokenizer

import dsv41
from dsv41.checkpoint.token_map import check_token_map, engram_token_map, load_tokenizer
from dsv41.config import DSV41Error, ModelConfig, config_to_dict
from dsv41.models import Params
from dsv41.sharding import devices_along, parse_mesh
from dsv41.sharding.agreement import check_same_input
from dsv41.sharding.placement import place
from dsv41.sharding.processes import is_first_process
from dsv41.train import make_optimizer
from dsv41.train.attention import AttentionOptions
from dsv41.train.corpus import Corpus
from dsv41.train.data import BatchOptions, TrainingBatches
from dsv41.train.forward import ForwardOptions, train_forward
from dsv41.train.initial import initial_masters
from dsv41.train.loop import RunParts, held_out_means, resume
from dsv41.train.master_weights import masters_from
from dsv41.train.optimizer import OptimizerConfig
from dsv41.train.pack import rope_tables
from dsv41.train.placement import Placement, check_axes
from dsv41.train.row_spread import total
from dsv41.train.schedule import TrainingSchedule
from dsv41.train.stages import StagedBatches
from dsv41.train.step import StepOptions, check_rows, init_state, make_train_step
from dsv41.train.texts import TextOptions, held_out_rows, training_documents, training_rows
from dsv41.train.tokenizer import tokenizer_hash
from launch.cli import new_flags, run
from launch.load_model import ModelFlags
from launch.mesh_flags import MeshFlags
from launch.training_flags import QATS, RunFlags, TextFlags, write_run
from launch.training_progress import train_and_report

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS, config=True)
_TEXT = TextFlags(FLAGS, length=4096, rows=8)
_MESH = MeshFlags(FLAGS, preset="train")
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
    list(QATS),
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
_SHORT_LENGTH = flags.DEFINE_integer(
    "short_length",
    None,
    "Tokens of a row in the first part of the run; a batch then has as many more rows. What attends to everything "
    "within reach learns to look back sooner.",
    lower_bound=1,
    flag_values=FLAGS,
)
_SHORT_UNTIL = flags.DEFINE_float(
    "short_until", 0.5, "Share of the tokens after which rows have --length.", lower_bound=0, upper_bound=1,
    flag_values=FLAGS,
)  # fmt: skip
_OPTIMIZER = flags.DEFINE_string(
    "optimizer", None, 'JSON object of fields of OptimizerConfig, such as {"clip_norm": null}.', flag_values=FLAGS
)


def main() -> None:
    _MESH.start()
    folder = _RUN.folder()
    config, schedule, options = _MODEL.config(), _schedule(), StepOptions(micro_batches=_MICRO_BATCHES.value)
    if config.vision_config is not None:
        config = dataclasses.replace(config, vision_config=None)  # the tower is trained by itself
    tokenizer = _tokenizer()
    token_map = _token_map(config, tokenizer)
    for length in {schedule.sequence, schedule.long_sequence}:
        check_rows(schedule.batch_tokens // length, options, _devices())
    optimizer_config = _optimizer_config()
    _MODEL.start_device()
    corpus = _TEXT.corpus()
    if is_first_process():
        print(f"{len(corpus.documents):,} documents of {corpus.source}", file=sys.stderr)
    batches, text = _batches(config, corpus, tokenizer, token_map, schedule)
    identity = _identity(config, tokenizer, text, optimizer_config, schedule)
    check_same_input(folder=str(folder.absolute()).encode(), identity=json.dumps(identity).encode())
    masters, placement = _masters(config, _MESH.mesh() if _devices() > 1 else None)
    optimizer = make_optimizer(
        config, masters, optimizer_config, spread=None if placement is None else placement.matrices
    )
    rope = rope_tables(config, FLAGS.length)
    step, state = _step(config, optimizer, options, masters, rope, placement)
    parts = RunParts(
        step=step,
        place=jax.device_put if placement is None else placement.batch,
        evaluate=_evaluation(config, corpus, tokenizer, token_map, rope, placement),
        schedule=schedule,
        batches=batches,
        identity=identity,
        **_RUN.outputs(),
    )
    state, begin = resume(parts, state)
    if is_first_process():
        write_run(folder, config, tokenizer, identity, {"corpus": corpus.describe()})
    train_and_report(folder, parts, state, begin, _RUN.loop(), verbose=FLAGS.verbose)


def _schedule() -> TrainingSchedule:
    schedule = _RUN.schedule()
    if _SHORT_LENGTH.value is None:
        return schedule
    if not _SHORT_LENGTH.value < FLAGS.length:
        raise DSV41Error(f"--short_length: expected fewer than --length={FLAGS.length}, got {_SHORT_LENGTH.value}")
    until = round(_SHORT_UNTIL.value * schedule.total)
    return dataclasses.replace(schedule, sequence=_SHORT_LENGTH.value, long_from=until)


def _batches(config: ModelConfig, corpus: Corpus, tokenizer: Tokenizer, token_map, schedule: TrainingSchedule):
    """The batches of this process, and a hash of what they are made of."""
    documents = training_documents(corpus, tokenizer, _REPEAT.value)
    short = min(schedule.long_from // schedule.batch_tokens, schedule.steps)
    lengths = [(schedule.long_sequence, schedule.steps)]
    if schedule.sequence < schedule.long_sequence:
        lengths = [(schedule.sequence, short), (schedule.long_sequence, schedule.steps - short)]
    stages, hashes = [], []
    for length, steps in lengths:
        text = TextOptions(
            length=length, seed=FLAGS.seed, repeat=_REPEAT.value, needles=_NEEDLES.value,
            tokens=steps * schedule.batch_tokens,
        )  # fmt: skip
        source = training_rows(corpus, tokenizer, config, text, documents)
        rows = schedule.batch_tokens // length
        reads = BatchOptions(rows=rows, process=jax.process_index(), processes=jax.process_count())
        stages.append(TrainingBatches(source, reads, token_map=token_map))
        hashes.append(source.fingerprint)
    if len(stages) == 1:
        return stages[0], hashes[0]
    return StagedBatches(stages, [short]), "-".join(hashes)


def _devices() -> int:
    """How many a run has, as the flags say.

    Raises:
      DSV41Error: the mesh is one that training does not spread anything over.
    """
    if FLAGS.mesh is None:
        return 1
    sizes = parse_mesh(FLAGS.mesh)
    check_axes(sizes)
    return devices_along(sizes, sizes)


def _step(config: ModelConfig, optimizer, options: StepOptions, masters: Params, rope, placement: Placement | None):
    """(state, pack, learning rate) -> (state, metrics), compiled when it is called; and the state to begin with."""

    def begin(masters):
        return init_state(masters, optimizer, FLAGS.seed)

    forward = ForwardOptions(attention=AttentionOptions(qat=QATS[_QAT.value], explored=_EXPLORED.value))
    step = make_train_step(config, optimizer, forward, options, placement)
    if placement is None:
        compiled = jax.jit(step, donate_argnums=0)
        rope = jax.tree.map(jax.numpy.asarray, rope)
        state = jax.jit(begin, donate_argnums=0)(masters)
        return lambda state, pack, rate: compiled(state, pack, rope, rate), state
    shardings = placement.state(jax.eval_shape(begin, masters))
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(shardings, placement.everywhere))
    rope = place(rope, placement.mesh, PartitionSpec())
    state = jax.jit(begin, donate_argnums=0, out_shardings=shardings)(masters)
    return lambda state, pack, rate: compiled(state, pack, rope, np.asarray(rate)), state


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


def _masters(config: ModelConfig, mesh: Mesh | None) -> tuple[Params, Placement | None]:
    """To begin with, and where they lie on the mesh."""
    if FLAGS.config is not None:
        make = functools.partial(initial_masters, config, FLAGS.seed)
        if mesh is None:
            return jax.jit(make)(), None
        placement = Placement.of(mesh, jax.eval_shape(make), config)
        return jax.jit(make, out_shardings=placement.masters)(), placement
    model = dsv41.load(_MODEL.checkpoint, vision=False, drafter=False)
    masters = masters_from(model.params, config, model.engram.tables if model.engram is not None else ())
    if mesh is None:
        return masters, None
    placement = Placement.of(mesh, masters, config)
    return place(masters, mesh, placement.specs), placement


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


def _evaluation(config: ModelConfig, corpus, tokenizer: Tokenizer, token_map, rope, placement: Placement | None):
    """State -> loss and recall on held-out rows."""
    rows = FLAGS.evaluate_rows
    if not rows or not corpus.held_out:
        return None
    source = held_out_rows(corpus, tokenizer, config, FLAGS.length)
    count, batch = min(rows, len(source.epoch(0))), min(rows, FLAGS.rows, len(source.epoch(0)))
    options = ForwardOptions(attention=AttentionOptions(qat=QATS[_QAT.value], recall=True), rematerialize=False)

    def evaluate(masters, pack):
        whole = masters if placement is None else placement.gather(masters)
        _, aux = train_forward(whole, pack, rope, jax.random.key(0), config=config, options=options)
        losses = total({name: aux[name] for name in ("lm_loss", "indexer_loss")}, pack.spread)
        recall = {f"recall_{n}": value for n, value in enumerate(aux.get("recall", ()))}
        return losses | {"tokens": aux["tokens"]} | recall

    compiled = jax.jit(evaluate if placement is None else placement.on_rows(evaluate, PartitionSpec()))

    def of_state(state):
        # Every process reads all of the rows.
        batches = TrainingBatches(source, BatchOptions(rows=batch), token_map=token_map)
        put = jax.device_put if placement is None else placement.whole_batch
        return held_out_means(compiled, state.masters, (put(next(batches)) for _ in range(count // batch)))

    return of_state


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
