"""Rows to train on and rows to evaluate on, of a corpus."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from tokenizers import Tokenizer

from dsv41.config import DSV41Error, ModelConfig
from dsv41.train.corpus import Corpus
from dsv41.train.data import RowSource, tokenize
from dsv41.train.needles import needle_documents
from dsv41.train.package_corpus import FOLDER

_NEEDLE_MARGIN = 64  # tokens of a row that the longest needle document leaves
_SHORTEST_NEEDLE = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What an epoch consists of.

    Attributes:
      length: tokens of a row.
      seed: of shuffles and needle documents.
      repeat: how often an epoch has each document that is not of a package.
      needles: share of the tokens that are of needle documents; each epoch has others.
      tokens: of the whole run, which needle documents are made for.
    """

    length: int
    seed: int = 0
    repeat: int = 1
    needles: float = 0.0
    tokens: int = 0

    def __post_init__(self):
        if self.repeat < 1:
            raise DSV41Error(f"repeat: expected at least 1, got {self.repeat}")
        if not 0 <= self.needles < 1:
            raise DSV41Error(f"needles: expected a share in [0, 1), got {self.needles}")


def training_documents(corpus: Corpus, tokenizer: Tokenizer, repeat: int = 1) -> list[np.ndarray]:
    """int32 [n] token ids of each training document, `repeat` times of those that are not of a package."""
    own = [d for d in corpus.train if not d.name.startswith(FOLDER)]
    packages = [d for d in corpus.train if d.name.startswith(FOLDER)]
    return tokenize(own, tokenizer) * repeat + tokenize(packages, tokenizer)


def training_rows(
    corpus: Corpus,
    tokenizer: Tokenizer,
    config: ModelConfig,
    options: TextOptions,
    documents: list[np.ndarray] | None = None,
) -> RowSource:
    """Rows of the corpus's training part and of needle documents.

    Args:
      corpus, tokenizer, config: what rows are made of, and for.
      options: what an epoch consists of.
      documents: of `training_documents`, if they are there already.

    Raises:
      DSV41Error: a row is too short for needle documents, or as `RowSource` and `needle_documents`.
    """
    documents = training_documents(corpus, tokenizer, options.repeat) if documents is None else documents
    changing = _needles(corpus, tokenizer, sum(map(len, documents)), options)
    return RowSource(documents, config, length=options.length, seed=options.seed, changing=changing)


def held_out_rows(corpus: Corpus, tokenizer: Tokenizer, config: ModelConfig, length: int) -> RowSource:
    """Rows of its held-out part, in order."""
    return RowSource(tokenize(corpus.held_out, tokenizer), config, length=length, seed=None)


def _needles(corpus: Corpus, tokenizer: Tokenizer, tokens: int, options: TextOptions) -> list[list[np.ndarray]]:
    """Token ids of the needle documents of each epoch of `tokens` other tokens."""
    if not options.needles:
        return []
    longest = options.length - _NEEDLE_MARGIN
    if longest < _SHORTEST_NEEDLE:
        least = _SHORTEST_NEEDLE + _NEEDLE_MARGIN
        raise DSV41Error(f"needles: rows of {options.length} tokens are too short for them, expected {least} or more")
    epoch = tokens / (1 - options.needles)
    mean = (longest - _SHORTEST_NEEDLE) / math.log(longest / _SHORTEST_NEEDLE)
    each = max(round(options.needles * epoch / mean), 1)
    epochs = max(math.ceil(options.tokens / epoch), 1)
    filler = [d.text for d in corpus.train]
    lengths = {"shortest": _SHORTEST_NEEDLE, "longest": longest}
    ids = [d.ids for d in needle_documents(each * epochs, options.seed, filler, tokenizer, **lengths)]
    return [ids[n * each : (n + 1) * each] for n in range(epochs)]
