"""Which pieces of which documents stand together in a row: best fit, with next to no padding (training.md section 1).

A document that fits into a row is never cut. Longer ones fill what the others leave, then rows of their own, and are
cut where a row ends. Every token of every document is used exactly once an epoch.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dsv41.config import DSV41Error

# A piece begins with one more token and the last one of a document ends with one more.
_BEGIN = _END = 1
MIN_SPACE = 32  # less of a row is left empty: a piece of a few tokens teaches nothing


class Piece(NamedTuple):
    """Tokens `begin` to `end` of a document; `last`: with the end of the document."""

    document: int
    begin: int
    end: int
    last: bool

    @property
    def tokens(self) -> int:
        """With those that are put around it."""
        return _BEGIN + self.end - self.begin + self.last * _END


class _Rows:
    """Rows that are being filled, and the room in each of them."""

    def __init__(self, length: int, alignment: int):
        self.pieces: list[list[Piece]] = []
        self._length, self._alignment = length, alignment
        self._room: list[tuple[int, int]] = []  # ascending: (free tokens, row)

    def open(self) -> tuple[int, int]:
        """The room of a new row."""
        self.pieces.append([])
        room = (self._length, len(self.pieces) - 1)
        bisect.insort(self._room, room)
        return room

    def best(self, tokens: int) -> tuple[int, int]:
        """The smallest room for so many tokens, of a new row if there is none."""
        i = bisect.bisect_left(self._room, (tokens, 0))
        return self._room[i] if i < len(self._room) else self.open()

    def largest(self) -> tuple[int, int]:
        """The largest room that is worth using, of a new row if there is none."""
        return self._room[-1] if self._room else self.open()

    def put(self, piece: Piece, room: tuple[int, int]) -> None:
        free, row = room
        del self._room[bisect.bisect_left(self._room, room)]  # `remove` looks at each: slow with 100,000 documents
        self.pieces[row].append(piece)
        free -= -(-piece.tokens // self._alignment) * self._alignment
        if free >= MIN_SPACE:
            bisect.insort(self._room, (free, row))


def plan_rows(
    sizes: Sequence[int], length: int, alignment: int = 1, rng: np.random.Generator | None = None
) -> list[list[Piece]]:
    """Lays out documents in rows.

    Args:
      sizes: tokens of each document, without those that are put around.
      length: of a row.
      alignment: what starts of pieces are multiples of.
      rng: shuffles documents, then rows; None: in order.

    Returns:
      The pieces of each row, in their order in it.

    Raises:
      DSV41Error: the length cannot be, or a document is empty.
    """
    if alignment < 1 or length % alignment or length < 2 * MIN_SPACE:
        raise DSV41Error(
            f"rows: expected a length of at least {2 * MIN_SPACE} tokens that is a multiple of {alignment}, "
            f"got {length}"
        )
    if empty := [i for i, size in enumerate(sizes) if size < 1]:
        raise DSV41Error(f"rows: document {empty[0]} has no tokens")
    order = range(len(sizes)) if rng is None else rng.permutation(len(sizes)).tolist()
    rows, long = _Rows(length, alignment), []
    for i in order:
        whole = Piece(i, 0, int(sizes[i]), True)
        if whole.tokens <= length:
            rows.put(whole, rows.best(whole.tokens))
        else:
            long.append(whole)
    for whole in long:
        begin = 0
        while begin < whole.end:
            room = rows.largest()
            rest = whole._replace(begin=begin)
            if rest.tokens > room[0]:
                end = min(begin + room[0] - _BEGIN, whole.end - 1)  # the end of the text needs a token before it
                rest = Piece(whole.document, begin, end, False)
            rows.put(rest, room)
            begin = rest.end
    if rng is None:
        return rows.pieces
    return [rows.pieces[i] for i in rng.permutation(len(rows.pieces))]
