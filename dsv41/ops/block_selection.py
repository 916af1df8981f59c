"""Choosing compressed entries in two levels: the best blocks by their maxima, then the best entries inside them.

Exact: the k best entries lie in the k blocks with the largest maxima (an entry outside is no larger than any of those k
maxima). Scores of whole contexts are never stored, only one maximum a block. This is the form that the kernels take;
`dsv41.ops.selection` has the streaming one. Both select the same sets but for the choice among equal scores.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv41.ops.selection import Ranked, SelectionSizes
from pallas_kernels.indexer import ops as indexer
from pallas_kernels.topk.ops import topk


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexQuery:
    """Queries of the indexer as they are stored (MXFP4), and how their heads are weighted."""

    values: jax.Array  # uint8 [B, T, N, C / 2] adjacent pairs
    scales: jax.Array  # uint8 [B, T, N, C / 32] E8M0
    weights: jax.Array  # bfloat16 [B, T, N]


def rank_by_blocks(
    query: IndexQuery,
    pool: jax.Array,
    pages: jax.Array,
    visible: jax.Array,
    kept: jax.Array | None,
    sizes: SelectionSizes,
) -> tuple[Ranked, Ranked]:
    """Top-k over all visible entries, and the blocks of the candidate pool if `sizes.pool_blocks` > 0.

    Args:
      query: of every token.
      pool: uint8 [P, rows, 4, 128] pages of index keys.
      pages: int32 [B, M] physical page of each run of 128 entries, -1 where none is assigned.
      visible: int32 [B, T] entries that each token sees.
      kept: int32 [B, T] the block that always stays, with the score inf; -1 for none.
      sizes: how many of what.

    Returns:
      entries [B, T, top_k] and blocks [B, T, pool_blocks], in any order, unused ones at the end.
    """
    total = pages.shape[1] * indexer.PAGE_ENTRIES // sizes.block
    used = -(-visible // sizes.block)
    if sizes.pool_blocks or total > sizes.top_k:
        maxima = indexer.block_maxima(*_parts(query), pool, pages, visible, block_size=sizes.block)
    if total > sizes.top_k:
        blocks = _topk(maxima, sizes.top_k, used)
    else:
        block = jnp.arange(total, dtype=jnp.int32)
        blocks = jnp.where(block < used[..., None], block, -1)
    candidates = Ranked(jnp.zeros((*visible.shape, 0), jnp.float32), jnp.zeros((*visible.shape, 0), jnp.int32))
    if sizes.pool_blocks:
        candidates = best_blocks(maxima, visible, kept, sizes)
    return rank_in_blocks(query, pool, pages, visible, blocks, sizes), candidates


def rank_in_blocks(
    query: IndexQuery,
    pool: jax.Array,
    pages: jax.Array,
    visible: jax.Array,
    blocks: jax.Array,
    sizes: SelectionSizes,
) -> Ranked:
    """Top-k over the visible entries of some blocks of each token, int32 [B, T, n], -1 unused; as `rank_by_blocks`."""
    scores = indexer.entry_scores(*_parts(query), pool, pages, visible, blocks, block_size=sizes.block)
    where = _topk(scores, sizes.top_k, jnp.full_like(visible, scores.shape[-1]))
    block = jnp.take_along_axis(blocks, jnp.maximum(where, 0) // sizes.block, axis=-1)
    ids = jnp.where(where < 0, -1, block * sizes.block + where % sizes.block)
    return Ranked(_scores_at(scores, where), ids)


def best_blocks(maxima: jax.Array, visible: jax.Array, kept: jax.Array, sizes: SelectionSizes) -> Ranked:
    """The best blocks by their maxima float32 [B, T, blocks]; visible, kept and sizes as in `rank_by_blocks`."""
    forced = jnp.where(jnp.arange(maxima.shape[-1]) == kept[..., None], jnp.inf, maxima)
    blocks = _topk(forced, sizes.pool_blocks, -(-visible // sizes.block))
    return Ranked(_scores_at(forced, blocks), blocks)


def _scores_at(scores: jax.Array, where: jax.Array) -> jax.Array:
    """float32 [B, T, k]: scores at places, -inf at -1."""
    return jnp.where(where < 0, -jnp.inf, jnp.take_along_axis(scores, jnp.maximum(where, 0), axis=-1))


def _parts(query: IndexQuery) -> tuple[jax.Array, jax.Array, jax.Array]:
    return query.values, query.scales, query.weights


def _topk(scores: jax.Array, k: int, lengths: jax.Array) -> jax.Array:
    """int32 [B, T, k] positions along the last axis."""
    rows = scores.reshape(-1, scores.shape[-1])
    return topk(rows, k, lengths=lengths.reshape(-1)).reshape(*scores.shape[:-1], k)
