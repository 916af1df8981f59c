"""Meshes, and how logical axes are spread over them."""

from dsv41.sharding.mesh import make_mesh, parse_mesh
from dsv41.sharding.presets import PRESETS, preset_rules
from dsv41.sharding.rules import AXES, LOCAL, MeshAxes, ShardingRules

__all__ = ["AXES", "LOCAL", "PRESETS", "MeshAxes", "ShardingRules", "make_mesh", "parse_mesh", "preset_rules"]
