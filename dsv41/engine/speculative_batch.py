"""Speculative decoding of a fixed batch of requests: chunked prefill, then rounds of draft and verify."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import ForwardBatch, KVCache
from dsv41.engine.engram_mode import EngramMode
from dsv41.engine.plain_batch import BatchOptions, PlainBatch
from dsv41.engine.request import Request
from dsv41.engine.round_plan import IN_FLIGHT, RoundPlan
from dsv41.engine.speculation import Speculation, SpeculationRecord
from dsv41.engine.speculative_step import (
    RoundInputs,
    RoundOutput,
    compiled_prefill,
    compiled_round,
    request_state,
)
from dsv41.models import Model
from dsv41.ops.sampling import SamplingParams
from dsv41.sharding import fetch


class SpeculativeBatch(PlainBatch):
    """Prompts first, all of them; then every round gives each live request one token or more."""

    def __init__(
        self,
        model: Model,
        requests: list[Request],
        sampling: list[SamplingParams],
        cache: KVCache,
        options: BatchOptions,
        *,
        speculation: Speculation,
        stop_ids: frozenset[int],
    ):
        super().__init__(model, requests, sampling, cache, options)
        text = model.config.text_config
        self._speculation = speculation
        self._lookup = model.device_lookup if self._mode is EngramMode.DEVICE else model.step_lookup
        self._look_back = text.engram_max_ngram_size - 1 if text.engram_layer_ids else 0
        self._plan = RoundPlan(model.config, speculation, self._rows)
        self._inputs = self._plan.inputs(self._params, jnp.asarray(sorted(stop_ids) or [-1], jnp.int32))
        for row in range(len(requests)):
            self._plan.begin(row)
        self._state = None
        self._flying: collections.deque[tuple[RoundOutput, np.ndarray | None]] = collections.deque()
        self._rounds: list[list[tuple]] = [[] for _ in requests]
        self._block = text.dspark_block_size

    def _warm_up_decoding(self) -> None:
        idle = request_state([], [], self._rows, self._look_back)
        for width in self._plan.widths:
            if self._is_new("round", width, self._speculation.rule, self._speculation.schedule):
                _, output = self._run_round(jax.tree.map(jnp.asarray, idle), width, self._inputs)
                jax.block_until_ready(output)

    def _forward(self, batch: ForwardBatch, tail: int | None) -> jax.Array | None:
        m = self._model
        logits, self._cache = compiled_prefill(m.mesh, m.rules)(
            m.params, m.drafter, m.place_rows(batch), self._cache, config=m.config, tail=tail
        )
        return logits

    def _run_round(self, state, width: int, inputs: RoundInputs):
        m, speculation = self._model, self._speculation
        state, self._cache, output = compiled_round(m.mesh, m.rules)(
            m.params, m.drafter, state, self._cache, inputs, self._lookup,
            config=m.config, rule=speculation.rule, schedule=speculation.schedule, width=width,
        )  # fmt: skip
        return state, output

    def step(self) -> list[tuple[int, int]]:
        """A chunk of every prompt that is not in yet, or else a round; returns (row, id) of new tokens in order."""
        live = self.live()
        prompts = {i: r for i, r in live.items() if not r.new_tokens}
        if prompts:
            drawn = self._forward_known(prompts)
            return [] if drawn is None else self._fetched(drawn)
        if self._state is None:
            known = [r.ids for r in self._requests]
            remaining = [r.remaining for r in self._requests]
            state = request_state(known, remaining, self._rows, self._look_back)
            self._state = jax.tree.map(jnp.asarray, state)
        while len(self._flying) < IN_FLIGHT and any(r.remaining > len(self._flying) for r in live.values()):
            self._start_round(live)
        output, stamp = self._flying.popleft()
        return self._finish_round(fetch(output), stamp)

    def _start_round(self, live: dict[int, Request]) -> None:
        for row in set(range(len(self._requests))) - set(live):
            self._plan.release(row)
        remaining = {i: r.remaining for i, r in live.items()}
        inputs, width, stamp = self._plan.next_round(self._inputs, remaining, len(self._flying))
        self._state, output = self._run_round(self._state, width, inputs)
        self._flying.append((output, stamp))

    def _finish_round(self, output: RoundOutput, stamp: np.ndarray | None) -> list[tuple[int, int]]:
        self._plan.record(output.survival, stamp)
        tokens = []
        for i, request in self.live().items():
            count = int(output.count[i])
            if not count:
                continue
            self._rounds[i].append((output.confidence[i], output.verified[i], output.accepted[i], count))
            first = request.new_tokens
            tokens += [(i, self._checked(i, int(t), first + k)) for k, t in enumerate(output.tokens[i, :count])]
        return tokens

    def records(self) -> list[SpeculationRecord]:
        """The rounds of each request."""
        return [self._record(rounds) for rounds in self._rounds]

    def _record(self, rounds: list[tuple]) -> SpeculationRecord:
        confidence, verified, accepted, emitted = zip(*rounds, strict=True) if rounds else ((), (), (), ())
        return SpeculationRecord(
            confidence=np.array(confidence, np.float32).reshape(-1, self._block),
            verified=np.array(verified, np.int32),
            accepted=np.array(accepted, np.int32),
            emitted=np.array(emitted, np.int32),
        )
