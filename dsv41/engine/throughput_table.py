"""What a step costs, by how many requests and tokens it carries: measured once a deployment, kept as a file.

The table answers one question of the verify schedule: steps per second when R requests bring B tokens to a step, their
anchors included (dspark.md section 7.3). A step is padded to [rows, width], and its width is chosen for B - R drafts
that may all belong to one request, so for a given R its cost jumps where B needs the next width, and rises a little in
between with the experts that more tokens need. A curve has the first B of each width and the largest B; the point at or
below a B counts. Curves are kept apart by R, because rows cost on their own: the same B on more requests reads more
caches. A number of requests that was not measured takes a neighbour's curve by its drafts, B - R.

A table of one rate throughout says that tokens cost nothing: everything is verified.
"""

from __future__ import annotations

import bisect
import dataclasses
import numbers
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dsv41.config import DSV41Error
from dsv41.config.record_file import read_record, write_record

_VERSION = 1
_LARGEST = float(np.finfo(np.float32).max)
_LABELS = ("device_kind", "jax_version", "model", "date", "command")
_FIELDS = {"block_size": int, "draft_tokens": int, **dict.fromkeys(_LABELS, str), "curves": list}

Curve = tuple[tuple[int, float], ...]
"""(batch tokens, steps per second) of each width, in order of batch tokens."""


def _check(ok: bool, field: str, expected: str, value: object) -> None:
    if not ok:
        raise DSV41Error(f"{field}: expected {expected}, got {value!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 1


def _check_curve(where: str, points: Curve) -> None:
    _check(len(points) > 0, where, "at least one point", points)
    for i, (tokens, rate) in enumerate(points):
        _check(_is_count(tokens), f"{where}[{i}]", "batch tokens, an integer of 1 or more", tokens)
        is_number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
        # False for NaN, and for integers beyond the range of floats.
        # As float32, which the device has them in.
        fits = is_number and 0 < rate <= _LARGEST and np.float32(rate) > 0
        _check(fits, f"{where}[{i}]", "a finite rate above 0", rate)
        above = i == 0 or points[i - 1][0] < tokens
        _check(above, f"{where}[{i}]", f"more than {points[i - 1][0]} batch tokens", tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputTable:
    """Steps per second.

    Attributes:
      block_size: drafts of a block that the drafter had.
      draft_tokens: most drafts of a request that a measured step verified; the widths of the steps depend on it. None:
        a whole block.
      curves: by number of requests.
      device_kind, jax_version, model, date, command: what was measured, where and how; for the reader only.

    Raises:
      DSV41Error: there is no curve, a curve's batch tokens do not rise or a rate is not a finite number above 0; the
        message names it.
    """

    block_size: int
    curves: Mapping[int, Curve]
    draft_tokens: int | None = None
    device_kind: str = ""
    jax_version: str = ""
    model: str = ""
    date: str = ""
    command: str = ""

    def __post_init__(self):
        _check(_is_count(self.block_size), "block_size", "an integer, 1 or more", self.block_size)
        if self.draft_tokens is None:
            object.__setattr__(self, "draft_tokens", self.block_size)
        fits = _is_count(self.draft_tokens) and self.draft_tokens <= self.block_size
        _check(fits, "draft_tokens", f"an integer from 1 to block_size={self.block_size}", self.draft_tokens)
        _check(len(self.curves) > 0, "curves", "at least one", self.curves)
        for requests, points in self.curves.items():
            _check(_is_count(requests), "requests", "an integer, 1 or more", requests)
            _check_curve(f"curve of {requests} requests", points)

    @classmethod
    def flat(cls, block_size: int) -> ThroughputTable:
        """The table in which a step always takes the same time, so that every draft is verified."""
        return cls(block_size=block_size, curves={1: ((1, 1.0),)})

    def steps_per_second(self, requests: int, batch_tokens: int) -> float:
        """The rate of a step. More requests than were measured count as the most, fewer as the next that were."""
        drafts, rates = self._curve(requests)
        return rates[max(bisect.bisect_right(drafts, batch_tokens - requests) - 1, 0)]

    def dense(self, requests: int, size: int | None = None) -> np.ndarray:
        """The curve of so many requests by batch tokens, for `verify_schedule`.

        Args:
          requests: in the batch, 0 or more.
          size: entries; by default as many as the requests can ever need.

        Returns:
          float32 [size]; entry B is the rate of a step of B tokens.
        """
        if size is None:
            size = requests * (1 + self.block_size) + 1
        drafts, rates = self._curve(requests)
        index = np.searchsorted(drafts, np.arange(size) - requests, side="right") - 1
        return np.array(rates, np.float32)[np.maximum(index, 0)]

    def _curve(self, requests: int) -> tuple[list[int], list[float]]:
        """Drafts of the batch at each point, and the rates."""
        measured = sorted(self.curves)
        nearest = measured[min(bisect.bisect_left(measured, requests), len(measured) - 1)]
        return [tokens - nearest for tokens, _ in self.curves[nearest]], [rate for _, rate in self.curves[nearest]]


def save_throughput_table(table: ThroughputTable, path: str | pathlib.Path) -> None:
    """Writes the table as JSON; `load_throughput_table` reads it back to an equal one.

    Raises:
      DSV41Error: the file cannot be written; what was there before is untouched.
    """
    curves = [
        {"requests": int(r), "points": [[int(b), float(rate)] for b, rate in table.curves[r]]}
        for r in sorted(table.curves)
    ]
    counts = {"block_size": int(table.block_size), "draft_tokens": int(table.draft_tokens)}
    labels = {name: getattr(table, name) for name in _LABELS}
    write_record(path, _VERSION, {**counts, **labels, "curves": curves})


def _read_curves(data: list[Any]) -> dict[int, Curve]:
    curves = {}
    for i, entry in enumerate(data):
        shaped = isinstance(entry, dict) and entry.keys() == {"requests", "points"}
        _check(shaped, f"curves[{i}]", "an object of requests and points", entry)
        requests, points = entry["requests"], entry["points"]
        _check(_is_count(requests), f"curves[{i}].requests", "an integer, 1 or more", requests)
        _check(requests not in curves, f"curves[{i}].requests", "each number once", requests)
        pairs = isinstance(points, list) and all(isinstance(p, list) and len(p) == 2 for p in points)
        _check(pairs, f"curves[{i}].points", "a list of [batch tokens, steps per second]", points)
        curves[requests] = tuple((tokens, rate) for tokens, rate in points)
    return curves


def load_throughput_table(path: str | pathlib.Path, block_size: int) -> ThroughputTable:
    """Reads a table that was measured with blocks of `block_size` drafts.

    Raises:
      DSV41Error: the file is missing, not such a table or of another block size; the message names file and field.
    """
    data = read_record(path, _VERSION, _FIELDS)
    try:
        table = ThroughputTable(**{**data, "curves": _read_curves(data["curves"])})
        _check(table.block_size == block_size, "block_size", str(block_size), table.block_size)
    except DSV41Error as e:
        raise DSV41Error(f"{path}: {e}") from e
    return table
