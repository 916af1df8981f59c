"""Choosing compressed entries: exact top-k of index scores, and the candidate pool (architecture.md section 3).

Keys arrive in tiles and only the best so far is kept, so memory does not depend on the context length or its limit.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.indexer import ops as indexer
from pallas_kernels.topk import ops as topk


def visible_entries(positions: jax.Array, valid: jax.Array, ratio: int) -> jax.Array:
    """int32 [B, T]: how many compressed entries the token at each position sees, 0 for padding."""
    return jnp.where(valid, (positions + 1) // ratio, 0)


def select(
    q: jax.Array,
    weights: jax.Array,
    visible: jax.Array,
    read_keys: Callable[[jax.Array], jax.Array],
    *,
    tile: int,
    top_k: int,
    pool_blocks: int,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Top-k over all visible entries, and the candidate pool if `pool_blocks` > 0.

    A block's score is the largest of its visible entries; the block of the newest visible entry always stays.

    Args:
      q: bfloat16 [B, T, N, C] index queries.
      weights: bfloat16 [B, T, N] head weights.
      visible: int32 [B, T].
      read_keys: tile number -> bfloat16 [B, tile, C], entries tile * i and up.
      tile: entries a tile, a multiple of block_size.
      top_k: entries to select.
      pool_blocks: blocks to keep, 0 for none.
      block_size: entries a block.

    Returns:
      selected int32 [B, T, top_k], best first, -1 unused; candidates int32 [B, T, pool_blocks], ascending, -1 at the
      end.
    """
    shape = visible.shape
    newest_block = (visible - 1) // block_size

    def body(i, carry):
        best, blocks = carry
        entry = i * tile + jnp.arange(tile, dtype=jnp.int32)
        scores = indexer.index_scores(q, weights, read_keys(i))
        scores = jnp.where(entry < visible[..., None], scores, -jnp.inf)
        best = topk.merge_topk(best, scores, entry)
        if pool_blocks:
            block = i * (tile // block_size) + jnp.arange(tile // block_size, dtype=jnp.int32)
            maxima = indexer.run_maxima(scores, block_size)
            newest = (block == newest_block[..., None]) & (visible > 0)[..., None]
            blocks = topk.merge_topk(blocks, jnp.where(newest, jnp.inf, maxima), block)
        return best, blocks

    steps = -(-visible.max() // tile)
    init = topk.empty_topk(shape, top_k), topk.empty_topk(shape, pool_blocks)
    (_, selected), (_, candidates) = jax.lax.fori_loop(0, steps, body, init)
    return selected, ascending(candidates)


def ascending(ids: jax.Array) -> jax.Array:
    """Sorts ids, unused (-1) ones last, so that scanning them meets lower positions first."""
    last = jnp.iinfo(jnp.int32).max
    ids = jnp.sort(jnp.where(ids < 0, last, ids), axis=-1)
    return jnp.where(ids == last, -1, ids)


def select_in_pool(
    q: jax.Array,
    weights: jax.Array,
    visible: jax.Array,
    candidates: jax.Array,
    read_blocks: Callable[[jax.Array], jax.Array],
    *,
    tile_blocks: int,
    top_k: int,
    block_size: int,
) -> jax.Array:
    """Top-k over the visible entries of each query's candidate blocks.

    Args:
      q, weights, visible, top_k, block_size: as in `select`.
      candidates: int32 [B, T, P] blocks, -1 unused ones at the end.
      read_blocks: int32 [B, T, n] blocks (>= 0) -> bfloat16 [B, T, n * block_size, C].
      tile_blocks: blocks scored at a time.

    Returns:
      int32 [B, T, top_k], best first, -1 unused.
    """
    pool = candidates.shape[-1]
    padded = jnp.pad(candidates, ((0, 0), (0, 0), (0, -pool % tile_blocks)), constant_values=-1)

    def body(i, best):
        blocks = jax.lax.dynamic_slice_in_dim(padded, i * tile_blocks, tile_blocks, axis=2)
        entry = (blocks[..., None] * block_size + jnp.arange(block_size)).reshape(*blocks.shape[:2], -1)
        scores = indexer.index_scores(q, weights, read_blocks(jnp.maximum(blocks, 0)))
        usable = (entry >= 0) & (entry < visible[..., None])
        return topk.merge_topk(best, jnp.where(usable, scores, -jnp.inf), entry)

    used = (candidates >= 0).sum(-1).max()
    steps = -(-used // tile_blocks)
    return jax.lax.fori_loop(0, steps, body, topk.empty_topk(visible.shape, top_k))[1]
