"""launch.chat: what turns reuse, a second run that goes on from disk, what it prints, and bad input."""

import io
import json
import os
import sys

import pytest

from dsv41.checkpoint.token_map import load_tokenizer
from launch import chat
from launch.cli import run
from tests.golden import DATA

TINY = f"--checkpoint={DATA / 'tiny_text'}"
# Two turns of 28 and 21 tokens; the window is 16. Every test runs the same programs.
TURNS = ("The quick brown fox jumps over the lazy dog.", " Then the dog sleeps in the sun.")
MODEL = (TINY, "--set=text_config.max_position_embeddings=4096", "--max_tokens=256", "--prefill_chunk=16")
SHORT = ("--max_new_tokens=8", "--stop_ids=")


def start(*arguments):
    return run(chat.main, chat.FLAGS, ["launch/chat.py", *arguments])


def report(capsys, *arguments, turns=TURNS):
    """The objects of the turns, and the last one."""
    assert start(*MODEL, *SHORT, "--json", *(f"--turn={t}" for t in turns), *arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    *found, last = map(json.loads, out.splitlines())
    assert set(last) == {"tiers"} and len(found) == len(turns)
    return found, last["tiers"]


def cached(turn):
    return {tier: n for tier, n in turn["cached_tokens"].items() if n}


@pytest.mark.slow
def test_a_second_turn_goes_on_from_the_first(capsys):
    (first, second), tiers = report(capsys)
    tokenizer = load_tokenizer(DATA / "tiny_text")
    lengths = [len(tokenizer.encode(t).ids) for t in TURNS]
    assert first["turn"] == 1 and first["prompt_tokens"] == 1 + lengths[0] == first["fresh_tokens"]
    assert cached(first) == {} and first["replayed_tokens"] == 0 and not first["window_hit"]
    assert len(first["token_ids"]) == 8 and first["finish_reason"] == "length"
    assert first["text"] == tokenizer.decode(first["token_ids"], skip_special_tokens=True)
    # All but the answer's last token is in the cache; an even number of tokens can be used.
    assert second["prompt_tokens"] == first["prompt_tokens"] + 8 + lengths[1]
    there = first["prompt_tokens"] + 7
    assert cached(second) == {"hbm": there - there % 2}
    assert second["fresh_tokens"] == second["prompt_tokens"] - (there - there % 2)
    assert second["window_hit"] and second["replayed_tokens"] == 0
    assert second["time_to_first_token_s"] > 0 and second["tokens_per_s"] > 0 and second["acceptance_length"] is None
    assert tiers["hbm"]["prompt_tokens"] == there - there % 2 and tiers["hbm"]["pages"] == 1
    assert tiers["windows"]["prompts"] == 1 and tiers["windows"]["snapshots"] >= 2
    assert tiers["host"] == {"pages": 0, "bytes": 0, "prompt_tokens": 0} and "ssd" not in tiers


@pytest.mark.slow
def test_without_snapshots_the_window_is_replayed(capsys):
    (_, second), tiers = report(capsys, "--snapshot_minutes=0")
    assert not second["window_hit"] and second["replayed_tokens"] == 16 and cached(second)
    assert set(tiers) == {"hbm", "host"}


@pytest.mark.slow
def test_without_reuse_everything_is_computed(capsys):
    (first, second), _ = report(capsys, "--noreuse", "--host_gb=0")
    assert cached(first) == cached(second) == {} and second["fresh_tokens"] == second["prompt_tokens"]


@pytest.mark.slow
def test_a_second_run_goes_on_from_disk(capsys, tmp_path):
    """Its first prompt is the beginning of a page of the first run."""
    (first, _), tiers = report(capsys, f"--store={tmp_path / 'kv'}")
    assert cached(first) == {} and tiers["ssd"]["pages"] >= 1 and tiers["ssd"]["bytes"] > 0
    assert tiers["ssd"]["prompt_tokens"] == 0
    (again, second), tiers = report(capsys, f"--store={tmp_path / 'kv'}")
    limit = again["prompt_tokens"] - 1
    assert cached(again) == {"ssd": limit - limit % 2} and again["replayed_tokens"] == 16
    assert again["fresh_tokens"] == again["prompt_tokens"] - cached(again)["ssd"]
    assert sum(cached(second).values()) > cached(again)["ssd"]
    assert tiers["ssd"]["prompt_tokens"] >= cached(again)["ssd"]


@pytest.mark.slow
def test_text(capsys, monkeypatch):
    """Answers alone on stdout; figures and the table on stderr. Turns are lines, blank ones are passed over."""
    (first, second), _ = report(capsys)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TURNS[0]}\n\n{TURNS[1]}\r\n"))
    assert start(*MODEL, *SHORT) == 0
    out, err = capsys.readouterr()
    assert out == f"{first['text']}\n{second['text']}\n"
    there = sum(second["cached_tokens"].values())
    assert f"[turn 1: {first['prompt_tokens']} prompt tokens, none reused, {first['fresh_tokens']} computed" in err
    assert f"{there} reused (hbm {there}), window from a snapshot, {second['fresh_tokens']} computed" in err
    assert "host memory: window snapshots" in err and "> " not in err
    assert start(*MODEL, *SHORT, f"--turn={TURNS[0]}") == 0
    assert f"> {TURNS[0]}\n" in capsys.readouterr().err


