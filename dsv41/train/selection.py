"""Selection over packed rows (architecture.md section 3, training.md section 4.3).

What a query sees is one run of entries: those of its document that are complete. Entries and candidate blocks are
numbered through the row. Nothing here has a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv41.ops.selection import SelectionSizes
from dsv41.train.pack import PackedBatch
from dsv41.train.row_spread import RowSpread
from pallas_kernels.indexer import ops as indexer
from pallas_kernels.tiling import map_query_tiles, query_tile
from pallas_kernels.topk.ops import topk

# Bytes of scores that a tile of queries may make.
_TILE_BYTES = 1 << 30


class Visible(NamedTuple):
    """The run of entries that each query sees: from `first` up to but not including `last`, int32 [B, T]."""

    first: jax.Array
    last: jax.Array

    @classmethod
    def of(cls, start: jax.Array, position: jax.Array, valid: jax.Array, ratio: int) -> Visible:
        """start, position int32 [B, T]: where in the row the token's document begins, and where it is in that."""
        first = start // ratio
        return cls(first, first + jnp.where(valid, (position + 1) // ratio, 0))

    @classmethod
    def of_pack(cls, pack: PackedBatch, ratio: int) -> Visible:
        return cls.of(pack.start, pack.position, pack.valid, ratio)

    def mask(self, entry: jax.Array) -> jax.Array:
        """bool, of entries int32 [S] or [B, T, S]."""
        return (entry >= self.first[..., None]) & (entry < self.last[..., None])


def select(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    visible: Visible,
    sizes: SelectionSizes,
    candidates: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The best visible entries of each query, and the candidate pool if `sizes.pool_blocks` > 0.

    Args:
      q: bfloat16 [B, T, N, C] index queries.
      weights: bfloat16 [B, T, N] head weights.
      keys: bfloat16 [B, S, C].
      visible: of each query.
      sizes: how many of what.
      candidates: int32 [B, T, P] blocks to select in, -1 unused; None: in all.
      implementation: of the top-k; see `pallas_kernels.dispatch`.

    Returns:
      entries int32 [B, T, min(top_k, S)] and blocks int32 [B, T, min(pool_blocks, blocks)], -1 unused. In plain
      XLA they come best first, the lower one of equal scores before the other; kernels may take any of equal ones, in
      any order. The block of the newest visible entry is always kept.
    """
    entries = jnp.arange(keys.shape[1], dtype=jnp.int32)

    def tile(q, weights, first, last, candidates):
        seen = Visible(first, last)
        mask = seen.mask(entries)
        if candidates is not None:
            mask &= _in_blocks(candidates, keys.shape[1] // sizes.block, sizes.block)
        scores = jnp.where(mask, indexer.index_scores(q, weights, keys), -jnp.inf)
        selected = _best(scores, sizes.top_k, implementation)
        if not sizes.pool_blocks:
            return selected, None
        maxima = indexer.run_maxima(scores, sizes.block)
        newest = jnp.where(last > first, (last - 1) // sizes.block, -1)
        maxima = jnp.where(jnp.arange(maxima.shape[-1]) == newest[..., None], jnp.inf, maxima)
        return selected, _best(maxima, sizes.pool_blocks, implementation)

    arrays = jax.lax.stop_gradient((q, weights, *visible, candidates))
    keys = jax.lax.stop_gradient(keys)
    per_token = q.shape[0] * keys.shape[1] * (q.shape[2] + 4) * 4
    return map_query_tiles(tile, query_tile(q.shape[1], per_token, _TILE_BYTES), *arrays)


def _best(scores: jax.Array, count: int, implementation: str | None) -> jax.Array:
    count = min(count, scores.shape[-1])
    rows = scores.reshape(-1, scores.shape[-1])
    return topk(rows, count, implementation=implementation).reshape(*scores.shape[:-1], count)


def _in_blocks(candidates: jax.Array, blocks: int, size: int) -> jax.Array:
    """bool [B, T, blocks * size]: entries of candidate blocks."""
    b, t = jnp.ogrid[: candidates.shape[0], : candidates.shape[1]]
    known = jnp.zeros((*candidates.shape[:2], blocks), bool)
    known = known.at[b[..., None], t[..., None], jnp.where(candidates < 0, blocks, candidates)].set(True, mode="drop")
    return jnp.repeat(known, size, axis=-1)


def explore(
    key: jax.Array, selected: jax.Array, visible: Visible, count: int, spread: RowSpread | None = None
) -> jax.Array:
    """The selection with up to `count` more entries of each query, drawn from those that it sees.

    An indexer that learns from what it selects alone is never told about the rest (training.md section 4.2). With
    `spread` a row's entries are those that it would have on one device.
    """
    first, last = (x[..., None] for x in visible)
    rows, *rest = (*selected.shape[:2], count)
    if spread is None:
        drawn = jax.random.uniform(key, (rows, *rest))
    else:
        drawn = spread.own(jax.random.uniform(key, (rows * spread.devices, *rest)))
    drawn = first + (drawn * (last - first)).astype(jnp.int32)
    drawn = jnp.sort(jnp.minimum(drawn, last - 1), axis=-1)
    again = jnp.concatenate([jnp.zeros_like(drawn[..., :1], bool), drawn[..., 1:] == drawn[..., :-1]], axis=-1)
    known = (drawn[..., None] == selected[:, :, None, :]).any(axis=-1)
    return jnp.concatenate([selected, jnp.where(again | known | (last <= first), -1, drawn)], axis=-1)
