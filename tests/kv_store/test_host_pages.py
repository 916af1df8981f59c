"""Pages in host memory: found by prefix, dropped from the ends of prefixes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.config import DSV41Error
from dsv41.kv_store import HostPages
from tests.kv_store.rows import PAGE, page_arrays, pages_of, tokens

BYTES = sum(a.nbytes for a in page_arrays(pages_of([1])[0]))


def test_children_may_come_before_their_parents():
    """The device drops the end of a prefix first."""
    host = HostPages(10 * BYTES)
    pages = pages_of(tokens(3 * PAGE + 4))
    for page in reversed(pages):
        assert host.put(page, page_arrays(page))
    for page in pages:
        assert page in host
        assert all((a == b).all() for a, b in zip(host.get(page), page_arrays(page)))
    assert host.nbytes == 4 * BYTES
    assert (host.stats.hits, host.stats.hit_bytes, host.stats.stored_bytes) == (4, 4 * BYTES, 4 * BYTES)
    assert host.get(pages_of(tokens(PAGE, seed=1))[0]) is None
    assert host.stats.misses == 1


def test_a_tail_is_found_by_what_it_has_in_common():
    host = HostPages(10 * BYTES)
    ids = tokens(PAGE)
    page = pages_of(ids)[0]
    host.put(page, page_arrays(page))
    arrays, agreed = host.get_tail(pages_of([*ids[:9], 5000, 5001])[0])
    assert agreed == 9
    assert (arrays[0] == page_arrays(page)[0]).all()
    assert host.get_tail(pages_of([5000])[0]) is None


def test_a_page_is_never_replaced_and_a_longer_one_serves_the_shorter():
    host = HostPages(10 * BYTES)
    page = pages_of(tokens(PAGE))[0]
    assert host.put(page.head(9), page_arrays(page.head(9)))
    assert host.put(page, page_arrays(page))
    assert not host.put(page, page_arrays(page.head(9)))
    assert not host.put(page.head(20), page_arrays(page.head(20)))
    assert (len(host), host.nbytes) == (1, BYTES)
    assert (host.get(page)[0] == page_arrays(page)[0]).all()


def test_room_is_made_at_the_ends_of_unused_prefixes():
    host = HostPages(4 * BYTES)
    old, new = pages_of(tokens(3 * PAGE)), pages_of(tokens(3 * PAGE, seed=1))
    for page in (*old, new[0]):
        host.put(page, page_arrays(page))
    host.get(old[0])
    host.put(new[1], page_arrays(new[1]))
    assert [page in host for page in (*old, *new)] == [True, True, False, True, True, False]
    assert host.stats.evictions == 1
    assert not host.put(new[2], (np.zeros(5 * BYTES, np.uint8),))
    assert (host.stats.refused, len(host)) == (1, 4)
    host.clear()
    assert (len(host), host.nbytes) == (0, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.booleans()), max_size=30))
def test_any_order_stays_inside_the_budget(rows):
    host = HostPages(5 * BYTES)
    for ids, backwards in rows:
        pages = pages_of(ids, page_tokens=4)
        for page in reversed(pages) if backwards else pages:
            host.put(page, page_arrays(page))
        assert host.nbytes == len(host) * BYTES <= 5 * BYTES
        found = host.get(pages[-1])
        if found is not None:
            assert (found[0] == page_arrays(pages[-1])[0]).all()
    host.clear()
    assert host.nbytes == 0


def test_bad_arguments_are_refused():
    with pytest.raises(DSV41Error, match="byte_budget must be positive"):
        HostPages(-5)
    page = pages_of([1])[0]
    with pytest.raises(DSV41Error, match="at least one array"):
        HostPages(5).put(page, ())
    with pytest.raises(DSV41Error, match="array 0: expected uint8, got int32"):
        HostPages(5).put(page, (np.zeros(1, np.int32),))