@pytest.mark.slow  # three more programs
def test_speculation(capsys):
    plain, _ = report(capsys, turns=TURNS[:1])
    drafted, _ = report(capsys, "--speculate=on", turns=TURNS[:1])
    assert drafted[0]["token_ids"] == plain[0]["token_ids"] and 1 <= drafted[0]["acceptance_length"] <= 6


def test_an_image_token_that_was_drawn_is_forgotten():
    """There is no image behind it: the next turn would be refused."""
    assert chat._said((17, 505, 4, 505), 505) == [17, 4]


@pytest.mark.slow
def test_a_conversation_that_grows_too_long(capsys, monkeypatch):
    """The last answer is cut to what fits, the turn after it is refused; the figures so far were printed."""
    line = "dog " * 10
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{line}\n" * 9))
    assert start(*MODEL, "--stop_ids=", "--max_new_tokens=110", "--json") == 2
    out, err = capsys.readouterr()
    turns = [json.loads(line) for line in out.splitlines()]
    assert len(turns) == 2 and len(turns[0]["token_ids"]) == 110
    assert turns[1]["prompt_tokens"] + len(turns[1]["token_ids"]) == 256
    assert err.count("\n") == 1 and "chat: turn 3: the conversation has" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--turn="], "--turn: turn 1 is empty"),
        (["--turn=\udcff"], "turn: not valid UTF-8"),
        (["--turn=a", "--max_new_tokens=0"], "--max_new_tokens: expected 1 or more, got 0"),
        (["--turn=a", "--max_tokens=3000"], "max_tokens=3000 exceeds max_position_embeddings=128"),
        ([f"--turn={'dog ' * 99}"], "--turn: the first 1 turns and a token of answer to each are"),
        (["--turn=a", "--store_gb=1"], "--store_gb: only with --store=DIR"),
        (["--turn=a", "--host_gb=-1"], "--host_gb: expected a number, 0 or more, got -1.0"),
        (["--turn=a", "--host_gb=inf"], "--host_gb: expected a number, 0 or more, got inf"),
        (["--turn=a", "--snapshot_minutes=nan"], "--snapshot_minutes: expected a number, 0 or more, got nan"),
        (["--turn=a", "--store=here/a-file"], "here/a-file"),
        (["--turn=a", "--stop_ids=512"], "--stop_ids: expected ids in [0, 512), got 512"),
        (["--turn=a", "--temperature=-1"], "temperature: expected 0 or more"),
        (["--turn=a", "--prefill=half"], "value should be one of <ced|full>"),
        (["--turn=a", "--draft_tokens=2"], "--draft_tokens: only with --speculate=on"),
        (["--checkpoint=absent"], "absent: no such"),
    ],
)
def test_bad_input(capsys, monkeypatch, tmp_path, arguments, message):
    """Found before the model is loaded, as a line on stderr."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("here")
    (tmp_path / "here" / "a-file").write_text("")
    monkeypatch.setattr("dsv41.load", lambda *_, **__: pytest.fail("loaded"))
    assert start(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("chat: ") and message in err
