"""What the engine admits, reuses, sets back and counts, over the numpy cache; cases C2 to C5 and M6 at full size."""

import dataclasses
import itertools

import numpy as np
import pytest

from dsv41.config import DSV41Error, load_config, with_overrides
from dsv41.engine import EngineOptions, Speculation
from dsv41.kv_store import HostPages, PageTiers, SnapshotPool
from dsv41.ops.sampling import SamplingParams
from tests.engine.fake_runner import PAGE, expected_tokens, fake_engine
from tests.golden import DATA
from tests.models_for_tests import OVERRIDES

# The released model's window.
CONFIG = with_overrides(load_config(DATA / "tiny_text"), OVERRIDES | {"text_config.sliding_window": "128"})
WINDOW = 128
NONE = {"pages": 0, "references": 0, "rows": 0}


@pytest.fixture
def make(monkeypatch):
    def made(*, snapshots=None, tiers=None, clock=None, **options):
        base = {"max_requests": 3, "max_tokens": 1024, "prefill_chunk": 128, "prefill_rows": 2, "poison": True}
        clock = clock or itertools.count().__next__
        return fake_engine(
            monkeypatch, CONFIG, EngineOptions(**base | options), snapshots=snapshots, tiers=tiers, clock=clock
        )

    return made


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, count).tolist()


def serve(engine, prompt, new: int = 3, **options):
    """The result of one request, which is right."""
    number = engine.add(prompt, max_new_tokens=new, stop_ids=(), **options)
    for _ in range(2000):
        if engine.result(number) is not None:
            break
        engine.step()
    result = engine.take(number)
    assert result.token_ids == expected_tokens(prompt, new, 0), result
    return result


def cached(result) -> int:
    return sum(result.metrics.cached_tokens.values())


# Reuse


@pytest.mark.parametrize("hit, used", [(64, 0), (128, 0), (129, 0), (130, 130), (131, 130), (1000, 1000)])
def test_case_c2_short_hits_are_not_used(make, hit, used):
    """129 would leave half a pair behind, and 128 of it gain nothing."""
    engine = make(max_tokens=1100)
    first = ids(hit)
    serve(engine, [*first, 7], 1)
    before = engine._run.computed
    result = serve(engine, [*first, 8, 9, 10], 1)
    assert cached(result) == used
    assert result.metrics.replayed_tokens == (WINDOW if used else 0)
    assert engine._run.computed - before == hit + 3 - used + result.metrics.replayed_tokens


def test_case_c3_an_edit_inside_a_long_session(make):
    engine = make(max_tokens=4096)
    live = ids(3572)
    serve(engine, live, 1)
    before = engine._run.computed
    result = serve(engine, live[:3237] + ids(95, seed=1), 1)
    # 3,237 is odd: one token of the common part is computed again.
    assert engine._run.computed - before == 96 + WINDOW
    assert (result.metrics.fresh_tokens, result.metrics.replayed_tokens, cached(result)) == (96, WINDOW, 3236)


def test_case_c4_sessions_do_not_take_each_others_windows(make):
    """The hit rate does not depend on how many sessions take turns, with one window snapshot or none."""
    rates = {}
    for sessions in (2, 64):
        engine = make(snapshots=SnapshotPool(1), num_pages=sessions * 40)
        rows = [ids(140, seed=s) for s in range(sessions)]
        for _ in range(10):
            for row in rows:
                row += [*serve(engine, row, 3).token_ids, *ids(20, seed=len(row))]
        rates[sessions] = engine.metrics.hit_rate
        assert engine.metrics.window_hits == 0
    assert rates[2] == rates[64] > 0.7


def test_case_c5_drafts_do_not_change_hits(make):
    counts = []
    for speculation in (None, Speculation()):
        engine = make(speculation=speculation)
        prompt = ids(300)
        first = serve(engine, prompt, 9)
        results = [serve(engine, prompt, 9), serve(engine, [*prompt, *first.token_ids, *ids(40, 1)], 9)]
        counts.append([(r.metrics.cached_tokens, r.metrics.replayed_tokens) for r in results])
    assert counts[0] == counts[1]
    assert [c["hbm"] for c, _ in counts[0]] == [298, 308]


