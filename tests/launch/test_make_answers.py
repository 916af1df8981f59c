"""launch.make_answers: the file it writes, that it goes on where it stopped, and bad input."""

import json
import pathlib
import re
import shutil

import jax
import pytest

from dsv41.checkpoint.token_map import load_tokenizer
from dsv41.engine import generate
from dsv41.evals import answers
from dsv41.evals.answers import open_answers
from dsv41.train.corpus_file import text_corpus
from launch import make_answers
from launch.cli import run
from tests.checkpoint_files import script_model
from tests.golden import DATA

TEXTS = [f"def f{i}(x):\n    '''Adds {i}.'''\n    return x + {i}\n\n\nprint(f{i}({i * i}))\n" for i in range(8)]


def start(*arguments):
    return run(make_answers.main, make_answers.FLAGS, ["launch/make_answers.py", *map(str, arguments)])


def model():
    """Batches of 3 and 4 prompts of up to 8 tokens run the same two programs."""
    return *script_model(), "--max_new_tokens=5"


def asked(source: pathlib.Path, *more):
    return (*model(), f"--text={source}", "--count=7", "--prompt_tokens=8", "--batch=4", *more)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "texts.jsonl"
    path.write_text("".join(json.dumps({"name": str(i), "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    return path


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The file of a run that was not stopped."""
    out = tmp_path_factory.mktemp("whole") / "answers.jsonl"
    assert start(*asked(source, f"--out={out}")) == 0
    return out


@pytest.fixture
def unloaded(monkeypatch):
    monkeypatch.setattr("dsv41.load", lambda *_, **__: pytest.fail("loaded"))


def test_lines(whole, source):
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [line["name"] for line in lines] == [f"answers/{i:08d}" for i in range(7)]
    training = [d.text for d in text_corpus([str(source)]).train]
    tokenizer = load_tokenizer(DATA / "tiny_text")
    for line in lines:
        assert list(line) == ["name", "text", "prompt_tokens", "new_tokens", "finish_reason", "key"]
        assert line["prompt_tokens"] == 8 and re.fullmatch("[0-9a-f]{16}", line["key"])
        assert line["new_tokens"] == 5 if line["finish_reason"] == "length" else line["new_tokens"] <= 5
        begin = tokenizer.decode(tokenizer.encode(line["text"], add_special_tokens=False).ids[:4])
        assert any(begin in text for text in training)
    assert len({line["key"] for line in lines}) == len({line["text"] for line in lines}) == 7


def test_training_reads_the_file(whole):
    corpus = text_corpus([str(whole)])
    lines = map(json.loads, whole.read_text().splitlines())
    assert {d.name: d.text for d in corpus.documents} == {f"answers.jsonl#{x['name']}": x["text"] for x in lines}
    assert corpus.train and corpus.held_out


def test_another_batch_gives_the_same_file(capsys, monkeypatch, whole, source, tmp_path, compilations):
    """And the batches behind the first one compile nothing, the last of one prompt neither."""
    out, compiled = tmp_path / "other.jsonl", []

    def counted(*arguments, **options):
        results = generate(*arguments, **options)
        compiled.append(len(compilations))
        return results

    monkeypatch.setattr(answers, "generate", counted)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1))
    assert compilations  # the listener works
    assert start(*asked(source, f"--out={out}", "--batch=3", "--json")) == 0
    assert len(compiled) == 3 and compiled[0] == compiled[1] == compiled[2]
    assert out.read_bytes() == whole.read_bytes()
    printed, err = capsys.readouterr()
    assert printed.count("\n") == 1 and err == ""
    report, lines = json.loads(printed), [json.loads(line) for line in out.read_text().splitlines()]
    assert (report["out"], report["texts"], report["new_texts"]) == (str(out), 7, 7)
    assert report["new_tokens"] == sum(line["new_tokens"] for line in lines)
    assert report["stopped"] == sum(line["finish_reason"] == "stop" for line in lines)
    assert report["tokens_per_s"] == pytest.approx(report["new_tokens"] / report["timings"]["generate_s"])


def test_a_cut_file_is_gone_on_with(capsys, whole, source, tmp_path):
    """A kill in the middle of line 3."""
    lines, out = whole.read_bytes().splitlines(keepends=True), tmp_path / "cut.jsonl"
    out.write_bytes(b"".join(lines[:2]) + lines[2][:-9])
    assert start(*asked(source, f"--out={out}")) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert capsys.readouterr().out.startswith("5 texts of ")


def test_a_complete_file_is_left_alone(capsys, whole, source, tmp_path, unloaded):
    """Also one that was made with a larger count, as far as that is asked for."""
    out = tmp_path / "answers.jsonl"
    for count in (7, 4):
        data = b"".join(whole.read_bytes().splitlines(keepends=True)[:count])
        out.write_bytes(data)
        assert start(*asked(source, f"--out={out}", f"--count={count}")) == 0
        assert capsys.readouterr().out == f"{out}: all {count} texts are there already\n"
        assert out.read_bytes() == data
    assert start(*asked(source, f"--out={out}", "--count=4", "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["texts"], report["new_texts"], report["tokens_per_s"]) == (4, 0, None)


def test_given_prompts(tmp_path):
    """Whatever their lengths, each is the beginning of the text with its number."""
    tokenizer = load_tokenizer(DATA / "tiny_text")
    prompts = [[0, 17, 42], [0, *tokenizer.encode("return x").ids][:8], [0, 3, 4, 5]]
    given, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    given.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts))
    assert start(*model(), f"--prompts={given}", f"--out={out}", "--seed=5") == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    order = sorted(range(3), key=lambda i: -len(prompts[i]))
    assert [line["name"] for line in lines] == [f"answers/{i:08d}" for i in order]
    for line, i in zip(lines, order, strict=True):
        assert line["prompt_tokens"] == len(prompts[i])
        assert line["text"].startswith(tokenizer.decode(prompts[i]).rstrip("\ufffd"))


@pytest.mark.parametrize(
    "changes, message",
    [
        (["--seed=1"], r"line 1: answers/00000000 has the key \w+, expected answers/00000000 with \w+: the file was b"),
        (["--max_new_tokens=4"], "begun with other flags, other prompts or another model"),
        (["--top_k=3"], "line 1: answers/00000000 has the key"),
        (["--set=text_config.routed_scaling_factor=1.25"], "line 1: answers/00000000 has the key"),
        (["--count=3"], "line 4: the file has more answers than the 3 that are asked for"),
    ],
)
def test_another_run_is_refused(capsys, whole, source, tmp_path, unloaded, changes, message):
    out = tmp_path / "answers.jsonl"
    shutil.copy(whole, out)
    assert start(*asked(source, f"--out={out}", *changes)) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"make_answers: {out}, line ") and re.search(message, err) and err.count("\n") == 1
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "data, message",
    [
        (b"{}\n", "line 1: not an answer, expected an object"),
        (b"a note\n", "line 1: not an answer, expected an object"),
        (b"a note", "line 1: not the beginning of an answer"),
    ],
)
def test_a_file_of_something_else_is_refused(capsys, source, tmp_path, unloaded, data, message):
    (tmp_path / "notes.jsonl").write_bytes(data)
    assert start(*asked(source, f"--out={tmp_path / 'notes.jsonl'}")) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "notes.jsonl").read_bytes() == data


def test_one_process_a_file(capsys, source, tmp_path, unloaded):
    out = tmp_path / "answers.jsonl"
    with open_answers(out):
        assert start(*asked(source, f"--out={out}")) == 2
    assert "another process appends to it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--out="], "--out: expected a name that ends in .jsonl, got"),
        (["--out=answers.txt"], "--out: expected a name that ends in .jsonl, got answers.txt"),
        (["--out=absent/answers.jsonl"], "no such directory absent"),
        (["--count=0"], "--count: expected 1 or more, got 0"),
        (["--prompt_tokens=1"], "--prompt_tokens: expected 2 or more, got 1"),
        (["--batch=0"], "--batch: expected 1 or more, got 0"),
        (["--prefill_chunk=0"], "--prefill_chunk: expected 1 or more, got 0"),
        (["--max_new_tokens=0"], "max_new_tokens: expected 1 or more, got 0"),
        (["--prompt_tokens=100", "--max_new_tokens=29"], "100 tokens and 29 new ones exceed max_position_embeddings"),
        (["--prompt_tokens=100", "--max_new_tokens=9"], "none of the 2 files has 100 tokens"),
        (["--prompts=p.jsonl"], "--prompts says what the prompts are: give it without --text"),
        (
            ["--tokens=t.safetensors", "--count=2"],
            "--tokens says what the prompts are: give it without --text, --count",
        ),
        (["--corpus=c.gz"], "--corpus says everything about the text"),
        (["--temperature=-1"], "temperature: expected 0 or more, got -1.0"),
        (["--seed=4294967295", "--count=2", "--prompt_tokens=3"], "seed: expected an integer in [0, 2^32)"),
        (["--checkpoint=bare"], "tokenizer.json: no such tokenizer file"),
    ],
)
def test_bad_input(capsys, monkeypatch, tmp_path, unloaded, arguments, message):
    """Found before the model, here the bundled one, is loaded; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    shutil.copy(DATA / "tiny_text" / "config.json", tmp_path / "bare")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"x = {i}\n" * 3}) + "\n" for i in range(3)))
    before = sorted(tmp_path.iterdir())
    assert (
        start("--out=answers.jsonl", "--text=texts.jsonl", "--prompt_tokens=9", "--max_new_tokens=8", *arguments) == 2
    )
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("make_answers: ") and message in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"prompt_ids": [0, 505]}, "prompt 1: position 1 is the image token"),
        ({"prompt_ids": [0, 512]}, "prompt 1: token 1 is 512, expected an id in [0, 512)"),
        ({"prompt_ids": [0] * 121}, "prompt 1: 121 tokens and 8 new ones exceed max_position_embeddings=128"),
    ],
)
def test_bad_prompts(capsys, tmp_path, unloaded, entry, message):
    given = tmp_path / "prompts.jsonl"
    given.write_text(f'{{"prompt": "ate the"}}\n{json.dumps(entry)}\n')
    assert start(f"--prompts={given}", f"--out={tmp_path / 'a.jsonl'}", "--max_new_tokens=8") == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_out_is_required(capsys):
    assert start() == 2
    assert "--out=FILE.jsonl is required" in capsys.readouterr().err
