"""A conversation that goes on from the device, from host memory, from disk, and from nothing (serving.md section 5)."""

import numpy as np
import pytest

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
    NOTHING,
    PAGE,
    WARM,
    WINDOW,
    cached,
    engine,
    evict_all,
    ids,
    serve,
    tokens,
    watch_prefill,
)
from tests.models.cache_rows import same_rows
from tests.models_for_tests import small_model

ROOT = cache_fingerprint(small_model().config, "small")
PROMPT = ids(601)  # 601 + 12 tokens, of which 612 are in the cache at the end
HIT = 612


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
        assert writer.stats.orphans
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
