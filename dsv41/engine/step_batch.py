"""Steps of a fixed shape: whatever a step has to do, it is padded to one of the few shapes that are compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import ml_dtypes
import numpy as np

from dsv41.cache import CacheLayout, ForwardBatch, KVCache
from dsv41.config import DSV41Error
from dsv41.engram_store import EngramRows
from dsv41.models import Model, SpanEmbeds, batch_bucket

Shape = tuple[int, int]  # rows B, new tokens T
Known = tuple[np.ndarray, np.ndarray]  # new token ids of a row, and all ids of its sequence before them


def step_batch(
    model: Model,
    shape: Shape,
    rows: Mapping[int, Known],
    images: Mapping[int, SpanEmbeds | None] | None = None,
    slots: Mapping[int, int] | None = None,
    *,
    engram: bool = True,
) -> ForwardBatch:
    """A step in which row i gets new tokens; all other rows are padding.

    A batch that kept only its live rows would change its shape, and be compiled again, each time a row ends.

    Args:
      model: hashes the tokens and reads their Engram rows.
      shape: (B, T) of the batch.
      rows: row -> (new token ids, at most T; ids of the same sequence that the cache holds already).
      images: row -> what stands for its image tokens; rows without images may be absent.
      slots: row -> its cache slot; None: slot i for row i.
      engram: False: Engram rows are left out.
    """
    index = list(rows)
    batch = model.make_batch(
        [new for new, _ in rows.values()],
        [past for _, past in rows.values()],
        slots=index if slots is None else [slots[i] for i in index],
        images=[images.get(i) for i in index] if images else None,
        padded=False,
        engram=False,
    )

    def place(x: np.ndarray) -> np.ndarray:
        padded = np.zeros(shape[: min(x.ndim, 2)] + x.shape[2:], x.dtype)
        if x.ndim == 1:
            padded[index] = x
        else:
            padded[index, : x.shape[1]] = x
        return padded

    batch = jax.tree.map(place, batch)
    if not engram or model.engram is None:
        return batch
    return with_rows(batch, model.join_rows(step_rows(model, shape, rows)))


def with_rows(batch: ForwardBatch, rows: tuple | None) -> ForwardBatch:
    """The batch with Engram rows: values and scales [B, T, L, K, ...] of the host or the device, or None."""
    if rows is None:
        return batch
    return dataclasses.replace(batch, engram_values=rows[0], engram_scales=rows[1])


def known_tokens(model: Model, shape: Shape, rows: Mapping[int, Known]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What Engram hashes of a step are made of: tokens int32 [B, T], history int32 [B, N - 1], valid bool [B, T]."""
    tokens, valid = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for i, (new, _) in rows.items():
        tokens[i, : len(new)], valid[i, : len(new)] = new, True
    history = model.look_back([], shape[0])
    if rows:
        history[list(rows)] = model.look_back([past for _, past in rows.values()], len(rows))
    return tokens, history.astype(np.int32), valid


def step_rows(model: Model, shape: Shape, rows: Mapping[int, Known], *, what: str = "batch row") -> EngramRows:
    """Engram rows of a step [B, T, L, K, D], from the host's tables; zeros where no row has a token.

    Where several processes compute a step, each reads the rows of its own tokens and leaves zeros at the others; or, of
    tables cut by row, the rows that it has (`Model.join_rows`).

    Raises:
      DSV41Error: a row cannot be read; starts with `what` and the number of the row that asked for it.
    """
    tokens, history, valid = known_tokens(model, shape, rows)
    valid &= model.own_rows(shape[0])[:, None]
    try:
        return model.host_lookup.rows(tokens, history, valid)
    except DSV41Error:
        for i in rows:  # all were asked for together, so ask again one by one
            one = slice(i, i + 1)
            try:
                model.host_lookup.rows(tokens[one], history[one], valid[one])
            except DSV41Error as e:
                raise DSV41Error(f"{what} {i}: {e}") from e
        raise


def idle_batch(model: Model, shape: Shape, *, with_images: bool = False) -> ForwardBatch:
    """A step of padding rows only: it leaves the cache as it is, but has to be compiled like any other.

    A step in which some row has an image is another program than one without.
    """
    one = np.zeros(1, np.int64)
    batch = jax.tree.map(np.zeros_like, step_batch(model, shape, {0: (one, one[:0])}))
    if not with_images:
        return batch
    width = model.config.text_config.hidden_size
    return dataclasses.replace(batch, image_embeds=np.zeros((*shape, width), ml_dtypes.bfloat16))


def init_run_cache(model: Model, sequences: int, tokens: int, *, draft_tokens: int = 0) -> KVCache:
    """A cache for `tokens` tokens a sequence, in a power of two of pages: few sizes mean few compiled programs.

    A block of drafts may reach `draft_tokens` positions beyond the last token, and its rows are rotated together.
    """
    text = model.config.text_config
    page = CacheLayout.from_config(text).page_tokens
    capacity = batch_bucket(-(-(tokens + draft_tokens) // page)) * page
    capacity = min(capacity, text.max_position_embeddings)
    return model.init_cache(model.batch_rows(sequences), capacity, draft_tokens=draft_tokens)
