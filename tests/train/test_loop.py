"""A run that is cut off and goes on is the run that was not, with a step that computes next to nothing."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.config import DSV41Error, load_config
from dsv41.train.checkpoints import Checkpoints
from dsv41.train.curves import Curves, read_curves
from dsv41.train.data import BatchOptions, RowSource, TrainingBatches
from dsv41.train.guards import GuardLimits, TrainingStopped, load_batch
from dsv41.train.loop import LoopOptions, Progress, RunParts, resume, run_steps
from dsv41.train.schedule import TrainingSchedule

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = load_config(ROOT / "configs" / "tiny.json")
TOKEN_MAP = np.arange(CONFIG.text_config.vocab_size, dtype=np.int32) % CONFIG.text_config.engram_compressed_vocab_size
LENGTH, ROWS, STEPS = 64, 2, 12
BATCH = LENGTH * ROWS
SCHEDULE = TrainingSchedule(
    batch_tokens=BATCH, peak=0.5, floor=0.05, warmup_steps=3, decay_from=5 * BATCH, decay_to=STEPS * BATCH,
    total=STEPS * BATCH, sequence=LENGTH, long_sequence=LENGTH,
)  # fmt: skip
OPTIONS = LoopOptions(save_every=5, evaluate_every=3)


class PowerCut(BaseException):
    """Ends a run where it stands, as a killed process does."""


@jax.jit
def _step(state, pack, learning_rate):
    """Depends on the batch, the rate, the random numbers, and all of what came before."""
    key, own = jax.random.split(state["key"])
    counts = jnp.zeros_like(state["w"]).at[pack.tokens].add(pack.loss_mask.astype(jnp.float32))
    gradient = counts * jax.random.normal(own, counts.shape) + 0.1 * state["w"]
    metrics = {"loss": jnp.abs(state["w"]).mean(), "grad_norm": jnp.linalg.norm(gradient), "finite": jnp.float32(1)}
    metrics |= {"tokens": pack.loss_mask.sum().astype(jnp.float32)}
    return {"w": state["w"] - learning_rate * gradient, "key": key}, metrics


def _documents(seed=5):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 500, rng.integers(1, 90)).astype(np.int32) for _ in range(9)]


def begin():
    return {"w": jnp.ones(CONFIG.text_config.vocab_size), "key": jax.random.key(3)}


def batches(seed=5, rows=ROWS):
    source = RowSource(_documents(seed), CONFIG, length=LENGTH, seed=1)
    return TrainingBatches(source, BatchOptions(rows=rows), token_map=TOKEN_MAP)


def parts(folder, *, fails=lambda step: False, bad=lambda step: None, identity=None, data=None):
    """What a run is made of, its step counted from its state's beginning here.

    Args:
      folder: of the run; made if it is missing.
      fails: whether the power goes before the step of this number, of those made with these parts.
      bad: changes to the metrics of a step.
      identity, data: of the run.
    """
    folder.mkdir(exist_ok=True)
    calls = iter(range(1, 1000))

    def step(state, pack, rate):
        number = next(calls)
        if fails(number):
            raise PowerCut
        state, metrics = _step(state, pack, rate)
        return state, metrics | (bad(number) or {})

    return RunParts(
        step=step,
        place=lambda pack: jax.tree.map(jnp.asarray, pack),
        evaluate=lambda state: {"lm_loss": float(state["w"].sum())},
        schedule=SCHEDULE,
        batches=data or batches(),
        checkpoints=Checkpoints(folder / "checkpoints"),
        curves=Curves(folder),
        held_out=Curves(folder, file="held_out.csv"),
        identity=identity or {"config": "tiny", "batch": ROWS},
    )


def go(run, options=OPTIONS):
    state, at = resume(run, begin())
    return run_steps(run, state, at, options)


def result(folder):
    """All that a run leaves but for times."""
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        saved = {}
        for step in checkpoints.steps():
            state = checkpoints.restore(step, begin())
            saved[step] = (np.asarray(state["w"]).tobytes(), jax.random.key_data(state["key"]).tolist())
            saved[step] += (checkpoints.record(step),)
    curves = {name: column.tolist() for name, column in read_curves(folder / "curves.csv").items()}
    assert min(curves.pop("tokens_per_second")) >= 0
    return saved, curves, (folder / "held_out.csv").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    _, at = go(parts(folder))
    assert at == Progress(STEPS, STEPS * BATCH)
    return folder


def test_what_a_run_leaves(whole):
    saved, curves, held_out = result(whole)
    assert list(saved) == [10, 12] and saved[12][2]["tokens"] == STEPS * BATCH
    assert curves["step"] == list(range(1, STEPS + 1)) and curves["tokens"] == [BATCH * s for s in curves["step"]]
    rates = read_curves(whole / "curves.csv")["tokens_per_second"]
    assert rates[0] == 0 and min(rates[1:]) > 0  # behind evaluations and checkpoints too
    assert "finite" not in curves and 0 < min(curves["predicted_tokens"]) < BATCH
    assert curves["learning_rate"] == [SCHEDULE.rate(tokens) for tokens in curves["tokens"]]
    assert [line.split(",")[0] for line in held_out.splitlines()] == ["step", "3", "6", "9", "12"]


@pytest.mark.parametrize("cut", [1, 4, 6, 9, 11])
def test_cut_off_and_continued(whole, tmp_path, cut):
    """Before the first checkpoint, right behind one, between two; what was not saved is computed again."""
    folder = tmp_path / "run"
    with pytest.raises(PowerCut):
        go(parts(folder, fails=lambda step: step == cut))
    run = parts(folder)
    state, at = resume(run, begin())
    assert at.step == (cut - 1) // 5 * 5
    run_steps(run, state, at, OPTIONS)
    assert result(folder) == result(whole)


def test_cut_off_again_and_again(whole, tmp_path):
    folder, at = tmp_path / "run", Progress(0, 0)
    for power in (7, 2, 4, 6, 3, 9):
        run = parts(folder, fails=lambda step, power=power: step > power)
        try:
            _, at = go(run)
        except PowerCut:
            continue
    assert at.step == STEPS and result(folder) == result(whole)


def test_in_portions(whole, tmp_path):
    """Some steps at a time, each portion saved at its end; the evaluations at the ends of portions are more."""
    folder = tmp_path / "run"
    for steps in (4, 1, 5, 9):
        _, at = go(parts(folder), dataclasses.replace(OPTIONS, steps=steps))
    assert at.step == STEPS
    (mine, curves, _), (theirs, expected, _) = result(folder), result(whole)
    assert curves == expected and mine[12] == theirs[12]


def test_a_finished_run_stays_as_it_is(whole):
    before = result(whole)
    _, at = go(parts(whole))
    assert at == Progress(STEPS, STEPS * BATCH) and result(whole) == before


def test_an_unreadable_checkpoint(whole, tmp_path, caplog):
    """The one before it is taken, and all that follows is made again."""
    folder = tmp_path / "run"
    go(parts(folder))
    (folder / "checkpoints" / "12" / "state" / "manifest.ocdbt").unlink()
    state, at = resume(run := parts(folder), begin())
    assert at.step == 10 and "the step before it is taken" in caplog.text
    run_steps(run, state, at, OPTIONS)
    assert result(folder) == result(whole)


# --- what is refused, and what stops a run


def test_another_run(whole):
    expected = "the run was begun with batch=2 and cannot go on with 4"
    before = result(whole)
    with pytest.raises(DSV41Error, match=expected):
        go(parts(whole, identity={"config": "tiny", "batch": 4}))
    with pytest.raises(DSV41Error, match="data: the state is of other documents, row length or seed"):
        go(parts(whole, data=batches(seed=6)))
    with pytest.raises(DSV41Error, match="data: the state is of another batch size"):
        go(parts(whole, data=batches(rows=4)))
    assert result(whole) == before


def test_numbers_that_are_not_finite(whole, tmp_path):
    """The batch is left, the run can be looked at, and goes on from its last checkpoint when it is mended."""
    folder = tmp_path / "run"
    with pytest.raises(TrainingStopped, match="step 8: grad_norm is inf, expected a finite number") as stopped:
        go(parts(folder, bad=lambda step: {"grad_norm": jnp.float32(jnp.inf)} if step == 8 else {}))
    bad, again = load_batch(stopped.value.batch), batches()
    again.restore(bad.rows)
    pack = next(again)
    assert (bad.step, bad.tokens) == (8, 8 * BATCH) and bad.metrics["grad_norm"] == float("inf")
    for name, array in vars(pack).items():
        np.testing.assert_array_equal(getattr(bad.pack, name), array)
    assert read_curves(folder / "curves.csv")["step"].tolist() == list(range(1, 8))
    stopped.value.batch.unlink()
    go(parts(folder))
    assert result(folder) == result(whole)


def test_gradients_that_run_away(tmp_path):
    options = dataclasses.replace(OPTIONS, guards=GuardLimits(spike=4, spike_steps=2, window=4))
    spikes = {step: {"grad_norm": jnp.float32(9.0 if step in (7, 9, 10) else 1.0)} for step in range(1, STEPS + 1)}
    with pytest.raises(TrainingStopped, match="step 10: grad_norm is 9, expected at most 4 once in 2 steps"):
        go(parts(tmp_path / "run", bad=spikes.get), options)


def test_a_continued_run_knows_what_came_before(tmp_path):
    """The gradient norms before the checkpoint count in the median, and its evaluation is shown until the next one."""
    options = dataclasses.replace(OPTIONS, guards=GuardLimits(spike=4, spike_steps=2, window=4), steps=5)
    calm, shown = {"grad_norm": jnp.float32(1.0)}, []
    go(parts(tmp_path / "run", bad=lambda step: calm), options)
    run = parts(tmp_path / "run", bad=lambda step: {"grad_norm": jnp.float32(9.0)} if step > 1 else calm)
    state, at = resume(run, begin())
    with pytest.raises(TrainingStopped, match="step 8: grad_norm is 9, expected at most 4 once in 2 steps"):
        run_steps(
            run, state, at, options, report=lambda at, numbers: shown.append((at.step, numbers.get("held_out_lm_loss")))
        )
    evaluated = run.checkpoints.record(5)["held_out"]["lm_loss"]
    assert shown[0] == (6, evaluated)
