"""Pages of a sequence on several devices, against one: numbers, messages, merged selections, fetched entries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dsv41.ops.selection import Ranked
from dsv41.ops.sequence_pages import (
    RoundRobin,
    fetch_entries,
    fetch_pages,
    gather_rows,
    merge_ranked,
    pages_here,
    read_entries,
)
from pallas_kernels.page_layout import PAGE_ENTRIES, MainPageLayout
from tests.collective_counts import collective_counts

AXES = ("sequence",)
ROWS = PartitionSpec(AXES)
LAYOUT = MainPageLayout(64)
PER_PAGE = PAGE_ENTRIES


def on_devices(fn, devices: int):
    """`fn` of one device's part of every array's first axis, on `devices` devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]), AXES)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False))


@pytest.mark.parametrize(("devices", "per_page"), [(2, 4), (4, 3), (3, 1)])
def test_numbers_here_and_through_the_sequence(devices, per_page):
    total = 5 * devices * per_page + 2
    number = np.arange(-1, total)
    seen = np.zeros(total, int)
    for device in range(devices):
        numbering = RoundRobin(device, devices, per_page)
        mine = number[(number >= 0) & (number // per_page % devices == device)]
        here = np.asarray(numbering.number_here(jnp.asarray(number)))
        np.testing.assert_array_equal(np.flatnonzero(here >= 0), mine + 1)
        np.testing.assert_array_equal(here[mine + 1], np.arange(len(mine)))
        np.testing.assert_array_equal(numbering.number_of(jnp.arange(-1, len(mine))), [-1, *mine])
        count = np.arange(total + 1)
        np.testing.assert_array_equal(numbering.count_here(count), (mine < count[:, None]).sum(axis=1))
        seen[mine] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("max_pages", [8, 5])
def test_every_device_learns_its_pages_of_all_rows(max_pages):
    devices, rows = 4, 3
    rng = np.random.default_rng(max_pages)
    table = rng.integers(-1, 9, (devices * rows, max_pages)).astype(np.int32)
    columns = rng.integers(0, 100, (devices * rows, 2)).astype(np.int32)
    got, others = on_devices(functools.partial(pages_here, axes=AXES), devices)(table, columns)
    got = np.asarray(got).reshape(devices, devices * rows, -1)
    for device in range(devices):
        expected = table[:, device::devices]
        np.testing.assert_array_equal(got[device, :, : expected.shape[1]], expected)
        assert (got[device, :, expected.shape[1] :] == -1).all()
    np.testing.assert_array_equal(others, np.tile(columns, (devices, 1)))


def test_rows_of_several_types_in_one_collective():
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 256, (4, 3, 5)).astype(np.uint8),
        jnp.asarray(rng.normal(size=(4, 7)), jnp.bfloat16),
        rng.integers(-9, 9, (4, 2, 2)).astype(np.int32),
    ]
    step = on_devices(lambda *parts: gather_rows(parts, AXES), 2)
    for got, array in zip(step(*arrays), arrays, strict=True):
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, np.tile(array, (2,) + (1,) * (array.ndim - 1)))
    assert collective_counts(step, *arrays) == {"all_gather": 1}


