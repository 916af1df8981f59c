"""The engine over a model: tokens of `generate`, whatever shares the batch; prefixes, windows, tiers and room."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dsv41.cache import write_page
from dsv41.engine import Speculation, generate
from dsv41.engine.engine_request import EngineRequest
from dsv41.kv_store import HostPages, PageTiers, SnapshotPool
from dsv41.ops.sampling import SamplingParams
from tests.engine.engines import (
    NOTHING,
    PAGE,
    PAGES,
    WARM,
    WINDOW,
    cached,
    engine,
    evict_all,
    ids,
    page_bytes,
    same_bytes,
    serve,
    spoil_rings,
    tokens,
    watch_prefill,
)
from tests.models.cache_rows import same_rows
from tests.models_for_tests import small_model

ALONE = {"reuse": False}
FULL = {"prefill": "full"}
GREEDY = SamplingParams(temperature=0)


@functools.cache
def plain(prefill: str):
    """An engine without state worth keeping."""
    return engine(prefill=prefill, **ALONE)


@functools.cache
def alone(prefill: str, prompt: tuple[int, ...], new: int, sampling=GREEDY) -> tuple[int, ...]:
    """Tokens of a request that nothing else is near."""
    return serve(plain(prefill), list(prompt), new=new, sampling=sampling).token_ids


@pytest.fixture
def compilations():
    """The programs compiled, or fetched from the compile cache, while a test runs."""
    seen = []

    def listen(event: str, _duration: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("speculation", [None, Speculation()], ids=["plain", "drafts"])
def test_nothing_is_compiled_while_serving(compilations, speculation):
    pool = SnapshotPool(1 << 24)
    made = engine(snapshots=pool, tiers=PageTiers(PAGE, host=HostPages(1 << 24)), speculation=speculation)
    made.warm_up()
    assert compilations  # this test is the first of its module
    compilations.clear()
    prompt = ids(280)
    row = [*prompt, *serve(made, prompt).token_ids]
    serve(made, row + ids(40, 1), row + ids(5, 2), row[:270] + ids(3, 3), ids(1), sampling=WARM)
    evict_all(made)
    number = made.add(row + ids(60, 4), max_new_tokens=9)
    made.step()
    made.abort(number)
    serve(made, row + ids(60, 4), row + ids(60, 5), reuse=True)
    counts = made.metrics
    assert counts.window_hits and counts.replayed_tokens and counts.cached_tokens["host"] and counts.evicted_pages
    assert made.leaks() == NOTHING
    assert compilations == []


# Equal to generate, whatever shares the batch


LENGTHS = ((1, 63, 66, 129), (60, 61, 62, 64))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_full_prefill_gives_the_tokens_of_generate(lengths):
    """Cases A9, C13: greedy, and sampled with a seed of its own; every length modulo 4."""
    prompts = [ids(n, n) for n in lengths]
    sampling = [GREEDY, WARM, dataclasses.replace(WARM, seed=8), GREEDY]
    wanted = generate(small_model(), prompts, max_new_tokens=10, stop_ids=(), sampling=sampling, prefill_chunk=8)
    made = plain("full")
    numbers = [made.add(p, max_new_tokens=10, stop_ids=(), sampling=s) for p, s in zip(prompts, sampling, strict=True)]
    made.run()
    assert [made.take(n).token_ids for n in numbers] == tokens(wanted)


@pytest.mark.parametrize("options", [FULL, {}, {"speculation": Speculation()}], ids=["full", "ced", "ced with drafts"])
def test_case_n16_results_do_not_depend_on_the_other_requests(options):
    """Bit for bit: other orders, arrivals in between, requests that end, are aborted or have other parameters."""
    made = engine(**options, **ALONE)
    prompts = [(ids(n, n), s) for n, s in ((100, GREEDY), (33, WARM), (150, WARM), (17, GREEDY))]
    wanted = [serve(made, p, new=12, sampling=s).token_ids for p, s in prompts]
    for order, gap in (((0, 1, 2, 3), 0), ((3, 2, 0, 1), 2), ((2, 3, 1, 0), 5)):
        other = [made.add(ids(90, 5 + gap), max_new_tokens=40, sampling=SamplingParams(seed=gap)) for _ in range(2)]
        numbers = {}
        for i in order:
            prompt, sampling = prompts[i]
            numbers[i] = made.add(prompt, max_new_tokens=12, stop_ids=(), sampling=sampling)
            for _ in range(gap):
                made.step()
        made.abort(other[0])
        made.run()
        assert [made.take(numbers[i]).token_ids for i in range(4)] == wanted
    assert made.leaks() == NOTHING


def test_drafts_do_not_change_greedy_tokens():
    prompts = [ids(n, n) for n in (100, 20, 5)]
    made = engine(speculation=Speculation(), **ALONE)
    assert tokens(serve(made, *prompts, new=20)) == [alone("ced", tuple(p), 20) for p in prompts]
    assert made.metrics.verified > 0


def test_a_stop_id_ends_a_request():
    prompt = ids(40)
    free = alone("ced", tuple(prompt), 12)
    made = plain("ced")
    number = made.add(prompt, max_new_tokens=12, stop_ids=(free[5], 500))
    made.run()
    result = made.take(number)
    assert result.finish_reason == "stop" and result.token_ids == free[: free.index(free[5]) + 1]


@pytest.mark.parametrize("prefill", ["ced", "full"])
def test_case_a12_chunks_do_not_change_anything(monkeypatch, prefill):
    prompt = ids(150)
    made = engine(prefill=prefill, **ALONE)
    rows = watch_prefill(made)
    wanted = serve(made, prompt)
    chunk = EngineRequest.chunk
    for size in (16, 17, 33):
        monkeypatch.setattr(EngineRequest, "chunk", lambda self, most, tail, size=size: chunk(self, size, tail))
        assert serve(made, prompt).token_ids == wanted.token_ids
        same_rows(rows[-1], rows[0])
    assert len(rows) == 4


# Prefixes


@pytest.mark.parametrize("options", [FULL, {}, {"speculation": Speculation()}], ids=["full", "ced", "ced with drafts"])
def test_case_c1_a_hit_reads_its_own_window(options):
    """Pages of [0, H) are those that were left, byte for byte, and what windows held before does not matter."""
    made = engine(**options)
    prompt = ids(300)
    first = serve(made, prompt)
    pages, index = page_bytes(made), made._prefix.index
    again = prompt + ids(20, 1)
    serve(made, ids(200, 2), ids(210, 3), ids(220, 4), ids(230, 5))
    left = {node.value: node.page.count for node in index._tree if node.page.tokens[0] == prompt[0]}
    rows = watch_prefill(made)
    result = serve(made, again, reuse=True)
    assert cached(result) == 300 and result.metrics.replayed_tokens == WINDOW
    full = [number for number, count in left.items() if count == PAGE]
    assert full and all(same_bytes(pages[n], page_bytes(made)[n]) for n in full)
    spoil_rings(made)
    other = serve(made, prompt + ids(20, 1))
    # The prompt's own end is in the index now; 318 is the hit, so that other rows are computed: the tokens agree.
    assert cached(other) == 318
    assert len(result.token_ids) == len(other.token_ids) == len(first.token_ids)
    dirty = engine(**options)
    serve(dirty, prompt)
    spoil_rings(dirty)
    seen = watch_prefill(dirty)
    assert serve(dirty, again).token_ids == result.token_ids
    same_rows(seen[0], rows[0])
    assert made.leaks() == dirty.leaks() == NOTHING


@pytest.mark.parametrize("hit, used", [(8, 0), (16, 0), (17, 0), (18, 18), (100, 100)])
def test_case_c2_short_hits_are_not_used(hit, used):
    made = shared_engine()
    first = ids(hit, hit)
    serve(made, [*first, 7], new=1)
    result = serve(made, [*first, 8, 9], new=3)
    assert cached(result) == used and result.metrics.replayed_tokens == (WINDOW if used else 0)
    if not used:
        assert result.token_ids == alone("ced", (*first, 8, 9), 3)


@functools.cache
def shared_engine():
    return engine()


def test_case_c5_hits_do_not_depend_on_drafts():
    counts = []
    for speculation in (None, Speculation()):
        made = engine(speculation=speculation)
        prompt = ids(100)
        row = prompt + list(serve(made, prompt).token_ids)
        results = [serve(made, prompt), serve(made, row + ids(30, 1))]
        counts.append([(cached(r), r.metrics.replayed_tokens, r.token_ids) for r in results])
    # Greedy tokens are the same too.
    assert counts[0] == counts[1] and [c[:2] for c in counts[0]] == [(98, 16), (106, 16)]


def test_case_c9_padding_rows_write_nothing():
    """One request among idle rows: all pages but its own stay as they are."""
    made = engine()
    serve(made, ids(300), ids(40, 1))
    before = page_bytes(made)
    number = made.add(ids(90, 2), max_new_tokens=30, stop_ids=())
    while made._request(number).new_tokens < 20:
        made.step()
    own = made._request(number).pages.pages
    after = page_bytes(made)
    assert [n for n in range(PAGES) if not same_bytes(before[n], after[n])] == own
    made.run()


def test_a_window_snapshot_is_as_good_as_having_stayed():
    """serving.md 10.5: with a suffix of a window or more, everything is as if all had been computed, bit for bit."""
    made, cold = engine(snapshots=SnapshotPool(1 << 24)), engine(**ALONE)
    rows, cold_rows = watch_prefill(made), watch_prefill(cold)
    row, ends = ids(250), []
    for turn in range(3):
        result = serve(made, row, new=7 + turn)
        assert result.metrics.window_hit == (turn > 0)
        assert result.metrics.replayed_tokens == 0
        assert result.token_ids == serve(cold, row, new=7 + turn).token_ids
        same_rows(rows[turn], cold_rows[turn])
        ends.append(cached(result))
        row = row + list(result.token_ids) + ids(20, turn)
    # 250 + 6 tokens in the cache, then 250 + 7 + 20 + 7 of which 284 is even.
    assert ends == [0, 256, 284]


def test_dropped_snapshots_change_what_is_counted_only():
    """At one hit replay gives one result, whether there never was a snapshot or it was dropped."""
    pools = [None, SnapshotPool(1), SnapshotPool(1 << 24)]
    results = []
    for pool in pools:
        made = engine(snapshots=pool)
        row, turns = ids(120), []
        for turn in range(3):
            if pool is not None:
                pool.clear()
            turns.append(serve(made, row))
            row = row + list(turns[-1].token_ids) + ids(20, turn)
        results.append([(r.token_ids, cached(r), r.metrics.replayed_tokens) for r in turns])
    assert results[0] == results[1] == results[2]


# Room and errors


def test_requests_that_are_set_back_get_the_same_tokens():
    prompts = [ids(500, n) for n in range(4)]
    made = engine(**FULL, **ALONE)
    results = serve(made, *prompts, new=16, sampling=WARM)
    assert made.metrics.preemptions == sum(r.metrics.preemptions for r in results) > 0
    wanted = [*serve(made, *prompts[:2], new=16, sampling=WARM), *serve(made, *prompts[2:], new=16, sampling=WARM)]
    assert [r.metrics.preemptions for r in wanted] == [0] * 4
    assert tokens(results) == tokens(wanted)
    assert made.leaks() == NOTHING


def test_broken_pages_end_the_request_that_reads_them():
    prompts = [ids(60, n) for n in range(3)]
    made = engine(**ALONE)
    numbers = [made.add(p, max_new_tokens=12, stop_ids=()) for p in prompts]
    while min(made._request(n).new_tokens for n in numbers) < 3:
        made.step()
    victim = made._request(numbers[1])
    made._run.cache = write_page(made._run.cache, victim.pages.pages[0], made._prefix._poison)
    made.run()
    broken = made.take(numbers[1])
    assert broken.finish_reason == "error" and "NaN or infinity" in broken.error
    assert broken.token_ids == alone("ced", tuple(prompts[1]), 12)[: len(broken.token_ids)]
    for i in (0, 2):
        assert made.take(numbers[i]).token_ids == alone("ced", tuple(prompts[i]), 12)
    assert made.metrics.failed == 1 and made.leaks() == NOTHING


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
