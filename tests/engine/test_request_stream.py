"""Open-loop streams: what is drawn, and when requests are handed to an engine that takes its time."""

import dataclasses

import numpy as np
import pytest

from dsv41.config import DSV41Error, load_config
from dsv41.data import TINY_MODEL
from dsv41.engine import EngineResult, Event, RequestMetrics
from dsv41.engine.request_stream import Arrival, Lengths, StreamPlan, make_stream, percentiles, run_stream

CONFIG = load_config(TINY_MODEL)
PLAN = StreamPlan(requests=50, rate=2.0, prompt_tokens=Lengths.parse("4:9"), new_tokens=Lengths.parse("3"))


@pytest.mark.parametrize(
    "text, low, high", [("7", 7, 7), ("4:9", 4, 9), ("1:1", 1, 1), ("lognormal:20:0", 20, 20), ("lognormal:2:1", 1, 99)]
)
def test_lengths(text, low, high):
    drawn = Lengths.parse(text).draw(np.random.default_rng(0), 200)
    assert all(type(n) is int for n in drawn) and low <= min(drawn) and max(drawn) <= high
    if text == "4:9":
        assert set(drawn) == set(range(4, 10))


@pytest.mark.parametrize("text", ["", "x", "0", "9:4", "1:2:3", "lognormal:5", "lognormal:0:1", "lognormal:5:-1"])
def test_lengths_that_are_none(text):
    with pytest.raises(DSV41Error, match="lengths: "):
        Lengths.parse(text)


def test_a_stream_repeats_and_depends_on_the_seed():
    one = make_stream(PLAN, CONFIG)
    assert one == make_stream(PLAN, CONFIG) != make_stream(dataclasses.replace(PLAN, seed=1), CONFIG)
    assert [a.at for a in one] == sorted(a.at for a in one)
    assert 15 < one[-1].at < 40  # 50 arrivals at 2 a second
    fast = make_stream(dataclasses.replace(PLAN, rate=4.0), CONFIG)
    assert [(a.prompt, 2 * a.at) for a in fast] == [(a.prompt, pytest.approx(a.at)) for a in one]
    assert {a.at for a in make_stream(dataclasses.replace(PLAN, rate=0), CONFIG)} == {0}


def test_prompts():
    """BOS, what all share, what each has; nothing special in it."""
    stream = make_stream(dataclasses.replace(PLAN, shared_prefix=6), CONFIG)
    assert len({tuple(a.prompt[:7]) for a in stream}) == 1 and len({tuple(a.prompt) for a in stream}) == 50
    assert all(a.prompt[0] == CONFIG.bos_token_id and 11 <= len(a.prompt) <= 16 and a.new_tokens == 3 for a in stream)
    special = {CONFIG.bos_token_id, CONFIG.eos_token_id, CONFIG.pad_token_id, CONFIG.image_token_id}
    assert not special & {t for a in stream for t in a.prompt[1:]}


def test_prompts_from_a_text():
    text = list(range(100, 130))
    stream = make_stream(dataclasses.replace(PLAN, shared_prefix=4), CONFIG, text)
    for arrival in stream:
        own = arrival.prompt[5:]
        assert arrival.prompt[1:5] == text[:4] and own == list(range(own[0], own[0] + len(own)))
    assert len({a.prompt[5] for a in stream}) > 5
    with pytest.raises(DSV41Error, match="the text has 8 tokens, a prompt needs 9"):
        make_stream(PLAN, CONFIG, text[:8])


@pytest.mark.parametrize("field, value", [("requests", 0), ("rate", -1.0), ("rate", np.nan), ("shared_prefix", -1)])
def test_plans_that_are_none(field, value):
    with pytest.raises(DSV41Error, match=f"request stream: {field}: expected"):
        dataclasses.replace(PLAN, **{field: value})


class SlowEngine:
    """One request at a time; a step takes a second, and gives it a token."""

    def __init__(self, error=None):
        self.now, self.queue, self.added, self.results, self.error = 100.0, [], [], {}, error

    def clock(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds

    def add(self, prompt, *, max_new_tokens, sampling, stop_ids):
        assert stop_ids == ()
        self.added.append(self.now - 100)
        self.queue.append([len(self.added), len(prompt), max_new_tokens, 0, RequestMetrics(added=self.now)])
        return len(self.added)

    def step(self):
        self.now += 1
        request = self.queue[0]
        number, prompt, most, done, metrics = request
        request[3] = done + 1
        if not done:
            metrics.first_token = self.now
        if done + 1 < most:
            return [Event(request=number, token_ids=(5,), finish_reason=None)]
        self.queue.pop(0)
        metrics.finished = self.now
        reason = "error" if self.error else "length"
        self.results[number] = EngineResult(
            token_ids=(5,) * most, finish_reason=reason, error=self.error, prompt_tokens=prompt, metrics=metrics
        )
        return [Event(request=number, token_ids=(5,), finish_reason=reason)]

    def take(self, number):
        return self.results.pop(number)


def test_latencies_count_from_the_arrival():
    """Requests that arrive within a step wait for its end, those behind a busy engine for longer; all of it counts."""
    engine, seen = SlowEngine(), []
    stream = [Arrival(at=at, prompt=[0] * 3, new_tokens=2) for at in (1.5, 1.75, 2.0, 20.0)]
    served, elapsed = run_stream(
        engine, stream, clock=engine.clock, sleep=engine.sleep, on_progress=lambda *x: seen.append(x)
    )
    assert engine.added == [1.5, 2.5, 2.5, 20.0]
    assert [s.first_token_s for s in served] == [1.0, 2.75, 4.5, 1.0]
    assert [s.finished_s for s in served] == [2.0, 3.75, 5.5, 2.0] and elapsed == 22.0
    assert [s.time_per_token_s for s in served] == [1.0] * 4
    assert seen == [(i, 4) for i in (1, 2, 3, 4)]


def test_an_error_ends_the_run():
    engine = SlowEngine(error="no numbers")
    with pytest.raises(DSV41Error, match="request 1: no numbers"):
        run_stream(engine, [Arrival(at=0, prompt=[0], new_tokens=1)], clock=engine.clock, sleep=engine.sleep)


def test_percentiles():
    assert percentiles([None, *range(101)]) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([None]) == {"p50": None, "p90": None, "p99": None}
