"""launch.evaluate: which files and prompts are measured, what is written and printed, and bad input."""

import json
import os

import pytest

from dsv41.data import TINY_MODEL
from dsv41.evals.perplexity import FileLoss
from dsv41.train.corpus import standard_library
from dsv41.train.corpus_file import write_corpus
from launch import evaluate
from launch.cli import run

MODEL = ("--set=text_config.max_position_embeddings=512",)
_RATIOS = json.loads((TINY_MODEL / "config.json").read_text())["text_config"]["compress_ratios"]
NO_DRAFTER = (
    "--set=text_config.num_nextn_predict_layers=0",
    "--set=text_config.dspark_target_layer_ids=[]",
    f"--set=text_config.compress_ratios={_RATIOS[:-3]}",
)


def start(*arguments):
    return run(evaluate.main, evaluate.FLAGS, ["launch/evaluate.py", *arguments])


@pytest.fixture
def library(tmp_path):
    """A corpus of which several files are held out."""
    folder = tmp_path / "library"
    folder.mkdir()
    for i in range(60):
        (folder / f"module{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n\n\n" * 20)
    return folder


@pytest.mark.slow
def test_all_parts(capsys, tmp_path, library):
    """Of the bundled model, whose weights are random: it recalls nothing, and drafts change nothing."""
    out = tmp_path / "out"
    (tmp_path / "run.json").write_text(json.dumps({"command": ["train", "it"], "seed": 17}))
    (tmp_path / "curves.csv").write_text("step,tokens,loss\n1,64,3.5\n2,128,2.5\n")
    arguments = (
        *MODEL, f"--out={out}", f"--corpus={library}", f"--run={tmp_path}", "--files=2",
        "--lengths=384,448", "--documents=1", "--batch=2", "--chunk=128", "--prompts=2", "--prompt_tokens=24",
        "--max_new_tokens=12", f"--plot={out / 'needle.png'}", "--json",
    )  # fmt: skip
    out.mkdir()
    assert start(*arguments) == 0
    printed, err = capsys.readouterr()
    assert printed.count("\n") == 1 and err == ""
    results = json.loads(printed)
    saved = json.loads((out / "results.json").read_text())
    assert saved | {"picture": "needle.png"} == results
    assert sorted(os.listdir(out)) == ["model_card.md", "needle.png", "results.json"]
    assert (out / "needle.png").read_bytes().startswith(b"\x89PNG")
    files = results["perplexity"]["files"]
    assert len(files) == 2 and all(100 < f["perplexity"] < 1e5 for f in files)  # of 512 tokens
    assert results["needle"]["lengths"] == [384, 448] and results["needle"]["by_length"] == [0, 0]
    cold, warm = results["acceptance"]
    assert (cold["temperature"], warm["temperature"]) == (0, 1)
    assert cold["identical_to_plain"] == 2 and warm["identical_to_plain"] is None
    assert cold["new_tokens"] == 24 and 1 <= cold["acceptance_length"] <= 6
    card = (out / "model_card.md").read_text()
    assert card.startswith("# Model card: tiny") and "    train it\n" in card and "| seed | 17 |" in card
    assert "| last step.tokens | 128 |" in card and "| last step.loss | 2.5 |" in card and "held out.loss" not in card
    assert "![accuracy by length and depth](needle.png)" in card and "python -m launch.evaluate --set=" in card


@pytest.fixture
def measured(monkeypatch):
    """Numbers instead of runs; returns what the runs were asked for."""
    asked = {}

    def losses(model, files, **options):
        asked.update(files=[f.name for f in files], **options)
        return [FileLoss(name=f.name, text_bytes=10, tokens=4, nats=8.0) for f in files]

    def acceptance(model, corpus, progress):
        progress(1, 2)
        found = {"prompts": 4, "prompt_tokens": 8, "max_new_tokens": 8, "new_tokens": 32, "plain_passes": 28}
        found |= {"rounds": 14, "fewer_passes": 2.0, "acceptance_length": 2.25, "by_position": [0.7, None]}
        return [found | {"temperature": t, "identical_to_plain": 4 if t == 0 else None} for t in (0.0, 1.0)]

    monkeypatch.setattr(evaluate, "file_losses", losses)
    monkeypatch.setattr(evaluate, "_MEASURES", {**evaluate._MEASURES, "acceptance": acceptance})
    return asked


