"""The engine with every layer on every prompt token: the tokens of `generate`, whatever shares the batch."""

import dataclasses

import numpy as np
import pytest

from dsv41.engine import generate
from dsv41.kv_store import HostPages, PageTiers
from tests.engine.engines import (
    ALONE,
    GREEDY,
    NOTHING,
    PAGE,
    WARM,
    alone,
    check_chunks,
    check_company,
    check_own_window,
    engine,
    ids,
    plain,
    serve,
    tokens,
)
from tests.models_for_tests import small_model

FULL = {"prefill": "full"}


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1, 63, 66, 129), (60, 61, 62, 64)])
def test_full_prefill_gives_the_tokens_of_generate(lengths):
    """Cases A9, C13: greedy, and sampled with a seed of its own; every length modulo 4."""
    prompts = [ids(n, n) for n in lengths]
    sampling = [GREEDY, WARM, dataclasses.replace(WARM, seed=8), GREEDY]
    wanted = generate(small_model(), prompts, max_new_tokens=10, stop_ids=(), sampling=sampling, prefill_chunk=8)
    made = plain("full")
    numbers = [made.add(p, max_new_tokens=10, stop_ids=(), sampling=s) for p, s in zip(prompts, sampling, strict=True)]
    made.run()
    assert [made.take(n).token_ids for n in numbers] == tokens(wanted)


@pytest.mark.slow
def test_case_n16_results_do_not_depend_on_the_other_requests():
    check_company(**FULL)


@pytest.mark.slow
def test_case_a12_chunks_do_not_change_anything(monkeypatch):
    check_chunks(monkeypatch, "full")


@pytest.mark.slow
def test_case_c1_a_hit_reads_its_own_window():
    check_own_window(**FULL)


@pytest.mark.slow
def test_requests_that_are_set_back_get_the_same_tokens():
    prompts = [ids(500, n) for n in range(4)]
    made = engine(**FULL, **ALONE)
    results = serve(made, *prompts, new=16, sampling=WARM)
    assert made.metrics.preemptions == sum(r.metrics.preemptions for r in results) > 0
    assert results[3].metrics.preemptions, "the youngest is set back"
    wanted = serve(made, *prompts[2:], new=16, sampling=WARM)
    assert [r.metrics.preemptions for r in wanted] == [0] * 2
    assert tokens(results[2:]) == tokens(wanted)
    assert made.leaks() == NOTHING


@pytest.mark.slow
def test_many_requests_with_shared_beginnings():
    """Random arrivals, aborts and a small pool; those that reuse nothing have the tokens they get alone."""
    rng, made = np.random.default_rng(0), engine(**FULL, tiers=PageTiers(PAGE, host=HostPages(1 << 20)))
    documents, sent, gone = [ids(n, n) for n in (20, 200, 300, 400)], {}, set()
    while len(sent) < 50 or made.busy:
        if len(sent) < 50 and rng.random() < 0.5:
            prompt = documents[rng.integers(4)][: rng.integers(1, 401)] + ids(rng.integers(1, 40), len(sent))
            reuse, new = bool(rng.random() < 0.7), int(rng.integers(1, 12))
            number = made.add(prompt, max_new_tokens=new, stop_ids=(), sampling=WARM, reuse=reuse)
            sent[number] = (tuple(prompt), new, reuse)
        made.step()
        if sent and rng.random() < 0.03:
            number = int(rng.choice(list(sent)))
            if made.result(number) is None:
                made.abort(number)
                gone.add(number)
    exact = [n for n, (_, _, reuse) in sent.items() if not reuse and n not in gone]
    for number, (_, new, _) in sent.items():
        result = made.result(number)
        assert result.error is None and (number in gone or len(result.token_ids) == new)
    for number in exact[:6]:
        prompt, new, _ = sent[number]
        assert made.result(number).token_ids == alone("full", prompt, new, WARM), number
    assert made.leaks() == NOTHING
    print(f"\n{len(sent)} requests, {len(gone)} aborted: {made.metrics}")
    assert made.metrics.cached_tokens["hbm"] and made.metrics.evicted_pages
