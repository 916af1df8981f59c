"""A batch whose rows are spread over devices, seen from the one that has some of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RowSpread:
    """Which rows of a batch this device has, inside `jax.shard_map`.

    Attributes:
      axes: of the mesh, along which rows are spread.
      numbers: of each device in the order of these axes. Device number d of D has the rows d, d + D, d + 2D, ... of the
        batch, so that a device's micro-batches are parts of the whole batch's.
    """

    axes: tuple[str, ...]
    numbers: tuple[int, ...]

    @property
    def devices(self) -> int:
        return len(self.numbers)

    def total(self, x: Any) -> Any:
        """The sums over all devices, of arrays."""
        return jax.lax.psum(x, self.axes)

    def own(self, x: jax.Array) -> jax.Array:
        """Of an array [B, ...] with something for each row of the batch, this device's [B / devices, ...]."""
        number = jnp.asarray(self.numbers, jnp.int32)[jax.lax.axis_index(self.axes)]
        rows = x.reshape(-1, self.devices, *x.shape[1:])
        return jax.lax.dynamic_index_in_dim(rows, number, axis=1, keepdims=False)

    def look_up(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Rows of a table whose columns are spread over the devices.

        Every device looks up its columns for all, and the parts are exchanged: no device has more of a table than its
        columns, and none works more than the others, whichever rows are asked for.

        Args:
          table: [rows, columns / devices].
          ids: int32 [B, ...], of this device.

        Returns:
          [B, ..., columns].
        """
        every = jax.lax.all_gather(ids, self.axes, tiled=True)
        return jax.lax.all_to_all(table[every], self.axes, split_axis=0, concat_axis=ids.ndim, tiled=True)


def total(x: Any, spread: RowSpread | None) -> Any:
    """Over the whole batch, of arrays with sums over the rows here."""
    return x if spread is None else spread.total(x)
