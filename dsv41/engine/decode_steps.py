"""Decode steps that are started before the host knows their tokens.

A drawn token stays on the device and is fed to the next step there, so that the device has work while the host fetches
it. What of that step needs nothing from the host starts at once: all of it if Engram tables are on the device or there
are none, else the layers before the first Engram. The host then fetches rows and starts the rest, part by part
(`dsv41.models.segments`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dsv41.cache import ForwardBatch, KVCache
from dsv41.engine.engram_mode import EngramMeter, EngramMode, StallClock
from dsv41.engine.step_batch import Known, step_rows, with_rows
from dsv41.engram_store import StepLookup
from dsv41.models import Model, compiled_segment, segment_params, step_segments
from dsv41.models.sharded import on_mesh
from dsv41.sharding import LOCAL, ShardingRules


@dataclasses.dataclass
class Flight:
    """A step that has been started.

    Attributes:
      batch: without Engram rows.
      history: int32 [B, N - 1] the tokens before its own, newest last, -1 where there is none.
      begun: programs of it that run already.
      left: what the last of them made: a `Carry`, or the logits if there are no more; None if none was started.
    """

    batch: ForwardBatch
    history: np.ndarray
    begun: int = 0
    left: object = None


@functools.cache
def _compiled_look_up(mesh: Mesh | None, rules: ShardingRules) -> Callable[..., Any]:
    """Rows of tokens out of tables on the device, compiled once a shape; on a mesh each device asks for its own."""

    def rows(lookup: StepLookup, tokens: jax.Array, history: jax.Array, valid: jax.Array, rules: ShardingRules = LOCAL):
        return lookup.rows(tokens, history, valid)

    def look_up(lookup: StepLookup, *step: jax.Array):
        spread = rules.spec("batch")
        return on_mesh(rows, mesh, rules, (lookup.specs(), *(spread,) * len(step)), spread)(lookup, *step)

    return jax.jit(look_up)


class DecodeSteps:
    """Starts and completes the decode steps of a batch.

    With `mode` None the model has no Engram.
    """

    def __init__(self, model: Model, mode: EngramMode | None, rows: int, meter: EngramMeter | None):
        self._model, self._mode, self._shape, self._meter = model, mode, (rows, 1), meter
        cut = mode is EngramMode.OVERLAP and model.mesh is None
        self._segments = step_segments(model.schedule) if cut else ()

    @property
    def early(self) -> bool:
        """Whether something of a step can be started before its tokens are known to the host."""
        if self._model.mesh is not None:
            return False
        return bool(self._segments and not self._segments[0].engrams) or self._mode in (None, EngramMode.DEVICE)

    def device_rows(self, tokens: jax.Array | np.ndarray, history: np.ndarray, valid: np.ndarray) -> tuple:
        """Rows [B, T, L, K, D] out of tables on the device; arguments as of `StepLookup.rows`."""
        model = self._model
        step = model.place_rows((tokens, history, valid))
        return _compiled_look_up(model.mesh, model.rules)(model.device_lookup, *step)

    def open(self, flight: Flight, cache: KVCache) -> KVCache:
        """Starts what needs no rows from the host; returns the cache.

        Args:
          flight: the step; nothing of it is started.
          cache: is consumed.
        """
        valid = flight.batch.num_new[:, None] > 0
        flight.batch = self._model.place_rows(with_rows(flight.batch, (None, None)))
        if self._segments:
            while flight.begun < len(self._segments) and not self._segments[flight.begun].engrams:
                cache = self._run(flight, None, cache)
        elif self._mode is None:
            flight.left, cache, _ = self._model.forward(flight.batch, cache)
        elif self._mode is EngramMode.DEVICE:
            rows = self.device_rows(flight.batch.tokens, flight.history, valid)
            flight.left, cache, _ = self._model.forward(with_rows(flight.batch, rows), cache)
        return cache

    def finish(self, flight: Flight, known: Mapping[int, Known], cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Starts the rest of a step.

        Args:
          flight: the step, opened.
          known: tokens of its rows; of those that are of no interest any more they may be missing.
          cache: is consumed.

        Returns:
          logits float32 [B, 1, V], cache.

        Raises:
          DSV41Error: a row cannot be read.
        """
        if self._segments:
            return self._finish_segments(flight, known, cache)
        if self._mode is EngramMode.BLOCKING or (self._mode and flight.left is None):
            clock = StallClock(None)
            rows = self._model.place_rows(self._model.join_rows(step_rows(self._model, self._shape, known)))
            flight.left, cache, _ = self._model.forward(with_rows(flight.batch, rows), cache)
            self._meter.stall_s += clock.stop()
        return flight.left, cache

    def _finish_segments(self, flight: Flight, known: Mapping[int, Known], cache: KVCache) -> tuple[jax.Array, KVCache]:
        model = self._model
        # What the device waits for: nothing here may cost more a row than it must.
        tokens, valid, rows = np.zeros(self._shape, np.int32), np.zeros(self._shape, bool), list(known)
        tokens[rows, 0], valid[rows] = [new[0] for new, _ in known.values()], True
        windows = model.host_lookup.windows(tokens, flight.history)
        for segment in self._segments[flight.begun :]:
            found, clock = None, StallClock(None if flight.left is None else flight.left.residual.streams)
            for ordinal in segment.engrams:
                found = tuple(model.host_lookup.layer_rows(ordinal, windows, valid))
            self._meter.stall_s += clock.stop()
            cache = self._run(flight, found, cache)
        return flight.left, cache

    def _run(self, flight: Flight, rows: tuple | None, cache: KVCache) -> KVCache:
        segment, params = self._segments[flight.begun], self._params[flight.begun]
        flight.left, cache = compiled_segment(segment.index)(
            params, flight.batch, cache, flight.left, rows, config=self._model.config, layers=segment.layers
        )
        flight.begun += 1
        return cache

    @functools.cached_property
    def _params(self) -> tuple:
        layers = len(self._model.schedule.layers)
        return tuple(segment_params(self._model.params, segment, layers) for segment in self._segments)
