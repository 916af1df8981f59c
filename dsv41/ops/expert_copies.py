"""Fills the slots that an `ExpertPlacement` has for copies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dsv41.config import DSV41Error
from dsv41.ops import collectives
from dsv41.ops.sharded_rows import take_sharded_rows
from dsv41.sharding import ExpertPlacement, ShardingRules, devices_along


def with_copies(stacks: Any, placement: ExpertPlacement, mesh: Mesh, rules: ShardingRules) -> Any:
    """Stacks with the extra slots of every device filled.

    One copy a device moves at a time; a device needs memory for as many experts as there are devices meanwhile.

    Args:
      stacks: tree of arrays [E, ...], spread over `rules.experts` of the mesh.
      placement: for these devices.
      mesh, rules: of the parameters.

    Returns:
      the tree with [devices * slots, ...], spread alike.

    Raises:
      DSV41Error: the placement is for another number of devices or experts.
    """
    devices, spec = devices_along(mesh.shape, rules.experts), rules.spec("experts")
    sizes = {x.shape[0] for x in jax.tree.leaves(stacks)}
    if placement.devices != devices or sizes != {placement.experts}:
        raise DSV41Error(
            f"expert placement: made for {placement.experts} experts on {placement.devices} devices, used for "
            f"{sorted(sizes)} on {devices}"
        )
    extra = np.array(placement.extra, np.int32)

    def fill(stacks):
        wanted = jnp.asarray(extra)[collectives.axis_index(rules.experts)]

        def extended(x):
            copies = [take_sharded_rows(x, wanted[j : j + 1], rules.experts) for j in range(extra.shape[1])]
            return jnp.concatenate([x, *copies])

        return jax.tree.map(extended, stacks)

    return jax.jit(jax.shard_map(fill, mesh=mesh, in_specs=spec, out_specs=spec))(stacks)
