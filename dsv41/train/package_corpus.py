"""More text that is there wherever dsv41 is installed: the sources of the packages that it needs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterator

from dsv41.config import DSV41Error
from dsv41.train.corpus import EXCLUDED_FOLDERS, Corpus, Document, corpus_hash, source_text

# Less of a file than this in letters, blanks and underscores: tables of numbers and serialised programs.
_LEAST_WORDS = 0.7
_NAME = re.compile(r"[A-Za-z0-9._-]+")
FOLDER = "packages/"


def installed_packages(root: str = "dsv41") -> dict[str, str]:
    """Versions of the installed packages that `root` needs, directly or not, without itself and without extras.

    Raises:
      DSV41Error: `root` is not installed.
    """
    found: dict[str, str] = {}
    queue = [root]
    while queue:
        name = queue.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name == root:
                raise DSV41Error(f"package {root}: not installed, so that what it needs is not known") from None
            continue  # only needed on another system or by another Python
        found[key] = package.version
        needs = (need for need in package.requires or () if "extra ==" not in need)
        queue += [_NAME.match(need).group() for need in needs]
    del found[re.sub(r"[-_.]+", "-", root).lower()]
    return dict(sorted(found.items()))


def with_packages(corpus: Corpus, root: str = "dsv41") -> Corpus:
    """The corpus and, for training only, the sources of the packages that `root` needs.

    Left out are tests, generated files and files that are mostly numbers.

    Raises:
      DSV41Error: as `installed_packages`, or there is a package whose files cannot be read.
    """
    packages = installed_packages(root)
    texts = {d.name: d for d in corpus.documents}
    for package in packages:
        texts |= {name: Document(name, text, held_out=False) for name, text in _sources(package)}
    documents = tuple(texts[name] for name in sorted(texts))
    return dataclasses.replace(
        corpus,
        documents=documents,
        sha256=corpus_hash((d.name, d.text) for d in documents),
        source=f"{corpus.source} and packages",
        packages=packages,
    )


def _sources(package: str) -> Iterator[tuple[str, str]]:
    for path in importlib.metadata.files(package) or ():
        if path.suffix != ".py" or ".." in path.parts or EXCLUDED_FOLDERS.intersection(path.parts[:-1]):
            continue
        try:
            text = source_text(path.locate().read_bytes())
        except OSError as e:
            raise DSV41Error(f"{path.locate()}: cannot read a source of {package} ({e.strerror or e})") from e
        if text is not None and sum(c.isalpha() or c in " \n_" for c in text) >= _LEAST_WORDS * len(text):
            yield f"{FOLDER}{path.as_posix()}", text
