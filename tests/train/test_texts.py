"""Which rows a run trains on and which it is evaluated on."""

import collections

import numpy as np
import pytest

from dsv41.checkpoint.token_map import load_tokenizer
from dsv41.config import DSV41Error, load_config
from dsv41.data import TINY_MODEL
from dsv41.train.corpus import Corpus, Document
from dsv41.train.package_corpus import FOLDER
from dsv41.train.texts import TextOptions, held_out_rows, training_rows
from dsv41.train.tokenizer import encode_text

LENGTH = 320
CONFIG = load_config(TINY_MODEL)


def document(kind, i, held_out=False):
    """A text that no other document has a line of."""
    lines = (f"{kind}_{i}_{j} = word_{j} * {i}\n" for j in range(4 + i % 9))
    name = f"{FOLDER if kind == 'package' else ''}{kind}{i}.py"
    return Document(name, "".join(lines), held_out)


DOCUMENTS = tuple(document(kind, i, kind == "held") for kind in ("own", "package", "held") for i in range(30))
CORPUS = Corpus(DOCUMENTS, "3", "0" * 64)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_MODEL / "tokenizer.json")


def epoch(source, number=0):
    """How often an epoch has each text; whole documents only."""
    first = sum(len(source.epoch(n)) for n in range(number))
    rows = (source[first + i] for i in range(len(source.epoch(number))))
    found = (tuple(d.tokens.tolist()) for row in rows for d in row)
    return collections.Counter(ids[1:-1] for ids in found if ids[-1] == CONFIG.eos_token_id)


def ids(tokenizer, kind):
    return {tuple(encode_text(tokenizer, d.text)) for d in DOCUMENTS if kind in d.name}


def test_an_epoch_has_every_training_document_once(tokenizer):
    found = epoch(training_rows(CORPUS, tokenizer, CONFIG, TextOptions(length=LENGTH)))
    assert found == dict.fromkeys(ids(tokenizer, "own") | ids(tokenizer, "package"), 1)


def test_those_that_are_repeated(tokenizer):
    found = epoch(training_rows(CORPUS, tokenizer, CONFIG, TextOptions(length=LENGTH, repeat=3)))
    assert found == dict.fromkeys(ids(tokenizer, "own"), 3) | dict.fromkeys(ids(tokenizer, "package"), 1)


def test_held_out_rows_are_the_rest_in_order(tokenizer):
    source = held_out_rows(CORPUS, tokenizer, CONFIG, LENGTH)
    assert epoch(source) == dict.fromkeys(ids(tokenizer, "held"), 1)
    again = held_out_rows(CORPUS, tokenizer, CONFIG, LENGTH)
    assert [[d.tokens.tolist() for d in source[i]] for i in range(5)] == [
        [d.tokens.tolist() for d in again[i]] for i in range(5)
    ]


def needles_of(found, tokenizer):
    """Token counts of the needle documents of an epoch."""
    plain = ids(tokenizer, "own") | ids(tokenizer, "package")
    return {text: count for text, count in found.items() if text not in plain}


def test_needle_documents(tokenizer):
    """About the share that was asked for, others in each epoch of the run, then the first ones again."""
    plain = sum(map(len, ids(tokenizer, "own") | ids(tokenizer, "package")))
    share, epochs = 0.5, 2
    options = TextOptions(length=LENGTH, needles=share, tokens=round(epochs * plain / (1 - share)))
    source = training_rows(CORPUS, tokenizer, CONFIG, options)
    found = [needles_of(epoch(source, n), tokenizer) for n in range(epochs + 1)]
    assert found[0] == found[2] and not found[0].keys() & found[1].keys()
    for needles in found[:epochs]:
        sizes = [len(text) for text in needles]
        assert 0.6 < sum(sizes) / plain < 1.6 and max(sizes) <= LENGTH and set(needles.values()) == {1}
        assert all("assert" in tokenizer.decode(list(text)) for text in needles)


def test_what_rows_depend_on(tokenizer):
    def rows(**options):
        return training_rows(CORPUS, tokenizer, CONFIG, TextOptions(**{"length": LENGTH, "tokens": 5000} | options))

    def first(source):
        return np.concatenate([d.tokens for d in source[0]]).tolist()

    plain = rows(needles=0.2)
    assert first(plain) == first(rows(needles=0.2)) and plain.fingerprint == rows(needles=0.2).fingerprint
    others = [rows(needles=0.2, seed=1), rows(needles=0.1), rows(needles=0.2, repeat=2), rows(needles=0.2, length=384)]
    assert len({source.fingerprint for source in (plain, *others)}) == 5


@pytest.mark.parametrize(
    "options, message",
    [
        ({"repeat": 0}, "repeat: expected at least 1, got 0"),
        ({"needles": 1.0}, r"needles: expected a share in \[0, 1\), got 1.0"),
        ({"needles": -0.1}, "needles"),
        ({"needles": 0.1, "length": 128}, "rows of 128 tokens are too short for them, expected 164 or more"),
    ],
)
def test_what_is_refused(tokenizer, options, message):
    with pytest.raises(DSV41Error, match=message):
        training_rows(CORPUS, tokenizer, CONFIG, TextOptions(**{"length": LENGTH} | options))
