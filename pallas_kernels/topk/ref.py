"""A running exact top-k: memory is that of k and one piece, whatever the length of the row."""

import jax
import jax.numpy as jnp


def empty_topk(shape: tuple[int, ...], k: int) -> tuple[jax.Array, jax.Array]:
    """The top-k of nothing: scores -inf float32 [*shape, k], ids -1 int32 [*shape, k]."""
    return jnp.full((*shape, k), -jnp.inf, jnp.float32), jnp.full((*shape, k), -1, jnp.int32)


def merge_topk(best: tuple[jax.Array, jax.Array], scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Folds one piece into a running top-k.

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
