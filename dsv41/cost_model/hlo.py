"""The text of a compiled program as instructions, and how often each runs in a step.

Only what a cost needs is read: results, operands, called computations and where an instruction came from. Both the CPU
and the TPU compiler print this form.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

_ITEM_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "bf16": 2, "f16": 2,
    "f32": 4, "f64": 8, "c64": 8, "c128": 16, "s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5,
}  # fmt: skip
# Instructions whose computations run as such; those of others are arithmetic of the instruction itself.
RUNS = ("while", "conditional", "call", "async-start", "call-start")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of a result.

    Attributes:
      dtype: as the compiler writes it, such as "bf16".
      dims: sizes, without padding.
      layout: minor-to-major order, tiling and memory space, as written; "" if none is.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def bytes(self) -> int:
        """Without the padding of tiles. Float8 of any kind takes one byte."""
        item = _ITEM_BYTES.get(self.dtype, 1 if self.dtype.startswith("f8") else 0)
        return math.ceil(math.prod(self.dims) * item)

    @property
    def in_main_memory(self) -> bool:
        """Whether it lies in HBM: no memory space is written, and no semaphore either."""
        return "S(" not in self.layout

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name, opcode: as written.
      shapes: arrays of the result; several if it is a tuple.
      operands: names.
      text: the rest of the line: attributes, metadata; of constants and parameters from the parenthesis on.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str

    @property
    def bytes(self) -> int:
        """Of all arrays of the result."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def scope(self) -> str:
        """Where in the program it came from (`jax.named_scope`); "" if the compiler made it."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it runs once, its condition left out."""
        names = _CALLED.findall(self.text)
        for branches in _BRANCHES.findall(self.text):
            names += [name.strip().lstrip("%") for name in branches.split(",")]
        return tuple(names)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled module.

    Attributes:
      computations: instructions by the computation's name.
      entry: name of the one that runs.
    """

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    @functools.cached_property
    def times(self) -> dict[str, float]:
        """How often each computation runs in a step, those inside fusions and reductions included.

        Loops count by their trips, which must be written or be told from a condition `i < constant`; others count once
        and are named in `unknown_loops`. Every branch of a conditional counts, as if it were taken.
        """
        found: Counter[str] = Counter()

        def visit(name: str, times: float) -> None:
            found[name] += times
            for instruction in self.computations[name]:
                trips = 1
                if instruction.opcode == "while":
                    trips = self.trips(instruction, name) or 1
                for inner in instruction.called:
                    visit(inner, times * trips)

        visit(self.entry, 1)
        return dict(found)

    @functools.cached_property
    def unknown_loops(self) -> tuple[str, ...]:
        """Scopes of loops whose trips the text does not say."""
        return tuple(
            instruction.scope or instruction.name
            for computation, instruction in self.instructions()
            if instruction.opcode == "while" and self.trips(instruction, computation) is None
        )

    def instructions(self) -> Iterator[tuple[str, Instruction]]:
        """(computation, instruction) of everything that runs, but for the insides of fusions and reductions."""
        inside = self._inside_fusions
        for name in self.times:
            if name not in inside:
                for instruction in self.computations[name]:
                    yield name, instruction

    @functools.cached_property
    def _inside_fusions(self) -> set[str]:
        """Computations that are arithmetic of one instruction: they read and write no memory of their own."""
        inside: set[str] = set()

        def add(name: str) -> None:
            if name not in inside:
                inside.add(name)
                for instruction in self.computations[name]:
                    for called in instruction.called:
                        add(called)

        for instructions in self.computations.values():
            for instruction in instructions:
                if instruction.opcode not in RUNS:
                    for called in instruction.called:
                        add(called)
        return inside

    def operand_shapes(self, computation: str, instruction: Instruction) -> tuple[Shape, ...]:
        """Arrays of an instruction's operands, in order."""
        return tuple(shape for name in instruction.operands for shape in self.shapes_of(computation, name))

    def shapes_of(self, computation: str, name: str) -> tuple[Shape, ...]:
        """Arrays of a result; none if there is no such instruction."""
        return self._results[computation].get(name, ())

    def scope_of(self, computation: str, instruction: Instruction) -> str:
        """Where an instruction came from; of one that the compiler made, where its users or its operands did."""
        if instruction.scope:
            return instruction.scope
        body = self.computations[computation]
        users = [i for i in body if instruction.name in i.operands]
        made = [i for i in body if i.name in instruction.operands]
        return next((i.scope for i in (*users, *made) if i.scope), "")

    @functools.cached_property
    def _results(self) -> dict[str, dict[str, tuple[Shape, ...]]]:
        return {name: {i.name: i.shapes for i in body} for name, body in self.computations.items()}

    def trips(self, loop: Instruction, computation: str) -> int | None:
        """Trips of a loop; None if the text does not say."""
        if (written := _TRIPS.search(loop.text)) is not None:
            return int(written[1])
        condition = {i.name: i for i in self.computations[_CONDITION.search(loop.text)[1]]}
        root = list(condition.values())[-1]
        if root.opcode != "compare" or "direction=LT" not in root.text:
            return None
        limit, place = None, None
        for name in root.operands:
            operand = condition[name]
            if operand.opcode == "constant":
                limit = _constant(operand)
            elif operand.opcode == "get-tuple-element":
                place = int(re.search(r"index=(\d+)", operand.text)[1])
        first = None if place is None else self._initial(loop, computation, place)
        return None if limit is None or first is None else max(limit - first, 0)

    def _initial(self, loop: Instruction, computation: str, place: int) -> int | None:
        """The constant that element `place` of a loop's state begins with; None if it is none."""
        by_name = {i.name: i for i in self.computations[computation]}
        state = by_name.get(loop.operands[0])
        if state is None or state.opcode != "tuple":
            return None
        value = by_name.get(state.operands[place])
        while value is not None and value.opcode in ("copy", "bitcast") and value.operands:
            value = by_name.get(value.operands[0])
        return _constant(value) if value is not None and value.opcode == "constant" else None


def _constant(instruction: Instruction) -> int | None:
    found = re.match(r"\((-?\d+)\)", instruction.text)
    return int(found[1]) if found else None


def parse(text: str) -> Program:
    """The program in `compiled.as_text()`.

    Raises:
      ValueError: no computation in it is marked as the entry.
    """
    computations: dict[str, list[Instruction]] = defaultdict(list)
    entry, current = None, None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head is not None and " = " not in line.partition("(")[0]:
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)) is not None:
            computations[current].append(_instruction(found[1], found[2]))
    if entry is None:
        raise ValueError("no compiled program: the text has no entry computation")
    return Program({name: tuple(body) for name, body in computations.items()}, entry)


def _instruction(name: str, rest: str) -> Instruction:
    """From what stands behind the equals sign: result type, opcode, operands in parentheses, attributes."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    start = len(opcode)
    close = _closing(rest, start) if start < len(rest) else start
    arguments = rest[start + 1 : close]
    constant = opcode.strip() in ("constant", "parameter")  # what stands in the parentheses is no operand
    operands = () if constant else tuple(re.findall(r"%([\w.\-]+)", arguments))
    text = rest[start:] if constant else rest[close + 1 :]
    shapes = tuple(
        Shape(dtype, tuple(int(d) for d in dims.split(",") if d), layout or "")
        for dtype, dims, layout in _SHAPE.findall(result)
    )
    return Instruction(name, opcode.strip(), shapes, operands, text)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "(":
            depth += 1
        elif text[i] == ")":
            depth -= 1
            if not depth:
                return i
    return len(text) - 1