def test_case_m6_fresh_and_cached_tokens_are_counted_apart(make):
    engine = make()
    prompt = ids(200)
    results = [serve(engine, prompt) for _ in range(10)]
    assert [r.metrics.fresh_tokens for r in results] == [200] + [2] * 9
    assert [cached(r) for r in results] == [0] + [198] * 9
    m = engine.metrics
    assert (m.prompt_tokens, m.fresh_tokens, m.cached_tokens["hbm"], m.replayed_tokens) == (2000, 218, 1782, 1152)
    assert m.hit_rate == 1782 / 2000


def test_a_request_may_leave_reuse_out(make):
    engine = make()
    prompt = ids(300)
    serve(engine, prompt, reuse=False)
    assert engine.leaks() == NONE and engine._prefix.pool.num_free == engine._prefix.pool.num_pages
    assert cached(serve(engine, prompt)) == 0
    assert cached(serve(engine, prompt, reuse=False)) == 0
    assert cached(serve(engine, prompt)) == 298
    assert all(cached(serve(make(reuse=False), prompt)) == 0 for _ in range(2))


def test_windows_from_snapshots(make):
    """After an answer, if the suffix fills the decoder's tail; else, or once they are gone, the window is replayed."""
    pool = SnapshotPool(1 << 20)
    engine = make(snapshots=pool)
    row = ids(200)
    row += serve(engine, row).token_ids
    for suffix, hit in ((WINDOW, True), (WINDOW + 50, True), (WINDOW - 2, False)):
        # The last token of the answer is not in the cache.
        end = len(row) - 1 - (len(row) - 1) % 2
        prompt = row + ids(suffix - (len(row) - end), seed=suffix)
        result = serve(engine, prompt)
        assert (result.metrics.window_hit, result.metrics.replayed_tokens) == (hit, 0 if hit else WINDOW)
        assert cached(result) == end
        row = [*prompt, *result.token_ids]
    pool.clear()
    result = serve(engine, row + ids(200, 1))
    assert not result.metrics.window_hit and result.metrics.replayed_tokens == WINDOW


def test_old_snapshots_are_replaced_by_replay(make):
    now = [0.0]
    engine = make(snapshots=SnapshotPool(1 << 20, ttl_s=600, clock=lambda: now[0]))
    row, hits = ids(200), []
    for pause in (0, 599, 600, 0):
        now[0] += pause
        result = serve(engine, row)
        hits.append(result.metrics.window_hit)
        row = [*row, *result.token_ids, *ids(WINDOW, len(row))]
    assert hits == [False, True, False, True]


@pytest.mark.parametrize("chunk", [1, 130])
def test_chunks_of_other_sizes(make, chunk):
    """The last one always holds the whole tail."""
    engine = make(prefill_chunk=chunk, snapshots=SnapshotPool(1 << 20))
    for length in (5, 127, 128, 129, 255, 256, 257, 600):
        row = ids(length, length)
        row += serve(engine, row).token_ids
        serve(engine, row + ids(140, 1))


# Room


def test_a_request_as_large_as_the_pool_finds_its_own_prefix(make):
    """To go on inside the pool's last page it would need one more, for the copy."""
    engine = make(max_tokens=16 * PAGE, num_pages=16)
    prompt = ids(15 * PAGE + 5)
    serve(engine, prompt)
    serve(engine, prompt, 10)
    serve(engine, [*prompt, 5], 10)
    assert engine.leaks() == NONE


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("speculation", [None, Speculation()], ids=["plain", "drafts"])
def test_requests_are_set_back_when_pages_run_out(make, reuse, speculation):
    engine = make(num_pages=36, max_tokens=320, reuse=reuse, speculation=speculation)
    prompts = [ids(190, seed) for seed in range(6)]
    numbers = [engine.add(p, max_new_tokens=100, stop_ids=(), sampling=SamplingParams(seed=3)) for p in prompts]
    for _ in range(3000):
        engine.step()
    results = [engine.take(n) for n in numbers]
    assert [r.token_ids for r in results] == [expected_tokens(p, 100, 3) for p in prompts]
    assert engine.metrics.preemptions == sum(r.metrics.preemptions for r in results) > 0
    assert results[0].metrics.preemptions == 0, "the oldest goes on"
    assert engine.leaks() == NONE


