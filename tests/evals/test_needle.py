"""Recall: what counts as an answer, and where it was asked for."""

import functools
import pathlib
import re
import types

import numpy as np
import pytest

from dsv41.checkpoint.token_map import load_tokenizer
from dsv41.config import DSV41Error, load_config
from dsv41.evals import Piece, needle
from dsv41.evals.needle import answer_spans, needle_accuracy
from dsv41.evals.padded_rows import RowsPiece
from dsv41.train.needles import needle_document
from dsv41.train.tokenizer import encode_text

ROOT = pathlib.Path(__file__).parents[2]
FILLER = [(ROOT / "dsv41" / "train" / name).read_text() for name in ("corpus.py", "pack.py")]
LENGTHS, DEPTHS = (300, 500), (0.0, 0.3, 0.7, 0.9)
CHUNK = 128
QUESTION = re.compile(r'== "?(\w+)"?\n')


@functools.cache
def model():
    """What the evaluation asks of one that is never run."""
    config = load_config(ROOT / "configs" / "nano.json")
    return types.SimpleNamespace(config=config, tokenizer=load_tokenizer(ROOT / "configs" / "nano_tokenizer.json"))


def answers(row: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """Of each question in a row with `<bos>`: the places of the answer's tokens, and of its fact as a share of all."""
    text = model().tokenizer.decode(row[1:].tolist())
    offsets = model().tokenizer.encode(text, add_special_tokens=False).offsets
    found = []
    for match in QUESTION.finditer(text, text.index("\ndef check():")):
        begin, end = match.span(1)
        places = [k + 1 for k, (a, b) in enumerate(offsets) if a < end and b > begin]
        found.append((np.array(places), text.index(match[1]) / text.index("\ndef check():")))
    return found


@pytest.fixture
def oracle(monkeypatch):
    """Logits of a model that errs where it is told to: `errs(places, depth)` -> places of wrong tokens."""
    told = types.SimpleNamespace(errs=lambda places, depth: [], rows=[], options=None)

    def score(_, rows, *, with_logits, batch, chunk, progress):
        assert with_logits
        told.options = (batch, chunk, progress)
        for n, row in enumerate(rows):
            best = np.append(row[1:], 0)
            for places, depth in answers(row):
                best[np.array(told.errs(places, depth), int) - 1] += 1
            logits = np.eye(4096, dtype=np.float32)[best]
            logprobs = np.where(best[:-1] == row[1:], -0.5, -3.0)[None].astype(np.float32)
            for k in range(0, len(row), CHUNK):
                scores = Piece(
                    row=0, position=k, tokens=CHUNK, logits=logits[None, k : k + CHUNK],
                    logprobs=logprobs[:, k : k + CHUNK],
                )  # fmt: skip
                told.rows.append(len(row))
                yield RowsPiece(numbers=(n,), scores=scores)

    monkeypatch.setattr(needle, "score_rows", score)
    return told


def accuracy(**options):
    return needle_accuracy(model(), FILLER, lengths=LENGTHS, depths=DEPTHS, documents=3, **options)


def test_all_is_recalled(oracle):
    found = accuracy(batch=2, chunk=64).describe()
    assert found["accuracy"] == [[1.0] * 4] * 2 and found["by_length"] == [1, 1] and found["by_depth"] == [1] * 4
    assert found["token_accuracy"] == [1, 1] and found["answer_loss"] == [0.5, 0.5]
    assert found["lengths"] == [300, 500] and found["depths"] == list(DEPTHS) and found["answers"] == 12
    assert oracle.options == (2, 64, None)
    assert 300 * 0.9 < min(oracle.rows) < 301 < 500 * 0.9 < max(oracle.rows) <= 501


@pytest.mark.parametrize("wrong", [0, -1])
def test_one_wrong_token_is_a_wrong_answer(oracle, wrong):
    """The first or the last one of what stands in the first half of the text."""
    oracle.errs = lambda places, depth: places[wrong:][:1] if depth < 0.5 else []
    found = accuracy()
    assert (found.right == [[0, 0, 3, 3]] * 2).all()
    described = found.describe()
    assert described["by_length"] == [0.5, 0.5] and described["by_depth"] == [0, 0, 1, 1]
    errors = found.tokens - found.tokens_right
    assert (errors == 6).all()  # one of each of two facts of three documents
    np.testing.assert_allclose(found.nats, 0.5 * found.tokens_right + 3 * errors)


def test_tokens_outside_the_answers_do_not_count(oracle):
    oracle.errs = lambda places, depth: [places[0] - 1, places[-1] + 1]
    assert (accuracy().right == 3).all()


def test_spans_hold_the_answer_alone():
    kinds = set()
    for seed in range(20):
        d = needle_document(np.random.default_rng(seed), FILLER, 400, model().tokenizer)
        ids = encode_text(model().tokenizer, d.text)
        for (begin, end), (first, last) in zip(d.answers, answer_spans(model().tokenizer, d), strict=True):
            assert model().tokenizer.decode(ids[first:last]).lstrip(" ") == d.text[begin:end]
            kinds.add(d.text[begin - 1])
    assert kinds == {" ", '"'}


def test_the_same_seed_asks_the_same(oracle):
    oracle.errs = lambda places, depth: places[places % 3 == 0]
    one, two, three = accuracy(seed=1), accuracy(seed=1), accuracy(seed=2)
    assert one.describe() == two.describe() != three.describe()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"documents": 0}, "expected documents and lengths, got 0"),
        ({"lengths": ()}, r"expected documents and lengths, got 8 and \[\]"),
        ({"lengths": (100, 4096)}, "4096 tokens and a begin exceed max_position_embeddings=4096"),
        ({"lengths": (20,)}, "5 facts and their questions take"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(DSV41Error, match=message):
        needle_accuracy(model(), FILLER, **options)


def test_a_tokenizer_is_needed():
    with pytest.raises(DSV41Error, match=r"no tokenizer\.json"):
        needle_accuracy(types.SimpleNamespace(config=model().config, tokenizer=None), FILLER)
