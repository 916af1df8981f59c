"""launch.make_corpus: the file that it writes is the corpus that it tells of, and bad input is refused."""

import json

import pytest

from dsv41.train.corpus import standard_library
from dsv41.train.corpus_file import read_corpus
from dsv41.train.package_corpus import FOLDER, installed_packages
from launch import make_corpus
from launch.cli import BAD_INPUT, run


def make(out, *flags):
    return run(make_corpus.main, make_corpus.FLAGS, ["launch/make_corpus.py", f"--out={out}", *flags])


@pytest.fixture
def texts(tmp_path):
    lines = (json.dumps({"name": f"d{i}", "text": f"text {i}\n"}) for i in range(80))
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_own_files(texts, tmp_path, capsys):
    assert make(tmp_path / "corpus.gz", f"--text={texts}") == 0
    corpus = read_corpus(tmp_path / "corpus.gz")
    assert json.loads(capsys.readouterr().out) == corpus.describe()
    assert len(corpus.documents) == 80 and corpus.train and corpus.held_out and corpus.source == "files"


def test_with_packages(texts, tmp_path, capsys):
    assert make(tmp_path / "corpus.gz", f"--text={texts}", "--packages") == 0
    corpus, report = read_corpus(tmp_path / "corpus.gz"), json.loads(capsys.readouterr().out)
    assert report == corpus.describe()
    assert report["source"] == "files and packages" and report["packages"] == installed_packages()
    assert sum(d.name.startswith(FOLDER) for d in corpus.documents) == report["documents"] - 80 > 100
    assert not any(d.held_out for d in corpus.documents if d.name.startswith(FOLDER))


def test_the_standard_library(tmp_path, capsys):
    assert make(tmp_path / "corpus.gz") == 0
    assert json.loads(capsys.readouterr().out) == standard_library().describe()
    assert read_corpus(tmp_path / "corpus.gz") == standard_library()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--out="], "is a directory"),
        (["--out=absent/corpus.gz"], "no such directory"),
        (["--out=corpus.gz", "--text=absent*.py"], "absent*.py: matches no file"),
        ([], "--out is required"),
    ],
)
def test_bad_input(tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    assert run(make_corpus.main, make_corpus.FLAGS, ["launch/make_corpus.py", *flags]) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
