"""What a compiled step costs: memory by kind, work, collectives and an estimate of its time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from dsv41.config import ModelConfig
from dsv41.cost_model import hlo
from dsv41.cost_model.chips import Chip
from dsv41.cost_model.collectives import KindTotal, collectives, count_by_layer, moved_like, totals
from dsv41.cost_model.memory import cache_bytes, kept_shapes, parameter_bytes, total_bytes
from dsv41.cost_model.programs import Step, StepSizes
from dsv41.cost_model.roofline import Roofline, roofline
from dsv41.cost_model.temporaries import Temporary, largest_temporaries
from dsv41.cost_model.traffic import hbm_bytes
from dsv41.cost_model.work import Work, step_work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """HBM of one device as the compiler laid it out, in bytes.

    Attributes:
      arguments, outputs, temporaries: each with padding.
      alias: of the outputs, what lies in memory of arguments.
      peak: the most that is in use at one time.
      limit: what a program may use.
    """

    arguments: int
    outputs: int
    temporaries: int
    alias: int
    peak: int
    limit: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.limit

    @property
    def needed(self) -> int:
        """Arguments, temporaries, and outputs that lie nowhere else."""
        return self.arguments + self.temporaries + self.outputs - self.alias


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """One device's share of a compiled step.

    Attributes:
      parameters, cache: bytes of the arguments by kind, as the shardings divide them.
      batch: bytes of what a step brings, Engram rows included.
      footprint: what the compiler made of it.
      work: counted from the config.
      compiled_flops, compiled_bytes: the compiler's count. Loops count once, kernels by their own estimate, gathers and
        prefetches too much.
      hbm_bytes: moved by the program, told from its text (`traffic`).
      collectives: by kind.
      collectives_in_layer: number by kind in the layer that has most, and outside layers under "elsewhere".
      moved: collectives that move arrays of the size of a weight or of a page pool, which should all stay.
      temporaries: the largest.
      unknown_loops: loops whose trips the program's text does not say, counted once.
      least, as_compiled: time by bytes that any implementation has to move, and by those that the program moves.
    """

    parameters: dict[str, int]
    cache: dict[str, int]
    batch: int
    footprint: Footprint
    work: Work
    compiled_flops: float
    compiled_bytes: float
    hbm_bytes: float
    collectives: tuple[KindTotal, ...]
    collectives_in_layer: dict[str, dict[str, float]]
    moved: tuple[str, ...]
    temporaries: tuple[Temporary, ...]
    unknown_loops: tuple[str, ...]
    least: Roofline
    as_compiled: Roofline

    def as_json(self) -> dict[str, Any]:
        """Plain values; derived figures included."""
        plain = dataclasses.asdict(self)
        plain["footprint"] |= {"needed": self.footprint.needed, "fits": self.footprint.fits}
        plain["work"] |= {"total_flops": self.work.total_flops, "total_bytes": self.work.total_bytes}
        for name, line in (("least", self.least), ("as_compiled", self.as_compiled)):
            plain[name] |= {"overlapped": line.overlapped, "in_turn": line.in_turn}
        return plain


def step_cost(config: ModelConfig, sizes: StepSizes, step: Step, compiled: jax.stages.Compiled, chip: Chip) -> StepCost:
    """Reads everything out of a compiled step."""
    program = hlo.parse(compiled.as_text())
    found = collectives(program, sizes.devices)
    by_layer = count_by_layer(found)
    layers = [kinds for layer, kinds in by_layer.items() if layer is not None]
    kinds = totals(found)
    memory, counted = compiled.memory_analysis(), compiled.cost_analysis() or {}
    work = step_work(config, sizes, step)
    moved = hbm_bytes(program)
    sent = sum(kind.sent_bytes for kind in kinds)
    return StepCost(
        parameters=parameter_bytes(step.params)
        | {f"drafter, {kind}": size for kind, size in parameter_bytes(step.drafter).items()},
        cache=cache_bytes(step.cache),
        batch=total_bytes(step.batch),
        footprint=Footprint(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            alias=memory.alias_size_in_bytes,
            peak=memory.peak_memory_in_bytes,
            limit=chip.hbm_bytes,
        ),
        work=work,
        compiled_flops=counted.get("flops", 0.0),
        compiled_bytes=counted.get("bytes accessed", 0.0),
        hbm_bytes=moved,
        collectives=kinds,
        collectives_in_layer={
            "most in a layer": max(layers, key=lambda kinds: sum(kinds.values()), default={}),
            "elsewhere": by_layer.get(None, {}),
        },
        moved=tuple(f"{c.kind} of {c.operands[0]} in {c.scope}" for c in moved_like(found, kept_shapes(step))),
        temporaries=largest_temporaries(program),
        unknown_loops=program.unknown_loops,
        least=roofline(chip, bytes=work.total_bytes, flops=work.total_flops, sent_bytes=sent),
        as_compiled=roofline(chip, bytes=moved, flops=work.total_flops, sent_bytes=sent),
    )
