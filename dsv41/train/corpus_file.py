"""A corpus in one file, so that another machine trains on the same text; and corpora from a user's own files.

The file is gzipped JSON lines: a header, then a document a line with `name`, `text` and `held_out`.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import pathlib
import platform
from collections.abc import Iterator, Sequence
from typing import Any

from dsv41.config import DSV41Error
from dsv41.config.atomic_file import write_file
from dsv41.train.corpus import Corpus, Document, corpus_hash, share_of_name

_FORMAT = "dsv41 corpus 1"


def write_corpus(path: str | pathlib.Path, corpus: Corpus) -> None:
    """Writes a corpus, bit for bit the same for the same one.

    Raises:
      DSV41Error: the file cannot be written.
    """
    header = {
        "format": _FORMAT,
        "source": corpus.source,
        "python_version": corpus.python_version,
        "packages": dict(corpus.packages),
        "sha256": corpus.sha256,
    }
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as file:
        for line in (header, *({"name": d.name, "text": d.text, "held_out": d.held_out} for d in corpus.documents)):
            file.write(f"{json.dumps(line)}\n".encode())
    write_file(path, buffer.getvalue())


def read_corpus(path: str | pathlib.Path) -> Corpus:
    """What `write_corpus` wrote.

    Raises:
      DSV41Error: the file is missing, no corpus, cut off, or its texts are not those that its header names.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise DSV41Error(f"{path}: no such file of a corpus")
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            header, *lines = [json.loads(line) for line in file]
        if header["format"] != _FORMAT:
            raise ValueError(f"format: expected {_FORMAT!r}, got {header['format']!r}")
        documents = tuple(Document(line["name"], line["text"], line["held_out"]) for line in lines)
        corpus = Corpus(documents, header["python_version"], header["sha256"], header["source"], header["packages"])
    except (OSError, EOFError, KeyError, TypeError, ValueError) as e:
        raise DSV41Error(f"{path}: not a corpus ({type(e).__name__}: {e})") from e
    found = corpus_hash((d.name, d.text) for d in documents)
    if found != corpus.sha256:
        raise DSV41Error(f"{path}: its texts have the hash {found}, its header says {corpus.sha256}")
    return corpus


def text_corpus(patterns: Sequence[str], *, held_out: float = 0.05) -> Corpus:
    """A corpus of a user's files: `.jsonl` with a `text` (and perhaps a `name`) a line, any other file as one text.

    Args:
      patterns: paths, with `*`, `?` and `**`.
      held_out: share of the documents that is kept for evaluation, by the hash of their names; of few documents at
        least one.

    Names are relative to the folder that holds everything, so the same files elsewhere are the same corpus.

    Raises:
      DSV41Error: a pattern matches nothing, a file cannot be read, a line is not a document, or a part is empty.
    """
    if not 0 <= held_out < 1:
        raise DSV41Error(f"held_out: expected a share in [0, 1), got {held_out}")
    texts: dict[str, str] = {}
    root = _folder(patterns)
    for pattern in patterns:
        paths = sorted(p for p in map(pathlib.Path, glob.glob(pattern, recursive=True)) if p.is_file())
        if not paths:
            raise DSV41Error(f"{pattern}: matches no file")
        for path in paths:
            texts |= dict(_texts(path, pathlib.Path(os.path.relpath(path, root)).as_posix()))
    shares = {name: share_of_name(name) for name in texts}
    limit = held_out
    if held_out and len(shares) > 1 and min(shares.values()) >= held_out:
        limit = sorted(shares.values())[1]
    documents = tuple(Document(name, texts[name], shares[name] < limit) for name in sorted(texts))
    corpus = Corpus(documents, platform.python_version(), corpus_hash(texts.items()), "files")
    if not corpus.train or (held_out and not corpus.held_out):
        part = "held-out" if corpus.train else "training"
        raise DSV41Error(f"{', '.join(patterns)}: none of {len(documents)} documents falls to the {part} part")
    return corpus


def _folder(patterns: Sequence[str]) -> str:
    """The deepest folder that everything which patterns can match lies in; "." of none."""
    fixed = []
    for pattern in patterns:
        parts = pathlib.Path(os.path.abspath(pattern)).parts[:-1]
        wild = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        fixed.append(str(pathlib.Path(*parts[:wild])))
    return os.path.commonpath(fixed) if fixed else "."


def _texts(path: pathlib.Path, name: str) -> Iterator[tuple[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise DSV41Error(f"{path}: cannot be read as UTF-8 text ({e})") from e
    if path.suffix != ".jsonl":
        yield from [(name, text)] if text else []
        return
    for number, line in enumerate(text.splitlines(), 1):
        document: Any = None
        try:
            document = json.loads(line) if line.strip() else {"text": ""}
            text, own = document["text"], document.get("name", number)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise DSV41Error(f"{path}, line {number}: expected an object with a string 'text'") from e
        if not isinstance(text, str):
            raise DSV41Error(f"{path}, line {number}: expected a string as 'text', got {type(text).__name__}")
        if text:
            yield f"{name}#{own}", text
