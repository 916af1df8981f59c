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
from dsv41.train.corpus_file import write_corpus
from launch.cli import new_flags, run
from launch.training_flags import SourceFlags

FLAGS = new_flags()
_OUT = flags.DEFINE_string("out", None, "The file to write.", flag_values=FLAGS)
_SOURCES = SourceFlags(FLAGS)


def main() -> None:
    if _OUT.value is None:
        raise DSV41Error("--out is required: the file to write")
    check_target(_OUT.value)
    corpus = _SOURCES.corpus()
    write_corpus(_OUT.value, corpus)
    print(json.dumps(corpus.describe(), indent=1))


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
