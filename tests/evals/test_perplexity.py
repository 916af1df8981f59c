"""Losses of files: those of their parts, whatever they are padded to and run with."""

import dataclasses
import functools
import math

import numpy as np
import pytest

import dsv41
from dsv41.config import DSV41Error
from dsv41.evals import Piece, score_tokens
from dsv41.evals.padded_rows import score_rows
from dsv41.evals.perplexity import FileLoss, all_files, file_losses
from dsv41.models import Model
from dsv41.train.corpus import Document
from tests.checkpoint_files import one_layer
from tests.models_for_tests import OVERRIDES

# The step of the tests of launch.score: two rows, 32 tokens.
SHAPE = {"batch": 2, "chunk": 32}
CONTEXT = 24


@functools.cache
def one_layer_model() -> Model:
    return dsv41.load(one_layer(), overrides=OVERRIDES)


def documents() -> list[Document]:
    texts = ("def f(x):\n    return x\n", "the cat ate the é\n" * 16, "import os\n" * 3)
    return [Document(f"{i}.py", text, True) for i, text in enumerate(texts)]


def parts(text: str) -> list[list[int]]:
    model = one_layer_model()
    ids = [*model.tokenizer.encode(text, add_special_tokens=False).ids, model.config.eos_token_id]
    return [[model.config.bos_token_id, *ids[n : n + CONTEXT - 1]] for n in range(0, len(ids), CONTEXT - 1)]


def logprobs(rows: list[list[int]]) -> list[np.ndarray]:
    """float32 [n - 1] of each row, which runs alone, beside a copy of itself."""
    found = []
    for row in rows:
        pieces = score_tokens(one_layer_model(), np.array([row + [3] * (CONTEXT - len(row))] * 2), chunk=32)
        found.append(np.concatenate([p.logprobs[0] for p in pieces])[: len(row) - 1])
    return found


def test_losses_are_those_of_the_parts():
    seen = []
    found = file_losses(one_layer_model(), documents(), context=CONTEXT, progress=lambda *n: seen.append(n), **SHAPE)
    assert len(parts(documents()[1].text)) > 2
    for file, document in zip(found, documents(), strict=True):
        rows = parts(document.text)
        assert file.name == document.name and file.text_bytes == len(document.text.encode())
        assert file.tokens == sum(len(row) - 1 for row in rows)
        np.testing.assert_allclose(file.nats, -sum(values.sum(dtype=float) for values in logprobs(rows)), rtol=1e-5)
    total = sum(len(row) for document in documents() for row in parts(document.text))
    assert seen[-1] == (total, total) and [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_rows_end_with_their_group(monkeypatch):
    """Short rows do not wait for the longest of all: two groups, of one step and of two, of one shape."""

    def score(model, tokens, *, chunk, with_logits):
        assert tokens.shape == (2, 50) and not with_logits
        for k in range(0, 50, chunk):
            yield Piece(
                row=0, position=k, tokens=2 * min(chunk, 50 - k), logits=None, logprobs=tokens[:, k : k + chunk]
            )

    monkeypatch.setattr("dsv41.evals.padded_rows.score_tokens", score)
    rows = [np.arange(3, 3 + n) for n in (50, 9, 30, 12)]
    pieces = list(score_rows(one_layer_model(), rows, batch=2, chunk=32))
    assert [(p.numbers, p.scores.position) for p in pieces] == [((1, 3), 0), ((2, 0), 0), ((2, 0), 32)]
    np.testing.assert_array_equal(pieces[0].scores.logprobs[0], [*rows[1], *[2] * 23])
    np.testing.assert_array_equal(pieces[2].scores.logprobs[1], rows[0][32:])


def test_what_is_reported():
    a = FileLoss(name="a", text_bytes=100, tokens=50, nats=50 * math.log(4))
    b = FileLoss(name="b", text_bytes=300, tokens=50, nats=50 * math.log(16))
    assert a.perplexity == pytest.approx(4) and a.bits_per_byte == pytest.approx(1)
    assert all_files([a, b]).describe() == pytest.approx(
        {"name": "all", "bytes": 400, "tokens": 100, "loss": math.log(8), "perplexity": 8, "bits_per_byte": 0.75}
    )


@pytest.mark.parametrize(
    "files, options, message",
    [
        ([], {}, "there are no files"),
        ([Document("a.py", "x", True), Document("b.py", "", True)], {}, "b.py is empty"),
        (None, {"context": 1}, "context: expected 2 to 4096 tokens, got 1"),
        (None, {"context": 4097}, "got 4097"),
        (None, {"batch": 0}, "expected rows and a batch of them, got 3 and 0"),
    ],
)
def test_bad_arguments(files, options, message):
    with pytest.raises(DSV41Error, match=message):
        file_losses(one_layer_model(), documents() if files is None else files, **options)


def test_a_tokenizer_is_needed():
    with pytest.raises(DSV41Error, match=r"no tokenizer\.json"):
        file_losses(dataclasses.replace(one_layer_model(), tokenizer=None), documents())
