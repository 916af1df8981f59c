"""The queries of an indexer spread over the devices that share its rows, which have no index heads of their own."""

from __future__ import annotations

import dataclasses

import jax

from dsv41.ops import collectives
from dsv41.sharding import MeshAxes


@dataclasses.dataclass(frozen=True)
class QuerySplit:
    """Queries [B, T, ...] in equal parts of rows, or of each row's tokens, over `axes`.

    Where the devices divide neither, every one of them does all of the work.

    Attributes:
      axes: mesh axes of the devices.
      axis: 0 for rows, 1 for tokens, None for no split.
    """

    axes: MeshAxes
    axis: int | None

    @classmethod
    def of(cls, rows: int, tokens: int, axes: MeshAxes) -> QuerySplit:
        """Rows are preferred: a row's keys are then read by one device only."""
        devices = collectives.axis_size(axes)
        divided = [axis for axis, size in enumerate((rows, tokens)) if devices > 1 and size % devices == 0]
        return cls(axes, divided[0] if divided else None)

    def rows(self, x: jax.Array, groups: int = 1) -> jax.Array:
        """This device's rows of x [groups * B, ...], where every group of B rows is split alike."""
        if self.axis != 0:
            return x
        return self._part(x.reshape(groups, -1, *x.shape[1:]), 1).reshape(-1, *x.shape[1:])

    def queries(self, x: jax.Array, groups: int = 1) -> jax.Array:
        """This device's part of x [groups * B, T, ...]."""
        return self._part(x, 1) if self.axis == 1 else self.rows(x, groups)

    def join(self, x: jax.Array) -> jax.Array:
        """The parts of all devices: [B, T, ...]."""
        return x if self.axis is None else collectives.gather(x, self.axes, self.axis)

    def _part(self, x: jax.Array, axis: int) -> jax.Array:
        size = x.shape[axis] // collectives.axis_size(self.axes)
        return jax.lax.dynamic_slice_in_dim(x, collectives.axis_index(self.axes) * size, size, axis)
