"""How an imported checkpoint is cut into pieces: each is written at once, and is there whole or not at all.

A piece holds some parameters of one layer, or a run of rows of an Engram table. Routed experts are stacked as they are
in memory: `layers.3.ffn.experts.w1.weight` [E, ...] is made of the tensors `layers.3.ffn.experts.{j}.w1.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from dsv41.checkpoint.inventory import TensorSpec, is_engram_table
from dsv41.checkpoint.load_parameters import EXPERT


class Parameter(NamedTuple):
    """One array of a piece.

    Attributes:
      name: as in memory.
      tensors: the tensors it is made of: experts in order if stacked, else itself.
      stacked: whether axis 0 counts experts.
    """

    name: str
    tensors: tuple[str, ...]
    stacked: bool


class ArrayPiece(NamedTuple):
    """Whole parameters."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(name for parameter in self.parameters for name in parameter.tensors)


class RowPiece(NamedTuple):
    """Rows [begin, end) of an Engram table's values or scales."""

    name: str
    tensor: str
    begin: int
    end: int

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.tensor,)


Piece = ArrayPiece | RowPiece


def group_parameters(names: Iterable[str]) -> tuple[Parameter, ...]:
    """Tensor names -> the parameters they make up; the experts of a stack must come in order."""
    tensors: dict[str, list[str]] = {}
    stacks: set[str] = set()
    for name in names:
        match = EXPERT.fullmatch(name)
        parameter = f"{match['experts']}.{match['leaf']}" if match else name
        tensors.setdefault(parameter, []).append(name)
        if match:
            stacks.add(parameter)
    return tuple(Parameter(name, tuple(parts), name in stacks) for name, parts in tensors.items())


def _group(spec: TensorSpec) -> str:
    """Parameters of different groups share no piece, so that loading without a part reads nothing of it."""
    path = spec.name.split(".")
    if path[0] in ("layers", "mtp"):
        return ".".join(path[:2])
    return "vision" if spec.part == "vision" else "model"


def plan_pieces(specs: Collection[TensorSpec], piece_bytes: int) -> list[Piece]:
    """The pieces of a checkpoint, in the order they are written; it depends on nothing but the arguments.

    Args:
      specs: the tensors of the checkpoint.
      piece_bytes: what a piece may take. A larger parameter is a piece of its own; tables are cut by rows.
    """
    sizes = {spec.name: spec.nbytes for spec in specs}
    groups: dict[str, list[str]] = {}
    for spec in specs:
        if not is_engram_table(spec.name):
            groups.setdefault(_group(spec), []).append(spec.name)
    pieces: list[Piece] = []
    for group, names in groups.items():
        bins: list[list[Parameter]] = []
        room = 0
        for parameter in group_parameters(names):
            size = sum(sizes[name] for name in parameter.tensors)
            if size > room:
                bins.append([])
                room = piece_bytes
            bins[-1].append(parameter)
            room -= size
        pieces += [ArrayPiece(f"{group}-{i}", tuple(parameters)) for i, parameters in enumerate(bins)]
    for spec in specs:
        if is_engram_table(spec.name):
            pieces += _row_pieces(spec, piece_bytes)
    return pieces


def _row_pieces(spec: TensorSpec, piece_bytes: int) -> list[RowPiece]:
    rows = spec.shape[0]
    step = max(1, piece_bytes * rows // spec.nbytes)
    return [
        RowPiece(f"{spec.name}-{i}", spec.name, begin, min(begin + step, rows))
        for i, begin in enumerate(range(0, rows, step))
    ]
