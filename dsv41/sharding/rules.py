"""Logical axes and the mesh axes that they are spread over."""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec

from dsv41.config import DSV41Error
from dsv41.sharding.expert_placement import ExpertPlacement

MeshAxes = tuple[str, ...]

AXES = ("data", "sequence", "tensor")
"""Axes of a mesh, outermost first. What each is for is a preset's to say (`dsv41.sharding.presets`)."""

LOGICAL_AXES = ("batch", "pages", "heads", "experts", "vocab", "engram_rows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Which mesh axes each logical axis is spread over; an empty tuple: over none, so that every device has all of it.

    A step is one program for each device (`jax.shard_map`). Every token is one device's own: rows of a batch are spread
    over `batch`, and the tokens of these rows over `heads` wherever no attention head is involved.

    Attributes:
      batch: rows of a step, slots of the cache with their window rings, and the page pools.
      pages: logical pages of one sequence, round robin: page j lies on device j modulo their number, counted along
        these axes. The last axes of `batch`, or none.
      heads: attention heads, by whole groups of the output projection.
      experts: routed experts.
      vocab: rows of embedding and head.
      engram_rows: rows of Engram tables that lie on devices.
      placements: copies of experts, by layer of the backbone; none at all if empty.

    Raises:
      DSV41Error: an axis is named twice, or spreads what it may not spread; names the logical axis.
    """

    batch: MeshAxes = ()
    pages: MeshAxes = ()
    heads: MeshAxes = ()
    experts: MeshAxes = ()
    vocab: MeshAxes = ()
    engram_rows: MeshAxes = ()
    placements: tuple[ExpertPlacement, ...] = ()

    def __post_init__(self):
        for name in LOGICAL_AXES:
            axes = getattr(self, name)
            if len(set(axes)) != len(axes):
                raise DSV41Error(f"sharding rules: {name}={axes} names an axis twice")
        if shared := set(self.batch) & set(self.heads):
            raise DSV41Error(f"sharding rules: batch and heads share {sorted(shared)}")
        if self.pages != self.batch[len(self.batch) - len(self.pages) :]:
            raise DSV41Error(f"sharding rules: pages={self.pages} are not the last axes of batch={self.batch}")
        for name in ("experts", "vocab", "engram_rows"):
            if unknown := set(getattr(self, name)) - set(self.tokens):
                raise DSV41Error(
                    f"sharding rules: {name} is spread over {sorted(unknown)}, along which neither batch nor heads is"
                )

    @property
    def tokens(self) -> MeshAxes:
        """Axes along which every device has tokens of its own."""
        return self.batch + self.heads

    def spec(self, *logical: str | None) -> PartitionSpec:
        """The partition of an array whose axes have these logical names; None: an axis that is not spread.

        Raises:
          DSV41Error: there is no such logical axis, or two of the array's axes use one mesh axis.
        """
        parts, used = [], set()
        for name in logical:
            axes = ()
            if name is not None:
                if name not in LOGICAL_AXES:
                    raise DSV41Error(f"sharding rules: no logical axis {name!r}")
                axes = getattr(self, name)
            if twice := used & set(axes):
                raise DSV41Error(f"sharding rules: an array with axes {logical} would use {sorted(twice)} twice")
            used |= set(axes)
            parts.append(axes or None)
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts)


LOCAL = ShardingRules()
"""Everything on one device."""
