"""An open-loop stream of requests: they arrive when they arrive, however busy the engine is."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine.engine import Engine
from dsv41.ops.sampling import SamplingParams

_UNIFORM, _LOGNORMAL = "uniform", "lognormal"


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A law of lengths, 1 or more: uniform from `low` to `high`, or lognormal of a median and a sigma.

    Attributes:
      kind: "uniform" or "lognormal".
      low: the least length, or the median.
      high: the greatest length, or sigma.
    """

    kind: str
    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """From "128" (always that), "64:256" (uniform, ends included) or "lognormal:128:0.5".

        Raises:
          DSV41Error: anything else.
        """
        head, *rest = text.split(":")
        try:
            if head == _LOGNORMAL:
                median, sigma = map(float, rest)
                law = cls(_LOGNORMAL, median, sigma)
            else:
                low, high = int(head), int(*rest or [head])
                law = cls(_UNIFORM, low, high)
        except (TypeError, ValueError) as e:
            raise DSV41Error(f"lengths: expected N, LOW:HIGH or lognormal:MEDIAN:SIGMA, got {text!r}") from e
        good = law.high >= law.low if law.kind == _UNIFORM else 0 <= law.high < 10
        if not (1 <= law.low < 2**31 and law.high < 2**31 and good):
            raise DSV41Error(f"lengths: {text!r} is no law of lengths, which are 1 or more")
        return law

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        if self.kind == _LOGNORMAL:
            drawn = np.rint(self.low * np.exp(self.high * rng.standard_normal(count)))
            return [int(n) for n in np.maximum(drawn, 1)]
        return rng.integers(int(self.low), int(self.high), count, endpoint=True).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request of the stream: seconds after the stream's start, and what it asks for."""

    at: float
    prompt: list[int]
    new_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """What a stream is drawn from.

    Attributes:
      requests: how many.
      rate: arrivals a second on average, as a Poisson process; 0: all at once.
      prompt_tokens: law of the tokens of each prompt's own.
      new_tokens: law of the tokens that each request draws.
      shared_prefix: tokens that all prompts begin with.
      seed: the same seed gives the same stream.
    """

    requests: int
    rate: float
    prompt_tokens: Lengths
    new_tokens: Lengths
    shared_prefix: int = 0
    seed: int = 0

    def __post_init__(self):
        for name, least in (("requests", 1), ("rate", 0), ("shared_prefix", 0), ("seed", 0)):
            value = getattr(self, name)
            if not least <= value < 2**32:
                raise DSV41Error(f"request stream: {name}: expected a number of {least} or more, got {value}")


def make_stream(plan: StreamPlan, config: ModelConfig, text: Sequence[int] | None = None) -> list[Arrival]:
    """The plan's requests in the order of arrival.

    Every prompt is BOS, the shared prefix and tokens of its own. Same seed and rate 2 r: the same requests in half of
    the time.

    Args:
      text: token ids to take prompts from: the prefix from their beginning, each prompt's own from a random place.
        None: random ids, special tokens left out.

    Raises:
      DSV41Error: the text is too short.
    """
    rng = np.random.default_rng(plan.seed)
    waits = rng.exponential(size=plan.requests)
    at = np.cumsum(waits) / plan.rate if plan.rate else np.zeros(plan.requests)
    own, new = plan.prompt_tokens.draw(rng, plan.requests), plan.new_tokens.draw(rng, plan.requests)
    longest = max(*own, plan.shared_prefix)
    if text is not None and len(text) < longest:
        raise DSV41Error(f"request stream: the text has {len(text)} tokens, a prompt needs {longest}")
    special = (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.image_token_id)
    words = np.setdiff1d(np.arange(config.text_config.vocab_size), special)

    def tokens(count: int, begin: int | None = None) -> list[int]:
        if text is None:
            return rng.choice(words, count).tolist()
        begin = int(rng.integers(len(text) - count + 1)) if begin is None else begin
        return list(text[begin : begin + count])

    start = [config.bos_token_id, *tokens(plan.shared_prefix, 0)]
    return [
        Arrival(at=float(when), prompt=start + tokens(count), new_tokens=more)
        for when, count, more in zip(at, own, new, strict=True)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What became of a request. Seconds are counted from its arrival, time in the queue included.

    Attributes:
      first_token_s: until its first token.
      finished_s: until its last token.
      prompt_tokens, new_tokens: of it.
    """

    first_token_s: float
    finished_s: float
    prompt_tokens: int
    new_tokens: int

    @property
    def time_per_token_s(self) -> float | None:
        """Mean seconds of a token behind the first; None if there is none."""
        return (self.finished_s - self.first_token_s) / (self.new_tokens - 1) if self.new_tokens > 1 else None


def run_stream(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    sampling: SamplingParams = SamplingParams(temperature=0),  # noqa: B008  frozen
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Served], float]:
    """Serves a stream; requests have no stop ids, so that they draw all of their tokens.

    Args:
      engine: warmed up, with nothing under way.
      arrivals: ascending.
      clock: the engine's.
      on_progress: called with (requests done, requests).

    Returns:
      What became of each, in the order of their ends, and the seconds from the start to the last end.

    Raises:
      DSV41Error: a request cannot be served, or its logits are not numbers.
    """
    waiting, live, done = collections.deque(arrivals), {}, []
    started = clock()
    while waiting or live:
        now = clock() - started
        while waiting and waiting[0].at <= now:
            arrival = waiting.popleft()
            added = engine.add(arrival.prompt, max_new_tokens=arrival.new_tokens, sampling=sampling, stop_ids=())
            live[added] = started + arrival.at
        if not live:
            sleep(waiting[0].at - now)
            continue
        for event in engine.step():
            if event.finish_reason is None:
                continue
            result, arrived = engine.take(event.request), live.pop(event.request)
            if result.error is not None:
                raise DSV41Error(f"request {event.request}: {result.error}")
            done.append(
                Served(
                    first_token_s=result.metrics.first_token - arrived,
                    finished_s=result.metrics.finished - arrived,
                    prompt_tokens=result.prompt_tokens,
                    new_tokens=len(result.token_ids),
                )
            )
            if on_progress is not None:
                on_progress(len(done), len(arrivals))
    return done, clock() - started


def percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    """p50, p90 and p99 of those that are not None; None each without any."""
    known = [v for v in values if v is not None]
    at = (50, 90, 99)
    found = np.percentile(known, at).tolist() if known else [None] * len(at)
    return {f"p{q}": v for q, v in zip(at, found, strict=True)}
