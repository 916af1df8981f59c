"""What the host decides about rounds: how they draw, how wide they are, how many drafts they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import ModelConfig
from dsv41.engine.speculation import Speculation
from dsv41.engine.speculative_step import RoundInputs, VerifySchedule, verify_widths
from dsv41.ops.sampling import SamplingArrays
from dsv41.ops.verify_schedule import BudgetHistory

IN_FLIGHT = 2
"""Rounds in flight: the host reads a round's tokens while the device runs the next one."""


class RoundPlan:
    """The rounds of a batch of fixed rows.

    Args:
      config: of the model.
      speculation: how to speculate; None: rounds without drafts.
      rows: of the batch, in use or not.

    Attributes:
      drafts: most drafts of a request that a round verifies.
      widths: tokens a row of the rounds that may be run, rising.
    """

    def __init__(self, config: ModelConfig, speculation: Speculation | None, rows: int):
        self._speculation, self._rows = speculation, rows
        self._block = config.text_config.dspark_block_size
        self.drafts = 0 if speculation is None else speculation.drafts(config)
        schedule = speculation.schedule if self.drafts else VerifySchedule.ALL
        table = speculation.throughput if self.drafts else None
        self._rates = None if table is None else table.dense(rows)
        self._greedy = schedule is VerifySchedule.GREEDY
        self.widths: tuple[int, ...] = (self.drafts + 1,)
        self._history: BudgetHistory | None = None
        if schedule is VerifySchedule.BUDGET:
            self.widths = verify_widths(self.drafts)
            # What is on record when a round is launched is older than the one in flight: two rounds old.
            self._history = BudgetHistory(rows, self._block, lag=IN_FLIGHT - 1)

    def inputs(self, sampling: SamplingArrays, stop_ids: jax.Array) -> RoundInputs:
        """Inputs of rounds that draw so and end requests at these ids (int32 [S] or [rows, S])."""
        temperatures = self._speculation.temperatures if self.drafts else None
        return RoundInputs(
            sampling=sampling,
            stop_ids=stop_ids,
            temperatures=jnp.asarray(temperatures.values if temperatures else [1.0] * self._block, jnp.float32),
            budget=jnp.int32(0),
            steps_per_second=jnp.asarray(self._rates, jnp.float32) if self._greedy else None,
        )

    def begin(self, row: int) -> None:
        """A new request has the row from now on."""
        if self._history is not None:
            self._history.begin(row)

    def release(self, row: int) -> None:
        """The row's request is not decoded any more."""
        if self._history is not None:
            self._history.release(row)

    def next_round(
        self, inputs: RoundInputs, remaining: Mapping[int, int], in_flight: int
    ) -> tuple[RoundInputs, int, np.ndarray | None]:
        """The round to be started.

        Args:
          inputs: from `inputs`.
          remaining: row -> tokens that its request may still get, as far as the host knows; of the rows in use.
          in_flight: rounds that are under way.

        Returns:
          the inputs with its budget, its width, and the stamp to `record` it with.
        """
        if self._history is None:
            return inputs, self.widths[-1], None
        # A round in flight gives a request at least one token, which cannot be drafted any more.
        caps = np.zeros(self._rows, np.int32)
        for row, tokens in remaining.items():
            caps[row] = max(min(tokens - in_flight - 1, self.drafts), 0)
        # The step is as large as the batch, however few of its rows are in use.
        budget = self._history.budget(caps, self._rates[self._rows - len(remaining) :])
        width = next(w for w in self.widths if w > min(budget, self.drafts))
        return dataclasses.replace(inputs, budget=jnp.int32(budget)), width, self._history.stamp()

    def record(self, survival: np.ndarray, stamp: np.ndarray | None) -> None:
        """Takes note of the survivals float32 [rows, K] of a round that has ended."""
        if self._history is not None:
            self._history.record(survival, stamp)
