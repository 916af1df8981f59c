"""Choosing compressed entries: exact top-k of index scores, and the candidate pool (architecture.md section 3).

Keys arrive in tiles and only the best so far is kept, so memory does not depend on the context length or its limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.indexer import ops as indexer
from pallas_kernels.topk import ops as topk


@dataclasses.dataclass(frozen=True)
class SelectionSizes:
    """How many entries a query selects, how many blocks the candidate pool keeps, and how many entries a block has.

    A layer that builds no pool has 0 of its blocks.
    """

    top_k: int
    pool_blocks: int
    block: int


def visible_entries(positions: jax.Array, valid: jax.Array, ratio: int) -> jax.Array:
    """int32 [B, T]: how many compressed entries the token at each position sees, 0 for padding."""
    return jnp.where(valid, (positions + 1) // ratio, 0)


class Ranked(NamedTuple):
    """Things that were chosen by score."""

    scores: jax.Array  # float32 [..., k], -inf where unused
    ids: jax.Array  # int32 [..., k], -1 where unused


def take_ranked(scores: jax.Array, ids: jax.Array, where: jax.Array) -> Ranked:
    """What lies at places int32 [..., k], -1 unused, along the last axis of scores and ids [..., n]."""
    at, used = jnp.maximum(where, 0), where >= 0
    taken = [jnp.take_along_axis(x, at, axis=-1) for x in (scores, ids)]
    return Ranked(jnp.where(used, taken[0], -jnp.inf), jnp.where(used, taken[1], -1))


def newest_block(visible: jax.Array, block_size: int) -> jax.Array:
    """The block of the newest visible entry, -1 if there is none."""
    return jnp.where(visible > 0, (visible - 1) // block_size, -1)


def rank(
    q: jax.Array,
    weights: jax.Array,
    visible: jax.Array,
    kept: jax.Array | None,
    read_keys: Callable[[jax.Array], jax.Array],
    *,
    tile: int,
    sizes: SelectionSizes,
) -> tuple[Ranked, Ranked]:
    """Top-k over all visible entries, and the blocks of the candidate pool if `sizes.pool_blocks` > 0.

    A block's score is the largest of its visible entries.

    Args:
      q: bfloat16 [B, T, N, C] index queries.
      weights: bfloat16 [B, T, N] head weights.
      visible: int32 [B, T].
      kept: int32 [B, T] the block that always stays, with the score inf; -1 for none.
      read_keys: tile number -> bfloat16 [B, tile, C], entries tile * i and up.
      tile: entries a tile, a multiple of the block size.
      sizes: how many of what.

    Returns:
      entries [B, T, top_k] and blocks [B, T, pool_blocks], best first, the first one first among equal scores.
    """

    def body(i, carry):
        best, blocks = carry
        entry = i * tile + jnp.arange(tile, dtype=jnp.int32)
        scores = indexer.index_scores(q, weights, read_keys(i))
        scores = jnp.where(entry < visible[..., None], scores, -jnp.inf)
        best = topk.merge_topk(best, scores, entry)
        if sizes.pool_blocks:
            block = i * (tile // sizes.block) + jnp.arange(tile // sizes.block, dtype=jnp.int32)
            maxima = indexer.run_maxima(scores, sizes.block)
            blocks = topk.merge_topk(blocks, jnp.where(block == kept[..., None], jnp.inf, maxima), block)
        return best, blocks

    steps = -(-visible.max() // tile)
    init = topk.empty_topk(visible.shape, sizes.top_k), topk.empty_topk(visible.shape, sizes.pool_blocks)
    return tuple(Ranked(*found) for found in jax.lax.fori_loop(0, steps, body, init))


def ascending(ids: jax.Array) -> jax.Array:
    """Sorts ids, unused (-1) ones last, so that scanning them meets lower positions first."""
    last = jnp.iinfo(jnp.int32).max
    ids = jnp.sort(jnp.where(ids < 0, last, ids), axis=-1)
    return jnp.where(ids == last, -1, ids)


def rank_in_pool(
    q: jax.Array,
    weights: jax.Array,
    visible: jax.Array,
    candidates: jax.Array,
    read_blocks: Callable[[jax.Array], jax.Array],
    *,
    tile_blocks: int,
    sizes: SelectionSizes,
) -> Ranked:
    """Top-k over the visible entries of each query's candidate blocks.

    Args:
      q, weights, visible, sizes: as in `rank`.
      candidates: int32 [B, T, P] blocks, -1 unused ones at the end.
      read_blocks: int32 [B, T, n] blocks (>= 0) -> bfloat16 [B, T, n * block size, C].
      tile_blocks: blocks scored at a time.

    Returns:
      entries [B, T, top_k], best first, among equal scores in the order of the candidates.
    """
    pool, size = candidates.shape[-1], sizes.block
    padded = jnp.pad(candidates, ((0, 0), (0, 0), (0, -pool % tile_blocks)), constant_values=-1)

    def body(i, best):
        blocks = jax.lax.dynamic_slice_in_dim(padded, i * tile_blocks, tile_blocks, axis=2)
        entry = (blocks[..., None] * size + jnp.arange(size)).reshape(*blocks.shape[:2], -1)
        scores = indexer.index_scores(q, weights, read_blocks(jnp.maximum(blocks, 0)))
        usable = (entry >= 0) & (entry < visible[..., None])
        return topk.merge_topk(best, jnp.where(usable, scores, -jnp.inf), entry)

    used = (candidates >= 0).sum(-1).max()
    steps = -(-used // tile_blocks)
    return Ranked(*jax.lax.fori_loop(0, steps, body, topk.empty_topk(visible.shape, sizes.top_k)))
