"""Batches of short rows first and of long ones later: the report's change of the sequence length (training.md 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dsv41.config import DSV41Error
from dsv41.train.data import TrainingBatches
from dsv41.train.pack import PackedBatch


class StagedBatches(Iterator[PackedBatch]):
    """Some batches of each pipeline, one after the other, and of the last one without end."""

    def __init__(self, stages: Sequence[TrainingBatches], steps: Sequence[int]):
        """
        Args:
          stages: the pipelines.
          steps: how many batches each but the last gives.

        Raises:
          DSV41Error: there is no pipeline, or a number of steps is negative or missing.
        """
        if not stages or len(steps) != len(stages) - 1 or any(n < 0 for n in steps):
            raise DSV41Error(f"stages: {len(stages)} pipelines need the steps of all but the last, got {list(steps)}")
        self._stages, self._steps = tuple(stages), tuple(steps)
        self._made = 0

    def _current(self) -> int:
        """Number of the pipeline that gives the next batch."""
        left = self._made
        for i, steps in enumerate(self._steps):
            if left < steps:
                return i
            left -= steps
        return len(self._steps)

    def __next__(self) -> PackedBatch:
        pack = next(self._stages[self._current()])
        self._made += 1
        return pack

    def state(self) -> dict[str, Any]:
        """Where the next batch begins, as JSON values."""
        return {
            "made": self._made, "steps": list(self._steps), "stages": [stage.state() for stage in self._stages],
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken.

        Raises:
          DSV41Error: the state is of other stages, or as `TrainingBatches.restore`.
        """
        if not isinstance(state, dict) or not {"made", "steps", "stages"} <= state.keys():
            raise DSV41Error("data: not the state of batches in stages")
        if state["steps"] != list(self._steps) or len(state["stages"]) != len(self._stages):
            raise DSV41Error(f"data: the state is of stages of {state['steps']} steps, not {list(self._steps)}")
        for stage, own in zip(self._stages, state["stages"], strict=True):
            stage.restore(own)
        self._made = state["made"]
