"""Choosing compressed entries in two levels: the best blocks by their maxima, then the best entries inside them.

Exact: the k best entries lie in the k blocks with the largest maxima (an entry outside is no larger than any of those k
maxima). Scores of whole contexts are never stored, only one maximum a block. This is the form that the kernels take;
`dsv41.ops.selection` has the streaming one. Both select the same sets but for the choice among equal scores.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv41.ops.selection import ascending
from pallas_kernels.indexer import ops as indexer
from pallas_kernels.topk.ops import topk


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexQuery:
    """Queries of the indexer as they are stored (MXFP4), and how their heads are weighted."""

    values: jax.Array  # uint8 [B, T, N, C / 2] adjacent pairs
    scales: jax.Array  # uint8 [B, T, N, C / 32] E8M0
    weights: jax.Array  # bfloat16 [B, T, N]


def select_by_blocks(
    query: IndexQuery,
    pool: jax.Array,
    pages: jax.Array,
    visible: jax.Array,
    *,
    top_k: int,
    pool_blocks: int,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Top-k over all visible entries, and the candidate pool if `pool_blocks` > 0.

    Args:
      query: of every token.
      pool: uint8 [P, rows, 4, 128] pages of index keys.
      pages: int32 [B, M] physical page of each run of 128 entries, -1 where none is assigned.
      visible: int32 [B, T] entries that each token sees.
      top_k: entries to select.
      pool_blocks: blocks to keep, 0 for none.
      block_size: entries a block.

    Returns:
      selected int32 [B, T, top_k] in any order, -1 unused ones at the end; candidates int32 [B, T, pool_blocks],
      ascending, -1 at the end.
    """
    total = pages.shape[1] * indexer.PAGE_ENTRIES // block_size
    used = -(-visible // block_size)
    if pool_blocks or total > top_k:
        maxima = indexer.block_maxima(*_parts(query), pool, pages, visible, block_size=block_size)
    if total > top_k:
        blocks = _topk(maxima, top_k, used)
    else:
        block = jnp.arange(total, dtype=jnp.int32)
        blocks = jnp.where(block < used[..., None], block, -1)
    candidates = jnp.zeros((*visible.shape, 0), jnp.int32)
    if pool_blocks:
        candidates = candidate_pool(maxima, visible, pool_blocks, block_size)
    return _best_of_blocks(query, pool, pages, visible, blocks, top_k, block_size), candidates


def select_in_blocks(
    query: IndexQuery,
    pool: jax.Array,
    pages: jax.Array,
    visible: jax.Array,
    candidates: jax.Array,
    *,
    top_k: int,
    block_size: int,
) -> jax.Array:
    """Top-k over the visible entries of each token's candidate blocks int32 [B, T, n], -1 unused; as above."""
    return _best_of_blocks(query, pool, pages, visible, candidates, top_k, block_size)


def candidate_pool(maxima: jax.Array, visible: jax.Array, pool_blocks: int, block_size: int) -> jax.Array:
    """The best blocks by their maxima float32 [B, T, blocks]; the block of the newest visible entry always stays.

    Returns int32 [B, T, pool_blocks], ascending, -1 at the end.
    """
    newest = jnp.where(visible > 0, (visible - 1) // block_size, -1)
    forced = jnp.where(jnp.arange(maxima.shape[-1]) == newest[..., None], jnp.inf, maxima)
    return ascending(_topk(forced, pool_blocks, -(-visible // block_size)))


def _parts(query: IndexQuery) -> tuple[jax.Array, jax.Array, jax.Array]:
    return query.values, query.scales, query.weights


def _topk(scores: jax.Array, k: int, lengths: jax.Array) -> jax.Array:
    """int32 [B, T, k] positions along the last axis."""
    rows = scores.reshape(-1, scores.shape[-1])
    return topk(rows, k, lengths=lengths.reshape(-1)).reshape(*scores.shape[:-1], k)


def _best_of_blocks(query, pool, pages, visible, blocks, top_k: int, block_size: int) -> jax.Array:
    scores = indexer.entry_scores(*_parts(query), pool, pages, visible, blocks, block_size=block_size)
    where = _topk(scores, top_k, jnp.full_like(visible, scores.shape[-1]))
    block = jnp.take_along_axis(blocks, jnp.maximum(where, 0) // block_size, axis=-1)
    return jnp.where(where < 0, -1, block * block_size + where % block_size)
