"""HBM bytes that a compiled program moves in a step, told from its text.

The compiler's own count (`cost_analysis`) takes whole tables for gathers, counts a prefetch to VMEM three times and
what is read there once more. Here an instruction counts by its operands and results in HBM; of what is only gathered or
cut from, what comes out; of an update, what is written; and a Pallas kernel by its own estimate, less what it has in
VMEM. Kernels whose work depends on values, as on which experts are chosen, estimate the most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dsv41.cost_model.hlo import RUNS, Instruction, Program, Shape

# Views, holders of others, ends of what has begun elsewhere, and calls whose insides count.
_FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "opt-barrier", "partition-id",
    "replica-id", *RUNS,
}  # fmt: skip
_CUTS = ("gather", "dynamic-slice", "slice")
_KERNEL = 'custom_call_target="tpu_custom_call"'


def hbm_bytes(program: Program) -> float:
    """Bytes read and written in HBM by a device; loops by their trips, every branch as if taken."""
    total = 0.0
    for name, instruction in program.instructions():
        total += program.times[name] * _moved(program, name, instruction)
    return total


def _in_hbm(shapes: Iterable[Shape]) -> int:
    return sum(shape.bytes for shape in shapes if shape.in_main_memory)


def _moved(program: Program, computation: str, instruction: Instruction) -> float:
    """Bytes of one execution."""
    opcode, results = instruction.opcode, instruction.shapes
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return 0
    operands = program.operand_shapes(computation, instruction)
    if opcode in ("copy-start", "slice-start"):
        # (there, here, semaphore) or ((here), there, semaphore): as much is read as arrives.
        there = results[0 if opcode == "copy-start" else len(operands)]
        return there.bytes * (operands[0].in_main_memory + there.in_main_memory)
    if opcode.endswith("-start"):
        return _in_hbm(operands) + _in_hbm(results[len(operands) : 2 * len(operands)])
    if opcode == "custom-call" and _KERNEL in instruction.text:
        found = re.search(r'"bytes_accessed":"(\d+)"', instruction.text)
        near = sum(shape.bytes for shape in (*operands, *results) if not shape.in_main_memory)
        return max(int(found[1]) - near, 0) if found else _in_hbm(operands) + _in_hbm(results)
    if opcode == "fusion":
        return _fusion(program, computation, instruction)
    if opcode in _CUTS:
        return 2 * _in_hbm(results)
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2 * _in_hbm(operands[-1:] if opcode == "scatter" else operands[1:2])
    return _in_hbm(operands) + _in_hbm(results)


def _fusion(program: Program, computation: str, fusion: Instruction) -> float:
    """Of each operand what is used of it, and the results or what is written into them."""
    body = program.computations[fusion.called[0]]
    by_name = {i.name: i for i in body}
    parameters = sorted((i for i in body if i.opcode == "parameter"), key=_number)
    root = body[-1]
    updated: set[str] = set()
    written = _in_hbm(fusion.shapes)
    if root.opcode in ("dynamic-update-slice", "scatter"):
        updated = {_source(by_name, root.operands[0])}
        piece = by_name[root.operands[2 if root.opcode == "scatter" else 1]]
        written = sum(shape.bytes for shape in piece.shapes) if fusion.shapes[0].in_main_memory else 0
    read = 0.0
    for parameter, name in zip(parameters, fusion.operands, strict=True):
        here = [s for s in program.shapes_of(computation, name) if s.in_main_memory]
        if not here or parameter.name in updated:
            continue
        users = _users(body, parameter.name)
        whole = sum(shape.bytes for shape in here)
        if users and all(user.opcode in _CUTS for user in users):
            whole = min(whole, sum(user.bytes for user in users))
        read += whole
    return read + written


def _number(parameter: Instruction) -> int:
    return int(re.match(r"\((\d+)\)", parameter.text)[1])


def _source(by_name: dict[str, Instruction], name: str) -> str:
    """The instruction behind views."""
    while by_name[name].opcode in ("bitcast", "copy", "convert") and by_name[name].operands:
        name = by_name[name].operands[0]
    return name


def _users(body: tuple[Instruction, ...], name: str) -> list[Instruction]:
    """Instructions that use a value, through views of it."""
    found = []
    for instruction in body:
        if name in instruction.operands:
            found += _users(body, instruction.name) if instruction.opcode == "bitcast" else [instruction]
    return found
