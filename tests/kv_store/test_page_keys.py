"""Keys of pages: equal exactly where everything that the bytes depend on is."""

import dataclasses
import hashlib
import pathlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv41.kv_store.page_keys as page_keys
from dsv41.config import DSV41Error, load_config, with_overrides
from dsv41.kv_store import ImageSpan, PageImage, cache_fingerprint, make_page, page_images, snapshot_key, split_row
from dsv41.kv_store.page_keys import agreement
from tests.kv_store.rows import PAGE, ROOT, image_hash, pages_of, span, tokens

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def keys(ids, spans=()):
    return [page.key for page in pages_of(ids, spans)]


def test_the_key_is_a_hash_of_exactly_these_bytes():
    page = make_page(ROOT, [5, 7, 1 << 20], [PageImage(-4, 6, bytes(32))])
    content = (
        ROOT + struct.pack("<II", 3, 1) + struct.pack(">3i", 5, 7, 1 << 20) + struct.pack("<iI", -4, 6) + bytes(32)
    )
    assert page.key == hashlib.sha256(content).digest()
    assert page.tokens.tolist() == [5, 7, 1 << 20]


def test_a_row_is_cut_into_full_pages_and_a_tail():
    ids = tokens(2 * PAGE + 5)
    pages = pages_of(ids)
    assert [page.count for page in pages] == [PAGE, PAGE, 5]
    assert np.concatenate([page.tokens for page in pages]).tolist() == ids
    assert [page.parent for page in pages] == [ROOT, pages[0].key, pages[1].key]
    assert pages_of([]) == []
    assert [page.count for page in pages_of(ids[: 2 * PAGE])] == [PAGE, PAGE]


def test_a_changed_token_changes_every_key_from_its_page_on():
    ids = tokens(4 * PAGE)
    other = list(ids)
    other[PAGE + 3] += 1
    same = [a == b for a, b in zip(keys(ids), keys(other))]
    assert same == [True, False, False, False]
    assert not set(keys(ids)) & {page.key for page in pages_of(ids, root=bytes(32))}


def test_images_count_on_every_page_that_they_touch():
    """All positions of an image have one id: pictures differ by content alone, and spans by where they lie."""
    ids = [9] * (4 * PAGE)
    first = PAGE - 2
    rows = {
        "none": (),
        "cat": (span(first, PAGE + 4, "cat"),),
        "dog": (span(first, PAGE + 4, "dog"),),
        "later": (span(first + 1, PAGE + 4, "cat"),),
        "longer": (span(first, PAGE + 5, "cat"),),
    }
    found = {name: keys(ids, spans) for name, spans in rows.items()}
    for number in range(4):
        assert len({found[name][number] for name in rows}) == len(rows)
    # The page in the middle of the span alone, after the same parent.
    middle = [page_images(spans, PAGE, PAGE) for spans in rows.values()]
    assert middle[0] == ()
    assert middle[1][0][:2] == (-2, PAGE + 4)
    assert len({make_page(ROOT, ids[:PAGE], images).key for images in middle}) == len(rows)


def test_two_adjacent_images_may_not_swap():
    ids = [9] * PAGE
    there = keys(ids, [span(0, 8, "cat"), span(8, 8, "dog")])
    back = keys(ids, [span(0, 8, "dog"), span(8, 8, "cat")])
    assert there != back


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 70)), max_size=5), st.integers(0, 6), st.integers(1, PAGE))
def test_page_images_are_those_that_overlap(gaps, number, count):
    spans, at = [], 0
    for gap, length in gaps:
        spans.append(span(at + gap, length, str(at)))
        at = spans[-1].end
    first = number * PAGE
    expected = [s for s in spans if max(s.start, first) < min(s.end, first + count)]
    assert page_images(spans, first, count) == tuple(
        (s.start - first, s.length, bytes.fromhex(s.content_hash)) for s in expected
    )


@given(st.integers(0, 3 * PAGE), st.integers(0, 3 * PAGE), st.booleans())
def test_known_pages_are_taken_over(known, length, image):
    ids, spans = tokens(3 * PAGE), [span(20, PAGE)] if image else []
    before = pages_of(ids[:known], spans)
    after = split_row(ROOT, ids[:length], PAGE, spans, known=before)
    assert [page.key for page in after] == keys(ids[:length], spans)
    shared = min(known, length) // PAGE
    assert all(a is b for a, b in zip(after[:shared], before))


