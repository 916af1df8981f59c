"""A text that any machine has: the sources of the Python standard library, and the language reference inside `pydoc`.

Nothing is downloaded. Every Python release has another text, so whatever is made from one records `Corpus.describe`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import pathlib
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dsv41.config import DSV41Error

# Tests, what an installation adds, packages that not every machine has, and those whose files are all cut from one
# mould: a codec held out would be one of fifty that were not.
EXCLUDED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "idle_test", "lib-dynload", "lib2to3",
     "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo"}
)  # fmt: skip
# Files that say where or how this interpreter was built or what somebody has set up on this machine.
_OF_THE_MACHINE = re.compile(r"_sysconfigdata.*|sitecustomize|usercustomize|__phello__.*|_distutils_hack.*")
_BUILD_FOLDER = re.compile(r"config-.*")
_GENERATED = re.compile(r"generated (?:from|by|with|automatically)|automatically generated|auto-?generated", re.I)
_HEAD_CHARACTERS = 600  # where a generated file says so
MIN_BYTES, MAX_BYTES = 256, 1 << 18
_SPLIT_STEPS = 1 << 32
REFERENCE = "pydoc_data/topics/"


@dataclasses.dataclass(frozen=True)
class Document:
    """One file or one topic of the reference.

    Attributes:
      name: its place in the library, with `/`.
      text: with `\\n` line ends.
      held_out: belongs to the part that no training sees.
    """

    name: str
    text: str
    held_out: bool


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents in the order of their names.

    Attributes:
      documents: all of them.
      python_version: of the interpreter whose library this is.
      sha256: of names and texts.
      source: what it was taken from, in words.
      packages: versions of the installed packages that have a part in it.
    """

    documents: tuple[Document, ...]
    python_version: str
    sha256: str
    source: str = "Python standard library"
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def train(self) -> tuple[Document, ...]:
        return tuple(d for d in self.documents if not d.held_out)

    @property
    def held_out(self) -> tuple[Document, ...]:
        return tuple(d for d in self.documents if d.held_out)

    def describe(self) -> dict[str, Any]:
        """What identifies the corpus, as JSON values: for records of what was made from it."""
        return {
            "source": self.source,
            "python_version": self.python_version,
            "sha256": self.sha256,
            "documents": len(self.documents),
            "bytes": sum(len(d.text.encode()) for d in self.documents),
            "held_out_documents": len(self.held_out),
            "held_out_bytes": sum(len(d.text.encode()) for d in self.held_out),
        } | ({"packages": dict(self.packages)} if self.packages else {})


def standard_library(root: str | pathlib.Path | None = None, *, held_out: float = 0.08) -> Corpus:
    """The corpus of the running interpreter.

    Which files belong to it depends on their names, sizes and first lines only, and which of these are held out on a
    hash of the name: a file stays on its side whatever else a Python release adds.

    Args:
      root: folder of the library; None: that of the running interpreter, with the topics of its reference.
      held_out: share of the documents that is kept for evaluation, in [0, 1).

    Raises:
      DSV41Error: the share is impossible, there are no sources in the folder, or either part is empty.
    """
    if not 0 <= held_out < 1:
        raise DSV41Error(f"held_out: expected a share in [0, 1), got {held_out}")
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    texts = dict(_sources(folder))
    if not texts:
        raise DSV41Error(f"{folder}: no sources of the Python standard library there")
    if root is None:
        texts |= _reference()
    documents = tuple(Document(name, texts[name], share_of_name(name) < held_out) for name in sorted(texts))
    corpus = Corpus(documents, platform.python_version(), corpus_hash(texts.items()))
    if not corpus.train or (held_out and not corpus.held_out):
        part = "held-out" if corpus.train else "training"
        raise DSV41Error(f"{folder}: none of its {len(documents)} documents falls to the {part} part")
    return corpus


def corpus_hash(texts: Iterable[tuple[str, str]]) -> str:
    """SHA-256 of (name, text) pairs in the order of the names; lengths go in, so that no two lists look alike."""
    digest = hashlib.sha256()
    for name, text in sorted(texts):
        for part in (name.encode(), text.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def share_of_name(name: str) -> float:
    """Where a name falls in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") / _SPLIT_STEPS


def _sources(folder: pathlib.Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if EXCLUDED_FOLDERS.intersection(relative.parts[:-1]) or _OF_THE_MACHINE.fullmatch(relative.stem):
            continue
        if any(_BUILD_FOLDER.fullmatch(part) for part in relative.parts[:-1]):
            continue
        try:
            data = path.read_bytes()
        except OSError as e:
            raise DSV41Error(f"{path}: cannot read a source of the standard library ({e.strerror or e})") from e
        text = source_text(data)
        if text is not None:
            yield relative.as_posix(), text


def source_text(data: bytes) -> str | None:
    """The text of a file; None if it is too small, too large, generated, or not in UTF-8."""
    if not MIN_BYTES <= len(data) <= MAX_BYTES:
        return None
    try:
        text = data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    return None if _GENERATED.search(text[:_HEAD_CHARACTERS]) else text


def _reference() -> dict[str, str]:
    """Topics of the language reference, which `pydoc` has for `help()`; none where they are not installed."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return {}
    return {f"{REFERENCE}{name}": text for name, text in topics.items() if MIN_BYTES <= len(text) <= MAX_BYTES}
