"""launch.train that is killed and goes on leaves what a run that was not killed does, bit for bit."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from dsv41.train.checkpoints import Checkpoints
from dsv41.train.curves import read_curves
from dsv41.train.guards import load_batch
from launch import train
from launch.cli import BAD_INPUT, run
from tests.launch.training_inputs import train_flags, write_inputs

# Each run compiles, or at least traces, a training step.
pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
STEPS, SAVE_EVERY, LENGTH, ROWS = 12, 4, 64, 2
# Two layers of the tiny model: a sliding one with the Engram, and one with compressed KV, indexer and candidates.
_LAYERS = {
    "num_hidden_layers": 2, "compress_ratios": [0, 1], "kv_source_layer_ids": [1], "index_source_layer_ids": [1],
    "candidate_source_layer_id": 1, "engram_layer_ids": [0], "engram_num_embeddings": [834],
    "num_nextn_predict_layers": 0, "dspark_target_layer_ids": [], "hc_sinkhorn_iters": 3,
}  # fmt: skip


def _texts():
    lines = ([f"def f{i}_{j}(x):\n    return x * {i * j} + {j}\n" for j in range(1 + i % 5)] for i in range(60))
    return ("".join(text) for text in lines)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with config, tokenizer and text."""
    return write_inputs(tmp_path_factory.mktemp("inputs"), _LAYERS, _texts())


def flags(inputs, out, **changes):
    own = {"length": LENGTH, "rows": ROWS, "tokens": STEPS * ROWS * LENGTH, "save_every": SAVE_EVERY}
    return train_flags(inputs, out, **own | {"evaluate_every": 3, "evaluate_rows": 2} | changes)


def start(arguments):
    """The script in a process of its own, with one device."""
    command = [sys.executable, "-m", "launch.train", *arguments]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def complete(arguments):
    process = start(arguments)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert complete(flags(inputs, out)).endswith(f"{out}: step 12 of 12, 1,536 tokens, complete\n")
    return out


def saved(out):
    """Step -> record, and every array of the state and the random key as bytes."""
    found = {}
    with Checkpoints(out / "checkpoints", read_only=True) as checkpoints:
        for step in checkpoints.steps():
            arrays = checkpoints.arrays(step)
            like = {name: np.empty(x.shape, x.dtype) for name, x in arrays.items()} | {"key": jax.random.key(0)}
            state = checkpoints.restore(step, like)
            state["key"] = np.asarray(jax.random.key_data(state["key"]))
            found[step] = checkpoints.record(step), {n: (x.dtype, x.shape, x.tobytes()) for n, x in state.items()}
    return found


def curves(out):
    """Both files, but for the times."""
    return [
        {name: column.tolist() for name, column in read_curves(out / file).items() if name != "tokens_per_second"}
        for file in ("curves.csv", "held_out.csv")
    ]


def same(a, b):
    (first, second), (rows, others) = (saved(a), saved(b)), (curves(a), curves(b))
    assert first.keys() == second.keys()
    for step, (record, arrays) in first.items():
        assert record == second[step][0]
        assert arrays.keys() == second[step][1].keys()
        assert [name for name, x in arrays.items() if x != second[step][1][name]] == []
    assert rows == others


def rows_written(out):
    file = out / "curves.csv"
    return max(file.read_bytes().count(b"\n") - 1, 0) if file.exists() else 0


def test_a_run_learns_and_leaves_its_state(whole):
    rows, held_out = curves(whole)
    assert rows["step"] == list(range(1, STEPS + 1)) and rows["tokens"][-1] == STEPS * ROWS * LENGTH
    assert held_out["step"] == [3, 6, 9, 12] and held_out["lm_loss"][-1] < held_out["lm_loss"][0]
    assert list(saved(whole)) == [8, 12]
    names = saved(whole)[12][1].keys()
    for part in ("masters.embed.weight", "masters.layers.0.engram.embed.weight", "masters.layers.1.ffn.gate.bias"):
        assert part in names
    assert "key" in names and any(name.startswith("optimizer.") for name in names)


@pytest.mark.parametrize("row", [6, 9])
def test_killed_and_continued(inputs, whole, tmp_path, row):
    """Killed some steps behind the first checkpoint, and behind the second."""
    out = tmp_path / "run"
    process = start(flags(inputs, out))
    while rows_written(out) < row:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    with Checkpoints(out / "checkpoints", read_only=True) as checkpoints:
        assert 0 < checkpoints.latest() < STEPS
    complete(flags(inputs, out))
    same(whole, out)


def test_a_finished_run_stays_as_it_is(inputs, whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "run")
    assert "step 12 of 12" in complete(flags(inputs, out))
    same(whole, out)


def test_another_run_is_refused(inputs, whole, capsys):
    """Before anything is compiled or written."""
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    (inputs / "other.jsonl").write_text((inputs / "text.jsonl").read_text().replace("return", "yield"))
    for changes, message in (
        ({"rows": 4}, "the run was begun with rows=2 and cannot go on with 4"),
        ({"seed": 1}, "the run was begun with seed=0 and cannot go on with 1"),
        ({"set": "text_config.rms_norm_eps=1e-6"}, "the run was begun with config="),
        ({"text": inputs / "other.jsonl"}, "the run was begun with text="),
        ({"peak": 1e-3}, "the run was begun with schedule="),
    ):
        assert run(train.main, train.FLAGS, ["train", *flags(inputs, whole, **changes)]) == BAD_INPUT
        assert message in capsys.readouterr().err.splitlines()[-1]
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_numbers_that_are_not_finite(inputs, tmp_path):
    """Weights that run away stop the run; its batch is that of the step, and the last checkpoint is a good one."""
    out = tmp_path / "run"
    process = start(flags(inputs, out, peak=1e38, warmup_steps=0, save_every=1, keep=20, evaluate_rows=0))
    err = process.communicate()[1]
    (file,) = out.glob("bad_batch_*.safetensors")
    assert process.returncode == BAD_INPUT and f"its batch is in {file}" in err.splitlines()[-1], err
    bad = load_batch(file)
    assert f"step {bad.step}: " in err and bad.tokens == bad.step * ROWS * LENGTH
    assert not all(np.isfinite(bad.metrics[name]) for name in ("loss", "grad_norm"))
    with Checkpoints(out / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest() == bad.step - 1
    assert read_curves(out / "curves.csv")["step"].tolist() == list(range(1, bad.step))
