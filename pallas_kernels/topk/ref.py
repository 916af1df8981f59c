"""The meaning of top-k in plain jnp: of a whole row (a pyramid of block maxima) and of a row that arrives in pieces."""

import jax
import jax.numpy as jnp

BLOCK = 8  # values that a level of the pyramid puts under one maximum
SORTED_WIDTH = 4096  # a level of at most this many values is sorted as it is


def topk(scores: jax.Array, k: int, *, lengths: jax.Array | None = None) -> jax.Array:
    """Positions of the k best scores of each row, best first, the lowest position first among equal scores.

    -inf and NaN are never taken; -0 equals +0. The result is that of `lax.top_k` on the whole row, but only short
    rows are ever sorted: maxima over blocks of 8 are taken until about 4,096 are left, the k best blocks are found
    there, and on the way down only the children of the k best blocks are looked at.

    Why this is exact, ties included. Order the entries of a level by (score descending, position ascending), which
    is total, and the blocks above it by (maximum descending, block number ascending). Claim: each of the k first
    entries lies in one of the k first blocks. Let entry e lie in block b, and let k blocks come before b. Each of
    those, b', holds an entry e' that equals its maximum, and max b' >= max b >= e. If e' > e, e' comes before e. If
    e' = e, then max b' = max b, so b' < b, all positions of b' are lower than those of b, and again e' comes before e.
    So k entries come before e, which is not among the k first. By induction from the top the k first blocks of every
    level are found, provided that ties among the gathered children also go to the lowest position: the kept blocks
    are sorted by number before their children are gathered, so that the children lie in the order of their positions,
    and `lax.top_k` prefers the lower index among equal ones.

    Args:
      scores: float32 or bfloat16 [rows, S].
      k: positions to take; may exceed S.
      lengths: int32 [rows], positions at and after it are not there; None: all S are.

    Returns:
      int32 [rows, k], -1 at the end where fewer than k scores can be taken.
    """
    rows, width = scores.shape
    usable = scores > -jnp.inf  # false for NaN
    if lengths is not None:
        usable &= jnp.arange(width, dtype=jnp.int32) < lengths[:, None]
    scores = jnp.where(usable, jnp.where(scores == 0, jnp.zeros_like(scores), scores), -jnp.inf)
    levels = [_padded(scores, max(width, k))]
    while levels[-1].shape[1] > max(SORTED_WIDTH, BLOCK * k):
        blocks = _padded(levels[-1], -(-levels[-1].shape[1] // BLOCK) * BLOCK).reshape(rows, -1, BLOCK)
        levels[-1] = blocks
        levels.append(blocks.max(axis=-1))
    best, ids = jax.lax.top_k(levels.pop(), k)
    for blocks in reversed(levels):
        ids = jnp.sort(ids, axis=-1)
        children = jnp.take_along_axis(blocks, ids[..., None], axis=1).reshape(rows, k * BLOCK)
        best, child = jax.lax.top_k(children, k)
        ids = jnp.take_along_axis(ids, child // BLOCK, axis=1) * BLOCK + child % BLOCK
    return jnp.where(best > -jnp.inf, ids, -1)


def _padded(scores: jax.Array, width: int) -> jax.Array:
    """Pads each row to `width` with scores that are never taken."""
    return jnp.pad(scores, ((0, 0), (0, width - scores.shape[1])), constant_values=-jnp.inf)


def empty_topk(shape: tuple[int, ...], k: int) -> tuple[jax.Array, jax.Array]:
    """The top-k of nothing: scores -inf float32 [*shape, k], ids -1 int32 [*shape, k]."""
    return jnp.full((*shape, k), -jnp.inf, jnp.float32), jnp.full((*shape, k), -1, jnp.int32)


def merge_topk(best: tuple[jax.Array, jax.Array], scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Folds one piece into a running top-k: memory is that of k and one piece, whatever the length of the row.

    Entries with score -inf are never taken: their place holds score -inf and id -1. Equal scores are taken in the
    order in which they arrive, so feeding a row in any split gives the same result. NaN is not allowed.

    Args:
      best: scores float32 [..., k] and ids int32 [..., k] so far, best first.
      scores: float32 [..., S].
      ids: int32, broadcastable to [..., S].
    """
    k = best[0].shape[-1]
    all_scores = jnp.concatenate([best[0], scores], axis=-1)
    all_ids = jnp.concatenate([best[1], jnp.broadcast_to(ids, scores.shape)], axis=-1)
    top, where = jax.lax.top_k(all_scores, k)
    top_ids = jnp.take_along_axis(all_ids, where, axis=-1)
    return top, jnp.where(top == -jnp.inf, -1, top_ids)