def test_text(capsys, tmp_path, library, measured):
    held_out = [d.name for d in standard_library(library).held_out]
    assert len(held_out) >= 3
    parts = "--parts=acceptance,perplexity"  # run in the order of the card
    assert start(*MODEL, f"--out={tmp_path / 'a' / 'b'}", f"--corpus={library}", parts, "--files=2", "--name=x") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "perplexity 7.389 (2.0000 nats a token, 1.1542 bits a byte) on 8 tokens of 2 held-out files",
        "acceptance length 2.250 at temperature 0: 28 passes became 14 rounds, 2.00x fewer; 4 of 4 texts as without "
        "drafts",
        "acceptance length 2.250 at temperature 1: 28 passes became 14 rounds, 2.00x fewer",
    ]
    assert "results.json" in err and err.count("\n") == 1
    assert measured["files"] == [held_out[0], held_out[len(held_out) // 2]]
    assert measured["context"] == 512 and (measured["batch"], measured["chunk"]) == (4, 512)
    results = json.loads((tmp_path / "a" / "b" / "results.json").read_text())
    assert results["perplexity"]["held_out"] == len(held_out) and "needle" not in results
    assert results["model"]["name"] == "x"
    assert results["model"]["bytes"] == sum(f.stat().st_size for f in TINY_MODEL.iterdir())
    assert results["corpus"] == standard_library(library).describe()
    assert results["seconds"].keys() == {"load", "perplexity", "acceptance"}


def test_every_file_of_a_corpus_file(capsys, tmp_path, library, measured):
    corpus = standard_library(library)
    write_corpus(tmp_path / "corpus.gz", corpus)
    arguments = (f"--corpus={tmp_path / 'corpus.gz'}", "--parts=perplexity", "--files=0", "--context=100", "--json")
    assert start(*MODEL, f"--out={tmp_path}", *arguments) == 0
    results = json.loads(capsys.readouterr().out)
    assert [f["name"] for f in results["perplexity"]["files"]] == [d.name for d in corpus.held_out]
    assert results["perplexity"]["context"] == measured["context"] == 100


def test_what_was_measured_before_a_fault_is_kept(capsys, tmp_path, library, measured):
    parts = "--parts=perplexity,needle"
    assert start(*MODEL, f"--out={tmp_path}", f"--corpus={library}", parts, "--lengths=100") == 2
    assert "5 facts and their questions take" in capsys.readouterr().err
    assert json.loads((tmp_path / "results.json").read_text()).keys() >= {"perplexity", "model", "command"}
    assert not (tmp_path / "model_card.md").exists()


@pytest.mark.parametrize("flags, drafter", [((), True), (NO_DRAFTER, False), (("--parts=needle",), False)])
def test_parts_by_default(monkeypatch, tmp_path, library, measured, flags, drafter):
    """Acceptance is measured, and the drafter loaded for it, where there is one."""
    ran, loaded = [], []
    monkeypatch.setattr(evaluate, "_MEASURES", {p: lambda *_, p=p: ran.append(p) for p in evaluate.PARTS})
    monkeypatch.setattr("dsv41.load", lambda *_, drafter, **__: loaded.append(drafter))
    monkeypatch.setattr(evaluate, "model_card", lambda *_: "")
    assert start(*MODEL, *flags, f"--out={tmp_path}", f"--corpus={library}", "--json") == 0
    assert loaded == [drafter]
    assert ran == (["needle"] if "--parts=needle" in flags else ["perplexity", "needle", "acceptance"][: 2 + drafter])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--parts=speed"], "--parts: expected some of perplexity,needle,acceptance, got 'speed'"),
        (["--parts="], "--parts: expected some of"),
        (["--files=-1"], "--files: expected 0 or more, got -1"),
        (["--batch=0"], "--batch: expected 1 or more, got 0"),
        (["--seed=-1"], "--seed: expected a number"),
        (["--context=513"], "--context: expected 2 to 512 tokens, got 513"),
        (["--lengths=256,x"], "--lengths: expected numbers of tokens as 256,1024, got 256,x"),
        (["--lengths=512"], "--lengths: expected 1 to 511 tokens each, got '512'"),
        (["--lengths="], "--lengths: expected"),
        (["--parts=acceptance", "--prompt_tokens=500"], "500 tokens and 128 new ones exceed"),
        ([*NO_DRAFTER, "--parts=acceptance"], "the model has no drafter"),
        (["--parts=perplexity", "--run=absent"], "--run: absent/run.json: not a readable JSON file"),
        (["--parts=perplexity", "--run=lists"], "--run: lists/run.json: expected a JSON object, got list"),
        (["--parts=perplexity", "--run=empty"], "empty/curves.csv: no rows of a training run"),
        (["--parts=perplexity", "--corpus=absent"], "absent: no such file of a corpus"),
        (["--parts=perplexity", "--plot=x.png"], "--plot: shows the parts needle and acceptance"),
    ],
)
def test_bad_input(capsys, monkeypatch, tmp_path, arguments, message):
    """Found before the model is loaded; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("lists", "[]"), ("empty", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    (tmp_path / "empty" / "curves.csv").write_text("step,tokens,loss\n")
    monkeypatch.setattr("dsv41.load", lambda *_, **__: pytest.fail("loaded"))
    assert start(*MODEL, "--out=out", "--lengths=300", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("evaluate: ") and message in err
    assert sorted(os.listdir(tmp_path)) == ["empty", "lists"]


def test_out_is_required(capsys):
    assert start() == 2
    assert "--out=DIR is required" in capsys.readouterr().err
