"""Thousands of requests over a small pool: no leak, no starvation, nobody reads what is somebody else's."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from dsv41.config import load_config, with_overrides
from dsv41.engine import EngineOptions, Speculation
from dsv41.kv_store import HostPages, PageStore, PageTiers, SnapshotPool, cache_fingerprint
from dsv41.ops.sampling import SamplingParams
from tests.engine.fake_runner import PAGE, expected_tokens, fake_engine, row_hashes
from tests.golden import DATA
from tests.models_for_tests import OVERRIDES

CONFIG = with_overrides(load_config(DATA / "tiny_text"), OVERRIDES)
OPTIONS = EngineOptions(
    max_requests=5, max_tokens=10 * PAGE, num_pages=17, prefill_chunk=24, prefill_rows=2, stop_ids=2, poison=True
)


@dataclasses.dataclass
class Sent:
    """A request of the simulation."""

    prompt: list[int]
    new: int
    seed: int
    stop_ids: tuple[int, ...]
    reuse: bool
    aborted: bool = False


class Traffic:
    """Prompts that begin alike, go on from earlier answers, or have nothing in common with any."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.documents = [self.ids(n) for n in self.rng.integers(1, 100, 12)]
        self.answered: collections.deque[list[int]] = collections.deque(maxlen=10)

    def ids(self, count: int) -> list[int]:
        return self.rng.integers(3, 500, count).tolist()

    def prompt(self) -> list[int]:
        rng, kind = self.rng, self.rng.integers(4)
        if kind == 0 and self.answered:  # the next turn, or an edit of the last one
            row = list(self.answered[rng.integers(len(self.answered))])
            row = row[: rng.integers(1, len(row) + 1)] if rng.random() < 0.4 else row
        elif kind == 3:
            row = []
        else:
            row = list(self.documents[rng.integers(len(self.documents))])
        return (row + self.ids(rng.integers(1, 40)))[: OPTIONS.max_tokens - 1]

    def request(self) -> Sent:
        rng, prompt = self.rng, self.prompt()
        new = int(rng.integers(1, min(40, OPTIONS.max_tokens - len(prompt)) + 1))
        stops = tuple(self.ids(rng.integers(0, 3))) if rng.random() < 0.3 else ()
        return Sent(prompt, new, int(rng.integers(100)), stops, reuse=rng.random() < 0.9)