@given(st.integers(1, 3 * PAGE), st.integers(0, 2 * PAGE), st.integers(1, 40))
def test_a_snapshot_is_known_by_the_chain_where_it_was_taken(length, start, size):
    ids, spans = tokens(3 * PAGE), [span(start, size)]
    key = snapshot_key(pages_of(ids, spans), length, PAGE)
    assert key == (keys(ids[:length], spans)[-1], length)


def test_snapshots_need_their_tokens():
    for length in (0, -1, PAGE + 6, 5 * PAGE):
        with pytest.raises(DSV41Error, match=f"got {length}"):
            snapshot_key(pages_of(tokens(PAGE + 5)), length, PAGE)


@settings(max_examples=300)
@given(st.data())
def test_agreement_is_the_longest_common_beginning(data):
    """Against the shorter forms of both rows: they agree for n tokens if and only if their first n have one key."""
    starts = st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(1, 6), st.sampled_from("ab")))
    made = []
    for _ in range(2):
        row = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
        where = data.draw(starts)
        spans = [span(*where)] if where and where[0] < len(row) else []
        made.append(make_page(ROOT, row, page_images(spans, 0, len(row))))
    a, b = made
    expected = max(n for n in range(min(a.count, b.count) + 1) if n == 0 or a.head(n).key == b.head(n).key)
    assert agreement(a, b) == agreement(b, a) == expected
    assert a.identity[: 4 * expected] == b.identity[: 4 * expected]


def test_identities_sort_like_tokens_and_tell_images_apart():
    assert make_page(ROOT, [1, 300]).identity < make_page(ROOT, [2, 0]).identity < make_page(ROOT, [2, 0, 0]).identity
    row = [9, 9, 9, 9]
    cat, dog = (make_page(ROOT, row, page_images([span(1, 2, name)], 0, 4)) for name in ("cat", "dog"))
    words = [np.frombuffer(page.identity, ">u4") for page in (cat, dog)]
    assert (words[0] == words[1]).tolist() == [True, False, False, True]
    assert len(set(words[0].tolist())) == 3


def test_bad_content_is_refused():
    bad = [
        (lambda: make_page(b"short", [1]), "parent: expected 32 bytes, got 5"),
        (lambda: make_page(ROOT, []), "at least one token"),
        (lambda: make_page(ROOT, [1, -2]), r"lie in \[0, 2\^31\), got -2 to 1"),
        (lambda: make_page(ROOT, [1 << 31]), r"2\^31"),
        (lambda: make_page(ROOT, [0.5]), "float64"),
        (lambda: make_page(ROOT, [[1]]), "expected a row"),
        (lambda: make_page(ROOT, [1], [PageImage(1, 4, bytes(32))]), "does not touch"),
        (lambda: make_page(ROOT, [1], [PageImage(-4, 4, bytes(32))]), "does not touch"),
        (lambda: make_page(ROOT, [1], [PageImage(0, 4, b"")]), "image digest"),
        (lambda: span(-1, 4), "start >= 0"),
        (lambda: span(0, 0), "length >= 1"),
        (lambda: ImageSpan(start=0, length=1, content_hash="abc"), "64 hexadecimal"),
        (lambda: ImageSpan(start=0, length=1, content_hash="z" * 64), "64 hexadecimal"),
        (lambda: split_row(ROOT, [1] * 9, PAGE, [span(0, 5), span(4, 5)]), "one at 4 begins before that at 0 ends"),
    ]
    for call, message in bad:
        with pytest.raises(DSV41Error, match=message):
            call()
    assert image_hash("a") != image_hash("b")


def test_the_fingerprint_covers_model_checkpoint_and_format(monkeypatch):
    config = load_config(CONFIGS / "tiny.json")
    base = cache_fingerprint(config, "weights 1")
    assert len(base) == 32
    assert base == cache_fingerprint(load_config(CONFIGS / "tiny.json"), "weights 1")
    others = {
        cache_fingerprint(config, "weights 2"),
        cache_fingerprint(with_overrides(config, {"text_config.rms_norm_eps": "1e-3"}), "weights 1"),
        cache_fingerprint(load_config(CONFIGS / "flash.json"), "weights 1"),
    }
    monkeypatch.setattr(page_keys, "FORMAT_VERSION", page_keys.FORMAT_VERSION + 1)
    others.add(cache_fingerprint(config, "weights 1"))
    layout = page_keys.CacheLayout.from_config
    monkeypatch.setattr(
        page_keys.CacheLayout,
        "from_config",
        lambda c: dataclasses.replace(layout(c), main=dataclasses.replace(layout(c).main, head_dim=512)),
    )
    others.add(cache_fingerprint(config, "weights 1"))
    assert len(others | {base}) == 6
