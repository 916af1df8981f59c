"""A corpus written to a file and read back, and corpora of a user's files."""

import gzip
import json

import pytest

from dsv41.config import DSV41Error
from dsv41.train.corpus import Corpus, Document, corpus_hash, share_of_name
from dsv41.train.corpus_file import read_corpus, text_corpus, write_corpus

TEXTS = {"a.py": "x = 1\n", "b/c.py": "π = '\u2028 \\n'\r\n\x85", "d.txt": "\x00 'held out'"}


def corpus():
    documents = tuple(Document(name, text, name == "d.txt") for name, text in TEXTS.items())
    return Corpus(documents, "3.11.7", corpus_hash(TEXTS.items()), "a source", {"numpy": "2.4"})


def rewrite(path, change):
    """The file with other lines."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)
    path.write_bytes(gzip.compress("".join(change(lines)).encode()))


def test_what_is_read_is_what_was_written(tmp_path):
    write_corpus(tmp_path / "c.gz", corpus())
    found = read_corpus(tmp_path / "c.gz")
    assert found == corpus() and found.describe() == corpus().describe()
    assert found.describe()["held_out_documents"] == 1


def test_the_same_corpus_gives_the_same_file(tmp_path):
    for name in ("one.gz", "other.gz"):
        write_corpus(tmp_path / name, corpus())
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "other.gz").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.gz", "other.gz"]


def test_a_file_that_was_cut_off(tmp_path):
    path = tmp_path / "c.gz"
    write_corpus(path, corpus())
    data = path.read_bytes()
    for size in (0, 1, 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(DSV41Error, match=r"c\.gz: not a corpus"):
            read_corpus(path)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda lines: lines[:-1], "its texts have the hash"),
        (lambda lines: [line.replace("x = 1", "x = 2") for line in lines], "its texts have the hash"),
        (lambda lines: [lines[0].replace("corpus 1", "corpus 9"), *lines[1:]], "format: expected 'dsv41 corpus 1'"),
        (lambda lines: lines[1:], "KeyError: 'format'"),
        (lambda lines: ["[]\n", *lines[1:]], "not a corpus"),
        (lambda lines: [*lines, '{"name": "e"}\n'], "KeyError: 'text'"),
        (lambda lines: ["no JSON\n"], "not a corpus"),
    ],
)
def test_a_file_that_is_none(tmp_path, change, message):
    write_corpus(tmp_path / "c.gz", corpus())
    rewrite(tmp_path / "c.gz", change)
    with pytest.raises(DSV41Error, match=message):
        read_corpus(tmp_path / "c.gz")


def test_no_file(tmp_path):
    with pytest.raises(DSV41Error, match="no such file of a corpus"):
        read_corpus(tmp_path / "absent.gz")
    (tmp_path / "text.gz").write_text("not gzipped")
    with pytest.raises(DSV41Error, match="not a corpus"):
        read_corpus(tmp_path / "text.gz")


# --- files of a user


def files(folder):
    (folder / "deep").mkdir(parents=True)
    for i in range(30):
        (folder / "deep" / f"f{i}.py").write_text(f"n = {i}\n")
    (folder / "empty.py").write_text("")
    lines = [*(json.dumps({"text": f"line {i}"}) for i in range(30)), "", json.dumps({"name": "own", "text": "named"})]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    return folder


def test_files_and_lines(tmp_path):
    folder = files(tmp_path / "my")
    found = text_corpus([f"{folder}/**/*.py", f"{folder}/*.jsonl"], held_out=0.3)
    texts = {d.name: d.text for d in found.documents}
    assert len(texts) == 61 and texts["deep/f7.py"] == "n = 7\n" and "empty.py" not in texts
    # A line without a name is called by its number.
    assert texts["lines.jsonl#1"] == "line 0" and texts["lines.jsonl#own"] == "named"
    assert found.sha256 == corpus_hash((d.name, d.text) for d in found.documents)
    assert all(d.held_out == (share_of_name(d.name) < 0.3) for d in found.documents)
    assert found.train and found.held_out and not found.packages


def test_the_same_files_elsewhere(tmp_path, monkeypatch):
    found = [text_corpus([f"{files(tmp_path / name)}/**/*.py"]) for name in ("one", "other")]
    assert found[0] == found[1]
    monkeypatch.chdir(tmp_path / "one")
    assert text_corpus(["**/*.py"]) == text_corpus(["./**/*.py"]) == found[0]
    folders = text_corpus([f"{tmp_path}/one/deep/*.py", f"{tmp_path}/other/*.jsonl"])
    assert {"one/deep/f3.py", "other/lines.jsonl#2"} < {d.name for d in folders.documents}


def test_of_few_documents_one_is_held_out(tmp_path):
    folder = files(tmp_path / "my")
    found = text_corpus([f"{folder}/deep/f[12].py"], held_out=1e-9)
    assert len(found.train) == len(found.held_out) == 1
    many = text_corpus([f"{folder}/deep/*.py"], held_out=1e-9)
    assert [d.name for d in many.held_out] == [min((d.name for d in many.documents), key=share_of_name)]
    assert not text_corpus([f"{folder}/deep/*.py"], held_out=0).held_out


def test_what_overlaps_counts_once(tmp_path):
    folder = files(tmp_path / "my")
    one, two = f"{folder}/deep/*.py", f"{folder}/deep/f*.py"
    assert text_corpus([one, two], held_out=0.3) == text_corpus([one], held_out=0.3)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2: expected an object with a string 'text'"),
        ("[1]", "line 2: expected an object"),
        ('{"txt": "a"}', "line 2: expected an object"),
        ('{"text": 5}', "line 2: expected a string as 'text', got int"),
    ],
)
def test_lines_that_are_no_documents(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(DSV41Error, match=message):
        text_corpus([str(path)])


def test_what_is_refused(tmp_path):
    folder = files(tmp_path / "my")
    with pytest.raises(DSV41Error, match=r"absent\*: matches no file"):
        text_corpus([f"{folder}/deep/*.py", "absent*"])
    with pytest.raises(DSV41Error, match="deep: matches no file"):
        text_corpus([f"{folder}/deep"])
    with pytest.raises(DSV41Error, match="held_out: expected a share"):
        text_corpus([f"{folder}/deep/*.py"], held_out=1.0)
    with pytest.raises(DSV41Error, match="none of 1 documents falls to the held-out part"):
        text_corpus([f"{folder}/deep/f1.py"], held_out=1e-9)
    (folder / "latin.py").write_bytes(b"caf\xe9")
    with pytest.raises(DSV41Error, match=r"latin\.py: cannot be read as UTF-8"):
        text_corpus([f"{folder}/*.py"])
