"""Entry points of top-k."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import function
from pallas_kernels.topk.ref import empty_topk, merge_topk

__all__ = ["empty_topk", "merge_topk", "topk"]


def topk(
    scores: jax.Array, k: int, *, lengths: jax.Array | None = None, implementation: str | None = None
) -> jax.Array:
    """Positions of the k best scores of each row, exact as a set (architecture.md section 3).

    -inf and NaN are never taken. The plain-XLA implementation returns them best first and resolves ties to the lowest
    position; kernels return them in any order and may take any of equal scores.

    Args:
      scores: float32 or bfloat16 [rows, S].
      k: positions to take, at least 1; may exceed S.
      lengths: int32 [rows], positions at and after it are not there; None: all S are.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      int32 [rows, k], -1 at the end where fewer than k scores can be taken.

    Raises:
      TypeError: a dtype is not one of these.
      ValueError: a shape or k does not fit, or the implementation asked for cannot run.
    """
    if scores.ndim != 2:
        raise ValueError(f"topk: scores must be [rows, S], got {scores.shape}")
    if scores.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"topk: scores must be float32 or bfloat16, got {scores.dtype}")
    if k < 1:
        raise ValueError(f"topk: k must be at least 1, got {k}")
    if lengths is not None and lengths.shape != scores.shape[:1]:
        raise ValueError(f"topk: lengths must be [rows] = {scores.shape[:1]}, got {lengths.shape}")
    if lengths is not None and lengths.dtype != jnp.int32:
        raise TypeError(f"topk: lengths must be int32, got {lengths.dtype}")
    if scores.shape[0] == 0 or scores.shape[1] == 0:
        return jnp.full((scores.shape[0], k), -1, jnp.int32)

    from pallas_kernels.topk import gpu, tpu

    problems = {"gpu": lambda: gpu.problem(scores, k, lengths=lengths), "tpu": lambda: tpu.problem(scores, k)}
    return function(__package__, "topk", implementation, problems)(scores, k, lengths=lengths)
