"""Free pages and holders of pages."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dsv41.cache import PagePool
from dsv41.config import DSV41Error

PAGES = 6


def test_pages_are_handed_out_once_and_come_back():
    pool = PagePool(3)
    assert pool.allocate(2) == [0, 1]
    assert pool.num_free == 1
    assert pool.release([1, 0]) == [1, 0]
    assert pool.num_free == 3
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_a_shared_page_is_free_after_its_last_holder():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.share([page, page])
    assert pool.holders(page) == 3
    assert pool.release([page]) == []
    assert pool.release([page, page]) == [page]
    assert pool.holders(page) == 0


def test_own_copies_only_what_others_hold():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    assert pool.own(page) == page
    pool.share([page])
    copy = pool.own(page)
    assert copy != page
    assert (pool.holders(page), pool.holders(copy), pool.num_free) == (1, 1, 0)
    pool.share([page])
    with pytest.raises(DSV41Error, match="1 pages are needed, 0 of 2 are free"):
        pool.own(page)
    assert pool.holders(page) == 2


def test_impossible_calls_change_nothing():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    for call, message in (
        (lambda: pool.allocate(3), "3 pages are needed, 2 of 3 are free"),
        (lambda: pool.allocate(-1), "-1 pages"),
        (lambda: pool.share([page, 2]), "page 2 is free and cannot be shared"),
        (lambda: pool.release([page, page]), "page 0 is released more often than it is held"),
        (lambda: pool.release([page, 3]), r"page 3 is outside \[0, 3\)"),
        (lambda: pool.release([page, -1]), "page -1 is outside"),
        (lambda: pool.own(1), "page 1 is free and cannot be written"),
    ):
        with pytest.raises(DSV41Error, match=message):
            call()
        assert (pool.holders(page), pool.num_free) == (1, 2)
    with pytest.raises(DSV41Error, match="num_pages must be positive, got 0"):
        PagePool(0)


class PoolMachine(RuleBasedStateMachine):
    """Sequences that grow, share and end, against plain lists of who holds what."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES)
        self.holders: list[list[int]] = []

    @property
    def free(self):
        return PAGES - len({page for pages in self.holders for page in pages})

    @rule(count=st.integers(0, 4))
    def allocate(self, count):
        if count > self.free:
            with pytest.raises(DSV41Error, match="are needed"):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert not {page for held in self.holders for page in held} & set(pages)
        self.holders.append(pages)

    @rule(data=st.data())
    def share(self, data):
        if self.holders:
            pages = list(data.draw(st.sampled_from(self.holders)))
            self.pool.share(pages)
            self.holders.append(pages)

    @rule(data=st.data())
    def write(self, data):
        held = [(i, j) for i, pages in enumerate(self.holders) for j in range(len(pages))]
        if not held:
            return
        i, j = data.draw(st.sampled_from(held))
        page = self.holders[i][j]
        others = sum(pages.count(page) for pages in self.holders) - 1
        if others and not self.free:
            with pytest.raises(DSV41Error, match="are needed"):
                self.pool.own(page)
            return
        self.holders[i][j] = self.pool.own(page)
        assert (self.holders[i][j] == page) == (not others)

    @rule(data=st.data())
    def end(self, data):
        if self.holders:
            pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
            still = {page for held in self.holders for page in held}
            assert self.pool.release(pages) == [page for page in pages if page not in still]

    @invariant()
    def counts_are_right(self):
        assert self.pool.num_free == self.free
        for page in range(PAGES):
            assert self.pool.holders(page) == sum(pages.count(page) for pages in self.holders)

    def teardown(self):
        for pages in self.holders:
            self.pool.release(pages)
        assert self.pool.num_free == PAGES


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
