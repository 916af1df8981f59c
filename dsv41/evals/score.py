"""Logits and log-probabilities of given tokens, piece by piece."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine import init_run_cache, step_batch
from dsv41.images import PreparedImage
from dsv41.models import Model, batch_bucket, token_bucket
from dsv41.sharding import fetch

CHUNK = 512
# Logits of one step, float32; rows are scored in groups that stay within it. One row may exceed it, and so may as many
# as a mesh has parts of a batch: of these the host then gets some positions at a time.
_LOGITS_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Scores of some rows at some positions.

    Attributes:
      row, position: of the first.
      tokens: rows times positions.
      logits: float32 [rows, positions, V]; None if not asked for.
      logprobs: float32 [rows, n] of the token that follows each position; n is smaller than the number of positions by
        one at the end of the rows.
    """

    row: int
    position: int
    tokens: int
    logits: np.ndarray | None
    logprobs: np.ndarray


def read_tokens(path: str | pathlib.Path) -> np.ndarray:
    """The array `tokens` int64 [B, T] of a safetensors file that holds it as int32 or int64.

    Raises:
      DSV41Error: the file or the array cannot be used; the message names the file.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise DSV41Error(f"{path}: no such file of tokens")
    try:
        with safe_open(path, framework="numpy") as file:
            if "tokens" not in file.keys():  # noqa: SIM118  the object is no dict
                raise DSV41Error(f"{path}: holds no array 'tokens', only {sorted(file.keys())}")
            found = file.get_slice("tokens")
            if found.get_dtype() not in ("I32", "I64"):
                raise DSV41Error(f"{path}: 'tokens' is {found.get_dtype()}, expected I32 or I64")
            if len(found.get_shape()) != 2 or 0 in found.get_shape():
                raise DSV41Error(f"{path}: 'tokens' has shape {found.get_shape()}, expected [B, T], neither of them 0")
            return file.get_tensor("tokens").astype(np.int64)
    except (OSError, SafetensorError) as e:
        raise DSV41Error(f"{path}: not a readable safetensors file ({e})") from e


def check_tokens(
    config: ModelConfig, tokens: np.ndarray, *, chunk: int = CHUNK, decode_from: int | None = None
) -> None:
    """Refuses what `score_tokens` cannot do.

    Raises:
      DSV41Error: an id outside the vocabulary, more tokens than positions, or an argument out of range.
    """
    text, length = config.text_config, tokens.shape[1]
    bad = np.argwhere((tokens < 0) | (tokens >= text.vocab_size))
    if len(bad):
        row, position = bad[0]
        raise DSV41Error(
            f"tokens[{row}, {position}] is {tokens[row, position]}, expected an id in [0, {text.vocab_size})"
        )
    if length > text.max_position_embeddings:
        raise DSV41Error(f"tokens: {length} a row exceed max_position_embeddings={text.max_position_embeddings}")
    if chunk < 1:
        raise DSV41Error(f"chunk: expected 1 or more, got {chunk}")
    if decode_from is not None and not 0 <= decode_from < length:
        raise DSV41Error(f"decode_from: expected a position in [0, {length}), got {decode_from}")


def _check_images(
    model: Model, tokens: np.ndarray, images: Sequence[Sequence[PreparedImage]] | None
) -> list[Sequence[PreparedImage]]:
    """The images of each row."""
    each = [()] * len(tokens) if images is None else list(images)
    if len(each) != len(tokens):
        raise DSV41Error(f"images: expected a list for each of {len(tokens)} rows, got {len(each)}")
    for i, (row, own) in enumerate(zip(tokens, each, strict=True)):
        model.check_images(row, own, what=f"row {i}")
    return each


def _steps(length: int, chunk: int, decode_from: int | None) -> list[tuple[int, int]]:
    """The positions [begin, end) of each step."""
    prefill = length if decode_from is None else decode_from
    steps = [(i, min(i + chunk, prefill)) for i in range(0, prefill, chunk)]
    return steps + [(i, i + 1) for i in range(prefill, length)]


def rows_at_once(rows: int, step_tokens: int, vocab_size: int) -> int:
    """Rows of a group: a power of two, as many as the logits of one step allow."""
    fit = max(_LOGITS_BYTES // (4 * step_tokens * vocab_size), 1)
    return min(batch_bucket(rows), 1 << (fit.bit_length() - 1))


@jax.jit
def _logprobs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Logits float32 [B, T, V], ids int32 [B, T] -> float32 [B, T]."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def score_tokens(
    model: Model,
    tokens: np.ndarray,
    *,
    chunk: int = CHUNK,
    decode_from: int | None = None,
    with_logits: bool = True,
    images: Sequence[Sequence[PreparedImage]] | None = None,
) -> Iterator[Piece]:
    """Scores every position of every row; rows are independent of each other.

    Args:
      model: the model.
      tokens: integers [B, T], no padding.
      chunk: tokens a row forwards in one step.
      decode_from: position from which on a step forwards one token.
      with_logits: whether the pieces carry logits.
      images: for each row, its images in the order of their spans, which are laid out in `tokens`.

    Yields:
      One piece a step and group of rows, or several where their logits are large: a group's steps in order, then the
      next group.

    Raises:
      DSV41Error: as `check_tokens`; image tokens without images, or images that do not fit (`Model.check_images`).
    """
    check_tokens(model.config, tokens, chunk=chunk, decode_from=decode_from)
    tokens = tokens.astype(np.int64)
    images = _check_images(model, tokens, images)
    length, vocab = tokens.shape[1], model.config.text_config.vocab_size
    steps = _steps(length, chunk, decode_from)
    widest = token_bucket(max(end - begin for begin, end in steps))
    group = model.batch_rows(rows_at_once(len(tokens), widest, vocab))
    for row in range(0, len(tokens), group):
        rows = tokens[row : row + group]
        embeds = {i: model.embed_images(r, images[row + i]) for i, r in enumerate(rows) if images[row + i]}
        cache = init_run_cache(model, group, length)
        for begin, end in steps:
            shape = (group, 1 if end - begin == 1 else widest)
            batch = step_batch(model, shape, {i: (r[begin:end], r[:begin]) for i, r in enumerate(rows)}, embeds)
            logits, cache, _ = model.forward(batch, cache, logits="all")
            targets = np.zeros(shape, np.int32)
            following = rows[:, begin + 1 : end + 1]
            targets[: len(rows), : following.shape[1]] = following
            logprobs = fetch(_logprobs(logits, targets))[: len(rows), : following.shape[1]]
            for first, values in _by_positions(logits, end - begin) if with_logits else [(0, None)]:
                count = end - begin if values is None else values.shape[1]
                yield Piece(
                    row=row,
                    position=begin + first,
                    tokens=len(rows) * count,
                    logits=None if values is None else values[: len(rows)],
                    logprobs=logprobs[:, first : first + count],
                )


def _by_positions(logits: jax.Array, length: int) -> Iterator[tuple[int, np.ndarray]]:
    """The first `length` positions of float32 [B, T, V] on the host, some at a time: (the first, [B, n, V]).

    On several hosts each device has a whole copy of what is fetched meanwhile.
    """
    rows, tokens, vocab = logits.shape
    count = min(max(_LOGITS_BYTES // (4 * rows * vocab), 1), tokens)
    for first in range(0, length, count):
        start = min(first, tokens - count)
        values = fetch(logits if count == tokens else _cut(logits, start, count))
        yield first, values[:, first - start : min(first + count, length) - start]


@functools.partial(jax.jit, static_argnames=("count",))
def _cut(logits: jax.Array, start: jax.Array, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(logits, start, count, axis=1)
