"""What the indexers learn from (training.md section 4).

The report does not say. Chosen here: the Kullback-Leibler divergence of the indexer's softmax from the attention of its
own layer, both over what the query attends to among compressed entries, as published for DeepSeek-V3.2. The indexer's
inputs are detached, so that it learns from nothing else and nothing else from it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv41.ops.straight_through import einsum_bf16
from dsv41.train.row_spread import RowSpread, total
from pallas_kernels.tiling import map_query_tiles, query_tile

# Bytes that a tile of queries may make.
_TILE_BYTES = 1 << 29


class IndexerLoss(NamedTuple):
    """Sum of the divergences of queries, and how many there are: float32 []."""

    total: jax.Array
    queries: jax.Array


def index_loss(
    q: jax.Array, weights: jax.Array, keys: jax.Array, selected: jax.Array, mass: jax.Array, valid: jax.Array
) -> IndexerLoss:
    """The divergence of one layer.

    Args:
      q: bfloat16 [B, T, N, C] index queries.
      weights: bfloat16 [B, T, N].
      keys: float32 [B, S, C].
      selected: int32 [B, T, K], -1 unused.
      mass: float32 [B, T, K] attention that the entries got.
      valid: bool [B, T]; other queries, and those with fewer than two entries, do not count.
    """

    @jax.checkpoint
    def tile(q, weights, selected, mass):
        rows = jnp.take_along_axis(keys, jnp.maximum(selected, 0).reshape(q.shape[0], -1, 1), axis=1)
        rows = rows.reshape(*selected.shape, -1).astype(jnp.bfloat16)
        dots = jax.nn.relu(einsum_bf16("btnc,btkc->btnk", q, rows))
        scores = (dots * weights.astype(jnp.float32)[..., None]).sum(axis=2)
        used = selected >= 0
        log_i = jax.nn.log_softmax(jnp.where(used, scores, -1e30), axis=-1)
        p = jnp.where(used, mass, 0.0)
        p = p / jnp.maximum(p.sum(axis=-1, keepdims=True), 1e-30)
        return (p * jnp.where(used & (p > 0), jnp.log(jnp.maximum(p, 1e-37)) - log_i, 0.0)).sum(axis=-1)

    b, t, n, c = q.shape
    k = selected.shape[2]
    divergence = map_query_tiles(tile, query_tile(t, b * k * (n + c) * 8, _TILE_BYTES), q, weights, selected, mass)
    counts = valid & ((selected >= 0).sum(axis=-1) >= 2)
    return IndexerLoss(jnp.where(counts, divergence, 0.0).sum(), counts.sum().astype(jnp.float32))


def recall(selected: jax.Array, mass: jax.Array, valid: jax.Array, spread: RowSpread | None = None) -> jax.Array:
    """Mean share of the attention's best entries that a selection has.

    Args:
      selected: int32 [B, T, K], -1 unused.
      mass: float32 [B, T, S], attention that every entry would get; 0 where it is not seen.
      valid: bool [B, T].
      spread: None, or how the rows of the whole batch are spread.

    Returns:
      float32 []: over queries that see more entries than K, the part of the K with the largest mass that is selected; 1
      if there are no such queries.
    """
    k = selected.shape[-1]
    best = jax.lax.top_k(mass, min(k, mass.shape[-1]))[1]
    found = (best[..., None] == selected[..., None, :]).any(axis=-1).mean(axis=-1)
    counts = valid & ((mass > 0).sum(axis=-1) > k)
    found, queries = total((found * counts).sum(), spread), total(counts.sum(), spread)
    return jnp.where(queries > 0, found / jnp.maximum(queries, 1), 1.0)