def _best_here(scores: np.ndarray, devices: int, k: int, seed: int | None) -> Ranked:
    """Each device's k best of the entries on its pages: [devices * rows, T, k], in any order with a seed."""
    found = Ranked(
        np.full((devices, *scores.shape[:2], k), -np.inf, np.float32), np.full((devices, *scores.shape[:2], k), -1)
    )
    for device, row, token in np.ndindex(devices, *scores.shape[:2]):
        ids = np.flatnonzero(np.arange(scores.shape[2]) // PER_PAGE % devices == device)
        ids = ids[np.isfinite(scores[row, token, ids]) | (scores[row, token, ids] > 0)]
        ids = ids[np.lexsort((ids, -scores[row, token, ids]))][:k]
        if seed is not None:
            ids = np.random.default_rng(seed).permutation(ids)
        found.ids[device, row, token, : len(ids)] = ids
        found.scores[device, row, token, : len(ids)] = scores[row, token, ids]
    return Ranked(*(x.reshape(-1, *x.shape[2:]) for x in (found.scores, found.ids.astype(np.int32))))


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("ordered", [True, False])
def test_merged_best_are_the_best_of_all(devices, ordered):
    rows, tokens, total = 2 * devices, 3, 5 * PER_PAGE
    rng = np.random.default_rng(devices)
    # Few different scores, so that most are equal to others; some entries are not there, some rows see next to nothing.
    scores = rng.integers(-3, 4, (rows, tokens, total)).astype(np.float32) / 2
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    scores[0, 0], scores[1, 1, 7:] = -np.inf, -np.inf
    scores[2, 2, 200] = np.inf
    parts = [_best_here(scores, devices, k, None if ordered else k) for k in (20, 600)]
    # The devices' parts lie one behind the other: device d found rows [d].
    step = on_devices(lambda *parts: merge_ranked(parts, AXES, ordered=ordered), devices)
    for got, k in zip(jax.tree.map(np.asarray, step(*parts)), (20, 600), strict=True):
        for row, token in np.ndindex(rows, tokens):
            ids = np.flatnonzero(scores[row, token] > -np.inf)
            ids = ids[np.lexsort((ids, -scores[row, token, ids]))][:k]
            got_ids, got_scores = got.ids[row, token], got.scores[row, token]
            np.testing.assert_array_equal(np.flatnonzero(got_ids >= 0), np.arange(len(ids)))
            np.testing.assert_array_equal(got_scores[: len(ids)], scores[row, token, got_ids[: len(ids)]])
            assert (got_scores[len(ids) :] == -np.inf).all()
            if ordered:
                np.testing.assert_array_equal(got_ids[: len(ids)], ids)
            else:
                assert len(set(got_ids[: len(ids)])) == len(ids)
                np.testing.assert_array_equal(np.sort(got_scores[: len(ids)]), np.sort(scores[row, token, ids]))
    assert collective_counts(step, *parts) == {"all_to_all": 1}


def _pools(devices: int, rows: int, max_pages: int):
    """Random bytes in pools [devices * n, ...], and where page j of each row lies in the pool of its device."""
    rng = np.random.default_rng(devices)
    per_device = rows * -(-max_pages // devices) + 1
    pool = rng.integers(0, 256, LAYOUT.shape(devices * per_device)).astype(np.uint8)
    free = [list(rng.permutation(per_device)) for _ in range(devices)]
    table = np.array([[free[j % devices].pop() for j in range(max_pages)] for _ in range(rows)], np.int32)
    return pool, table, table + np.arange(max_pages) % devices * per_device


@pytest.mark.parametrize("devices", [2, 4])
def test_fetched_entries_are_the_bytes_of_their_owners(devices):
    rows, max_pages = 2 * devices, 5
    pool, table, through_all = _pools(devices, rows, max_pages)
    entries = np.random.default_rng(1).integers(-1, max_pages * PER_PAGE, (rows, 3, 50)).astype(np.int32)
    entries[0, 0] = -1

    def step(pool, table, entries):
        here, _ = pages_here(table, entries[:, :0, 0], AXES)

        def address(entries):
            number = RoundRobin(jax.lax.axis_index(AXES), devices, PER_PAGE).number_here(entries)
            page = jnp.take_along_axis(here, jnp.maximum(number, 0).reshape(here.shape[0], -1) // PER_PAGE, axis=1)
            return jnp.where(number < 0, -1, page.reshape(number.shape)), number % PER_PAGE

        pages, where = fetch_entries(pool, entries, address, LAYOUT, AXES)
        return LAYOUT.gather(pages, jnp.maximum(where, 0) // PAGE_ENTRIES, where % PAGE_ENTRIES), where

    compiled = on_devices(step, devices)
    (values, scales), where = compiled(pool, table, entries)
    page = np.take_along_axis(through_all, np.maximum(entries, 0).reshape(rows, -1) // PER_PAGE, axis=1)
    expected = jax.jit(LAYOUT.gather)(pool, page.reshape(entries.shape), np.maximum(entries, 0) % PER_PAGE)
    used = entries >= 0
    np.testing.assert_array_equal(np.asarray(where) >= 0, used)
    np.testing.assert_array_equal(np.asarray(values)[used], np.asarray(expected[0])[used])
    np.testing.assert_array_equal(np.asarray(scales)[used], np.asarray(expected[1])[used])
    # One exchange is that of page tables.
    counts = collective_counts(compiled, pool, table, entries)
    assert counts == {"all_to_all": 2, "all_gather": 1}


@pytest.mark.parametrize("devices", [2, 4])
def test_fetched_pages_are_those_of_the_rows(devices):
    rows, max_pages = 2 * devices, 2 * devices
    pool, table, through_all = _pools(devices, rows, max_pages)

    def step(pool, table):
        here, _ = pages_here(table, table[:, :0], AXES)
        return fetch_pages(pool, here, AXES)

    got = np.asarray(on_devices(step, devices)(pool, table)).reshape(rows, devices, -1, *pool.shape[1:])
    for device in range(devices):
        np.testing.assert_array_equal(got[:, device], pool[through_all[:, device::devices]])


@pytest.mark.parametrize("head_dim", [32, 64, 512])
def test_reading_by_whole_rows(head_dim):
    layout, rng = MainPageLayout(head_dim), np.random.default_rng(head_dim)
    pool = rng.integers(0, 256, layout.shape(3), np.uint8)
    page, entry = np.divmod(np.arange(3 * PAGE_ENTRIES, dtype=np.int32), PAGE_ENTRIES)
    gather = jax.jit(layout.gather)
    read, expected = jax.jit(read_entries, static_argnums=3)(pool, page, entry, layout), gather(pool, page, entry)
    for got, wanted in zip(read, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    values, scales = (np.asarray(x).reshape(3, PAGE_ENTRIES, -1) for x in read)
    packed = jax.jit(layout.pack)(values, scales)
    for got, wanted in zip(gather(packed, page, entry), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
