"""launch.train: what it refuses before it works for long. test_train_resume.py has whole runs."""

import json
import re

import pytest

from dsv41.checkpoint.token_map import engram_token_map, load_tokenizer
from dsv41.config import load_config
from dsv41.train.corpus import Corpus, Document
from launch import train
from launch.cli import BAD_INPUT, run
from tests.checkpoint_files import TINY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out is required"),
        (["--out={tmp}/run", "--config={tiny}/config.json"], "--config needs --tokenizer"),
        (["--out={tmp}/run", "--tokenizer=x.json"], "--tokenizer goes with --config"),
        (["--out={tmp}/run", "--rows=3", "--micro_batches=2"], "a multiple of 2 micro-batches x 1 devices"),
        (["--out={tmp}/run", "--corpus=x", "--packages"], "give it without --text and --packages"),
        (["--out={tmp}/run", "--corpus={tmp}/x"], "x: no such file of a corpus"),
        (["--out={tmp}/run", "--text={tmp}/*.none"], "*.none: matches no file"),
        (["--out={tmp}/run", '--optimizer={"momentum": 2}'], "momentum: expected at least 0 and below 1"),
        (["--out={tmp}/run", "--optimizer=[1]"], "--optimizer: expected a JSON object"),
        (["--out={tmp}/run", '--optimizer={"speed": 2}'], "--optimizer: expected a JSON object of fields"),
        (["--out={tmp}/run", "--text={tmp}/a.jsonl"], "a.jsonl, line 2: expected an object with a string 'text'"),
        (["--out={tmp}/run", "--text={tmp}/*.txt", "--needles=0.1", "--length=128", "--rows=1"], "too short for them"),
        (["--out={tmp}/b.txt/run"], "--out: cannot make the directory"),
        (["--out={tmp}/run", "--peak=0"], "peak: expected a positive number"),
        (["--out={tmp}/run", "--short_length=4096"], "--short_length: expected fewer than --length=4096"),
        (["--out={tmp}/run", "--short_length=96"], "a multiple of sequence=96 and long_sequence=4096"),
        (["--out={tmp}/run", "--short_length=512", "--micro_batches=16"], "a multiple of 16 micro-batches"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x = 1"}) + "\n{}\n")
    for name in "bcdefghijk":
        (tmp_path / f"{name}.txt").write_text("x = 1\n" * 50)
    filled = [a.replace("{tmp}", str(tmp_path)).replace("{tiny}", str(TINY)) for a in arguments]
    assert run(train.main, train.FLAGS, ["train", *filled]) == BAD_INPUT
    assert message in capsys.readouterr().err


def test_help_names_every_flag_once(capsys):
    assert run(train.main, train.FLAGS, ["train", "--help"]) == 0
    text = capsys.readouterr().out
    for name in ("out", "corpus", "text", "packages", "qat", "explored", "minutes", "save_every", "optimizer"):
        assert len(re.findall(rf"^  --(\[no\])?{name}:", text, re.MULTILINE)) == 1, name


def test_short_rows_come_first():
    texts = tuple(Document(f"{i}.py", "".join(f"x{i} = {j}\n" for j in range(60)), i == 0) for i in range(20))
    tokenizer, config = load_tokenizer(TINY), load_config(TINY)
    train.FLAGS(["train", "--out=x", "--length=128", "--rows=2", "--tokens=2048", "--warmup_steps=1",
                 "--short_length=64", "--short_until=0.4"])  # fmt: skip
    schedule, token_map = train._schedule(), engram_token_map(tokenizer, config.text_config.vocab_size)
    batches, _ = train._batches(config, Corpus(texts, "3", "0"), tokenizer, token_map, schedule)
    shapes = [next(batches).tokens.shape for _ in range(schedule.steps)]
    assert shapes == [(4, 64)] * 3 + [(2, 128)] * 5
    assert [schedule.sequence_length(256 * (n + 1)) for n in range(8)] == [shape[1] for shape in shapes]
