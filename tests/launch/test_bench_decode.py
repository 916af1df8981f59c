"""launch.bench_decode: figures that add up, random weights, what it prints, and bad input. No time is looked at."""

import json
import os
import pathlib

import pytest

from launch import bench_decode
from launch.cli import run
from tests.checkpoint_files import three_layers

ROOT = pathlib.Path(__file__).parents[2]
LONG = "--set=text_config.max_position_embeddings=4096"
# Every test runs the same programs.
QUICK = ("--rate=0", "--max_requests=2", "--max_tokens=256", "--prefill_chunk=64", "--new_tokens=4")
STREAM = (*QUICK, "--requests=5", "--prompt_tokens=20:30", "--shared_prefix=40")


def start(*arguments):
    return run(bench_decode.main, bench_decode.FLAGS, ["launch/bench_decode.py", *arguments])


def model():
    """Three layers: windows are replayed behind those with compressed KV."""
    return f"--checkpoint={three_layers()}", LONG


def report(capsys, *arguments):
    assert start(*arguments, "--json") == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and err == ""
    return json.loads(out)


def check(found, requests=5):
    assert found["requests"] == requests and found["new_tokens"] == 4 * requests
    assert found["prompt_tokens"] == found["fresh_tokens"] + sum(found["cached_tokens"].values())
    for name in ("time_to_first_token_s", "time_per_token_s"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"] < found["elapsed_s"]
    assert found["new_tokens_per_s"] == pytest.approx(4 * requests / found["elapsed_s"])
    assert found["preemptions"] == 0 and set(found["tiers"]) >= {"hbm"}


@pytest.mark.slow
def test_json_text_prompts_and_plot(capsys, tmp_path):
    plot = tmp_path / "times.png"
    found = report(capsys, *model(), *STREAM, f"--text={ROOT / 'README.md'}", f"--plot={plot}")
    check(found)
    # Two prompts are admitted before any has left its pages; the others go on from the shared prefix.
    assert 0.2 < found["hit_rate"] < 0.7 and found["cached_tokens"]["hbm"] >= 3 * 40
    assert found["replayed_tokens"] >= 3 * 16 and found["acceptance_length"] is None
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_random_weights(capsys):
    found = report(capsys, f"--config={ROOT / 'configs' / 'tiny.json'}", LONG, *STREAM, "--noreuse", "--rate=1000")
    check(found)
    assert found["hit_rate"] == 0 and found["prompts"] == "random ids"


@pytest.mark.slow
def test_text(capsys):
    assert start(*model(), *STREAM) == 0
    out, err = capsys.readouterr()
    for words in (
        "5 requests, all at once",
        "to the first token",
        "per token behind it",
        "tokens/s",
        "reused",
        "Tiers",
    ):
        assert words in out
    assert err.count("\n") == 1 and "compiled in" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--requests=0"], "requests: expected a number of 1 or more"),
        (["--rate=-1"], "rate: expected a number of 0 or more"),
        (["--prompt_tokens=9:4"], "--prompt_tokens: lengths: '9:4'"),
        (["--new_tokens=many"], "--new_tokens: lengths: expected N, LOW:HIGH or lognormal:MEDIAN:SIGMA"),
        (["--shared_prefix=-3"], "shared_prefix: expected"),
        (["--max_requests=0"], "max_requests: expected 1 or more"),
        (["--max_tokens=100"], "--max_tokens=100: the longest request has 193 tokens, answer included"),
        ([], "max_tokens=128: the longest request has 193 tokens"),
        (["--text=absent.txt"], "absent.txt: not a readable text file"),
        (["--text=short.txt"], "the text has 2 tokens, a prompt needs 128"),
        (["--config=x.json", "--checkpoint=y"], "give either --checkpoint=DIR or --config=FILE"),
        (["--plot=absent/x.png"], "absent/x.png: no such directory absent"),
    ],
)
def test_bad_input(capsys, monkeypatch, tmp_path, arguments, message):
    """Found before the model is loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("the")
    monkeypatch.setattr("dsv41.load", lambda *_, **__: pytest.fail("loaded"))
    assert start(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("bench_decode: ") and message in err
    assert os.listdir(tmp_path) == ["short.txt"]


@pytest.mark.parametrize("flag", ["--store=kv", "--text=short.txt"])
def test_a_config_alone_has_neither_pages_to_keep_nor_a_tokenizer(capsys, monkeypatch, tmp_path, flag):
    monkeypatch.chdir(tmp_path)
    assert start(f"--config={ROOT / 'configs' / 'tiny.json'}", LONG, flag) == 2
    assert "needs --checkpoint=DIR" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_config_that_is_too_large_for_random_weights(capsys):
    assert start(f"--config={ROOT / 'configs' / 'flash.json'}") == 2
    assert "GiB, more than 8; use a checkpoint" in capsys.readouterr().err
