"""The pool of window snapshots: lifetime, room, counts."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import dsv41.kv_store.snapshot_pool as snapshot_pool
from dsv41.config import DSV41Error
from dsv41.kv_store import SnapshotPool, default_budget, host_memory_bytes
from tests.kv_store.rows import Clock


def array(size, value=0):
    return np.full(size, value, np.uint8)


def make_pool(budget=100, ttl_s=60.0):
    clock = Clock()
    return SnapshotPool(budget, ttl_s=ttl_s, clock=clock), clock


def test_a_snapshot_comes_back_as_it_was():
    pool, _ = make_pool()
    rows = (array(30, 7), array((2, 5), 9))
    assert pool.put((b"key", 128), rows, {"length": 128})
    found = pool.get((b"key", 128))
    assert all(a is b for a, b in zip(found.arrays, rows))
    assert (found.meta, found.nbytes, pool.nbytes) == ({"length": 128}, 40, 40)
    assert pool.get((b"key", 130)) is None
    assert (pool.stats.hits, pool.stats.misses, pool.stats.hit_bytes) == (1, 1, 40)


def test_a_snapshot_lives_for_its_time_after_the_last_use():
    pool, clock = make_pool(ttl_s=60.0)
    pool.put("a", (array(10),))
    pool.put("b", (array(10),))
    clock.now += 59
    assert pool.get("a") is not None
    clock.now += 1
    assert pool.get("b") is None
    assert (len(pool), pool.nbytes, pool.stats.expirations) == (1, 10, 1)
    clock.now += 60
    pool.expire()
    assert (len(pool), pool.nbytes, pool.stats.expirations) == (0, 0, 2)


def test_the_least_recently_used_makes_room():
    pool, _ = make_pool(budget=100)
    for name in "abc":
        pool.put(name, (array(30),))
    pool.get("a")
    assert pool.put("d", (array(60),))
    assert [name for name in "abcd" if pool.get(name)] == ["a", "d"]
    assert (pool.stats.evictions, pool.nbytes) == (2, 90)


def test_what_is_larger_than_the_budget_is_not_kept():
    pool, _ = make_pool(budget=100)
    pool.put("a", (array(90),))
    assert not pool.put("b", (array(60), array(41)))
    assert pool.get("a") is not None
    assert (pool.stats.refused, pool.stats.evictions) == (1, 0)


def test_a_key_has_one_snapshot():
    pool, _ = make_pool()
    pool.put("a", (array(60, 1),))
    pool.put("a", (array(50, 2),))
    assert pool.get("a").arrays[0][0] == 2
    assert (len(pool), pool.nbytes, pool.stats.evictions) == (1, 50, 0)
    pool.discard("a")
    pool.discard("a")
    assert (len(pool), pool.nbytes) == (0, 0)


def test_bad_arguments_are_refused():
    with pytest.raises(DSV41Error, match="byte_budget must be positive, got 0"):
        SnapshotPool(0)
    with pytest.raises(DSV41Error, match="ttl_s must be positive, got -1"):
        SnapshotPool(1, ttl_s=-1)
    with pytest.raises(DSV41Error, match="array 1: expected uint8, got float32"):
        make_pool()[0].put("a", (array(1), np.zeros(3, np.float32)))
    for share in (0, 1.5, float("nan")):
        with pytest.raises(DSV41Error, match="share"):
            default_budget(share)


def test_the_default_budget_is_a_tenth_of_what_the_host_has(tmp_path, monkeypatch):
    total = host_memory_bytes()
    assert total > 1 << 28
    assert SnapshotPool().byte_budget == default_budget() == int(total * 0.1)
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(snapshot_pool, "_CGROUP_LIMIT", limit)
    limit.write_text("1073741\n")
    assert host_memory_bytes() == 1_073_741
    limit.write_text("max\n")
    assert host_memory_bytes() >= total


class PoolMachine(RuleBasedStateMachine):
    """Against a list in order of use."""

    def __init__(self):
        super().__init__()
        self.pool, self.clock = make_pool(budget=50, ttl_s=10)
        self.order = []  # (key, size, last use), least recently used first

    def expire(self):
        self.order = [item for item in self.order if item[2] > self.clock.now - 10]

    @rule(key=st.integers(0, 5), size=st.integers(1, 60))
    def put(self, key, size):
        self.order = [item for item in self.order if item[0] != key]
        self.expire()
        assert self.pool.put(key, (array(size, key),)) == (size <= 50)
        if size <= 50:
            while sum(item[1] for item in self.order) + size > 50:
                self.order.pop(0)
            self.order.append((key, size, self.clock.now))

    @rule(key=st.integers(0, 5))
    def get(self, key):
        self.expire()
        found = self.pool.get(key)
        kept = [item for item in self.order if item[0] == key]
        assert (found is not None) == bool(kept)
        if kept:
            assert found.arrays[0].shape == (kept[0][1],)
            assert (found.arrays[0] == key).all()
            self.order.remove(kept[0])
            self.order.append((key, kept[0][1], self.clock.now))

    @rule(seconds=st.integers(0, 6))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule()
    def drop_everything(self):
        self.pool.clear()
        self.order = []

    @invariant()
    def bytes_add_up(self):
        assert len(self.pool) == len(self.order)
        assert self.pool.nbytes == sum(item[1] for item in self.order) <= 50


TestSnapshots = PoolMachine.TestCase
TestSnapshots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