def test_waiting_requests_are_served_in_order(make):
    """A small one does not overtake a large one that waits for pages."""
    engine = make(num_pages=20, max_tokens=320, reuse=False)
    order = []
    numbers = [engine.add(ids(n, n), max_new_tokens=3, stop_ids=()) for n in (200, 300, 10, 300, 5, 6)]
    while engine.busy:
        engine.step()
        order += [n for n in numbers if n not in order and engine._request(n).metrics.admitted is not None]
    assert order == numbers


def test_waiting_for_room_does_not_read_the_disk_again_and_again(make):
    host = HostPages(1 << 20)
    tiers = PageTiers(PAGE, host=host)
    engine = make(num_pages=20, max_tokens=320, tiers=tiers)
    prompt = ids(280)
    serve(engine, prompt)
    serve(engine, ids(300, 1), 10)  # evicts it
    long, short = engine.add(ids(250, 2), max_new_tokens=60, stop_ids=()), engine.add(prompt, max_new_tokens=3)
    before = host.stats.hits
    engine.run()
    assert sum(engine.take(short).metrics.cached_tokens.values()) and engine.take(long)
    assert host.stats.hits - before < 6 * 17


# Aborts and errors


def test_aborts_in_every_state(make):
    engine = make(max_requests=2, snapshots=SnapshotPool(1 << 20), speculation=Speculation())
    prompts = [ids(n, n) for n in (300, 301, 302, 303)]
    decoding, prefilling, waiting, other = (engine.add(p, max_new_tokens=50, stop_ids=()) for p in prompts)
    engine.abort(waiting)
    while not engine._request(decoding).new_tokens:
        engine.step()
    engine.abort(decoding)
    late = engine.add(ids(400, 5), max_new_tokens=50, stop_ids=())
    while engine._request(late).metrics.admitted is None:
        engine.step()
    assert engine._request(late).status.value == "prefill"
    engine.abort(late)
    engine.abort(late)
    engine.run()
    for number, prompt in ((prefilling, prompts[1]), (other, prompts[3])):
        assert engine.take(number).token_ids == expected_tokens(prompt, 50, 0)
    first = engine.result(decoding)
    assert first.finish_reason == "abort"
    assert first.token_ids == expected_tokens(prompts[0], 50, 0)[: len(first.token_ids)] != ()
    assert engine.result(waiting).token_ids == engine.result(late).token_ids == ()
    assert engine.metrics.aborted == 3 and engine.leaks() == NONE
    engine.abort(decoding)
    assert engine.metrics.aborted == 3


def test_the_stream_of_a_request(make):
    engine = make(speculation=Speculation())
    prompt = ids(50)
    wanted = expected_tokens(prompt, 20, 0)
    other = engine.add(ids(60, 1), max_new_tokens=20, stop_ids=())
    assert tuple(engine.stream(engine.add(prompt, max_new_tokens=20, stop_ids=()))) == wanted
    stop = engine.add(prompt, max_new_tokens=20, stop_ids=(wanted[7],))
    assert tuple(engine.stream(stop)) == wanted[: wanted.index(wanted[7]) + 1]
    assert engine.result(stop).finish_reason == "stop"
    assert tuple(engine.stream(other)) == expected_tokens(ids(60, 1), 20, 0)


def test_events_are_the_tokens(make):
    engine = make(speculation=Speculation())
    prompts = [ids(n, n) for n in (5, 60, 200)]
    numbers = [engine.add(p, max_new_tokens=n, stop_ids=()) for p, n in zip(prompts, (1, 9, 30), strict=True)]
    seen, ends = {n: [] for n in numbers}, {}
    while engine.busy:
        for event in engine.step():
            assert event.request not in ends
            seen[event.request] += event.token_ids
            if event.finish_reason:
                ends[event.request] = event.finish_reason
    assert [tuple(seen[n]) for n in numbers] == [engine.result(n).token_ids for n in numbers]
    assert set(ends.values()) == {"length"} and len(ends) == 3


