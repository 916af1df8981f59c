"""Residual streams between sublayers (architecture.md section 2)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.layers.linear import RMSNorm
from pallas_kernels.hyper_connection import ops as mhc


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual:
    """The streams, and what the last sublayer adds to them.

    The update waits for the next sublayer, because one pass over the streams can add it, collapse the result into that
    sublayer's input and compute that sublayer's mix.
    """

    streams: jax.Array  # bfloat16 [B, T, R, D]
    pre: jax.Array  # float32 [B, T, R] the mix that collapses the streams into the next sublayer's input
    # of the last sublayer: its output bfloat16 [B, T, D], post float32 [B, T, R], comb float32 [B, T, R, R]; None: the
    # streams are complete
    update: tuple[jax.Array, jax.Array, jax.Array] | None = None

    def complete(self) -> Residual:
        """With nothing left to add."""
        if self.update is None:
            return self
        y, post, comb = self.update
        return Residual(mhc.update(self.streams, y, post, comb), self.pre)


@dataclasses.dataclass(frozen=True)
class Entered:
    """A sublayer's input, and what its output will be added with."""

    x: jax.Array  # bfloat16 [B, T, D], normalised
    streams: jax.Array  # bfloat16 [B, T, R, D], complete
    pre: jax.Array  # float32 [B, T, R] the next sublayer's
    post: jax.Array  # float32 [B, T, R]
    comb: jax.Array  # float32 [B, T, R, R] [source, target]

    def leave(self, y: jax.Array) -> Residual:
        """y bfloat16 [B, T, D], the sublayer's output."""
        return Residual(self.streams, self.pre, (y, self.post, self.comb))


class Sublayer(nnx.Module):
    """Attention or MoE between the residual streams: what it is made of belongs to a block.

    Args:
      inner: what runs on the collapsed streams.
      norm: of its input; the mix uses its epsilon.
      mix: what predicts it: fn float32 [(2 + R) * R, R * D], scale float32 [3], base float32 [(2 + R) * R].
      iters, hc_eps: of the Sinkhorn rounds.
    """

    def __init__(
        self, inner: nnx.Module, norm: RMSNorm, mix: tuple[nnx.Param, nnx.Param, nnx.Param], iters: int, hc_eps: float
    ):
        self.inner, self.norm = inner, norm
        self.fn, self.scale, self.base = mix
        self.iters, self.hc_eps = iters, hc_eps

    def enter(self, residual: Residual) -> Entered:
        """Adds the pending update and prepares the sublayer: its normalised input, and its mix of the complete
        streams."""
        mix, norm = (self.fn[...], self.scale[...], self.base[...]), self.norm
        options = {"iters": self.iters, "norm_eps": norm.eps, "hc_eps": self.hc_eps}
        streams = residual.streams
        if residual.update is None:
            coefficients = mhc.mix_coefficients(streams, *mix, **options)
            return Entered(norm(mhc.collapse(streams, residual.pre)), streams, *coefficients)
        lead = streams.shape[:2]
        rows = (streams, *residual.update, residual.pre)
        rows = [x.reshape(-1, *x.shape[2:]) for x in rows]
        streams, x, *coefficients = mhc.residual_step(*rows, *mix, norm.weight[...], **options)
        return Entered(*(a.reshape(*lead, *a.shape[1:]) for a in (x, streams, *coefficients)))

    def __call__(self, residual: Residual, *args: Any) -> tuple[Residual, jax.Array, Any]:
        """The whole sublayer.

        Args:
          residual: what the one before left.
          args: of `inner`, behind its input.

        Returns:
          the residual, the complete streams that it began with bfloat16 [B, T, R, D], and what `inner` returned: its
          output bfloat16 [B, T, D], alone or first of several values.
        """
        entered = self.enter(residual)
        made = self.inner(entered.x, *args)
        return entered.leave(made[0] if isinstance(made, tuple) else made), entered.streams, made


def open_streams(x: jax.Array, num_streams: int) -> Residual:
    """Embeddings bfloat16 [B, T, D] -> equal streams and a one-hot first mix."""
    streams = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], num_streams, x.shape[2]))
    return Residual(streams, jnp.zeros(streams.shape[:3], jnp.float32).at[..., 0].set(1.0))
