"""How well a model predicts files that it has not seen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from dsv41.config import DSV41Error
from dsv41.evals.padded_rows import BATCH, Progress, score_rows
from dsv41.evals.score import CHUNK
from dsv41.models import Model
from dsv41.train.corpus import Document
from dsv41.train.tokenizer import encode_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileLoss:
    """What predicting one file, or several, cost.

    Attributes:
      name: of the file.
      text_bytes: of its text in UTF-8.
      tokens: that were predicted: those of the text and the end.
      nats: sum of their negative log-probabilities.
    """

    name: str
    text_bytes: int
    tokens: int
    nats: float

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Of the text: comparable between tokenizers."""
        return self.nats / math.log(2) / self.text_bytes

    def describe(self) -> dict[str, str | int | float]:
        """As JSON values."""
        return {
            "name": self.name,
            "bytes": self.text_bytes,
            "tokens": self.tokens,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }


def all_files(files: Sequence[FileLoss]) -> FileLoss:
    """The files taken together: every token counts the same."""
    return FileLoss(
        name="all",
        text_bytes=sum(f.text_bytes for f in files),
        tokens=sum(f.tokens for f in files),
        nats=sum(f.nats for f in files),
    )


def file_losses(
    model: Model,
    documents: Sequence[Document],
    *,
    context: int | None = None,
    batch: int = BATCH,
    chunk: int = CHUNK,
    progress: Progress | None = None,
) -> list[FileLoss]:
    """The loss of each document, each by itself.

    As in training, a file is `<bos>` text `<eos>`; one that is longer than the context is cut, and every part begins
    with `<bos>` and knows nothing of those before it.

    Args:
      model: with its tokenizer.
      documents: files of text.
      context: tokens of a part, 2 or more; None: max_position_embeddings.
      batch: parts that run together.
      chunk: tokens a part forwards in one step.
      progress: called with (tokens scored, tokens in all).

    Raises:
      DSV41Error: the model has no tokenizer, there are no documents, one is empty, the context is out of range, or
        log-probabilities are not numbers.
    """
    most = model.config.text_config.max_position_embeddings
    context = most if context is None else context
    if model.tokenizer is None:
        raise DSV41Error("perplexity: the checkpoint has no tokenizer.json, which turns files into tokens")
    if not documents:
        raise DSV41Error("perplexity: there are no files")
    if empty := [d.name for d in documents if not d.text]:
        raise DSV41Error(f"perplexity: {empty[0]} is empty")
    if not 2 <= context <= most:
        raise DSV41Error(f"perplexity: context: expected 2 to {most} tokens, got {context}")
    parts, owner = [], []
    for i, document in enumerate(documents):
        ids = [*encode_text(model.tokenizer, document.text), model.config.eos_token_id]
        for begin in range(0, len(ids), context - 1):
            parts.append(np.array([model.config.bos_token_id, *ids[begin : begin + context - 1]]))
            owner.append(i)
    nats, tokens = np.zeros(len(documents)), np.zeros(len(documents), np.int64)
    for piece in score_rows(model, parts, batch=batch, chunk=chunk, progress=progress):
        for number, logprobs in zip(piece.numbers, piece.scores.logprobs, strict=False):
            own = logprobs[: max(len(parts[number]) - 1 - piece.scores.position, 0)]
            nats[owner[number]] -= own.sum(dtype=np.float64)
            tokens[owner[number]] += len(own)
    if bad := [d.name for d, sum_of_file in zip(documents, nats, strict=True) if not np.isfinite(sum_of_file)]:
        raise DSV41Error(f"perplexity: the log-probabilities of {bad[0]} are not numbers")
    return [
        FileLoss(name=d.name, text_bytes=len(d.text.encode()), tokens=int(n), nats=float(s))
        for d, n, s in zip(documents, tokens, nats, strict=True)
    ]
