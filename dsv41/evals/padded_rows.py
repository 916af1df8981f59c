"""Scores rows of different lengths with one compiled step. Behind its end a row is padding, which no token sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dsv41.config import DSV41Error
from dsv41.evals.score import CHUNK, Piece, rows_at_once, score_tokens
from dsv41.models import Model, token_bucket

BATCH = 4

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsPiece:
    """Scores of some rows at some positions, padding included.

    Attributes:
      numbers: of the rows, as they were given.
      scores: in the order of `numbers`; rows behind them are padding.
    """

    numbers: tuple[int, ...]
    scores: Piece


def score_rows(
    model: Model,
    rows: Sequence[np.ndarray],
    *,
    batch: int = BATCH,
    chunk: int = CHUNK,
    with_logits: bool = False,
    progress: Progress | None = None,
) -> Iterator[RowsPiece]:
    """Scores rows in groups of about the same length.

    All groups have the same shape, and end with their own longest row.

    Args:
      model: the model.
      rows: token ids of each.
      batch: rows of a group; fewer if their logits are too large.
      chunk: tokens a row forwards in one step.
      with_logits: whether the pieces carry logits.
      progress: called with (tokens scored, tokens in all), padding left out.

    Raises:
      DSV41Error: there are no rows, or as `score_tokens`.
    """
    if not len(rows) or batch < 1:
        raise DSV41Error(f"score: expected rows and a batch of them, got {len(rows)} and {batch}")
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    longest, total = max(map(len, rows)), sum(map(len, rows))
    fit = rows_at_once(batch, token_bucket(min(chunk, longest)), model.config.text_config.vocab_size)
    batch, done = min(batch, len(rows), fit), 0
    for begin in range(0, len(order), batch):
        numbers = tuple(order[begin : begin + batch])
        tokens = np.full((batch, longest), model.config.pad_token_id, np.int64)
        for i, number in enumerate(numbers):
            tokens[i, : len(rows[number])] = rows[number]
        end = len(rows[numbers[-1]])
        for piece in score_tokens(model, tokens, chunk=chunk, with_logits=with_logits):
            behind = piece.position + piece.tokens // batch
            yield RowsPiece(numbers=numbers, scores=piece)
            if progress is not None:
                progress(done + sum(min(len(rows[n]), behind) for n in numbers), total)
            if behind >= end:
                break
        done += sum(len(rows[n]) for n in numbers)
