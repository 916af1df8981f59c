"""The engine's device side: the cache, the state of its rows, and the compiled steps over them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import CacheLayout, ForwardBatch
from dsv41.config import DSV41Error
from dsv41.engine.engine_options import CED, EngineOptions
from dsv41.engine.engine_request import EngineRequest
from dsv41.engine.engine_step import compiled_plain_round, compiled_prefill_chunk, compiled_set_row
from dsv41.engine.plain_batch import GREEDY
from dsv41.engine.round_plan import IN_FLIGHT, RoundPlan
from dsv41.engine.speculative_step import (
    RequestState,
    RoundInputs,
    RoundOutput,
    compiled_round,
    request_state,
)
from dsv41.engine.step_batch import Known, Shape, idle_batch, step_batch, step_rows, with_rows
from dsv41.engram_store import DEVICE_BYTES, Prefetcher
from dsv41.models import Model, token_bucket
from dsv41.ops.sampling import SamplingParams, sampling_arrays


@dataclasses.dataclass(eq=False)
class _Flight:
    """A round that has been started: its output, and which request each row had."""

    output: RoundOutput
    requests: list[tuple[int, EngineRequest]]
    stamp: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """Chunks of prompts in the rows of a step: which they are, and their tokens."""

    key: tuple[tuple[int, int, int], ...]
    known: dict[int, Known]

    @classmethod
    def of(cls, requests: Sequence[EngineRequest], sizes: Sequence[int]) -> _Chunks:
        """The next `sizes` tokens of the requests."""
        parts = [(r, r.cursor, r.cursor + size) for r, size in zip(requests, sizes, strict=True)]
        return cls(
            tuple((r.id, begin, end) for r, begin, end in parts),
            {i: (r.ids[begin:end], r.ids[:begin]) for i, (r, begin, end) in enumerate(parts)},
        )


class EngineRunner:
    """Runs steps; what they are for is the engine's business."""

    def __init__(self, model: Model, options: EngineOptions):
        text = model.config.text_config
        if model.row_shards > 1:
            raise DSV41Error(
                f"engine: the mesh spreads rows over {model.row_shards} groups of devices; the engine runs on a mesh "
                "that spreads heads and experts only (tensor), generate() on any"
            )
        self._model, self._options = model, options
        self.rows = options.max_requests
        self._plan = RoundPlan(model.config, options.speculation, self.rows)
        self.cache = model.init_cache(
            self.rows,
            options.max_tokens,
            num_pages=options.num_pages or self._all_pages(),
            draft_tokens=self._plan.drafts,
        )
        self._window = text.sliding_window
        # The last step of a prompt must have room for the tail that goes through the decoder.
        self.chunk = token_bucket(max(options.prefill_chunk, self._window))
        self._look_back = text.engram_max_ngram_size - 1 if text.engram_layer_ids else 0
        self._state = jax.tree.map(jnp.asarray, request_state([], [], self.rows, self._look_back))
        self._sampling = [GREEDY] * self.rows
        self._stop = np.full((self.rows, options.stop_ids), -1, np.int32)
        self._inputs: RoundInputs | None = None
        self._flying: collections.deque[_Flight] = collections.deque()
        # Rows of small tables are not worth a thread.
        large = model.engram is not None and model.engram.nbytes > DEVICE_BYTES
        self._ahead: Prefetcher[tuple] | None = Prefetcher(depth=1) if large and model.engram.whole else None

    def _all_pages(self) -> int:
        layout = CacheLayout.from_config(self._model.config.text_config)
        return self.rows * layout.pages_for(self._options.max_tokens)

    @property
    def in_flight(self) -> bool:
        return bool(self._flying)

    @property
    def tokens_ahead(self) -> int:
        """Tokens behind those known that a round may write."""
        return self._plan.drafts + 1

    def reach(self, request: EngineRequest) -> int:
        """Tokens that the cache may hold of a request after the round that is to be started."""
        return request.known - 1 + (len(self._flying) + 1) * self.tokens_ahead

    # Rows

    def set_sampling(self, row: int, sampling: SamplingParams, stop_ids: Sequence[int]) -> None:
        """How the row's request draws, from the next step on."""
        self._sampling[row] = sampling
        self._stop[row] = -1
        self._stop[row, : len(stop_ids)] = stop_ids
        self._inputs = None

    def begin(self, request: EngineRequest) -> None:
        """The request is decoded from the next round on; all its tokens but the last are in the cache."""
        self._plan.begin(request.row)
        new = request_state([request.ids], [request.remaining], 1, self._look_back)
        # Rounds of a request never repeat their number, also after it was set back: their noise must be fresh.
        new.round[0] = request.new_tokens - 1
        self._set_row(request.row, new)

    def stop(self, row: int) -> None:
        """The row is not decoded any more."""
        self._plan.release(row)
        self._set_row(row, request_state([], [], 1, self._look_back))

    def _set_row(self, row: int, new: RequestState) -> None:
        self._state = compiled_set_row()(self._state, jnp.int32(row), jax.tree.map(jnp.asarray, new))

    def _round_inputs(self) -> RoundInputs:
        if self._inputs is None:
            sampling = jax.tree.map(jnp.asarray, sampling_arrays(self._sampling))
            self._inputs = self._plan.inputs(sampling, jnp.asarray(self._stop))
        return self._inputs

    # Prompts

    def prefill(self, requests: Sequence[EngineRequest], sizes: Sequence[int]) -> list[int | None]:
        """Forwards the next tokens of prompts; the token behind each prompt that is in now."""
        shape = (self._options.prefill_rows, self.chunk)
        chunks = _Chunks.of(requests, sizes)
        images = {i: r.embeds for i, r in enumerate(requests) if r.embeds is not None}
        slots = {i: r.row for i, r in enumerate(requests)}
        batch = step_batch(self._model, shape, chunks.known, images, slots, engram=False)
        batch = with_rows(batch, self._engram_rows(chunks, shape))
        for request, size in zip(requests, sizes, strict=True):
            request.cursor += size
        ends = [r.cursor == r.target for r in requests]
        tails = [min(self._window, r.target - r.floor) if end else 0 for r, end in zip(requests, ends, strict=True)]
        batch = self._with_limits(batch, requests, tails)
        params = [r.sampling for r in requests] + [GREEDY] * (shape[0] - len(requests))
        drawn = [r.new_tokens for r in requests] + [0] * (shape[0] - len(requests))
        ids = self._forward(batch, params, drawn, any(ends))
        self._look_ahead([r for r, end in zip(requests, ends, strict=True) if not end], shape)
        if not any(ends):
            return [None] * len(requests)
        ids = jax.device_get(ids)
        return [int(ids[i]) if end else None for i, end in enumerate(ends)]

    def _engram_rows(self, chunks: _Chunks, shape: Shape) -> tuple | None:
        """Rows of a step, waited for unless `_look_ahead` foresaw it; None without Engram."""
        if self._model.engram is None:
            return None
        found = None if self._ahead is None else self._ahead.take(chunks.key)
        return self._model.join_rows(step_rows(self._model, shape, chunks.known)) if found is None else found

    def _look_ahead(self, requests: Sequence[EngineRequest], shape: Shape) -> None:
        """Has the rows of these prompts' next chunks fetched meanwhile; in vain if other requests join them."""
        if self._ahead is None:
            return
        self._ahead.forget()
        tail = self._window if self._options.prefill == CED else 0
        if requests:
            chunks = _Chunks.of(requests, [r.chunk(self.chunk, tail) for r in requests])
            model = self._model
            self._ahead.ask(chunks.key, lambda: model.place_rows(tuple(step_rows(model, shape, chunks.known))))

    def _with_limits(
        self, batch: ForwardBatch, requests: Sequence[EngineRequest], tails: Sequence[int]
    ) -> ForwardBatch:
        def column(values: list[int]) -> np.ndarray:
            return np.array(values + [0] * (batch.tokens.shape[0] - len(values)), np.int32)

        return dataclasses.replace(
            batch,
            window_floor=column([r.floor for r in requests]),
            write_from=column([r.write_from for r in requests]),
            tail=column(list(tails)) if self._options.prefill == CED else None,
        )

    def _forward(self, batch: ForwardBatch, params: list[SamplingParams], drawn: list[int], ends: bool):
        tail = (min(self._window, self.chunk) if ends else 0) if self._options.prefill == CED else None
        m = self._model
        ids, self.cache = compiled_prefill_chunk(m.mesh, m.rules)(
            m.params,
            m.drafter if self._plan.drafts else None,
            jax.tree.map(jnp.asarray, batch),
            self.cache,
            jax.tree.map(jnp.asarray, sampling_arrays(params)),
            jnp.asarray(drawn, jnp.int32),
            config=m.config,
            tail=tail,
        )
        return ids

    # Rounds

    def may_start(self, live: Sequence[EngineRequest]) -> bool:
        """Whether another round is worth starting: one in flight may already give a request its last token."""
        return len(self._flying) < IN_FLIGHT and any(r.remaining > len(self._flying) for r in live)

    def start_round(self, live: Sequence[EngineRequest]) -> None:
        """Starts a round of the requests that are decoded."""
        remaining = {r.row: r.remaining for r in live}
        inputs, width, stamp = self._plan.next_round(self._round_inputs(), remaining, len(self._flying))
        output = self._run_round(width, inputs)
        self._flying.append(_Flight(output, [(r.row, r) for r in live], stamp))

    def _run_round(self, width: int, inputs: RoundInputs) -> RoundOutput:
        m = self._model
        if not self._plan.drafts:
            self._state, self.cache, output = compiled_plain_round(m.mesh, m.rules)(
                m.params, self._state, self.cache, inputs, m.step_lookup, config=m.config
            )
            return output
        how = self._options.speculation
        self._state, self.cache, output = compiled_round(m.mesh, m.rules)(
            m.params, m.drafter, self._state, self.cache, inputs, m.step_lookup,
            config=m.config, rule=how.rule, schedule=how.schedule, width=width,
        )  # fmt: skip
        return output

    def finish_round(self) -> list[tuple[EngineRequest, list[int], int, int]]:
        """The oldest round in flight, if any: (request, its new tokens, drafts verified, drafts accepted)."""
        if not self._flying:
            return []
        flight = self._flying.popleft()
        output = jax.device_get(flight.output)
        self._plan.record(output.survival, flight.stamp)
        return [
            (
                request,
                output.tokens[row, : output.count[row]].tolist(),
                int(output.verified[row]),
                int(output.accepted[row]),
            )
            for row, request in flight.requests
            if output.count[row]
        ]

    def warm_up(self) -> None:
        """Runs every step once without tokens."""
        rows = self._options.prefill_rows
        with_images = (False, True) if self._model.vision is not None else (False,)
        for images in with_images:
            batch = idle_batch(self._model, (rows, self.chunk), with_images=images)
            batch = self._with_limits(batch, [], [0] * rows)
            for ends in (False, True) if self._options.prefill == CED else (True,):
                self._forward(batch, [GREEDY] * rows, [0] * rows, ends)
        for row in range(self.rows):
            self.stop(row)
        for width in self._plan.widths:
            jax.block_until_ready(self._run_round(width, self._round_inputs()))
