"""launch.calibrate_confidence: prompts in, temperatures out, and bad input."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from dsv41.engine import SpeculationRecord, load_temperatures
from launch import calibrate_confidence
from launch.cli import run
from tests.golden import DATA

TINY = f"--checkpoint={DATA / 'tiny_text'}"
MODEL = (TINY, "--set=text_config.max_position_embeddings=4096")


def start(*arguments):
    return run(calibrate_confidence.main, calibrate_confidence.FLAGS, ["launch/calibrate_confidence.py", *arguments])


@pytest.fixture
def prompts(tmp_path):
    lines = [{"prompt": "ate the"}, {"prompt_ids": [0, 17, 42], "id": "kept by others"}]
    (tmp_path / "prompts.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return f"--prompts={tmp_path / 'prompts.jsonl'}"


@pytest.mark.slow
def test_json_and_plot(capsys, tmp_path, prompts):
    out, plot = tmp_path / "temperatures.json", tmp_path / "curves.png"
    files = (prompts, f"--out={out}", f"--plot={plot}")
    assert start(*MODEL, *files, "--max_new_tokens=12", "--batch=2", "--json") == 0
    printed, err = capsys.readouterr()
    assert printed.count("\n") == 1 and err.startswith("warning: only ")
    report = json.loads(printed)
    found = load_temperatures(out, 5)
    assert report["prompts"] == 2 and report["rounds"] > report["samples"] == found.samples > 0
    for name, values in (("temperatures", found.values), ("ece_before", found.ece_before)):
        assert report[name] == list(values)
    assert report["ece_after"] == list(found.ece_after)
    assert 1 <= report["acceptance_length"] <= 6
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["curves.png", "prompts.jsonl", "temperatures.json"]


@pytest.fixture
def recorded(monkeypatch):
    """Rounds instead of a run; returns where to put how many, and what the run was asked for."""
    asked = {"rounds": 1000, "verified": 5}

    def record(model, prompts, **options):
        asked.update(options, prompts=prompts)
        rounds = asked["rounds"]
        each = SpeculationRecord(
            confidence=np.zeros((rounds, 5), np.float32),
            verified=np.full(rounds, asked["verified"], np.int32),
            accepted=np.full(rounds, asked["verified"], np.int32),
            emitted=np.full(rounds, 6, np.int32),
        )
        return [each]

    monkeypatch.setattr(calibrate_confidence, "record_rounds", record)
    return asked


def test_text(capsys, tmp_path, recorded):
    """A row for each draft, and no warning if there are rounds enough."""
    save_file({"tokens": np.array([[0, 5, 6], [0, 7, 8]], np.int32)}, tmp_path / "tokens.safetensors")
    files = (f"--tokens={tmp_path / 'tokens.safetensors'}", f"--out={tmp_path / 't.json'}")
    assert start(*MODEL, *files, "--acceptance=token", "--seed=3") == 0
    out, err = capsys.readouterr()
    rows = [line.replace("│", " ").split() for line in out.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    assert "1,000 of 1,000 rounds" in out and "6.000 tokens a round" in out
    assert err.count("\n") == 1 and "t.json: 5 temperatures" in err
    assert recorded["prompts"] == [[0, 5, 6], [0, 7, 8]]
    assert recorded["rule"].value == "token" and recorded["sampling"].temperature == 1
    assert recorded["sampling"].seed == 3


@pytest.mark.parametrize("rounds, verified", [(0, 5), (4, 4)])
def test_without_usable_rounds_nothing_is_written(capsys, tmp_path, prompts, recorded, rounds, verified):
    recorded.update(rounds=rounds, verified=verified)
    out = tmp_path / "t.json"
    out.write_text("from before")
    assert start(*MODEL, prompts, f"--out={out}") == 2
    assert f"of {rounds} rounds none verified all 5 drafts" in capsys.readouterr().err
    assert out.read_text() == "from before"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "prompts.jsonl: holds no prompts"),
        ("\n{", "prompts.jsonl, line 2: not JSON"),
        ("[1]", "line 1: expected an object with either prompt or prompt_ids"),
        ("{}", "line 1: expected an object with either prompt or prompt_ids"),
        ('{"prompt": "a", "prompt_ids": [1]}', "line 1: expected an object with either prompt or prompt_ids"),
        ('{"prompt": 3}', "line 1: prompt: expected text, got 3"),
        ('{"prompt": "\\ud800"}', "line 1: prompt: holds half a surrogate pair"),
        ('{"prompt_ids": "0,1"}', "line 1: prompt_ids: expected a list of token ids"),
        ('{"prompt_ids": [0, 1.5]}', "line 1: prompt_ids: expected a list of token ids"),
        ('{"prompt_ids": [0, true]}', "line 1: prompt_ids: expected a list of token ids"),
        ('{"prompt_ids": [1]}\n{"prompt_ids": [512]}', "prompt 1: token 0 is 512"),
        ('{"prompt_ids": []}', "prompt 0: empty"),
    ],
)
def test_bad_prompts(capsys, monkeypatch, tmp_path, text, message):
    monkeypatch.setattr("dsv41.load", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "prompts.jsonl").write_text(text)
    files = (f"--prompts={tmp_path / 'prompts.jsonl'}", f"--out={tmp_path / 't.json'}")
    assert start(TINY, *files, "--max_new_tokens=16") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--out=absent/x.json"], "absent/x.json: no such directory absent"),
        (["--plot=absent/x.png"], "absent/x.png: no such directory absent"),
        (["--tokens=x"], "give either --prompts=FILE or --tokens=FILE.safetensors"),
        (["--prompts=absent"], "absent: no such file of prompts"),
        (["--prompts=."], "not a readable text file"),
        (["--max_new_tokens=6"], "max_new_tokens: expected 7 or more"),
        (["--batch=0"], "batch: expected 1 or more, got 0"),
        (["--prefill_chunk=0"], "prefill_chunk: expected 1 or more, got 0"),
        (["--temperature=-1"], "temperature: expected 0 or more"),
        (["--seed=-1"], "seed: expected an integer"),
    ],
)
def test_bad_input(capsys, monkeypatch, tmp_path, prompts, arguments, message):
    """Found before the model is loaded; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dsv41.load", lambda *_, **__: pytest.fail("loaded"))
    assert start(TINY, prompts, "--out=t.json", "--max_new_tokens=16", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("calibrate_confidence: ") and message in err
    assert os.listdir(tmp_path) == ["prompts.jsonl"]


def test_out_is_required(capsys):
    assert start(TINY, "--prompts=x") == 2
    assert "--out=FILE.json is required" in capsys.readouterr().err
