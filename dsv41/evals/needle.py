"""Recall at a distance: facts stated once among held-out code, asked for at the end (dsv41/train/needles.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dsv41.config import DSV41Error
from dsv41.evals.padded_rows import BATCH, Progress, score_rows
from dsv41.evals.score import CHUNK
from dsv41.models import Model
from dsv41.train.needles import NeedleDocument, needle_document
from dsv41.train.tokenizer import encode_text

LENGTHS = (256, 512, 1024, 2048, 3072, 4000)
DEPTHS = (0.0, 0.2, 0.4, 0.6, 0.8)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class NeedleAccuracy:
    """What was recalled. Axes: L lengths, D depths.

    Attributes:
      lengths: tokens of a document, as asked for.
      depths: of the facts in the text before the questions: 0 is its beginning.
      documents: of each length; each asks once at every depth.
      right: int [L, D] answers all of whose tokens were the most likely ones.
      tokens, tokens_right: int [L] tokens of the answers, and those of them that were the most likely ones.
      nats: float64 [L] negative log-probability of the answers' tokens.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    documents: int
    right: np.ndarray
    tokens: np.ndarray
    tokens_right: np.ndarray
    nats: np.ndarray

    def describe(self) -> dict[str, object]:
        """As JSON values; `answer_loss` in nats a token."""
        return {
            "lengths": list(self.lengths),
            "depths": list(self.depths),
            "documents": self.documents,
            "answers": int(self.documents * len(self.depths)),
            "accuracy": (self.right / self.documents).tolist(),
            "by_length": (self.right.mean(axis=1) / self.documents).tolist(),
            "by_depth": (self.right.mean(axis=0) / self.documents).tolist(),
            "token_accuracy": (self.tokens_right / self.tokens).tolist(),
            "answer_loss": (self.nats / self.tokens).tolist(),
        }


def answer_spans(tokenizer, document: NeedleDocument) -> list[tuple[int, int]]:
    """(begin, end) in tokens of each answer: the tokens that hold nothing else."""
    spans = []
    for begin, end in document.answers:
        begin -= document.text[begin - 1] == " "  # a blank is part of the token behind it
        spans.append(tuple(len(encode_text(tokenizer, document.text[:n])) for n in (begin, end)))
    return spans


def needle_accuracy(
    model: Model,
    filler: Sequence[str],
    *,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    documents: int = 8,
    seed: int = 0,
    batch: int = BATCH,
    chunk: int = CHUNK,
    progress: Progress | None = None,
) -> NeedleAccuracy:
    """Asks a model for what stands in documents of given lengths.

    All tokens of a document are forwarded once. An answer is right if each of its tokens is the most likely one behind
    the right ones before it, which is when decoding at temperature 0 would give it.

    Args:
      model: with its tokenizer.
      filler: texts for between the facts; held out from training, unless something else is to be measured.
      lengths: tokens of a document, without the `<bos>` before it.
      depths: of the facts of every document; see `needle_document`.
      documents: of each length.
      seed: of the documents.
      batch, chunk, progress: as in `file_losses`.

    Raises:
      DSV41Error: the model has no tokenizer, a length is longer than its context, or a number is out of range.
    """
    _check(model, lengths, documents)
    tokenizer = model.tokenizer
    made = [
        needle_document(np.random.default_rng([seed, length, i]), filler, length, tokenizer, depths=depths)
        for length in lengths
        for i in range(documents)
    ]
    rows = [np.array([model.config.bos_token_id, *d.ids]) for d in made]
    best, logprobs = _at_answers(
        model, rows, [answer_spans(tokenizer, d) for d in made], batch=batch, chunk=chunk, progress=progress
    )
    shape = (len(lengths), len(depths))
    right, counts = np.zeros(shape, np.int64), np.zeros((3, len(lengths)))
    for n, document in enumerate(made):
        for fact, hits, values in zip(document.order, best[n], logprobs[n], strict=True):
            right[n // documents, fact] += hits.all()
            counts[:, n // documents] += len(hits), hits.sum(), -values.sum()
    return NeedleAccuracy(
        lengths=tuple(lengths),
        depths=tuple(depths),
        documents=documents,
        right=right,
        tokens=counts[0].astype(np.int64),
        tokens_right=counts[1].astype(np.int64),
        nats=counts[2],
    )


def _check(model: Model, lengths: Sequence[int], documents: int) -> None:
    text = model.config.text_config
    if model.tokenizer is None:
        raise DSV41Error("needles: the checkpoint has no tokenizer.json, which turns documents into tokens")
    if documents < 1 or not lengths:
        raise DSV41Error(f"needles: expected documents and lengths, got {documents} and {list(lengths)}")
    if max(lengths) >= text.max_position_embeddings:
        raise DSV41Error(
            f"needles: {max(lengths)} tokens and a begin exceed max_position_embeddings={text.max_position_embeddings}"
        )


def _at_answers(
    model: Model,
    rows: Sequence[np.ndarray],
    spans: Sequence[Sequence[tuple[int, int]]],
    **options,
) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Of each row and answer, whose spans are those without `<bos>`: bool and float64 [tokens of the answer].

    The first says whether the token was the most likely one, the second is its log-probability.
    """
    hits, values = [np.zeros(len(r), bool) for r in rows], [np.zeros(len(r)) for r in rows]
    asked = [np.concatenate([np.arange(*span) for span in own]) for own in spans]
    for piece in score_rows(model, rows, with_logits=True, **options):
        scores = piece.scores
        for i, n in enumerate(piece.numbers):
            # The token behind `<bos>` and k others is predicted at position k.
            here = asked[n][(asked[n] >= scores.position) & (asked[n] < scores.position + scores.logits.shape[1])]
            at = here - scores.position
            hits[n][here] = scores.logits[i, at].argmax(-1) == rows[n][here + 1]
            values[n][here] = scores.logprobs[i, at]
    return (
        [[hits[n][slice(*span)] for span in own] for n, own in enumerate(spans)],
        [[values[n][slice(*span)] for span in own] for n, own in enumerate(spans)],
    )
