"""Collectives of a compiled program: which, how many, and how many bytes each moves."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

from dsv41.cost_model.hlo import Instruction, Program, Shape

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_SMALLEST_KEPT = 64 << 10
_LAYER = re.compile(r"\b(?:layer|draft_stage)_\d+\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction.

    Attributes:
      kind: one of `KINDS`.
      name: in the program's text.
      operands: arrays that a device gives.
      results: arrays that it gets.
      devices: in a group.
      times: it runs in a step.
      scope: where in the model (`jax.named_scope`); that of a neighbour, if the compiler made it out of another.
    """

    kind: str
    name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    devices: int
    times: float
    scope: str

    @property
    def operand_bytes(self) -> int:
        return sum(shape.bytes for shape in self.operands)

    @property
    def result_bytes(self) -> int:
        return sum(shape.bytes for shape in self.results)

    @property
    def sent_bytes(self) -> float:
        """Bytes that leave a device each time, by an algorithm that sends no byte twice as far as it must.

        Gathering and scattering in a ring pass on (n - 1) / n of the whole array, a sum does both; an exchange keeps
        its own part of n. Of a ragged exchange the whole operand counts, the most that can leave.
        """
        n = self.devices
        return {
            "all-gather": self.result_bytes * (n - 1) / n,
            "all-reduce": 2 * self.operand_bytes * (n - 1) / n,
            "reduce-scatter": self.operand_bytes * (n - 1) / n,
            "all-to-all": self.operand_bytes * (n - 1) / n,
            "ragged-all-to-all": float(self.operand_bytes),
            "collective-permute": float(self.operand_bytes),
        }[self.kind]

    @property
    def layer(self) -> str | None:
        """The layer it belongs to, "layer_7" or "draft_stage_0"; None outside layers."""
        found = _LAYER.search(self.scope)
        return found[0] if found else None


def collectives(program: Program, devices: int) -> tuple[Collective, ...]:
    """All of a program's collectives, in the order of its text.

    Args:
      program: compiled for a mesh.
      devices: of the mesh: the size of a group that the text does not say.
    """
    found = []
    for name, times in program.times.items():
        for instruction in program.computations[name]:
            kind = _kind(instruction, name)
            if kind is not None:
                found.append(_collective(program, name, instruction, kind, devices, times))
    return tuple(found)


def _kind(instruction: Instruction, computation: str) -> str | None:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in KINDS:
        return None
    # The TPU compiler writes a reduce-scatter as a fusion of a sum and a slice of it.
    if opcode == "all-reduce" and "all-reduce-scatter" in computation:
        return "reduce-scatter"
    return opcode


def _collective(
    program: Program, computation: str, instruction: Instruction, kind: str, devices: int, times: float
) -> Collective:
    operands, results = program.operand_shapes(computation, instruction), instruction.shapes
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # the others are the output's place, offsets and sizes
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        # A pair of what goes in and what comes out, and sometimes semaphores.
        results = results[len(operands) : 2 * len(operands)]
    return Collective(
        kind=kind,
        name=instruction.name,
        operands=operands,
        results=results,
        devices=_group_size(instruction.text, devices),
        times=times,
        scope=program.scope_of(computation, instruction),
    )


def _group_size(text: str, devices: int) -> int:
    """Devices of a group, from any of the three forms in which groups are written."""
    if (mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text)) is not None:
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        return math.prod(sizes[axis] for axis in re.findall(r"'(\w+)'", mesh[2]))
    if (iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", text)) is not None:
        return int(iota[2])
    if (groups := re.search(r"replica_groups=\{\{([\d,]+)\}", text)) is not None:
        return groups[1].count(",") + 1
    return devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindTotal:
    """Collectives of one kind.

    Attributes:
      kind: one of `KINDS`.
      count: in a step, loops by their trips.
      operand_bytes, sent_bytes: in a step and device; see `Collective`.
      largest_bytes: operand of the largest one.
    """

    kind: str
    count: float
    operand_bytes: float
    sent_bytes: float
    largest_bytes: int


def totals(found: Iterable[Collective]) -> tuple[KindTotal, ...]:
    """By kind, most bytes first."""
    by_kind: dict[str, list[Collective]] = {}
    for collective in found:
        by_kind.setdefault(collective.kind, []).append(collective)
    rows = [
        KindTotal(
            kind=kind,
            count=sum(c.times for c in group),
            operand_bytes=sum(c.times * c.operand_bytes for c in group),
            sent_bytes=sum(c.times * c.sent_bytes for c in group),
            largest_bytes=max(c.operand_bytes for c in group),
        )
        for kind, group in by_kind.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.sent_bytes))


def count_by_layer(found: Iterable[Collective]) -> dict[str | None, dict[str, float]]:
    """Number of collectives by layer and kind; None: those outside layers."""
    counts: dict[str | None, dict[str, float]] = {}
    for collective in found:
        kinds = counts.setdefault(collective.layer, {})
        kinds[collective.kind] = kinds.get(collective.kind, 0) + collective.times
    return counts


def moved_like(found: Iterable[Collective], kept: Iterable[Shape]) -> list[Collective]:
    """Collectives that move what should stay where it is: weights, KV pools, Engram tables.

    Compilers reshape and reinterpret, so an operand counts that has as many items, of as many bytes each, as one
    device's part of an array in `kept`. Arrays below 64 KiB are left out: any activation could have their size.

    Args:
      found: of `collectives`.
      kept: one device's parts of the arrays.
    """
    forms = {_form(shape) for shape in kept if shape.bytes >= _SMALLEST_KEPT}
    return [c for c in found if any(_form(shape) in forms for shape in c.operands)]


def _form(shape: Shape) -> tuple[int, int]:
    return math.prod(shape.dims), shape.bytes
