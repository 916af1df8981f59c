"""launch.profile_speculation: the table it writes, what it prints, and bad input. No time is looked at."""

import json
import os
import sys

import pytest

from dsv41.engine import load_throughput_table
from launch import profile_speculation
from launch.cli import run
from tests.golden import DATA

TINY = f"--checkpoint={DATA / 'tiny_text'}"
MODEL = (TINY, "--set=text_config.max_position_embeddings=4096")
QUICK = ("--requests=1", "--context=7", "--draft_tokens=1", "--steps=1", "--min_seconds=0")


def start(*arguments):
    return run(profile_speculation.main, profile_speculation.FLAGS, ["launch/profile_speculation.py", *arguments])


@pytest.mark.slow
def test_json_and_plot(capsys, tmp_path):
    out, plot = tmp_path / "table.json", tmp_path / "curves.png"
    assert start(*MODEL, *QUICK, f"--out={out}", f"--plot={plot}", "--json") == 0
    printed, err = capsys.readouterr()
    assert printed.count("\n") == 1 and err == ""
    report = json.loads(printed)
    table = load_throughput_table(out, 5)
    assert {r: [list(p) for p in points] for r, points in table.curves.items()} == {
        curve["requests"]: curve["points"] for curve in report["curves"]
    }
    assert [b for b, _ in table.curves[1]] == [1, 2]
    assert table.model == "tiny_text" and table.command.startswith("profile_speculation --requests=1 --context=7 ")
    assert report["context"] == 7 and report["slowdown"] > 0 and report["flat"] == (report["slowdown"] < 1.05)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["curves.png", "table.json"]


@pytest.mark.parametrize("rates, flat", [((10.0, 9.9), True), ((10.0, 5.0), False)])
def test_text(capsys, monkeypatch, tmp_path, rates, flat):
    """A row for each point, and a hint if drafts cost nothing."""
    monkeypatch.setattr("dsv41.engine.profile_rounds._Rounds.__init__", lambda *_: None)
    monkeypatch.setattr("dsv41.engine.profile_rounds._Rounds.rate", lambda self, width, _: rates[width - 1])
    assert start(*MODEL, *QUICK, "--requests=1,3", f"--out={tmp_path / 'table.json'}") == 0
    out, err = capsys.readouterr()
    numbers = [line.replace("│", " ").split() for line in out.splitlines() if line.startswith("│")]
    assert [row[:2] for row in numbers] == [["1", "1"], ["1", "2"], ["4", "4"], ["4", "5"], ["4", "8"]]
    assert ("--verify=all" in out) == flat
    assert err.count("\n") == 1 and "table.json: 2 curves" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--out="], "is a directory"),
        (["--out=absent/x.json"], "absent/x.json: no such directory absent"),
        (["--plot=absent/x.png"], "absent/x.png: no such directory absent"),
        (["--requests=1,two"], "--requests: expected batch sizes as 1,2,4, got '1,two'"),
        (["--requests="], "requests: expected at least one batch size"),
        (["--requests=0"], "requests: expected integers, 1 or more, got 0"),
        (["--context=123"], "context: expected 122 or less"),
        (["--draft_tokens=6"], "draft_tokens: expected 0 to 5"),
        (["--temperature=-1"], "temperature: expected 0 or more"),
        (["--acceptance=any"], "--acceptance=any"),
    ],
)
def test_bad_input(capsys, monkeypatch, tmp_path, arguments, message):
    """Found before the model is loaded; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dsv41.load", lambda *_, **__: pytest.fail("loaded"))
    assert start(TINY, "--out=table.json", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("profile_speculation: ") and message in err
    assert os.listdir(tmp_path) == []


def test_out_is_required(capsys):
    assert start(TINY) == 2
    assert "--out=FILE.json is required" in capsys.readouterr().err


def test_a_plot_needs_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("dsv41.load", lambda *_, **__: pytest.fail("loaded"))
    assert start(TINY, f"--out={tmp_path / 'x.json'}", f"--plot={tmp_path / 'x.png'}") == 2
    assert "--plot: matplotlib is not installed" in capsys.readouterr().err
