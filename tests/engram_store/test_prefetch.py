"""The thread that works ahead: order, errors in the caller, and an end without waiting for what nobody takes."""

import threading

import pytest

from dsv41.config import DSV41Error
from dsv41.engram_store import Prefetcher


def test_results_come_by_key_in_any_order():
    order = []
    with Prefetcher(depth=3) as ahead:
        for n in range(3):
            assert ahead.ask(n, lambda n=n: order.append(n) or n * n)
        assert not ahead.ask(3, lambda: 9)  # bounded
        assert ahead.ask(1, lambda: -1)  # asked for already
        assert [ahead.take(n) for n in (2, 0, 1)] == [4, 0, 1]
        assert order == [0, 1, 2]
        assert ahead.take(7) is None
        assert ahead.ask(3, lambda: 9) and ahead.take(3) == 9


def test_an_error_is_the_callers_and_the_thread_goes_on():
    def fail():
        raise DSV41Error("prompt 3: engram table of layer 1: row 5")

    with Prefetcher() as ahead:
        ahead.ask("a", fail)
        ahead.ask("b", lambda: 2)
        with pytest.raises(DSV41Error, match="prompt 3: engram table of layer 1"):
            ahead.take("a")
        assert ahead.take("b") == 2


def test_waiting_looks_at_the_device_meanwhile():
    ready, looks = threading.Event(), []
    with Prefetcher() as ahead:
        ahead.ask(0, lambda: ready.wait(10))

        def look():
            looks.append(1)
            if len(looks) == 3:
                ready.set()

        assert ahead.take(0, look) is True
    assert len(looks) >= 3


def test_closing_drops_what_waits_behind_the_present_call():
    started, go, called = threading.Event(), threading.Event(), []
    ahead = Prefetcher(depth=5)
    ahead.ask(0, lambda: (started.set(), go.wait(10)))
    for n in range(1, 5):
        ahead.ask(n, lambda n=n: called.append(n))
    assert started.wait(10)
    threading.Timer(0.05, go.set).start()
    ahead.close()
    assert called == []
    assert not [t for t in threading.enumerate() if t.name.startswith("engram-prefetch")]


def test_an_early_end_inside_with():
    def interrupted():
        with Prefetcher() as ahead:
            ahead.ask(0, lambda: 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not [t for t in threading.enumerate() if t.name.startswith("engram-prefetch")]
