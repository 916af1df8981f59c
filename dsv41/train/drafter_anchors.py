"""Where blocks begin that the drafter learns from (dspark.md section 3.2).

Axis letters: B rows, T tokens of a row, N anchors of a row, K drafts of a block.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv41.train.pack import PackedBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Anchors:
    """Blocks of every row, ascending by anchor; those that are missing are dummies, and come last."""

    index: jax.Array  # int32 [B, N] token of the row that is the anchor; 0 of a dummy
    keep: jax.Array  # bool [B, N] false of a dummy
    # bool [B, N, K] the draft predicts a token of the anchor's document that counts, and so do all before it
    valid: jax.Array
    tokens: jax.Array  # int32 [B, N, K] what the draft follows: the anchor, then the true drafts before it
    labels: jax.Array  # int32 [B, N, K] what it should predict; anything where `valid` is false
    position: jax.Array  # int32 [B, N] of the anchor in its document
    start: jax.Array  # int32 [B, N] where in the row the document begins

    def slots(self, drafts: int) -> jax.Array:
        """int32 [B, N, K] token of the row at each input of a block; it may lie behind the row."""
        return self.index[..., None] + jnp.arange(drafts, dtype=jnp.int32)


def eligible(pack: PackedBatch) -> jax.Array:
    """bool [B, T]: tokens p that may be anchors: p and p + 1 are tokens of one document that are to be predicted.

    So an anchor is never the first token of a document: there is no feature before it.
    """
    counts = jnp.asarray(pack.loss_mask)
    return counts & jnp.pad(counts[:, :-1], ((0, 0), (1, 0))) & (jnp.asarray(pack.position) > 0)


def draw_anchors(key: jax.Array, pack: PackedBatch, count: int, drafts: int) -> Anchors:
    """Draws anchors of every row uniformly, without replacement.

    Args:
      key: of the draw; a row's anchors do not depend on what the others hold.
      pack: the rows.
      count: N, static; a row with fewer eligible tokens gets all of them, and dummies.
      drafts: K, static.
    """
    able = eligible(pack)
    rank = jnp.where(able, jax.random.uniform(key, able.shape), -1.0)
    count_here = min(count, able.shape[1])
    best, index = jax.lax.top_k(rank, count_here)
    index = jnp.sort(jnp.where(best >= 0, index, able.shape[1]).astype(jnp.int32), axis=1)
    index = jnp.pad(index, ((0, 0), (0, count - count_here)), constant_values=able.shape[1])
    return anchors_at(pack, index, drafts)


def anchors_at(pack: PackedBatch, index: jax.Array, drafts: int) -> Anchors:
    """The blocks at int32 [B, N] tokens of the rows, ascending; T or more: a dummy. No check that they are eligible."""
    tokens, document = jnp.asarray(pack.tokens), jnp.asarray(pack.document)
    length = tokens.shape[1]
    keep = index < length
    index = jnp.where(keep, index, 0)

    def take(x: jax.Array, at: jax.Array) -> jax.Array:
        flat = jnp.minimum(at, length - 1).reshape(at.shape[0], -1)
        return jnp.take_along_axis(jnp.asarray(x), flat, axis=1).reshape(at.shape)

    at = index[..., None] + jnp.arange(drafts, dtype=jnp.int32)
    own = take(document, index)
    counts = (at < length) & take(pack.loss_mask, at) & (take(document, at) == own[..., None])
    valid = jnp.cumprod((counts & keep[..., None]).astype(jnp.int32), axis=-1).astype(bool)
    position = take(pack.position, index)
    return Anchors(
        index=index,
        keep=keep,
        valid=valid,
        tokens=take(tokens, at),
        labels=take(pack.targets, at),
        position=position,
        start=index - position,
    )
