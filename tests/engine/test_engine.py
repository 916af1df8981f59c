"""The engine with only a prompt's tail in the decoder: batches, prefixes, windows, and the tiers behind the device."""

import functools

import numpy as np
import pytest

from dsv41.cache import write_page
from dsv41.engine import Speculation, ThroughputTable, VerifySchedule
from dsv41.kv_store import (
    HostPages,
    PageId,
    PageStore,
    PageTiers,
    SnapshotPool,
    cache_fingerprint,
    split_row,
)
from dsv41.kv_store.store_index import RecordName
from tests.engine.engines import (
    ALONE,
    NOTHING,
    PAGE,
    PAGES,
    WARM,
    WINDOW,
    alone,
    cached,
    check_chunks,
    check_company,
    check_own_window,
    engine,
    evict_all,
    ids,
    page_bytes,
    plain,
    same_bytes,
    serve,
    tokens,
    watch_prefill,
)
from tests.models.cache_rows import same_rows
from tests.models_for_tests import small_model

ROOT = cache_fingerprint(small_model().config, "small")
PROMPT = ids(601)  # 601 + 12 tokens, of which 612 are in the cache at the end
HIT = 612
# With drafts everything is compiled once more.
DRAFTS = pytest.param(Speculation(), marks=pytest.mark.slow, id="drafts")
BOTH = pytest.mark.parametrize("speculation", [pytest.param(None, id="plain"), DRAFTS])


@pytest.mark.slow
@BOTH
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


@BOTH
def test_case_n16_results_do_not_depend_on_the_other_requests(speculation):
    check_company(speculation=speculation)


@pytest.mark.slow
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


# Prefixes


def test_case_a12_chunks_do_not_change_anything(monkeypatch):
    check_chunks(monkeypatch, "ced")


@BOTH
def test_case_c1_a_hit_reads_its_own_window(speculation):
    check_own_window(speculation=speculation)


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


@pytest.mark.slow
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
    # Kept, they spare the replay, and as much is reused.
    made, row = engine(snapshots=SnapshotPool(1 << 24)), ids(120)
    for turn in range(3):
        result = serve(made, row)
        assert cached(result) == results[0][turn][1]
        assert result.metrics.window_hit == (turn > 0) and result.metrics.replayed_tokens == 0
        row = row + list(result.token_ids) + ids(20, turn)


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


# Tiers (serving.md section 5)


def host_tiers() -> PageTiers:
    return PageTiers(PAGE, host=HostPages(1 << 24))


def store(path) -> PageStore:
    return PageStore(path, ROOT, byte_budget=1 << 24)


def second_turn(made, answer, suffix: int = 40):
    """The result of a prompt that goes on behind the answer, and what the cache held of it."""
    rows = watch_prefill(made)
    result = serve(made, [*PROMPT, *answer, *ids(suffix, 1)], new=12)
    assert made.leaks() == NOTHING
    return result, rows[-1]


def from_device(tmp_path):
    made = engine()
    return made, serve(made, PROMPT, new=12).token_ids


def from_host(tmp_path):
    made = engine(tiers=host_tiers())
    answer = serve(made, PROMPT, new=12).token_ids
    evict_all(made)
    return made, answer


def from_host_in_part(tmp_path):
    """The device keeps the full pages."""
    made = engine(tiers=host_tiers())
    answer = serve(made, PROMPT, new=12).token_ids
    evict_some(made, 1)
    return made, answer


def from_disk(tmp_path):
    with store(tmp_path) as writer:
        answer = serve(engine(tiers=PageTiers(PAGE, store=writer)), PROMPT, new=12).token_ids
    return engine(tiers=PageTiers(PAGE, store=PageStore(tmp_path, ROOT, writable=False))), answer


def evict_some(made, count: int) -> None:
    """As `evict_all`, for so many pages."""
    prefix = made._prefix
    made._run.cache, pages = prefix._take(made._run.cache, prefix.pool.num_free + count)
    made._run.cache = prefix._freed(made._run.cache, prefix.pool.release(pages))


SOURCES = {
    from_device: {"hbm": HIT, "host": 0, "ssd": 0},
    from_host: {"hbm": 0, "host": HIT, "ssd": 0},
    from_host_in_part: {"hbm": 512, "host": 100, "ssd": 0},
    from_disk: {"hbm": 0, "host": 0, "ssd": HIT},
}


