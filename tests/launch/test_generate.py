"""launch.generate: text and ids in and out, one JSON object, and bad input."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from dsv41.checkpoint.token_map import load_tokenizer
from launch import generate
from launch.cli import run
from tests.checkpoint_files import script_model, three_layers
from tests.golden import DATA

ROOT = pathlib.Path(__file__).parents[2]
TINY = f"--checkpoint={DATA / 'tiny_text'}"
LONG = "--set=text_config.max_position_embeddings=4096"


def start(*arguments):
    return run(generate.main, generate.FLAGS, ["launch/generate.py", *arguments])


def report(capsys, *arguments):
    """The JSON object that a run prints, which must be all that it prints. Prompts have up to 8 tokens: every test runs
    the same two programs."""
    assert start(*script_model(), "--json", *arguments) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and err == ""
    return json.loads(out)


def test_json(capsys):
    found = report(capsys, "--prompt_ids=0,17,42", "--max_new_tokens=5", "--stop_ids=")
    assert set(found) == {"token_ids", "text", "prompt_tokens", "finish_reason", "timings", "cache"}
    assert len(found["token_ids"]) == 5 and found["prompt_tokens"] == 3 and found["finish_reason"] == "length"
    tokenizer = load_tokenizer(DATA / "tiny_text")
    assert found["text"] == tokenizer.decode(found["token_ids"], skip_special_tokens=True)
    timings = found["timings"]
    assert all(timings[name] > 0 for name in ("load_s", "prefill_s", "decode_s", "prefill_tokens_per_s"))
    assert timings["decode_tokens_per_s"] == pytest.approx(4 / timings["decode_s"])
    assert found["cache"]["kv_bytes_per_token"] > 0


def test_greedy_repeats_and_the_seed_matters(capsys):
    arguments = ("--prompt_ids=0,17,42", "--max_new_tokens=6", "--stop_ids=")
    warm = (*arguments, "--temperature=1", "--top_p=1")
    first, again = (report(capsys, *arguments)["token_ids"] for _ in range(2))
    assert first == again
    drawn = [report(capsys, *warm, f"--seed={seed}")["token_ids"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert report(capsys, *warm, "--top_k=1")["token_ids"] == first


def test_a_prompt_begins_with_one_bos(capsys):
    tokenizer = load_tokenizer(DATA / "tiny_text")
    ids = tokenizer.encode("ate the").ids
    assert generate.encode(tokenizer, "ate the", 0) == [0, *ids]
    assert generate.encode(tokenizer, "<bos>ate the", 0) == [0, *ids]
    assert generate.encode(tokenizer, "", 0) == [0]
    arguments = ("--max_new_tokens=3", "--stop_ids=")
    by_text = report(capsys, "--prompt=ate the", *arguments)
    by_ids = report(capsys, f"--prompt_ids={','.join(map(str, [0, *ids]))}", *arguments)
    assert by_text["token_ids"] == by_ids["token_ids"] and by_text["prompt_tokens"] == 1 + len(ids)


def test_stop_ids(capsys):
    free = report(capsys, "--prompt_ids=0,17,42", "--max_new_tokens=5", "--stop_ids=")
    stop = free["token_ids"][2]
    found = report(capsys, "--prompt_ids=0,17,42", "--max_new_tokens=5", f"--stop_ids=3,{stop}")
    assert found["finish_reason"] == "stop"
    assert found["token_ids"] == free["token_ids"][: free["token_ids"].index(stop) + 1]
    tokenizer = load_tokenizer(DATA / "tiny_text")
    assert found["text"] == tokenizer.decode(found["token_ids"][:-1], skip_special_tokens=True)


def test_text(capsys):
    """The text alone on stdout, the figures on stderr."""
    arguments = ("--prompt=ate the", "--max_new_tokens=5")
    text = report(capsys, *arguments)["text"]
    assert start(*script_model(), *arguments) == 0
    out, err = capsys.readouterr()
    assert out == text + "\n"
    assert err.count("\n") == 1 and "tokens/s" in err and "72 bytes a token" in err


def test_progress_if_verbose(capfd):
    assert start(*script_model(), "--prompt_ids=0", "--max_new_tokens=1", "--json", "--verbose") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["prompt_tokens"] == 1
    assert "loading" in err and "prefill" in err and "1/1" in err


def test_without_a_tokenizer(capsys, tmp_path):
    """A model with Engram needs its tokenizer to hash with; that it is missing is said before any loading."""
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        shutil.copy(DATA / "tiny_text" / name, tmp_path)
    for prompt in ("--prompt=hello", "--prompt_ids=1,2"):
        assert start(f"--checkpoint={tmp_path}", prompt) == 2
        assert "tokenizer.json: no such tokenizer file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give either --prompt=TEXT or --prompt_ids=ID,ID,..."),
        (["--prompt=a", "--prompt_ids=1"], "give either --prompt=TEXT or --prompt_ids=ID,ID,..."),
        (["--prompt_ids=1,two"], "--prompt_ids: expected ids as 0,17,42, got '1,two'"),
        (["--prompt_ids="], "prompt 0: empty"),
        (["--prompt_ids=1,512"], "prompt 0: token 1 is 512, expected an id in [0, 512)"),
        (["--prompt_ids=1", "--stop_ids=x"], "--stop_ids: expected ids"),
        (["--prompt_ids=1", "--stop_ids=512"], "--stop_ids: expected ids in [0, 512), got 512"),
        (["--prompt_ids=1", "--prefill=half"], "value should be one of <ced|full>"),
        (
            ["--prompt_ids=1", "--prefill=ced", "--set=text_config.engram_layer_ids=[1,7]"],
            "decoder has an Engram",
        ),
        (["--prompt_ids=1", "--max_new_tokens=0"], "max_new_tokens: expected 1 or more, got 0"),
        (["--prompt_ids=1,2", "--max_new_tokens=127"], "2 tokens and 127 new ones exceed max_position_embeddings=128"),
        (["--prompt_ids=1", "--temperature=-1"], "temperature: expected 0 or more, got -1.0"),
        (["--prompt_ids=1", "--top_p=0"], "top_p: expected a number in (0, 1], got 0.0"),
        (["--prompt_ids=1", "--seed=-1"], "seed: expected an integer in [0, 2^32), got -1"),
        (["--prompt_ids=1", "--set=text_config.hc_mult"], "--set: expected key=value"),
        (["--prompt_ids=1", "--speculate=on", "--draft_tokens=6"], "draft_tokens: expected 0 to 5"),
        (["--prompt_ids=1", "--speculate=maybe"], "value should be one of <on|off>"),
        (["--prompt_ids=1", "--prefill_chunk=0"], "prefill_chunk: expected 1 or more, got 0"),
        (["--prompt_ids=1", "--stop_ids=99999"], "--stop_ids: expected ids in [0, 512), got 99999"),
        (["--prompt_ids=1", "--draft_tokens=2"], "--draft_tokens: only with --speculate=on"),
        (["--prompt_ids=1", "--speculate=on", "--verify=budget"], "schedule 'budget' needs a throughput table"),
        (["--prompt_ids=1", "--speculate=on", "--verify=budget", "--throughput_table=none.json"], "none.json"),
        (["--prompt_ids=1", "--speculate=on", "--throughput_table=x"], "--throughput_table: only with --verify=budget"),
        (["--prompt_ids=1", "--speculate=on", "--confidence_temperatures=x"], "only with --verify=budget"),
        (["--prompt_ids=1", "--checkpoint=absent"], "absent: no such"),
        (["--prompt=\udcff"], "--prompt: not valid UTF-8"),
        (["--prompt_ids=1", "--speculator=on"], "Unknown command line flag 'speculator'"),
    ],
)
def test_bad_input(capsys, monkeypatch, tmp_path, arguments, message):
    """Without --checkpoint: the bundled model, which is not even loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dsv41.load", lambda *_, **__: pytest.fail("loaded"))
    assert start(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("generate: ") and message in err


@pytest.mark.slow
def test_speculation(capsys):
    """The same tokens, and what the rounds came to."""
    arguments = ("--prompt_ids=0,17,42", "--max_new_tokens=9", "--stop_ids=")
    plain = report(capsys, TINY, *arguments)
    found = report(capsys, TINY, *arguments, "--speculate=on")
    assert found["token_ids"] == plain["token_ids"]
    timings = found["timings"]
    rounds = 8 / timings["tokens_per_forward"]
    assert rounds == pytest.approx(round(rounds)) and 2 <= rounds <= 8
    assert 1 <= timings["acceptance_length"] <= 6 and 0 < timings["mean_verified_length"] <= 5
    assert plain["timings"]["acceptance_length"] is None and plain["timings"]["tokens_per_forward"] == 1
    assert start(TINY, LONG, *arguments, "--speculate=on") == 0
    assert "acceptance length" in capsys.readouterr().err


@pytest.mark.slow
def test_prefill_with_the_tail_only(capsys):
    """The same up to the window of 16 tokens; behind a longer prompt it need not be."""
    arguments = (f"--checkpoint={three_layers()}", "--max_new_tokens=5", "--stop_ids=")
    full = report(capsys, "--prompt_ids=0,17,42", *arguments)
    assert report(capsys, "--prompt_ids=0,17,42", *arguments, "--prefill=ced")["token_ids"] == full["token_ids"]
    long = ",".join(map(str, range(3, 23)))
    found = report(capsys, f"--prompt_ids={long}", *arguments, "--prefill=ced")
    assert found["prompt_tokens"] == 20 and len(found["token_ids"]) == 5


def start_program(environment, *arguments):
    command = [sys.executable, "-m", "launch.generate", "--prompt=The quick brown fox", "--max_new_tokens=2", "--json"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_as_a_program():
    assert len(start_program(None)["token_ids"]) <= 2


@pytest.mark.slow  # a fresh compile cache means compiling everything
def test_compile_cache(tmp_path):
    kept = tmp_path / "a" / "kept"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    first = start_program(environment, f"--compile_cache_dir={kept}")
    assert any(kept.iterdir())
    again = start_program(environment, f"--compile_cache_dir={kept}")
    assert again["timings"]["compile_s"] < first["timings"]["compile_s"]
    assert again["token_ids"] == first["token_ids"]
