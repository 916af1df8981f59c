"""A training run: steps until an end, evaluations and checkpoints between them, and going on where one was left."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dsv41.config import DSV41Error
from dsv41.train.checkpoints import Checkpoints
from dsv41.train.curves import Curves
from dsv41.train.data import TrainingBatches
from dsv41.train.guards import GuardLimits, check_step
from dsv41.train.pack import PackedBatch
from dsv41.train.schedule import TrainingSchedule
from dsv41.train.stages import StagedBatches

# Steps whose numbers are not waited for: the device has work while the host looks at older ones.
_BEHIND = 2
# Steps between looks at the time in a job of several processes: they have to agree, which waits for the devices.
_LOOKS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """When a run does what, and when it stops.

    Attributes:
      save_every, evaluate_every: steps between checkpoints and between evaluations; 0: only at the end.
      log_every: steps between rows of the curves, each the last step's numbers.
      seconds: wall time after which it saves and stops; None: none.
      steps: how many it makes at most this time; None: to the end of the schedule.
      guards: what stops it.
    """

    save_every: int = 0
    evaluate_every: int = 0
    log_every: int = 1
    seconds: float | None = None
    steps: int | None = None
    guards: GuardLimits = dataclasses.field(default_factory=GuardLimits)

    def __post_init__(self):
        for field, least in (("save_every", 0), ("evaluate_every", 0), ("log_every", 1)):
            if getattr(self, field) < least:
                raise DSV41Error(f"{field}: expected at least {least}, got {getattr(self, field)}")
        for field in ("seconds", "steps"):
            if getattr(self, field) is not None and not getattr(self, field) > 0:
                raise DSV41Error(f"{field}: expected a positive number, got {getattr(self, field)}")


class Progress(NamedTuple):
    """Where a run is: steps made and tokens seen, batches with all their padding."""

    step: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class RunParts:
    """What a run is made of.

    Attributes:
      step: compiled; (state, placed batch, learning_rate float32 []) -> (state, metrics float32 []), its state donated.
      place: a batch of the pipeline, on the devices.
      evaluate: state -> numbers on the host of held-out text; None: nothing is evaluated.
      schedule: of the learning rate and the length of the run.
      batches: of the run.
      checkpoints: in its directory.
      curves, held_out: rows of steps, and of evaluations; None: another process writes them.
      identity: JSON values that a checkpoint must share for the run to go on from it.
    """

    step: Callable[..., tuple[Any, dict[str, jax.Array]]]
    place: Callable[[PackedBatch], PackedBatch]
    evaluate: Callable[[Any], dict[str, float]] | None
    schedule: TrainingSchedule
    batches: TrainingBatches | StagedBatches
    checkpoints: Checkpoints
    curves: Curves | None
    held_out: Curves | None
    identity: Mapping[str, Any]


class _Pending(NamedTuple):
    """A step that was given to the device, and what is needed if its numbers turn out bad."""

    at: Progress
    rate: float
    pack: PackedBatch
    data: dict[str, Any]
    metrics: dict[str, jax.Array]


def resume(parts: RunParts, state: Any) -> tuple[Any, Progress]:
    """The state to begin with: that of the last checkpoint, or `state` if there is none.

    Batches and curves are set back to it.

    Raises:
      DSV41Error: the checkpoint is of another run; names what differs.
    """
    step = parts.checkpoints.latest()
    if step is not None:
        check_identity(parts.checkpoints.record(step)["identity"], parts.identity)
    found = None if step is None else parts.checkpoints.restore_latest(state)
    if found is None:
        at = Progress(0, 0)
    else:
        at = Progress(found.step, found.record["tokens"])
        parts.batches.restore(found.record["data"])
    for curves in (parts.curves, parts.held_out):
        if curves is not None:
            curves.truncate(at.step)
    return (state if found is None else found.state), at


def check_identity(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises DSV41Error naming the first value in which two runs differ."""
    for name in sorted(saved.keys() | own.keys()):
        if saved.get(name) != own.get(name):
            raise DSV41Error(
                f"the run was begun with {name}={saved.get(name)!r} and cannot go on with {own.get(name)!r}: "
                "give the same flags, or another directory"
            )


def run_steps(
    parts: RunParts,
    state: Any,
    begin: Progress,
    options: LoopOptions,
    *,
    report: Callable[[Progress, dict[str, float]], None] = lambda at, numbers: None,
) -> tuple[Any, Progress]:
    """Trains from `begin` on, until the schedule, the steps or the time are at their end, and saves.

    Args:
      parts: of the run.
      state: to begin with; it is given up.
      begin: where it stands; if that is not the beginning, its checkpoint is there.
      options: when what is done.
      report: is told every row of the curves; numbers of the last evaluation have names that begin with "held_out_".

    Returns:
      The state, and where the run is now.

    Raises:
      TrainingStopped: a step went wrong; its batch has been saved, and the last checkpoint is as it was.
      DSV41Error: something cannot be written.
    """
    loop = _Loop(parts, options, report, parts.checkpoints.record(begin.step) if begin.step else {})
    end = parts.schedule.steps if options.steps is None else min(parts.schedule.steps, begin.step + options.steps)
    at, until = begin, None if options.seconds is None else time.monotonic() + options.seconds
    while at.step < end and not _is_over(until, at.step - begin.step):
        pack = next(parts.batches)
        at = Progress(at.step + 1, at.tokens + parts.schedule.batch_tokens)
        rate = parts.schedule.rate(min(at.tokens, parts.schedule.total))
        state, metrics = parts.step(state, parts.place(pack), jnp.float32(rate))
        loop.pending.append(_Pending(at, rate, pack, parts.batches.state(), metrics))
        loop.settle(_BEHIND)
        if at.step < end:
            loop.between(state, at)
    loop.settle(0)
    if at.step > begin.step:
        loop.evaluate(state, at)
        loop.save(state, at)
    return state, at


