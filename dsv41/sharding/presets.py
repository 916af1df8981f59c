"""Rules for what a mesh is used for.

With one KV head, attention is spread by sequences and the MoE by experts: keys and values are stored once, and no
attention layer communicates. `tensor` divides the work of single sequences by heads on top of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dsv41.config import DSV41Error, TextConfig
from dsv41.sharding.mesh import devices_along
from dsv41.sharding.rules import LOCAL, MeshAxes, ShardingRules

PRESETS = ("decode", "prefill", "train")


def preset_rules(preset: str, sizes: Mapping[str, int], config: TextConfig) -> ShardingRules:
    """The rules of a preset on a mesh; axes of size 1 are left out, so that one device runs the plain program.

    | preset | batch | pages of a sequence | heads | vocabulary |
    |---|---|---|---|---|
    | decode | data, sequence | sequence | tensor | sequence, tensor |
    | prefill | data, sequence | – | tensor | tensor |
    | train | data, sequence | – | tensor | sequence, tensor |

    Experts and Engram rows are spread over all axes. Where that does not divide them, copies are kept along the first
    axes: experts over the longest run of last axes that divides their number.

    Args:
      preset: one of `PRESETS`.
      sizes: of the mesh axes.
      config: whose experts, heads and vocabulary are spread.

    Raises:
      DSV41Error: there is no such preset, or the mesh does not divide the heads.
    """
    if preset not in PRESETS:
        raise DSV41Error(f"sharding preset {preset!r}: expected one of {', '.join(PRESETS)}")

    def present(*axes: str) -> MeshAxes:
        return tuple(axis for axis in axes if sizes.get(axis, 1) > 1)

    heads = present("tensor")
    if config.o_groups % devices_along(sizes, heads):
        raise DSV41Error(f"mesh axis tensor={sizes['tensor']}: does not divide the {config.o_groups} groups of heads")
    every = present("data", "sequence", "tensor")
    rules = ShardingRules(
        batch=present("data", "sequence"),
        pages=present("sequence") if preset == "decode" else (),
        heads=heads,
        experts=_dividing(_experts(config), every, sizes),
        vocab=_dividing(
            config.vocab_size, present("tensor") if preset == "prefill" else present("sequence", "tensor"), sizes
        ),
        engram_rows=every,
    )
    return rules if every else LOCAL


def _experts(config: TextConfig) -> int:
    """What the devices must divide to divide the experts of the backbone and of the drafter."""
    return math.gcd(config.n_routed_experts, config.dspark_n_routed_experts if config.num_nextn_predict_layers else 0)


def _dividing(count: int, axes: MeshAxes, sizes: Mapping[str, int]) -> MeshAxes:
    """The longest run of last axes whose devices divide `count`."""
    while axes and count % devices_along(sizes, axes):
        axes = axes[1:]
    return axes
