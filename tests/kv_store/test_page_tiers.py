"""Host memory over disk, and the bytes of a prefix that travels through them."""

import dataclasses
import pathlib

import numpy as np
import pytest

from dsv41.cache import CacheLayout
from dsv41.config import DSV41Error, load_config
from dsv41.kv_store import HostPages, PageStore, PageTiers, TierCounts, split_row
from tests.kv_store.rows import PAGE, ROOT, page_arrays, pages_of, tokens

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
BYTES = sum(a.nbytes for a in page_arrays(pages_of([1])[0]))


@pytest.fixture
def tiers(tmp_path):
    with PageStore(tmp_path, ROOT, byte_budget=1 << 30) as store:
        host = HostPages(1 << 20)
        made = PageTiers(PAGE, host=host, store=store)
        made.host, made.store = host, store
        yield made


def on_disk(tiers, *pages):
    for page in pages:
        assert tiers.save(page, page_arrays(page))
    tiers.store.flush()


def in_memory(tiers, *pages):
    for page in pages:
        assert tiers.host.put(page, page_arrays(page))


def same(arrays, page):
    return all((a == b).all() for a, b in zip(arrays, page_arrays(page)))


def test_a_prefix_is_put_together_from_both_tiers(tiers):
    ids = tokens(6 * PAGE + 20)
    pages = pages_of(ids)
    on_disk(tiers, *pages[:5])
    in_memory(tiers, pages[2], pages[3], pages[5], pages[6])
    found = tiers.find(pages, PAGE, len(ids) - 1)
    assert [same(*pair) for pair in zip(found.full, pages[1:6], strict=True)] == [True] * 5
    assert (found.tail_tokens, found.tokens) == (19, len(ids) - 1)
    assert same(found.tail, pages[6])
    assert tiers.disk_counts == TierCounts(2, 2 * PAGE, 2 * BYTES)
    assert tiers.host_counts == TierCounts(4, 3 * PAGE + 19, 4 * BYTES)


def test_it_ends_where_both_end(tiers):
    ids = tokens(5 * PAGE)
    pages = pages_of(ids)
    on_disk(tiers, pages[0])
    in_memory(tiers, pages[1], pages[3])
    found = tiers.find(pages, 0, 5 * PAGE)
    assert (len(found.full), found.tail, found.tokens) == (2, None, 2 * PAGE)
    found = tiers.find(pages, 3 * PAGE, 4 * PAGE - 1)
    assert (found.full, found.tail_tokens, found.tokens) == ((), PAGE - 1, 4 * PAGE - 1)


def test_a_tail_must_go_beyond_what_the_device_has(tiers):
    ids = tokens(2 * PAGE)
    pages = pages_of(ids)
    on_disk(tiers, pages[0], pages[1].head(25))
    in_memory(tiers, pages[1].head(20))
    for have, expected in ((PAGE + 25, 0), (PAGE + 22, 25), (PAGE + 3, 25), (PAGE, 25), (0, 25)):
        found = tiers.find(pages, have, 2 * PAGE)
        assert found.tail_tokens == expected
        assert found.tokens == max(have, PAGE + 25)
        assert len(found.full) == (have < PAGE)
    assert tiers.find(pages, PAGE, PAGE + 18).tail_tokens == 18
    assert tiers.host_counts.tokens == 18


def test_what_leaves_the_device_goes_to_both(tiers):
    pages = pages_of(tokens(2 * PAGE))
    on_disk(tiers, pages[0])
    assert tiers.demote(pages[1], page_arrays(pages[1]))
    assert tiers.demote(pages[0], page_arrays(pages[0]))
    tiers.store.flush()
    assert (len(tiers.host), tiers.store.num_records) == (2, 2)
    tiers.host.clear()
    tiers.touch(pages)
    assert tiers.find(pages, 0, 2 * PAGE).tokens == 2 * PAGE


def test_either_tier_may_be_missing(tmp_path):
    pages = pages_of(tokens(PAGE + 20))
    none = PageTiers(PAGE)
    assert none.unsaved(pages) == []
    assert not none.demote(pages[0], page_arrays(pages[0]))
    none.touch(pages)
    assert none.find(pages, 0, PAGE).tokens == 0
    memory = PageTiers(PAGE, host=HostPages(1 << 20))
    for page in pages:
        memory.demote(page, page_arrays(page))
    assert memory.find(pages, 0, PAGE + 20).tokens == PAGE + 20
    with PageStore(tmp_path, ROOT, byte_budget=1 << 20) as store:
        disk = PageTiers(PAGE, store=store)
        for page in pages:
            assert not disk.demote(page, page_arrays(page))
        store.flush()
        reading = PageTiers(PAGE, store=PageStore(tmp_path, ROOT, writable=False))
        assert reading.unsaved(pages) == []
        assert not reading.save(pages[0], page_arrays(pages[0]))
        for opened in (disk, reading):
            assert opened.find(pages, 0, PAGE + 20).tokens == PAGE + 20


def test_impossible_questions_are_refused():
    pages = pages_of(tokens(PAGE + 20))
    for have, limit in ((-1, 5), (6, 5), (PAGE + 21, 999)):
        with pytest.raises(DSV41Error, match=f"{have} tokens on the device"):
            PageTiers(PAGE).find(pages, have, limit)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_prefix_of_1001_tokens_of_the_released_layout(tmp_path, tier):
    """Case C10: every record of all four sources is back, each in its own pool: 890,356 bytes of records."""
    layout = CacheLayout.from_config(load_config(CONFIGS / "flash.json").text_config)
    counts = [layout.pages_per_logical(ratio) for ratio in layout.ratios]
    shapes = [part.shape(count) for part in (layout.main, layout.index) for count in counts]
    pages = split_row(ROOT, tokens(1001), layout.page_tokens)
    assert [page.count for page in pages] == [256, 256, 256, 233]
    bytes_of = {page.key: page_arrays(page, shapes) for page in pages}

    host = HostPages(1 << 30) if tier == "host" else None
    with PageStore(tmp_path, ROOT, byte_budget=1 << 30) as store:
        tiers = PageTiers(layout.page_tokens, host=host, store=store if tier == "disk" else None)
        for page in pages:
            tiers.demote(page, bytes_of[page.key])
        store.flush()
        found = tiers.find(pages, 0, 1001)
    assert found.tokens == 1001
    records = 0
    for page, arrays in zip(pages, [*found.full, found.tail], strict=True):
        assert [a.shape for a in arrays] == shapes
        for a, b in zip(arrays, bytes_of[page.key]):
            np.testing.assert_array_equal(a, b)
        records += layout.record_bytes(page.count)
    assert records == layout.record_bytes(1001) == 3 * 500 * 356 + 1001 * 356 == 890_356
    counted = dataclasses.asdict(tiers.host_counts if tier == "host" else tiers.disk_counts)
    # Whole pages travel, the last one too.
    assert counted == {"pages": 4, "tokens": 1001, "bytes": 4 * 256 * 890}
    assert sum(int(np.prod(shape)) for shape in shapes) == layout.page_bytes == 256 * 890