def check_index(engine) -> None:
    """Every page that later prompts can find holds what it is found by."""
    index, cache = engine._prefix.index, engine._run.cache
    rows = {}

    def row(page) -> list[int]:
        if page.key not in rows:
            parent = index._tree.get(page.parent)
            rows[page.key] = (row(parent.page) if parent else []) + page.tokens.tolist()
        return rows[page.key]

    for node in index._tree:
        hashes, count = row_hashes(row(node.page))[-node.page.count :], node.page.count
        ones = cache.main[1][node.value].view(np.int64)[:count]
        np.testing.assert_array_equal(ones, np.stack([hashes, node.page.tokens], axis=1))
        np.testing.assert_array_equal(cache.main[0][node.value].view(np.int64)[: count // 2, 0], hashes[1::2])


def simulate(engine, requests: int, seed: int, *, drop=lambda: None) -> dict[int, Sent]:
    """Sends requests in bursts, aborts some, and takes the results of the rest as they come."""
    traffic, rng, sent, waiting = Traffic(seed), np.random.default_rng(seed + 1), {}, set()
    ticks = itertools.count()
    engine._clock = lambda: float(next(ticks))
    steps = 0
    while len(sent) < requests or engine.busy:
        for _ in range(rng.integers(0, 8) if len(sent) < requests and len(engine._queue) < 6 else 0):
            new = traffic.request()
            number = engine.add(
                new.prompt, max_new_tokens=new.new, stop_ids=new.stop_ids, reuse=new.reuse,
                sampling=SamplingParams(seed=new.seed),
            )  # fmt: skip
            sent[number] = new
            waiting.add(number)
        if waiting and rng.random() < 0.03:
            number = int(rng.choice(sorted(waiting)))
            engine.abort(number)
            sent[number].aborted = True
        engine.step()
        steps += 1
        assert steps < 200 * requests, "the engine stands still"
        if rng.random() < 0.02:
            drop()
        if steps % 50 == 0:
            check_index(engine)
        for number in [n for n in waiting if engine.result(n) is not None]:
            waiting.discard(number)
            finish(engine, number, sent[number], traffic)
    return sent


def finish(engine, number: int, sent: Sent, traffic: Traffic) -> None:
    result = engine.result(number)
    wanted = expected_tokens(sent.prompt, sent.new, sent.seed, sent.stop_ids)
    assert result.error is None, f"request {number}: {result.error}"
    if sent.aborted:
        assert result.finish_reason == "abort"
        wanted = wanted[: len(result.token_ids)]
    else:
        assert result.finish_reason == ("stop" if wanted[-1] in sent.stop_ids else "length")
        traffic.answered.append([*sent.prompt, *wanted])
    assert result.token_ids == wanted, f"request {number}"


MODES = {
    "ced, drafts": {"prefill": "ced", "speculation": Speculation()},
    "ced": {"prefill": "ced"},
    "full": {"prefill": "full"},
    "full, drafts, no reuse": {"prefill": "full", "speculation": Speculation(draft_tokens=2), "reuse": False},
}


@pytest.mark.parametrize("mode", MODES)
def test_many_requests(monkeypatch, mode):
    """2,000 and then some, with aborts, evictions, requests set back, and snapshots that are dropped at any moment."""
    count = 2000 if mode == "ced, drafts" else 250
    snapshots = SnapshotPool(1 << 14)
    tiers = PageTiers(PAGE, host=HostPages(40 * PAGE * 24))
    options = dataclasses.replace(OPTIONS, **MODES[mode])
    engine = fake_engine(monkeypatch, CONFIG, options, tiers=tiers, snapshots=snapshots)
    sent = simulate(engine, count, seed=len(mode), drop=snapshots.clear)
    check_index(engine)
    assert engine.leaks() == {"pages": 0, "references": 0, "rows": 0}
    metrics = engine.metrics
    print(f"\n{mode}: {len(sent)} requests, {sum(s.aborted for s in sent.values())} aborted; {metrics}")
    assert metrics.finished + metrics.aborted == len(sent) == metrics.requests >= count
    assert metrics.preemptions > 0
    assert sum(metrics.cached_tokens.values()) + metrics.fresh_tokens == metrics.prompt_tokens
    if options.reuse:
        assert metrics.evicted_pages and metrics.cached_tokens["hbm"] and metrics.cached_tokens["host"]
        assert (metrics.window_hits > 0) == (mode != "full")
    admitted = [engine.result(n).metrics.admitted for n in sent]
    in_order = [a for a in admitted if a is not None]
    assert in_order == sorted(in_order), "first come, first served"


def test_many_requests_over_a_disk_that_damages_pages(monkeypatch, tmp_path):
    """Two engines, one after the other, on one store; now and then a record changes or is gone."""
    rng, root = np.random.default_rng(0), cache_fingerprint(CONFIG, "none")
    damaged = []

    def damage() -> None:
        files = sorted(f for f in tmp_path.rglob("*") if f.is_file() and f.name != "writer.lock")
        for file in files[:: 1 + len(files) // 5]:
            raw = bytearray(file.read_bytes())
            raw[rng.integers(len(raw))] ^= 1 << rng.integers(8)
            file.write_bytes(raw[: rng.integers(len(raw))] if rng.random() < 0.3 else raw)
            damaged.append(file)

    for turn in range(2):
        with PageStore(tmp_path, root, byte_budget=1 << 20) as store:
            tiers = PageTiers(PAGE, host=HostPages(4 * PAGE * 24), store=store)
            engine = fake_engine(monkeypatch, CONFIG, OPTIONS, tiers=tiers)
            simulate(engine, 150, seed=5, drop=damage if turn else store.flush)
            check_index(engine)
            assert engine.leaks() == {"pages": 0, "references": 0, "rows": 0}
            print(f"\n{engine.metrics}\n{store.stats}")
            assert engine.metrics.cached_tokens["ssd"]
    assert damaged and store.stats.damaged
