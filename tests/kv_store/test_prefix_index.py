"""The index of prefixes against a naive list of what was published, and how much of a hit is used."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dsv41.cache import PagePool
from dsv41.config import DSV41Error
from dsv41.kv_store import PrefixIndex, make_page, split_row, usable_hit
from tests.kv_store.rows import PAGE, ROOT, pages_of, span, tokens


def published(pool, index, ids, spans=(), tail=True):
    """A sequence that computed a row and published it; its pool pages."""
    rows = pages_of(ids, spans)
    numbers = pool.allocate(len(rows))
    for i, page in enumerate(rows):
        if page.count == PAGE:
            assert index.publish(page, numbers[i]) == numbers[i]
        elif tail:
            index.publish_tail(page, numbers[i])
    return numbers


def make_index(num_pages=16):
    pool = PagePool(num_pages)
    return pool, PrefixIndex(pool, ROOT, PAGE)


def test_a_rewind_inside_a_page_reuses_its_beginning():
    """Case C3: what was said up to there is not computed again, whatever follows differs."""
    pool, index = make_index()
    ids = tokens(3 * PAGE + 9)
    numbers = published(pool, index, ids)
    edited = [*ids[: PAGE + 20], 5000, *ids[:40]]
    match = index.match(pages_of(edited), len(edited) - 1)
    assert match.full == (numbers[0],)
    assert (match.tail, match.tail_tokens, match.tokens) == (numbers[1], 20, PAGE + 20)
    assert match.cut(PAGE + 20, PAGE) == ((numbers[0],), numbers[1])
    assert match.cut(PAGE, PAGE) == ((numbers[0],), None)
    assert match.cut(PAGE - 2, PAGE) == ((), numbers[0])


def test_a_match_of_a_long_session_is_exact_to_the_token():
    """Case C3 with its own numbers: 95 tokens are new, and 128 are replayed."""
    live, prompt, common = 55_572, 55_332, 55_237
    ids = tokens(live)
    pool = PagePool(256)
    index = PrefixIndex(pool, ROOT, 256)
    rows = split_row(ROOT, ids, 256)
    for page, number in zip(rows, pool.allocate(len(rows))):
        index.publish(page, number) if page.count == 256 else index.publish_tail(page, number)
    edited = ids[:common] + [1000] * (prompt - common)
    match = index.match(split_row(ROOT, edited, 256), prompt - 1)
    assert match.tokens == common
    hit = usable_hit(match.tokens, prompt, window=128)
    assert hit == common - 1  # odd: a pair is not cut
    assert (prompt - hit) + 128 == 95 + 128 + 1


def test_the_limit_cuts_inside_a_page():
    pool, index = make_index()
    ids = tokens(2 * PAGE)
    numbers = published(pool, index, ids)
    match = index.match(pages_of(ids), 2 * PAGE - 1)
    assert (match.full, match.tail, match.tail_tokens) == ((numbers[0],), numbers[1], PAGE - 1)
    assert index.match(pages_of(ids), 2 * PAGE).full == tuple(numbers)
    assert index.match(pages_of(ids), 0).tokens == 0
    with pytest.raises(DSV41Error, match="9 tokens of a match of 0"):
        index.match(pages_of(ids), 0).cut(9, PAGE)


def test_other_images_are_other_prefixes():
    pool, index = make_index()
    ids = [9] * (2 * PAGE)
    numbers = published(pool, index, ids, [span(10, PAGE, "cat")])
    dogs = index.match(pages_of(ids, [span(10, PAGE, "dog")]), 2 * PAGE)
    assert (dogs.full, dogs.tail, dogs.tokens) == ((), numbers[0], 10)
    assert index.match(pages_of(ids, [span(10, PAGE, "cat")]), 2 * PAGE).full == tuple(numbers)


def test_the_first_writer_stays():
    pool, index = make_index()
    ids = tokens(PAGE)
    first = published(pool, index, ids)
    (mine,) = pool.allocate(1)
    assert index.publish(pages_of(ids)[0], mine) == first[0]
    assert pool.holders(mine) == 1
    pool.release([mine, *first])
    assert pool.num_free == 15
    assert [e.number for e in index.evict(9)] == first
    assert pool.num_free == 16


def test_a_tail_gives_way_to_what_goes_on_from_it():
    pool, index = make_index()
    ids = tokens(PAGE)
    short, longer, full = (pages_of(ids[:n])[0] for n in (5, 9, PAGE))
    (number,) = pool.allocate(1)
    assert index.publish_tail(short, number)
    assert index.publish_tail(longer, number)  # the same page, filled further
    assert not index.publish_tail(short, number)
    assert pool.holders(number) == 2
    (other,) = pool.allocate(1)
    assert index.publish(full, other) == other
    assert index.counts() == (1, 0, 1)
    assert pool.release([number]) == [number]
    assert short not in index
    assert full in index
    assert not index.publish_tail(longer, other)


def test_parents_and_pages_in_use_are_not_evicted():
    pool, index = make_index()
    ids = tokens(3 * PAGE)
    numbers = published(pool, index, ids)
    pool.release(numbers[:2])
    assert index.evict(3) == []  # the last page is in use, and the others lead to it
    pool.release(numbers[2:])
    gone = index.evict(2)
    assert [e.number for e in gone] == [numbers[2], numbers[1]]
    assert [e.page.key for e in gone] == [pages_of(ids)[2].key, pages_of(ids)[1].key]
    assert index.counts() == (1, 0, 0)
    index.clear()
    assert (len(index), pool.num_free) == (0, 16)


def test_impossible_publications_change_nothing():
    pool, index = make_index()
    ids = tokens(3 * PAGE)
    first, second, _ = pages_of(ids)
    a, b = pool.allocate(2)
    index.publish(first, a)
    bad = [
        (lambda: index.publish(first.head(3), b), "a full page has 32 tokens, got 3"),
        (lambda: index.publish_tail(second, b), "fewer than 32 tokens, got 32"),
        (lambda: index.publish(pages_of(ids)[2], b), "the parent of page 1 is not in the index"),
        (lambda: index.publish(second, 7), "page 7 is free"),
        (lambda: index.publish(second, a), "page 0 is already there"),
        (lambda: index.publish(second, 99), "page 99 is outside"),
    ]
    for call, message in bad:
        with pytest.raises(DSV41Error, match=message):
            call()
    assert len(index) == 1
    assert (pool.holders(a), pool.holders(b), pool.num_free) == (2, 1, 14)
    with pytest.raises(DSV41Error, match="root: expected 32 bytes"):
        PrefixIndex(pool, b"", PAGE)


def test_rows_of_another_model_match_nothing():
    pool, index = make_index()
    ids = tokens(PAGE + 5)
    published(pool, index, ids)
    assert index.match(pages_of(ids, root=bytes(32)), PAGE + 5).tokens == 0


SIZE = 4
POOL = 7
ROWS = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=3 * SIZE),
    st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(1, 6), st.sampled_from("ab"))),
)


def split(row):
    ids, image = row
    spans = [span(*image)] if image else []
    return split_row(ROOT, ids, SIZE, spans)


class IndexMachine(RuleBasedStateMachine):
    """Sequences that match, compute, publish and end; the oracle compares every entry with every row."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(POOL)
        self.index = PrefixIndex(self.pool, ROOT, SIZE)
        self.entries = {}  # key: [page, number, last use]
        self.live = []  # pool pages of each sequence
        self.tick = 0

    def expected_match(self, pages, limit):
        full = []
        for page in pages:
            if page.count < SIZE or (len(full) + 1) * SIZE > limit or page.key not in self.entries:
                break
            full.append(page.key)
        parent, left = full[-1] if full else ROOT, limit - len(full) * SIZE
        agreed = 0
        for entry, *_ in self.entries.values():
            if len(full) < len(pages) and entry.parent == parent:
                want = pages[len(full)]
                same = [
                    n for n in range(1, min(want.count, entry.count, left) + 1) if want.head(n).key == entry.head(n).key
                ]
                agreed = max([agreed, *same])
        return full, agreed

    def use(self, *keys):
        self.tick += 1
        for key in keys:
            self.entries[key][2] = self.tick

    @rule(row=ROWS, limit=st.integers(0, 3 * SIZE))
    def match(self, row, limit):
        pages = split(row)
        full, agreed = self.expected_match(pages, limit)
        found = self.index.match(pages, limit)
        assert found.full == tuple(self.entries[key][1] for key in full)
        assert found.tail_tokens == agreed
        assert found.tokens == len(full) * SIZE + agreed
        used = list(full)
        if agreed:
            (key,) = [key for key, entry in self.entries.items() if entry[1] == found.tail]
            entry, want = self.entries[key][0], pages[len(full)]
            assert entry.parent == want.parent
            assert entry.head(agreed).key == want.head(agreed).key
            used.append(key)
        self.use(*used)

    @rule(row=ROWS, with_tail=st.booleans())
    def run(self, row, with_tail):
        """A request: takes what is there, computes the rest, publishes."""
        pages = split(row)
        found = self.index.match(pages, len(row[0]))
        self.use(*self.expected_match(pages, len(row[0]))[0])
        if found.tail is not None:
            self.use(next(key for key, entry in self.entries.items() if entry[1] == found.tail))
        missing = len(pages) - len(found.full)
        if missing > self.pool.num_free:
            return
        self.pool.share(found.full)
        mine = [*found.full, *self.pool.allocate(missing)]
        for i, page in enumerate(pages):
            if page.count == SIZE:
                number = self.index.publish(page, mine[i])
                if number != mine[i]:
                    self.pool.share([number])
                    self.pool.release([mine[i]])
                    mine[i] = number
                self.note(page, mine[i])
            elif with_tail:
                longer = [
                    key
                    for key, (entry, *_) in self.entries.items()
                    if entry.parent == page.parent and entry.head(page.count).key == page.key
                ]
                assert self.index.publish_tail(page, mine[i]) == (not longer)
                if longer:
                    (key,) = [key for key in longer if self.touched(key, longer)]
                    self.use(key)
                else:
                    self.note(page, mine[i])
        self.live.append(mine)

    def touched(self, key, keys):
        """Of several entries that cover a tail the index uses the one that sorts first."""
        return self.entries[key][0].identity == min(self.entries[k][0].identity for k in keys)

    def note(self, page, number):
        if page.key not in self.entries:
            for key, (entry, *_) in list(self.entries.items()):
                if entry.parent == page.parent and entry.count < page.count and page.head(entry.count).key == key:
                    del self.entries[key]
            self.entries[page.key] = [page, number, 0]
            self.use(page.key, *[page.parent] * (page.parent in self.entries))
        else:
            self.use(page.key)

    @rule(data=st.data())
    def end(self, data):
        if self.live:
            self.pool.release(self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    @rule(count=st.integers(1, 3))
    def evict(self, count):
        held = {number for mine in self.live for number in mine}
        gone = self.index.evict(count)
        for i in range(count):
            parents = {entry.parent for entry, *_ in self.entries.values()}
            able = {k: e for k, e in self.entries.items() if k not in parents and e[1] not in held}
            if not able:
                assert len(gone) == i
                return
            page, number = gone[i]
            assert page.key in able
            assert self.entries[page.key][1] == number
            assert able[page.key][2] == min(last for *_, last in able.values())
            assert self.pool.holders(number) == 0
            del self.entries[page.key]

    @invariant()
    def nothing_leaks(self):
        numbers = [number for _, number, _ in self.entries.values()]
        held = [number for mine in self.live for number in mine]
        assert len(set(numbers)) == len(numbers) == len(self.index)
        for number in range(POOL):
            assert self.pool.holders(number) == numbers.count(number) + held.count(number)
        tails = sum(entry.count < SIZE for entry, *_ in self.entries.values())
        assert self.index.counts() == (len(numbers), tails, len(set(numbers) & set(held)))

    def teardown(self):
        for mine in self.live:
            self.pool.release(mine)
        self.index.evict(POOL)
        assert len(self.index) == 0
        assert self.pool.num_free == POOL


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_many_children_of_one_parent():
    """Thousands of prompts that differ on their first page."""
    count = 3000
    pool, index = make_index(count)
    numbers = pool.allocate(count)
    rows = [[i, *range(PAGE - 1)] for i in range(count)]
    for row, number in zip(rows, numbers):
        index.publish(make_page(ROOT, row), number)
    for i in (0, 17, count - 1):
        match = index.match(pages_of([i, 0, 1, 99]), 4)
        assert (match.tail, match.tail_tokens) == (numbers[i], 3)
    pool.release(numbers)
    assert [e.number for e in index.evict(2)] == numbers[1:3]  # 0 was matched since


# --- usable hits ---


@pytest.mark.parametrize(
    ("hit", "used", "first_replayed"),
    [(64, 0, None), (128, 0, None), (129, 0, None), (130, 130, 2), (1000, 1000, 872)],
)
def test_short_hits_gain_nothing(hit, used, first_replayed):
    """Case C2. A hit of 129 would cut a pair, and its even part gains nothing."""
    assert usable_hit(hit, 5000, window=128) == used
    if used:
        assert used - 128 == first_replayed
    if hit == 129:
        assert usable_hit(hit, 5000, window=128, multiple=1) == 129


def test_a_hit_leaves_a_token_to_compute():
    assert usable_hit(1000, 1000, window=128) == 998
    assert usable_hit(1001, 1001, window=128) == 1000
    assert usable_hit(5, 0, window=0) == 0
    assert usable_hit(2, 1, window=0) == 0


def test_a_hit_does_not_end_inside_an_image():
    images = [span(301, 50, "a"), span(351, 99, "b")]
    assert usable_hit(400, 999, window=128, spans=images) == 300  # 350 would be inside the first
    assert usable_hit(320, 999, window=128, spans=images) == 300
    assert usable_hit(450, 999, window=128, spans=images) == 450
    assert usable_hit(300, 999, window=128, spans=images) == 300
    assert usable_hit(320, 999, window=128, spans=[span(100, 500)]) == 0


def test_a_hit_must_gain_enough():
    assert usable_hit(200, 999, window=128, min_gain=72) == 200
    assert usable_hit(200, 999, window=128, min_gain=74) == 0
    assert usable_hit(2, 999, window=0) == 2


@given(
    hit=st.integers(0, 80),
    prompt=st.integers(0, 80),
    window=st.integers(0, 20),
    gain=st.integers(1, 9),
    multiple=st.sampled_from([1, 2, 4]),
    gaps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=4),
)
def test_a_usable_hit_is_the_largest_that_is_allowed(hit, prompt, window, gain, multiple, gaps):
    spans, at = [], 0
    for gap, length in gaps:
        spans.append(span(at + gap, length))
        at = spans[-1].end
    allowed = [
        h
        for h in range(max(min(hit, prompt - 1), 0) + 1)
        if h % multiple == 0 and h - window >= gain and not any(s.start < h < s.end for s in spans)
    ]
    expected = max(allowed, default=0)
    assert usable_hit(hit, prompt, window=window, min_gain=gain, multiple=multiple, spans=spans) == expected
