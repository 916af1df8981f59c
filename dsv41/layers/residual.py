"""Residual streams between sublayers (architecture.md section 2)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

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
class MixParameters:
    """What predicts a sublayer's mix."""

    fn: jax.Array  # float32 [(2 + R) * R, R * D]
    scale: jax.Array  # float32 [3]
    base: jax.Array  # float32 [(2 + R) * R]


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


def enter(residual: Residual, mix: MixParameters, norm: RMSNorm, *, iters: int, hc_eps: float) -> Entered:
    """Adds the pending update and prepares a sublayer: its normalised input, and its mix of the complete streams.

    `iters` and `hc_eps` are those of the Sinkhorn rounds; the mix uses the epsilon of `norm`.
    """
    options = {"iters": iters, "norm_eps": norm.eps, "hc_eps": hc_eps}
    streams = residual.streams
    if residual.update is None:
        coefficients = mhc.mix_coefficients(streams, mix.fn, mix.scale, mix.base, **options)
        return Entered(norm(mhc.collapse(streams, residual.pre)), streams, *coefficients)
    lead = streams.shape[:2]
    rows = (streams, *residual.update, residual.pre)
    rows = [x.reshape(-1, *x.shape[2:]) for x in rows]
    streams, x, *coefficients = mhc.residual_step(*rows, mix.fn, mix.scale, mix.base, norm.weight[...], **options)
    return Entered(*(a.reshape(*lead, *a.shape[1:]) for a in (x, streams, *coefficients)))


def open_streams(x: jax.Array, num_streams: int) -> Residual:
    """Embeddings bfloat16 [B, T, D] -> equal streams and a one-hot first mix."""
    streams = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], num_streams, x.shape[2]))
    return Residual(streams, jnp.zeros(streams.shape[:3], jnp.float32).at[..., 0].set(1.0))
