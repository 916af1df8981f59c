"""launch.score: the file it writes, the figures it prints, and bad input."""

import json
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dsv41
from dsv41.evals import score_tokens
from launch import score
from launch.cli import run
from tests.checkpoint_files import one_layer, script_model
from tests.golden import DATA, expected
from tests.models_for_tests import OVERRIDES

ROOT = pathlib.Path(__file__).parents[2]
TINY = f"--checkpoint={DATA / 'tiny_text'}"
LONG = "--set=text_config.max_position_embeddings=4096"


def start(*arguments):
    return run(score.main, score.FLAGS, ["launch/score.py", *arguments])


@pytest.fixture
def files(tmp_path):
    """The two file flags; the tokens are the golden prompt's."""
    save_file({"tokens": expected("tiny_text")["input_ids"][:, :53].astype(np.int32)}, tmp_path / "tokens.safetensors")
    return f"--tokens={tmp_path / 'tokens.safetensors'}", f"--out={tmp_path / 'out.safetensors'}"


@pytest.fixture
def short(files):
    """The same flags for 24 tokens a row, more than the window of 16 has: the tests run a step of 32 and one of 1."""
    path = files[0].removeprefix("--tokens=")
    save_file({"tokens": np.ascontiguousarray(load_file(path)["tokens"][:, :24])}, path)
    return files


def out_of(files):
    return load_file(files[1].removeprefix("--out="))


def test_the_logits_of_score_tokens(capsys, short):
    """And the figures that follow from them."""
    assert start(*script_model(), *short, "--json") == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and err == ""
    report, found = json.loads(out), out_of(short)
    assert list(found) == ["logits"] and found["logits"].dtype == np.float32
    tokens = expected("tiny_text")["input_ids"][:, :24]
    (piece,) = score_tokens(dsv41.load(one_layer(), overrides=OVERRIDES), tokens)
    np.testing.assert_array_equal(found["logits"], piece.logits)
    assert report["array"] == "logits" and report["shape"] == [2, 24, 512] and report["predictions"] == 46
    assert report["mean_logprob"] == pytest.approx(piece.logprobs.mean(dtype=np.float64))
    assert report["perplexity"] == pytest.approx(math.exp(-report["mean_logprob"]))
    assert report["timings"]["load_s"] > 0 and report["timings"]["score_s"] > 0


@pytest.mark.slow  # score_tokens has a test with the same numbers
def test_golden_logits(capsys, files):
    """Free run: mean 0.06 as in the golden README."""
    assert start(TINY, LONG, *files, "--json") == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and err == ""
    report = json.loads(out)
    found = out_of(files)
    assert list(found) == ["logits"] and found["logits"].dtype == np.float32
    golden = expected("tiny_text")
    error = np.abs(found["logits"] - golden["prefill.logits"])
    assert error.mean() < 0.06 and error.max() < 1
    np.testing.assert_array_equal(found["logits"][:, -1].argmax(-1), golden["prefill.next_id"])
    assert report["array"] == "logits" and report["shape"] == [2, 53, 512] and report["predictions"] == 104


def test_logprobs_only(capsys, short):
    assert start(*script_model(), *short, "--logprobs_only") == 0
    out, err = capsys.readouterr()
    found = out_of(short)
    assert list(found) == ["logprobs"] and found["logprobs"].shape == (2, 23)
    perplexity = math.exp(-found["logprobs"].mean(dtype=np.float64))
    assert out.startswith(f"perplexity {perplexity:.6g} (") and out.count("\n") == 1
    assert err.count("\n") == 1 and "logprobs [2, 23]" in err


def test_cuts_write_the_same_file(monkeypatch, short):
    """Steps of 17, 4, 1, 1 and 1 tokens write what one of 24 does."""
    steps = []

    def counted(*arguments, **options):
        for piece in score_tokens(*arguments, **options):
            steps.append(piece.tokens // 2)
            yield piece

    monkeypatch.setattr(score, "score_tokens", counted)
    whole = [start(*script_model(), *short), out_of(short)["logits"]]
    cut = [start(*script_model(), *short, "--chunk=17", "--decode_from=21"), out_of(short)["logits"]]
    assert whole[0] == cut[0] == 0 and steps == [24, 17, 4, 1, 1, 1]
    np.testing.assert_array_equal(whole[1], cut[1])


def test_one_token_has_no_perplexity(capsys, files):
    save_file({"tokens": np.zeros((2, 1), np.int64)}, files[0].removeprefix("--tokens="))
    assert start(*script_model(), *files, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["perplexity"] is None and report["mean_logprob"] is None and report["shape"] == [2, 1, 512]


@pytest.mark.parametrize(
    "arrays, arguments, message",
    [
        ({"ids": np.zeros((1, 3), np.int32)}, [], "holds no array 'tokens'"),
        ({"tokens": np.full((1, 3), 512, np.int32)}, [], "tokens[0, 0] is 512, expected an id in [0, 512)"),
        ({"tokens": np.zeros((1, 1), np.int32)}, ["--logprobs_only"], "--logprobs_only needs two tokens a row"),
        ({"tokens": np.zeros((1, 129), np.int32)}, [], "129 a row exceed max_position_embeddings=128"),
        ({"tokens": np.zeros((1, 3), np.int32)}, ["--decode_from=3"], "decode_from: expected a position in [0, 3)"),
        ({"tokens": np.zeros((1, 3), np.int32)}, ["--chunk=0"], "chunk: expected 1 or more, got 0"),
        ({"tokens": np.zeros((1, 3), np.int32)}, ["--out=absent/x.safetensors"], "no such directory absent"),
        ({"tokens": np.zeros((1, 3), np.int32)}, ["--tokens=absent"], "absent: no such file of tokens"),
        ({"tokens": np.zeros((1, 3), np.int32)}, ["--checkpoint=absent"], "absent: no such config file"),
    ],
)
def test_bad_input(capsys, monkeypatch, tmp_path, files, arrays, arguments, message):
    """Found before the model is loaded; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dsv41.load", lambda *_, **__: pytest.fail("loaded"))
    save_file(arrays, "tokens.safetensors")
    assert start(TINY, *files, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("score: ") and message in err
    assert os.listdir(tmp_path) == ["tokens.safetensors"]


def test_required_flags(capsys):
    assert start("--out=x") == 2
    assert "--tokens=FILE.safetensors is required" in capsys.readouterr().err


def test_as_a_program(files):
    command = [sys.executable, "-m", "launch.score", TINY, files[0], "--out=absent/x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "score: absent/x: no such directory absent\n"
