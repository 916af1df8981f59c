"""Measures what a speculative round costs on this machine, by how many requests and tokens it carries.

Every round is run again and again from one and the same state, as if only one token had been accepted and then taken
back: the state's `start` decides what a round sees, so the context neither grows nor shrinks while it is measured
(dspark.md section 7.3). All drafts of a round's width are verified, whatever the confidences say.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
import numbers
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine.generate import PREFILL_CHUNK
from dsv41.engine.round_plan import IN_FLIGHT
from dsv41.engine.speculation import Speculation, check_drafter
from dsv41.engine.speculative_step import (
    RequestState,
    RoundInputs,
    RoundOutput,
    VerifySchedule,
    compiled_prefill,
    compiled_round,
    request_state,
    verify_widths,
)
from dsv41.engine.step_batch import init_run_cache, step_batch
from dsv41.engine.throughput_table import Curve, ThroughputTable
from dsv41.models import Model, batch_bucket, token_bucket
from dsv41.ops.sampling import SamplingParams, sampling_arrays
from dsv41.ops.verification import AcceptanceRule

_LONGEST_DEFAULT_CONTEXT = 4096
_WARM_UP = 3
# Makes every confidence one half: no draft is left out for being unlikely.
_LEVEL = 1e30
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def _check(ok: bool, field: str, expected: str, value: object) -> None:
    if not ok:
        raise DSV41Error(f"{field}: expected {expected}, got {value!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfilePlan:
    """What is measured, and how long.

    Attributes:
      requests: batch sizes; each is rounded up to the rows that a batch of so many requests has.
      context: committed tokens of every request; None: 4096, or as many as the model takes.
      draft_tokens: most drafts that a round verifies; None: all of a block.
      rule, sampling: of the rounds. They cost little, but not nothing.
      steps: rounds that are timed at each point, at least.
      min_seconds: time that they take together, at least.
      prefill_chunk: tokens of a row that a step forwards while the contexts are filled.

    Raises:
      DSV41Error: a field is out of range; the message names it.
    """

    requests: tuple[int, ...] = (1, 2, 4, 8)
    context: int | None = None
    draft_tokens: int | None = None
    rule: AcceptanceRule = AcceptanceRule.BLOCK
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    steps: int = 32
    min_seconds: float = 10.0
    prefill_chunk: int = PREFILL_CHUNK

    def __post_init__(self):
        _check(len(self.requests) > 0, "requests", "at least one batch size", self.requests)
        for value in self.requests:
            _check(_is_count(value), "requests", "integers, 1 or more", value)
        for name in ("context", "draft_tokens"):
            value = getattr(self, name)
            _check(value is None or _is_count(value), name, "an integer, 1 or more", value)
        for name in ("steps", "prefill_chunk"):
            _check(_is_count(getattr(self, name)), name, "an integer, 1 or more", getattr(self, name))
        seconds = self.min_seconds
        _check(math.isfinite(seconds) and seconds >= 0, "min_seconds", "a number, 0 or more", seconds)

    def resolved(self, config: ModelConfig) -> ProfilePlan:
        """The plan for a model: `requests` are rows, rising, each once; nothing is None.

        Raises:
          DSV41Error: the model has no drafter, drafts fewer tokens or takes fewer positions.
        """
        drafts = Speculation(draft_tokens=self.draft_tokens).drafts(config)
        room = config.text_config.max_position_embeddings - drafts - 1
        context = min(_LONGEST_DEFAULT_CONTEXT, room) if self.context is None else self.context
        _check(
            context <= room,
            "context",
            f"{room} or less, so that an anchor and {drafts} drafts fit into max_position_embeddings="
            f"{config.text_config.max_position_embeddings}",
            context,
        )
        rows = tuple(sorted({batch_bucket(r) for r in self.requests}))
        return dataclasses.replace(self, requests=rows, context=context, draft_tokens=drafts)


def probes(rows: int, draft_tokens: int) -> tuple[tuple[int, int], ...]:
    """(width, batch tokens) of each point of a curve: with how many tokens a batch first needs that width, and the most
    tokens that it can have."""
    widths = verify_widths(draft_tokens)
    firsts = [(width, rows + before) for before, width in zip((0, *widths[:-1]), widths, strict=True)]
    most = (widths[-1], rows * widths[-1])
    return tuple(firsts) if most in firsts else (*firsts, most)


@jax.jit
def _copy(state: RequestState) -> RequestState:
    return jax.tree.map(jnp.copy, state)


class _Rounds:
    """Rounds of `rows` requests that always begin at the same place."""

    def __init__(self, model: Model, plan: ProfilePlan, rows: int):
        self._model, self._plan, self._rows = model, plan, rows
        text = model.config.text_config
        ids = np.random.default_rng(0).integers(0, text.vocab_size, (rows, plan.context + 1))
        ids[ids == model.config.image_token_id] = model.config.bos_token_id
        self._cache = init_run_cache(model, rows, plan.context + 1 + plan.draft_tokens, draft_tokens=plan.draft_tokens)
        self._fill(ids[:, :-1])
        look_back = text.engram_max_ngram_size - 1 if text.engram_layer_ids else 0
        state = request_state(list(ids), [plan.draft_tokens + 1] * rows, rows, look_back)
        self._state = jax.tree.map(jnp.asarray, state)
        each = [dataclasses.replace(plan.sampling, seed=row) for row in range(rows)]
        self._inputs = RoundInputs(
            sampling=jax.tree.map(jnp.asarray, sampling_arrays(each)),
            stop_ids=jnp.asarray([-1], jnp.int32),
            temperatures=jnp.full(text.dspark_block_size, _LEVEL, jnp.float32),
            budget=jnp.int32(0),
            steps_per_second=None,
        )

    def _fill(self, ids: np.ndarray) -> None:
        m, chunk = self._model, min(self._plan.prefill_chunk, ids.shape[1])
        for begin in range(0, ids.shape[1], chunk):
            rows = {i: (row[begin : begin + chunk], row[:begin]) for i, row in enumerate(ids)}
            batch = jax.tree.map(jnp.asarray, step_batch(m, (self._rows, token_bucket(chunk)), rows))
            _, self._cache = compiled_prefill(m.mesh, m.rules)(m.params, m.drafter, batch, self._cache, config=m.config)

    def _run(self, width: int) -> RoundOutput:
        m = self._model
        _, self._cache, output = compiled_round(m.mesh, m.rules)(
            m.params, m.drafter, _copy(self._state), self._cache, self._inputs, m.step_lookup,
            config=m.config, rule=self._plan.rule, schedule=VerifySchedule.BUDGET, width=width,
        )  # fmt: skip
        return output

    def rate(self, width: int, tokens: int) -> float:
        """Rounds of that width with so many tokens a second, from the median time between the ends of two."""
        drafts = tokens - self._rows
        self._inputs = dataclasses.replace(self._inputs, budget=jnp.int32(drafts))
        for _ in range(_WARM_UP):
            output = jax.device_get(self._run(width))
        if output.verified.sum() != drafts:
            raise DSV41Error(f"profile: a round of width {width} left drafts out; do the model's outputs hold NaN?")
        # As many as a run has, so that the host's part of a round is hidden or shows just as it does there.
        flying = collections.deque(self._run(width) for _ in range(IN_FLIGHT))
        jax.device_get(flying.popleft())
        ends = [time.perf_counter()]
        while len(ends) <= self._plan.steps or ends[-1] - ends[0] < self._plan.min_seconds:
            flying.append(self._run(width))
            jax.device_get(flying.popleft())
            ends.append(time.perf_counter())
        jax.block_until_ready(flying)
        return 1 / float(np.median(np.diff(ends)))


def _curve(model: Model, plan: ProfilePlan, rows: int) -> Iterator[tuple[int, float]]:
    """(batch tokens, rounds a second) of every width, as they are measured."""
    try:
        rounds = _Rounds(model, plan, rows)
        for width, tokens in probes(rows, plan.draft_tokens):
            yield tokens, rounds.rate(width, tokens)
    except jax.errors.JaxRuntimeError as e:
        if _OUT_OF_MEMORY not in str(e):
            raise
        raise DSV41Error(f"profile: {rows} requests of {plan.context} tokens do not fit into memory") from e


def profile_rounds(
    model: Model,
    plan: ProfilePlan | None = None,
    *,
    model_name: str = "",
    command: str = "",
    on_point: Callable[[int, int], None] | None = None,
    on_curve: Callable[[ThroughputTable], None] | None = None,
) -> ThroughputTable:
    """Times rounds of every batch size and width of the plan.

    Each point compiles a program and then runs for `min_seconds` or longer.

    Args:
      model: with its drafter.
      plan: what to measure; None: the defaults of `ProfilePlan`.
      model_name, command: labels of the table.
      on_point: called with (points measured, points in all) after each.
      on_curve: called with the table so far after each batch size, so that what follows cannot lose it.

    Raises:
      DSV41Error: the plan does not fit the model, the drafter was not loaded, or a batch size does not fit into the
        device's memory.
    """
    plan = (plan or ProfilePlan()).resolved(model.config)
    check_drafter(model)
    curves: dict[int, Curve] = {}
    points = sum(len(probes(rows, plan.draft_tokens)) for rows in plan.requests)
    for rows in plan.requests:
        measured = []
        for point in _curve(model, plan, rows):
            measured.append(point)
            if on_point is not None:
                on_point(sum(map(len, curves.values())) + len(measured), points)
        curves[rows] = tuple(measured)
        table = ThroughputTable(
            block_size=model.config.text_config.dspark_block_size,
            curves=dict(curves),
            draft_tokens=plan.draft_tokens,
            device_kind=jax.devices()[0].device_kind,
            jax_version=jax.__version__,
            model=model_name,
            date=datetime.date.today().isoformat(),
            command=command,
        )
        if on_curve is not None:
            on_curve(table)
    return table
