"""Needle documents: what is asked was said once, far away, and cannot be known otherwise."""

import functools
import pathlib
import re

import numpy as np
import pytest

from dsv41.checkpoint.token_map import load_tokenizer
from dsv41.config import DSV41Error
from dsv41.train import needles
from dsv41.train.needles import NAMES, NeedleDocument, needle_document, needle_documents

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
STATED = re.compile(r'^ *(?:codes\.(\w+) = |table\["(\w+)"\] = |def (\w+)\(\):\n *return )"?(\w+)"?$', re.M)
ASKED = re.compile(r'^    assert (?:codes\.(\w+)|table\["(\w+)"\]|(\w+)\(\)) == "?(\w+)"?$', re.M)
QUESTIONS = "\n\ndef check():\n"


@functools.cache
def tokenizer():
    return load_tokenizer(CONFIGS / "nano_tokenizer.json")


@functools.cache
def filler() -> tuple[str, ...]:
    """Texts of a few hundred tokens, blank lines and deep indentation among them."""
    files = ("cache/pages.py", "engine/plain_batch.py", "train/corpus.py", "config/atomic_file.py")
    return tuple((CONFIGS.parent / "dsv41" / name).read_text() for name in files)


def document(seed=0, tokens=900, **options) -> NeedleDocument:
    return needle_document(np.random.default_rng(seed), filler(), tokens, tokenizer(), **options)


def found(pattern: re.Pattern, text: str) -> dict[str, str]:
    """Name -> value; every name once."""
    pairs = [(a or b or c, value) for a, b, c, value in pattern.findall(text)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_asked_was_stated(seed):
    d = document(seed)
    body, questions = d.text.split(QUESTIONS)
    stated, asked = found(STATED, body), found(ASKED, questions)
    assert stated == asked and stated.keys() <= set(NAMES) and len(d.answers) == len(d.facts) == len(asked)
    # In the order of the questions, and a fact begins where its statement does.
    assert [d.text[begin:end] for begin, end in d.answers] == list(asked.values())
    for (begin, _), fact, (name, value) in zip(d.answers, d.facts, asked.items(), strict=True):
        assert fact < len(body) < begin
        assert found(STATED, d.text[fact : d.text.index(value, fact) + len(value) + 2]) == {name: value}


def test_the_rest_is_filler():
    known = {line for text in filler() for line in text.split("\n")}
    body = STATED.sub("", document(3, tokens=3000).text.split(QUESTIONS)[0])
    assert set(body.split("\n")) <= known and len(body) > 5000


@pytest.mark.parametrize("tokens", [120, 200, 600, 2000, 4000])
def test_length(tokens):
    for seed in range(5):
        d = document(seed, tokens)
        assert 0.93 * tokens - 16 < len(d.ids) <= tokens
        assert tokenizer().encode(d.text, add_special_tokens=False).ids == d.ids.tolist()


def test_all_kinds_come_and_no_value_twice():
    documents = [document(seed, 400, depths=[0.1, 0.3, 0.5, 0.7]) for seed in range(50)]
    text = "".join(d.text for d in documents)
    for statement in ("codes.", 'table["', "():\n"):
        assert text.count(statement) > 30
    values = [d.text[begin:end] for d in documents for begin, end in d.answers]
    assert len(set(values)) == len(values) == 200
    assert 60 < sum(value.isdigit() for value in values) < 140


def test_facts_lie_at_their_depths():
    depths = [1.0, 0.0, 0.25, 0.75, 0.5]
    d = document(7, 1500, depths=depths)
    places = np.array(d.facts) / d.text.index(QUESTIONS)
    np.testing.assert_allclose(places, [depths[i] for i in d.order], atol=0.06)
    assert sorted(d.order) == [0, 1, 2, 3, 4] and list(d.order) != [0, 1, 2, 3, 4]


def texts(count: int, seed: int, shortest: int, longest: int) -> list[str]:
    found = needle_documents(count, seed, filler(), tokenizer(), shortest=shortest, longest=longest)
    return [d.text for d in found]


def test_seeds():
    found = texts(6, 5, 150, 500)
    assert found == texts(6, 5, 150, 500) and found[:3] == texts(3, 5, 150, 500)
    assert len({*found, *texts(6, 6, 150, 500)}) == 12


def test_those_made_side_by_side_are_those_made_alone(monkeypatch):
    together = texts(7, 5, 150, 500)
    monkeypatch.setattr(needles, "_AT_ONCE", 3)
    assert texts(7, 5, 150, 500) == together
    for i, text in enumerate(together):
        rng = np.random.default_rng([5, i])
        tokens = int(np.exp(rng.uniform(np.log(150), np.log(500))))
        assert needle_document(rng, filler(), tokens, tokenizer()).text == text


def test_lengths_spread():
    found = needle_documents(60, 0, filler(), tokenizer(), shortest=100, longest=1600)
    sizes = np.array([len(d.ids) for d in found])
    assert sizes.min() < 160 and 1100 < sizes.max() <= 1600
    assert 15 < (sizes < 400).sum() < 45  # half below the geometric mean


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tokens": 40, "depths": [0.5] * 8}, r"8 facts and their questions take \d+ tokens, more than 40"),
        ({"depths": []}, "expected 1 to 102 facts, got 0"),
        ({"depths": [0.5] * 103}, "expected 1 to 102 facts, got 103"),
        ({"depths": [0, 1.5]}, r"expected depths in \[0, 1\], got \[0, 1.5\]"),
    ],
)
def test_documents_that_cannot_be(options, message):
    with pytest.raises(DSV41Error, match=message):
        document(**options)


def test_there_must_be_filler_and_lengths():
    with pytest.raises(DSV41Error, match="no text to put them into"):
        needle_document(np.random.default_rng(0), ["", ""], 300, tokenizer())
    with pytest.raises(DSV41Error, match="lengths that rise from above 0, got 300 to 200"):
        needle_documents(1, 0, filler(), tokenizer(), shortest=300, longest=200)
