"""What steps cost on machines that are not at hand: memory, work and collectives of compiled programs."""

from dsv41.cost_model.chips import Chip, chip_of
from dsv41.cost_model.collectives import KINDS, Collective, collectives, count_by_layer, moved_like, totals
from dsv41.cost_model.hlo import parse
from dsv41.cost_model.memory import cache_bytes, kept_shapes, local_shapes, parameter_bytes, total_bytes
from dsv41.cost_model.programs import PROGRAMS, Step, StepSizes, abstract_step
from dsv41.cost_model.report import StepCost, step_cost
from dsv41.cost_model.work import Work, step_work

__all__ = [
    "KINDS",
    "PROGRAMS",
    "Chip",
    "Collective",
    "Step",
    "StepCost",
    "StepSizes",
    "Work",
    "abstract_step",
    "cache_bytes",
    "chip_of",
    "collectives",
    "count_by_layer",
    "kept_shapes",
    "local_shapes",
    "moved_like",
    "parameter_bytes",
    "parse",
    "step_cost",
    "step_work",
    "total_bytes",
    "totals",
]
