"""Which device's part of the pools a page must lie in, and getting pages from there."""

import dataclasses

import jax
import numpy as np
import pytest

from dsv41.cache import ForwardBatch, PageOwners, PagePool, init_cache, local_step
from dsv41.config import DSV41Error
from dsv41.sharding import ShardingRules, make_mesh
from tests.models_for_tests import small_model

RULES = ShardingRules(batch=("data", "sequence"), pages=("sequence",))
SIZES = {"data": 2, "sequence": 3, "tensor": 1}
OWNERS = PageOwners(groups=2, shards=3)


def test_owners_follow_the_rules():
    assert PageOwners.of(RULES, SIZES) == OWNERS
    assert PageOwners.of(ShardingRules(batch=("data", "sequence")), SIZES) == PageOwners(groups=6, shards=1)
    assert PageOwners.of(ShardingRules(), SIZES) == PageOwners()
    slot, number = np.arange(6)[:, None], np.arange(4)
    np.testing.assert_array_equal(OWNERS.owner(slot, number, 6), [[0, 1, 2, 0]] * 3 + [[3, 4, 5, 3]] * 3)


@pytest.mark.parametrize("owners", [PageOwners(), OWNERS, PageOwners(6, 1), PageOwners(1, 3)])
@pytest.mark.parametrize("max_pages", [1, 4, 6])
def test_all_slots_with_all_pages(owners, max_pages):
    table, pages = owners.table_of_all(12, max_pages), owners.pages_for_all(12, max_pages)
    assert len(np.unique(table)) == table.size
    owners.check(table, pages)
    if owners.shards == 1:
        np.testing.assert_array_equal(table.reshape(-1), np.arange(pages))


def test_a_page_elsewhere_is_named():
    table = OWNERS.table_of_all(6, 4)
    pages = OWNERS.pages_for_all(6, 4)
    table[4, 2] = -1
    OWNERS.check(table, pages)
    table[4, 2] = table[4, 1] + 1
    with pytest.raises(DSV41Error, match=r"page 2 of slot 4 is .* device 4 of 6; it must lie on device 5"):
        OWNERS.check(table, pages)
    table[4, 2] = pages
    with pytest.raises(DSV41Error, match=rf"page 2 of slot 4 is {pages}, outside \[0, {pages}\)"):
        OWNERS.check(table, pages)
    with pytest.raises(DSV41Error, match="num_slots=5 cannot be spread equally over 6 devices"):
        OWNERS.check(table[:5], pages)


def test_pages_from_the_part_that_is_asked_for():
    pool = PagePool(12, parts=6)
    wanted = OWNERS.owner(np.int64(5), np.arange(5), 6).tolist()
    assert wanted == [3, 4, 5, 3, 4]
    pages = pool.allocate(5, wanted)
    assert [page // 2 for page in pages] == wanted
    assert [pool.num_free_in(part) for part in range(6)] == [2, 2, 2, 0, 0, 1] and pool.num_free == 7
    with pytest.raises(DSV41Error, match="1 pages are needed, 0 of part 4's 2 are free"):
        pool.allocate(2, [0, 4])
    assert pool.num_free == 7
    with pytest.raises(DSV41Error, match="6 parts, and none was named"):
        pool.allocate(1)
    pool.share([pages[2]])
    copy = pool.own(pages[2])
    assert copy != pages[2] and copy // 2 == 5
    assert pool.release([pages[0]]) == [pages[0]] and pool.allocate(1, [3]) == [pages[0]]
    with pytest.raises(DSV41Error, match="num_pages=10 is not a multiple of 6 parts"):
        PagePool(10, parts=6)


def test_inside_a_step_pages_are_counted_from_their_device():
    """A page of another device than its own counts as none."""
    config = small_model().config.text_config
    mesh = make_mesh({"data": 2, "sequence": 3}, jax.devices()[:6])
    cache = init_cache(config, num_slots=6, max_tokens=1024, mesh=mesh, rules=RULES)
    table = np.array(cache.page_table)
    per_device = table.max() // 6 + 1
    expected = table % per_device
    table[1, 2], table[4, 3], expected[1, 2], expected[4, 3] = table[1, 3], -1, -1, -1
    ones = np.ones((6, 1), np.int32)
    batch = ForwardBatch(ones, ones[:, 0], ones[:, 0], np.arange(6, dtype=np.int32), ones > 0, None, None)

    def step(batch, table):
        mine = init_cache(config, num_slots=1, max_tokens=1024, num_pages=int(per_device))
        batch, mine = local_step(batch, dataclasses.replace(mine, page_table=table), RULES)
        return batch.slot, mine.page_table, batch.pages.table[None]

    rows = RULES.spec("batch")
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
    slot, local, group = run(batch, table)
    np.testing.assert_array_equal(slot, np.zeros(6))
    np.testing.assert_array_equal(local, expected)
    padded = np.pad(expected, ((0, 0), (0, 2)), constant_values=-1)
    for device in range(6):
        first = device // 3 * 3
        np.testing.assert_array_equal(group[device], padded[first : first + 3, device % 3 :: 3])
