"""Tokens of a step spread over the devices that share its rows.

Devices along `ShardingRules.heads` have the same rows. Whatever treats tokens one by one (residual streams, experts,
Engram) runs on each device's own part of them; attention, where a device has heads of its own, sees all.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv41.ops import collectives
from dsv41.sharding import MeshAxes


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """How the tokens [B, T] of a step are spread over `axes`: in equal runs of B * T, padded at the end.

    Over no axis every method hands on what it is given, [B, T, ...]; else a device's part is [1, n, ...].
    """

    rows: int
    tokens: int
    axes: MeshAxes

    @property
    def _part(self) -> int:
        """Tokens of a device."""
        return -(-self.rows * self.tokens // collectives.axis_size(self.axes))

    def _flat(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [tokens of all devices, ...], padded by zeros."""
        x = x.reshape(-1, *x.shape[2:])
        missing = self._part * collectives.axis_size(self.axes) - x.shape[0]
        return jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)))

    def split(self, x: jax.Array) -> jax.Array:
        """This device's part of what all have: [B, T, ...] -> [1, n, ...]. Padding is zero, and false."""
        if not self.axes:
            return x
        first = collectives.axis_index(self.axes) * self._part
        return jax.lax.dynamic_slice_in_dim(self._flat(x), first, self._part)[None]

    def join(self, x: jax.Array) -> jax.Array:
        """The parts of all devices: [1, n, ...] -> [B, T, ...]."""
        if not self.axes:
            return x
        x = collectives.gather(x[0], self.axes)[: self.rows * self.tokens]
        return x.reshape(self.rows, self.tokens, *x.shape[1:])

    def split_total(self, x: jax.Array) -> jax.Array:
        """This device's part of the sum over devices: [B, T, ...] -> [1, n, ...]."""
        return collectives.scatter_total(self._flat(x), self.axes)[None] if self.axes else x

    def take(self, x: jax.Array, first: jax.Array, width: int) -> jax.Array:
        """Tokens from first int32 [B] on of each row, on every device: [1, n, ...] -> [B, width, ...].

        Beyond T the last one is repeated.
        """
        index = jnp.clip(first[:, None] + jnp.arange(width), 0, self.tokens - 1)
        if not self.axes:
            return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)
        index += jnp.arange(self.rows)[:, None] * self.tokens - collectives.axis_index(self.axes) * self._part
        own = (index >= 0) & (index < self._part)
        taken = x[0][jnp.clip(index, 0, self._part - 1)]
        # All others add zeros, so that the sum is the value.
        taken = jnp.where(own.reshape(*own.shape, *(1,) * (taken.ndim - 2)), taken, jnp.zeros_like(taken))
        return collectives.total(taken, self.axes)