def test_a_conversation_goes_on_from_every_tier(tmp_path):
    """One hit, one result: pages, windows and tokens are the same bits wherever the prefix was. Behind nothing at all
    the pages of the prefix are the same too; what replay makes of the rest is printed."""
    cold = engine(reuse=False)
    answer = serve(cold, PROMPT, new=12).token_ids
    exact, exact_rows = second_turn(cold, answer)
    results = []
    for source, tiers in SOURCES.items():
        made, same_answer = source(tmp_path)
        assert same_answer == answer
        result, rows = second_turn(made, answer)
        assert result.metrics.cached_tokens == tiers and result.metrics.replayed_tokens == WINDOW
        results.append((result.token_ids, rows))
    for token_ids, rows in results[1:]:
        assert token_ids == results[0][0]
        same_rows(rows, results[0][1])
    differ = total = 0
    for name, arrays in exact_rows.items():
        kind, _, k = name.partition(".")
        if kind in ("main", "index"):
            ratio = cold._run.cache.layout.ratios[int(k)]
            for a, b in zip(results[0][1][name], arrays, strict=True):
                np.testing.assert_array_equal(a[: HIT // ratio], b[: HIT // ratio])
                differ, total = differ + (a != b).sum(), total + b[HIT // ratio :].size
    agree = sum(a == b for a, b in zip(results[0][0], exact.token_ids, strict=True))
    print(f"\nbehind a hit at {HIT}: {differ} of {total} values of new entries differ, {agree} of 12 tokens agree")


def test_a_snapshot_beside_pages_from_host_memory():
    """Pages of one tier and the window of another: as if nothing had ever left the device."""
    made = engine(tiers=host_tiers(), snapshots=SnapshotPool(1 << 24))
    answer = serve(made, PROMPT, new=12).token_ids
    evict_all(made)
    result, rows = second_turn(made, answer)
    assert result.metrics.cached_tokens["host"] == HIT and result.metrics.window_hit
    cold = engine(reuse=False)
    exact, exact_rows = second_turn(cold, answer)
    assert result.token_ids == exact.token_ids
    same_rows(rows, exact_rows)


def pages_of(answer) -> list[PageId]:
    return split_row(ROOT, [*PROMPT, *answer[:-1]], PAGE)


@pytest.mark.parametrize("broken, left", [(0, 0), (1, 256), (2, 512)])
def test_a_damaged_page_on_disk_is_computed_again(tmp_path, caplog, broken, left):
    _, answer = from_disk(tmp_path)
    path = tmp_path / RecordName.of(pages_of(answer)[broken]).path
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with store(tmp_path) as writer:
        made = engine(tiers=PageTiers(PAGE, store=writer))
        result, _ = second_turn(made, answer)
        assert result.metrics.cached_tokens["ssd"] == left
        assert writer.stats.damaged == 1
    assert [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    if not left:
        cold = engine(reuse=False)
        assert result.token_ids == second_turn(cold, answer)[0].token_ids
    # What was computed again was stored again.
    with store(tmp_path) as writer:
        made = engine(tiers=PageTiers(PAGE, store=writer))
        again, _ = second_turn(made, answer)
        assert again.metrics.cached_tokens["ssd"] == 652 and writer.stats.damaged == 0


def test_pages_of_another_checkpoint_are_not_used(tmp_path):
    _, answer = from_disk(tmp_path)
    other = cache_fingerprint(small_model().config, "other weights")
    with PageStore(tmp_path, other, byte_budget=1 << 24) as writer:
        made = engine(checkpoint="other weights", tiers=PageTiers(PAGE, store=writer))
        assert cached(second_turn(made, answer)[0]) == 0


def test_a_page_that_the_disk_refuses_costs_no_request(tmp_path):
    """It is offered again with the next row that has it, and what follows it too."""
    with store(tmp_path) as writer:
        put, calls = writer.put, []
        writer.put = lambda page, arrays: calls.append(page) or (len(calls) > 1 and put(page, arrays))
        made = engine(tiers=PageTiers(PAGE, store=writer))
        results = [serve(made, PROMPT, new=3) for _ in range(2)]
        assert [cached(r) for r in results] == [0, 600]
        assert len(calls) > 1
        writer.flush()
        assert not writer.unsaved(split_row(ROOT, PROMPT, PAGE)[:2])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [VerifySchedule.BUDGET, VerifySchedule.GREEDY])
def test_schedules_that_look_at_the_batch(schedule):
    """Greedy tokens stay the same; rows come, go and are aborted at any moment."""
    table = ThroughputTable(block_size=5, curves={4: ((4, 100.0), (7, 60.0), (17, 30.0))})
    made = engine(speculation=Speculation(schedule=schedule, throughput=table), reuse=False)
    prompts = [ids(n, n) for n in (100, 20, 5, 70, 33)]
    wanted = tokens(serve(engine(reuse=False), *prompts, new=20))
    made.warm_up()
    numbers = [made.add(p, max_new_tokens=20, stop_ids=()) for p in prompts]
    others = [made.add(ids(150, n), max_new_tokens=20, sampling=WARM) for n in range(3)]
    for number in others:
        for _ in range(3):
            made.step()
        made.abort(number)
    made.run()
    assert [made.take(n).token_ids for n in numbers] == wanted
    assert made.metrics.accepted <= made.metrics.verified and made.leaks() == NOTHING
