"""Writes the text of a training run into one file, so that another machine trains on the same.

    python -m launch.make_corpus --out=corpus.jsonl.gz
    python -m launch.make_corpus --out=corpus.jsonl.gz --packages
    python -m launch.make_corpus --out=corpus.jsonl.gz --text='my/**/*.py' --text=more.jsonl

Without --text it is the standard library of the running interpreter; every Python release has another one. A share of
the documents, chosen by their names, is marked as held out. launch.train, launch.train_dspark and launch.evaluate take
the file as --corpus. It is gzipped JSON lines: a header, then name, text and held_out of a document in each line.

Prints one JSON object: source, python_version, sha256 (of names and texts), documents, bytes, held_out_documents,
held_out_bytes and, with --packages, their versions.
"""

import json
import sys

from absl import flags

from dsv41.config import DSV41Error
from dsv41.config.atomic_file import check_target
from dsv41.train.corpus import standard_library
from dsv41.train.corpus_file import text_corpus, write_corpus
from dsv41.train.package_corpus import with_packages
from launch.cli import new_flags, run

FLAGS = new_flags()
_OUT = flags.DEFINE_string("out", None, "The file to write.", flag_values=FLAGS)
_TEXT = flags.DEFINE_multi_string(
    "text",
    [],
    "Your own files instead of the standard library, as a glob; .jsonl files have an object with a string 'text' in "
    "each line, others are one text each. May be given several times.",
    flag_values=FLAGS,
)
_PACKAGES = flags.DEFINE_bool(
    "packages", False, "Add the sources of the installed packages that dsv41 needs, for training.", flag_values=FLAGS
)


def main() -> None:
    if _OUT.value is None:
        raise DSV41Error("--out is required: the file to write")
    check_target(_OUT.value)
    corpus = text_corpus(_TEXT.value) if _TEXT.value else standard_library()
    corpus = with_packages(corpus) if _PACKAGES.value else corpus
    write_corpus(_OUT.value, corpus)
    print(json.dumps(corpus.describe(), indent=1))


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
