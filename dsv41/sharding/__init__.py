"""Meshes, and how logical axes are spread over them."""

from dsv41.sharding.expert_placement import ExpertPlacement, plan_copies
from dsv41.sharding.mesh import devices_along, first_devices, make_mesh, parse_mesh
from dsv41.sharding.placement import fetch, place, zeros
from dsv41.sharding.presets import PRESETS, preset_rules
from dsv41.sharding.rules import AXES, LOCAL, LOGICAL_AXES, MeshAxes, ShardingRules

__all__ = [
    "AXES",
    "LOCAL",
    "LOGICAL_AXES",
    "PRESETS",
    "ExpertPlacement",
    "MeshAxes",
    "ShardingRules",
    "devices_along",
    "fetch",
    "first_devices",
    "make_mesh",
    "parse_mesh",
    "place",
    "plan_copies",
    "preset_rules",
    "zeros",
]
