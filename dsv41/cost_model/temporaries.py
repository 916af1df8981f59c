"""The largest arrays that a compiled program makes in HBM besides its results."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from dsv41.cost_model.hlo import RUNS, Instruction, Program, Shape

# Results that are views, hold others, or are written into an operand's memory.
_NO_MEMORY = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "opt-barrier", "copy-start",
    "slice-start", "async-update", "call-update", "dynamic-update-slice", "scatter", *RUNS,
}  # fmt: skip
_NUMBER = re.compile(r"((?:\b(?:layer|draft_stage)_)|(?:\[\\*.(?:layers|mtp)\\*.\]\[))\d+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temporary:
    """Arrays of one shape made at one place of the model.

    Attributes:
      shape: as written, such as "bf16[5120,8192]".
      opcode: of the instruction.
      bytes: of one.
      count: instructions that make one; layers are not told apart.
      scope: where in the model; "" if the compiler made it up.
    """

    shape: str
    opcode: str
    bytes: int
    count: int
    scope: str


def largest_temporaries(program: Program, limit: int = 10) -> tuple[Temporary, ...]:
    """The `limit` largest of them. Not all of them live at one time: the program's temporary bytes may be less."""
    found: dict[tuple[str, str, str], list[Shape]] = {}
    for _, instruction in program.instructions():
        scope = _NUMBER.sub(r"\1*", instruction.scope)
        for shape in _made(program, instruction):
            found.setdefault((str(shape), instruction.opcode, scope), []).append(shape)
    rows = [
        Temporary(shape=shape, opcode=opcode, bytes=made[0].bytes, count=len(made), scope=scope)
        for (shape, opcode, scope), made in found.items()
    ]
    return tuple(sorted(rows, key=lambda t: (-t.bytes, -t.count))[:limit])


def _made(program: Program, instruction: Instruction) -> Iterator[Shape]:
    """Arrays in HBM that an instruction takes new memory for."""
    if instruction.opcode in _NO_MEMORY:
        return
    if instruction.opcode == "fusion" and _updates(program, instruction):
        return
    places = instruction.text.partition("output_to_operand_aliasing=")[2].partition("}, frontend")[0]
    aliased = set(re.findall(r"\{(\d*)\}: \(", places))
    for i, shape in enumerate(instruction.shapes):
        if shape.in_main_memory and not aliased & {str(i), ""}:
            yield shape


def _updates(program: Program, fusion: Instruction) -> bool:
    """Whether a fusion writes part of an array that it is given."""
    root = program.computations[fusion.called[0]][-1]
    return root.opcode in ("dynamic-update-slice", "scatter")
