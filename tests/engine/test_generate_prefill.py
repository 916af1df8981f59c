"""generate(prefill="ced"): exact within the window, whatever the chunks, and what the engine would say behind it."""

import functools

import pytest

from dsv41.config import DSV41Error
from dsv41.engine import Engine, EngineOptions, Speculation, generate
from dsv41.ops.sampling import SamplingParams
from tests.models_for_tests import tiny_model

CHUNK = 16
# Two within the window of 16 tokens, two beyond it.
PROMPTS = [[0], [0, *range(40, 55)], [0, *range(200, 219)], [0, *range(100, 160)]]


def run(prompts=PROMPTS, **options):
    options = {"max_new_tokens": 6, "stop_ids": (), "prefill_chunk": CHUNK, "prefill": "ced"} | options
    return [r.token_ids for r in generate(tiny_model(), prompts, **options)]


@functools.cache
def plain():
    return run()


@pytest.mark.slow
def test_prompts_within_the_window_give_the_tokens_of_full_prefill():
    assert plain()[:2] == run(prefill="full")[:2]


@pytest.mark.slow
def test_a_chunk_smaller_than_the_window_counts_as_one():
    """The last chunk always holds the whole tail."""
    assert run(prefill_chunk=3) == plain()


@pytest.mark.slow
def test_the_engine_gives_the_same_tokens():
    engine = Engine(tiny_model(), EngineOptions(max_requests=4, max_tokens=256, prefill_chunk=CHUNK, reuse=False))
    requests = [engine.add(p, max_new_tokens=6, stop_ids=()) for p in PROMPTS]
    engine.run()
    assert [engine.take(r).token_ids for r in requests] == plain()


@pytest.mark.slow
def test_speculation_gives_the_same_tokens():
    seen = []
    prefill = run(speculate=Speculation(), on_prefill=lambda done, total: seen.append((done, total)))
    assert prefill == plain()
    # Of 1, 16, 20 and 61 tokens: 1, 16, 4 and 16 first; the last 16 of each prompt stay together.
    assert seen == [(n, 98) for n in (37, 69, 82, 98)]


@pytest.mark.slow
def test_a_stop_while_other_prompts_are_under_way():
    stop = plain()[0][0]
    stopped = run(stop_ids=[stop])
    assert stopped[0] == (stop,)
    for mine, free in zip(stopped, plain(), strict=True):
        assert mine == free[: len(mine)]


@pytest.mark.slow
def test_sampling_repeats():
    warm = SamplingParams(temperature=1, seed=3)
    assert run(sampling=warm) == run(sampling=warm) != plain()


def test_unknown_kinds_are_refused():
    with pytest.raises(DSV41Error, match="prefill: expected 'ced' or 'full', got 'half'"):
        run(prefill="half")