def _is_over(until: float | None, steps: int) -> bool:
    """Whether the time is up, after so many steps; the same in all processes."""
    if until is None:
        return False
    over = time.monotonic() >= until
    if jax.process_count() == 1:
        return over
    return steps % _LOOKS == 0 and bool(multihost_utils.broadcast_one_to_all(np.asarray(over)))


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


class _Loop:
    """What a run keeps between steps.

    Args:
      parts, options, report: of `run_steps`.
      record: of the checkpoint that the run goes on from.
    """

    def __init__(self, parts: RunParts, options: LoopOptions, report, record: Mapping[str, Any]):
        self.parts, self.options, self.report = parts, options, report
        self.pending: collections.deque[_Pending] = collections.deque()
        self.norms: list[float] = record.get("norms", [])
        self.evaluated: dict[str, float] = record.get("held_out", {})
        self.data: dict[str, Any] = parts.batches.state()
        self._clock: tuple[float, int] | None = None  # when so many tokens had been seen; None: nothing has run yet

    def settle(self, behind: int) -> None:
        """Looks at the numbers of all steps but the last few."""
        while len(self.pending) > behind:
            done = self.pending.popleft()
            numbers = {name: float(value) for name, value in jax.device_get(done.metrics).items()}
            self.norms = check_step(
                self.parts.checkpoints.folder.parent, done.at.step, numbers, done.pack, tokens=done.at.tokens,
                rows=self.data, norms=self.norms, limits=self.options.guards,
            )  # fmt: skip
            self.data = done.data
            if _due(done.at.step, self.options.log_every):
                self._log(done.at, numbers | {"learning_rate": done.rate})

    def _log(self, at: Progress, numbers: dict[str, float]) -> None:
        numbers.pop("finite", None)
        if "tokens" in numbers:  # of this step that count in its loss; the column is of those seen so far
            numbers["predicted_tokens"] = numbers.pop("tokens")
        now, rate = time.perf_counter(), 0.0
        if self._clock is not None:
            then, tokens = self._clock
            rate = (at.tokens - tokens) / (now - then)
        self._clock = (now, at.tokens)
        if self.parts.curves is not None:
            self.parts.curves.append(at.step, at.tokens, numbers | {"tokens_per_second": rate})
        self.report(at, numbers | {"tokens_per_second": rate} | self._held_out())

    def _held_out(self) -> dict[str, float]:
        return {f"held_out_{name}": value for name, value in self.evaluated.items()}

    def between(self, state: Any, at: Progress) -> None:
        """Evaluates and saves if it is time to."""
        evaluated, saved = _due(at.step, self.options.evaluate_every), _due(at.step, self.options.save_every)
        if evaluated or saved:
            self.settle(0)
        if evaluated:
            self.evaluate(state, at)
        if saved:
            self.save(state, at)

    def evaluate(self, state: Any, at: Progress) -> None:
        if self.parts.evaluate is not None:
            self.evaluated = self.parts.evaluate(state)
            if self.parts.held_out is not None:
                self.parts.held_out.append(at.step, at.tokens, self.evaluated)
            self.report(at, self._held_out())
            self._clock = time.perf_counter(), at.tokens

    def save(self, state: Any, at: Progress) -> None:
        record = {"identity": dict(self.parts.identity), "tokens": at.tokens, "data": self.data}
        record |= {"norms": self.norms, "held_out": self.evaluated}
        self.parts.checkpoints.save(at.step, state, record)
        self._clock = time.perf_counter(), at.tokens


def held_out_means(
    evaluate: Callable[..., dict[str, jax.Array]], state: Any, batches: Iterable[PackedBatch]
) -> dict[str, float]:
    """Means over batches, weighted by their "tokens", on the host.

    Raises:
      DSV41Error: there are no tokens.
    """
    total: dict[str, float] = {}
    tokens = 0.0
    for pack in batches:
        numbers = {name: float(value) for name, value in jax.device_get(evaluate(state, pack)).items()}
        weight = numbers.pop("tokens")
        tokens += weight
        for name, value in numbers.items():
            total[name] = total.get(name, 0.0) + weight * value
    if not tokens:
        raise DSV41Error("evaluation: the held-out rows have no tokens")
    return {name: value / tokens for name, value in total.items()}
