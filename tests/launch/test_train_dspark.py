"""launch.train_dspark: a drafter of a small model, killed and continued, exported and trained on; and bad input."""

import json
import os

import jax
import numpy as np
import pytest

import dsv41
from dsv41.config import config_to_dict
from dsv41.engine import load_temperatures
from dsv41.train.checkpoints import Checkpoints
from dsv41.train.curves import read_curves
from dsv41.train.export import write_checkpoint
from dsv41.train.initial import initial_drafter_masters, initial_masters
from dsv41.train.master_weights import masters_from
from dsv41.train.saved_masters import saved_masters
from launch import export_checkpoint, train_dspark
from launch.cli import BAD_INPUT, run
from tests.checkpoint_files import TINY
from tests.train.drafters import mini_config

STEPS, LENGTH, ROWS, ANCHORS = 4, 64, 2, 8


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with texts and the untrained checkpoints of a model with a drafter and of one without."""
    folder, config = tmp_path_factory.mktemp("inputs"), mini_config()
    texts = ("".join(f"def f{i}_{j}(x):\n    return x * {i * j}\n" for j in range(1 + i % 5)) for i in range(60))
    lines = (json.dumps({"name": f"d{i}", "text": text}) for i, text in enumerate(texts))
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    masters, tokenizer = initial_masters(config), TINY / "tokenizer.json"
    drafter = initial_drafter_masters(config, seed=7)
    write_checkpoint(folder / "model", config, masters, tokenizer=tokenizer, drafter=drafter)
    write_checkpoint(folder / "bare", config, masters, tokenizer=tokenizer)
    return folder


def start(inputs, out, *more, checkpoint="model"):
    given = {
        "checkpoint": inputs / checkpoint, "text": inputs / "text.jsonl", "out": out, "length": LENGTH, "rows": ROWS,
        "tokens": STEPS * ROWS * LENGTH, "anchors": ANCHORS, "warmup_steps": 1, "save_every": 2, "evaluate_every": 2,
        "evaluate_rows": 2, "log_every": 1,
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in given.items()]
    return run(train_dspark.main, train_dspark.FLAGS, ["launch/train_dspark.py", *arguments, *more])


def arrays(out, step):
    with Checkpoints(out / "checkpoints", read_only=True) as checkpoints:
        return {name: np.asarray(x) for name, x in checkpoints.arrays(step).items()}


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert start(inputs, out) == 0
    return out


@pytest.mark.slow
def test_a_run_leaves_what_it_says(inputs, whole):
    assert sorted(os.listdir(whole)) == [
        "checkpoints", "confidence_temperatures.json", "config.json", "curves.csv", "curves.png", "held_out.csv",
        "run.json", "tokenizer.json",
    ]  # fmt: skip
    curves, held_out = read_curves(whole / "curves.csv"), read_curves(whole / "held_out.csv")
    assert curves["step"].tolist() == [1, 2, 3, 4] and held_out["step"].tolist() == [2, 4]
    for name in ("loss", "l1", "accept_1", "accept_5", "agree_1", "expected_tokens", "confidence_error"):
        assert np.isfinite(curves[name]).all() and np.isfinite(held_out[name]).all()
    assert held_out["l1"][1] < held_out["l1"][0]
    assert (curves["expected_tokens"] >= 1).all() and (curves["expected_tokens"] <= 6).all()
    assert load_temperatures(whole / "confidence_temperatures.json", 5).samples > 0
    # Nothing of the backbone is in a drafter's run.
    assert all(name.startswith(("masters.mtp.", "optimizer.")) for name in arrays(whole, 4))
    assert json.loads((whole / "run.json").read_text())["identity"]["anchors"] == ANCHORS


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_for_bit(inputs, whole, tmp_path, capsys):
    assert start(inputs, tmp_path / "run", "--steps=3") == 0
    assert "stopped; the same command goes on" in capsys.readouterr().out
    assert start(inputs, tmp_path / "run") == 0
    assert "goes on behind step 3" in capsys.readouterr().err
    found, expected = arrays(tmp_path / "run", 4), arrays(whole, 4)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert np.array_equal(found[name], x), name
    assert start(inputs, tmp_path / "run", "--anchors=9") == BAD_INPUT
    assert "anchors" in capsys.readouterr().err


@pytest.mark.slow
def test_what_was_trained_is_exported_and_trained_on(inputs, whole, tmp_path):
    out = tmp_path / "model"
    flags = [f"--checkpoint={inputs / 'bare'}", f"--drafter_run={whole}", f"--out={out}"]
    flags += [f"--confidence_temperatures={whole / 'confidence_temperatures.json'}"]
    assert run(export_checkpoint.main, export_checkpoint.FLAGS, ["launch/export_checkpoint.py", *flags]) == 0
    model = dsv41.load(out)
    masters, step = saved_masters(whole, initial_drafter_masters(model.config))
    assert step == 4
    stored = masters_from(model.drafter, model.config)
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(masters)[0], jax.tree.leaves(stored), strict=True):
        # Scales of 32 values are powers of two: FP4 is off by 1/4 of the largest at most.
        assert np.abs(np.asarray(x) - np.asarray(y)).max() <= np.abs(x).max() / 4 + 1e-6, path
    bias = masters["mtp"][0]["ffn"]["gate"]["bias"]
    assert np.asarray(bias).any()
    assert start(inputs, tmp_path / "tuned", "--from=released", "--steps=1", checkpoint=out) == 0
    tuned, _ = saved_masters(tmp_path / "tuned", masters)
    assert np.array_equal(tuned["mtp"][0]["ffn"]["gate"]["bias"], bias)
    assert not np.array_equal(tuned["mtp"][0]["attn"]["wkv"]["weight"], stored["mtp"][0]["attn"]["wkv"]["weight"])


@pytest.mark.slow
def test_alongside(inputs, tmp_path):
    """Both are in the checkpoint, which is one to begin with again."""
    out = tmp_path / "run"
    assert start(inputs, out, "--alongside", "--optimizer=adamw", "--steps=2") == 0
    names = arrays(out, 2)
    assert "masters.embed.weight" in names and "masters.mtp.0.attn.wkv.weight" in names
    before = initial_masters(mini_config())["layers"][1]["attn"]["wkv"]["weight"]
    assert not np.array_equal(names["masters.layers.1.attn.wkv.weight"], before)
    assert np.isfinite(read_curves(out / "curves.csv")["lm_loss"]).all()
    assert start(inputs, tmp_path / "again", "--from=released", "--steps=1", checkpoint=out) == 0
    tuned = arrays(tmp_path / "again", 1)
    assert not np.array_equal(tuned["masters.mtp.0.attn.wkv.weight"], names["masters.mtp.0.attn.wkv.weight"])


@pytest.mark.parametrize(
    "more, message",
    [
        (["--anchors=0"], "anchors"),
        (["--decay=0"], "decay"),
        (["--backbone_peak=0"], "--backbone_peak: expected a positive number"),
        (["--checkpoint_step=3"], "is no directory of launch.train"),
        (["--from=elsewhere"], "from"),
        (["--from=released", "--stages=1"], "--stages: the checkpoint says"),
        (["--stages=0"], "stages"),
        (["--rows=0"], "rows"),
        (["--text=absent*.py"], "absent*.py"),
    ],
)
def test_bad_input(inputs, tmp_path, capsys, monkeypatch, more, message):
    monkeypatch.setattr("dsv41.load", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(train_dspark, "saved_masters", lambda *_, **__: pytest.fail("loaded"))
    assert start(inputs, tmp_path / "run", *more) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and message in err.splitlines()[-1]


def test_a_model_without_drafter_needs_to_be_told_its_stages(inputs, tmp_path, capsys, monkeypatch):
    assert start(inputs, tmp_path / "run", checkpoint="bare") == BAD_INPUT
    assert capsys.readouterr().err.endswith("the config says that there is no drafter; give --stages\n")
    found = []
    monkeypatch.setattr(train_dspark, "_masters", found.append)
    with pytest.raises(TypeError):  # nothing to unpack
        start(inputs, tmp_path / "run", "--stages=1", checkpoint="bare")
    assert config_to_dict(found[0]) == config_to_dict(mini_config())


def test_out_is_required(capsys):
    assert run(train_dspark.main, train_dspark.FLAGS, ["launch/train_dspark.py"]) == BAD_INPUT
    assert "--out is required" in capsys.readouterr().err
