"""Meshes, and how logical axes are spread over them."""

from dsv41.sharding.mesh import make_mesh, parse_mesh
from dsv41.sharding.placement import fetch, place, zeros
from dsv41.sharding.presets import PRESETS, preset_rules
from dsv41.sharding.rules import AXES, LOCAL, MeshAxes, ShardingRules

__all__ = [
    "AXES",
    "LOCAL",
    "PRESETS",
    "MeshAxes",
    "ShardingRules",
    "fetch",
    "make_mesh",
    "parse_mesh",
    "place",
    "preset_rules",
    "zeros",
]