def test_times(make):
    clock = itertools.count()
    engine = make(clock=lambda: float(next(clock)))
    m = serve(engine, ids(300), 5).metrics
    assert m.added < m.admitted < m.first_token < m.finished
    assert m.time_to_first_token_s == m.first_token - m.added
    assert m.rounds == 4 and m.acceptance_length == 1.0


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([5] * 1000, {"max_new_tokens": 25}, "1000 tokens and 25 new ones exceed what the engine holds of one: 1024"),
        ([5], {"stop_ids": range(9)}, "9 stop ids, the engine's options allow 8"),
        ([5], {"stop_ids": [512]}, "stop id 512, expected an id in"),
        ([512], {}, "token 0 is 512"),
        ([], {}, "empty"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens"),
        ([505], {}, "image token"),
    ],
)
def test_requests_that_are_refused(make, prompt, options, message):
    engine = make()
    with pytest.raises(DSV41Error, match=message):
        engine.add(prompt, **{"max_new_tokens": 3} | options)
    assert not engine.busy and engine.metrics.requests == 0


def test_refusals(make, monkeypatch):
    engine = make(num_pages=4)
    with pytest.raises(DSV41Error, match="what the engine holds of one: 64"):
        engine.add(ids(60), max_new_tokens=5)
    for call in (engine.result, engine.abort, engine.take, lambda n: next(engine.stream(n))):
        with pytest.raises(DSV41Error, match="no request 5"):
            call(5)
    number = engine.add(ids(5), max_new_tokens=5)
    for call, message in (
        (lambda: engine.take(number), "request 0 is not done"),
        (engine.leaks, "a request is under way"),
        (engine.warm_up, "a request is under way"),
    ):
        with pytest.raises(DSV41Error, match=message):
            call()
    with pytest.raises(DSV41Error, match="need the checkpoint's identity"):
        type(engine)(engine._model, EngineOptions(), tiers=PageTiers(PAGE, host=HostPages(1 << 20)))
    with pytest.raises(DSV41Error, match="num_pages: expected 1 or more, got 0"):
        EngineOptions(num_pages=0)
    with pytest.raises(DSV41Error, match="prefill: expected 'ced' or 'full', got 'half'"):
        EngineOptions(prefill="half")
    with pytest.raises(DSV41Error, match="max_tokens=5000 exceeds max_position_embeddings=4096"):
        make(max_tokens=5000)
    engram_late = with_overrides(CONFIG, {"text_config.engram_layer_ids": "[1, 8]"})
    with pytest.raises(DSV41Error, match=r"prefill 'ced' does not fit this model.*use 'full'"):
        EngineOptions().check(engram_late)
    EngineOptions(prefill="full").check(engram_late)
    without = dataclasses.replace(engine._model, drafter=None)
    with pytest.raises(DSV41Error, match="the drafter was not loaded"):
        type(engine)(without, EngineOptions(speculation=Speculation()))


def test_equal_prompts_side_by_side_end_with_one_set_of_pages(make):
    """Who computed the same beside another changes over to the pages of the first, also while it goes on."""
    engine = make(num_pages=70, speculation=Speculation())
    prompt = ids(250)
    numbers = [engine.add(prompt, max_new_tokens=n, stop_ids=()) for n in (40, 50, 60)]
    engine.run()
    assert [engine.take(n).token_ids for n in numbers] == [expected_tokens(prompt, n, 0) for n in (40, 50, 60)]
    # 250 + 59 tokens are in the cache at the end.
    assert engine._prefix.pool.num_pages - engine._prefix.pool.num_free == -(-309 // PAGE)
    assert engine.leaks() == NONE


def test_going_on_from_a_prompt_that_is_still_answered(make):
    engine = make(speculation=Speculation())
    prompt = ids(205)
    first = engine.add(prompt, max_new_tokens=60, stop_ids=())
    while engine._request(first).new_tokens < 5:
        engine.step()
    second = serve(engine, [*prompt, 9, 9, 9], 40)
    assert cached(second) == 204
    engine.run()
    assert engine.take(first).token_ids == expected_tokens(prompt, 60, 0)
    assert engine.leaks() == NONE


def test_broken_prompts_leave_nothing_for_others(make):
    engine = make()
    prompt = ids(300)
    number = engine.add(prompt, max_new_tokens=5)
    engine.step()
    page = engine._request(number).pages.pages[0]
    for pool in engine._run.cache.main:
        pool[page] = 0xFF
    engine.run()
    assert engine.take(number).finish_reason == "error"
    assert engine.metrics.failed == 1 and engine.leaks() == NONE
    assert cached(serve(engine, prompt)) == 0
