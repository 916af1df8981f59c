"""Selection in two levels against the streaming one, which the golden data hold."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41.ops import selection
from dsv41.ops.block_selection import IndexQuery, best_blocks, rank_by_blocks, rank_in_blocks
from dsv41.ops.selection import SelectionSizes, ascending, newest_block
from pallas_kernels.indexer import ops as indexer
from pallas_kernels.page_layout import PAGE_ENTRIES, IndexPageLayout
from pallas_kernels.quantize import ops as quantize

BLOCK, HEADS, WIDTH = 4, 3, 32
PAGES, TOKENS = 3, 5
LAYOUT = IndexPageLayout(WIDTH)


_quantized = jax.jit(quantize.quantize_mxfp4)


def _case(seed: int, ties: bool):
    """Queries, a pool with its pages in any order, and how many entries each query sees."""
    rng = np.random.default_rng(seed)
    values, scales = _quantized(rng.normal(size=(2, TOKENS, HEADS, WIDTH)).astype(ml_dtypes.bfloat16))
    query = IndexQuery(values, scales, jnp.asarray(rng.normal(size=(2, TOKENS, HEADS)), jnp.bfloat16))
    keys = rng.normal(size=(2 * PAGES, PAGE_ENTRIES, WIDTH))
    if ties:
        keys = keys[:, :1] * rng.integers(0, 2, (2 * PAGES, PAGE_ENTRIES, 1))
    pages = rng.permutation(2 * PAGES).reshape(2, PAGES).astype(np.int32)
    page, entry = np.divmod(np.arange(2 * PAGES * PAGE_ENTRIES), PAGE_ENTRIES)
    stored = _quantized(keys.reshape(-1, WIDTH).astype(ml_dtypes.bfloat16))
    pool = jax.jit(LAYOUT.write)(np.zeros(LAYOUT.shape(2 * PAGES), np.uint8), page, entry, *stored)
    visible = rng.integers(0, PAGES * PAGE_ENTRIES + 1, (2, TOKENS)).astype(np.int32)
    visible[0, 0], visible[1, 1] = 0, PAGES * PAGE_ENTRIES
    return query, pool, jnp.asarray(pages), jnp.asarray(visible)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _streaming(query, pool, pages, visible, top_k, pool_blocks):
    def read_keys(i):
        keys = quantize.dequantize_mxfp4(*LAYOUT.read_pages(pool, pages[:, i][:, None]))
        return keys.reshape(2, PAGE_ENTRIES, WIDTH)

    q = quantize.dequantize_mxfp4(query.values, query.scales)
    sizes, newest = SelectionSizes(top_k, pool_blocks, BLOCK), newest_block(visible, BLOCK)
    found, blocks = selection.rank(q, query.weights, visible, newest, read_keys, tile=PAGE_ENTRIES, sizes=sizes)
    return found.ids, ascending(blocks.ids)


_entry_scores = jax.jit(indexer.entry_scores, static_argnames="block_size")


def _same_sets(query, pool, pages, visible, actual, expected) -> None:
    """Equal as sets, but for the choice among equal scores."""
    all_blocks = np.broadcast_to(np.arange(PAGES * PAGE_ENTRIES // BLOCK, dtype=np.int32), (2, TOKENS, 96))
    parts = (query.values, query.scales, query.weights)
    scores = np.asarray(_entry_scores(*parts, pool, pages, visible, all_blocks, block_size=BLOCK))
    for row in np.ndindex(visible.shape):
        got, wanted = (np.asarray(ids)[row] for ids in (actual, expected))
        used = got >= 0
        assert (np.flatnonzero(~used) >= used.sum()).all()  # unused places at the end
        assert len(set(got[used])) == used.sum() == (wanted >= 0).sum()
        np.testing.assert_array_equal(np.sort(scores[row][got[used]]), np.sort(scores[row][wanted[wanted >= 0]]))


@functools.partial(jax.jit, static_argnames="sizes")
def _by_blocks(query, pool, pages, visible, sizes):
    selected, blocks = rank_by_blocks(query, pool, pages, visible, newest_block(visible, BLOCK), sizes)
    return selected.ids, ascending(blocks.ids)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("top_k", "pool_blocks"), [(8, 5), (20, 40), (500, 0)])
def test_the_same_entries_and_the_same_pool(top_k, pool_blocks, ties):
    query, pool, pages, visible = _case(top_k + pool_blocks, ties)
    sizes = SelectionSizes(top_k, pool_blocks, BLOCK)
    selected, candidates = _by_blocks(query, pool, pages, visible, sizes)
    expected, expected_pool = _streaming(query, pool, pages, visible, top_k, pool_blocks)
    _same_sets(query, pool, pages, visible, selected, expected)
    np.testing.assert_array_equal(candidates, expected_pool)


def test_inside_the_pool_only():
    query, pool, pages, visible = _case(7, ties=False)
    _, candidates = _streaming(query, pool, pages, visible, 8, 5)
    in_blocks = jax.jit(rank_in_blocks, static_argnums=5)
    selected = in_blocks(query, pool, pages, visible, candidates, SelectionSizes(8, 0, BLOCK)).ids
    candidates = np.asarray(candidates)
    everything, _ = _streaming(query, pool, pages, visible, PAGES * PAGE_ENTRIES, 0)
    for row in np.ndindex(visible.shape):
        inside = [e for e in np.asarray(everything)[row] if e >= 0 and e // BLOCK in candidates[row]]
        # The pool is ascending, so that plain XLA resolves ties alike here.
        assert [e for e in np.asarray(selected)[row] if e >= 0] == inside[:8]


def _candidates(maxima, visible, pool_blocks: int, size: int) -> np.ndarray:
    sizes = SelectionSizes(1, pool_blocks, size)

    @jax.jit
    def candidates(maxima, visible):
        return ascending(best_blocks(maxima, visible, newest_block(visible, size), sizes).ids)

    return np.asarray(candidates(maxima, visible))


@pytest.mark.parametrize(
    ("length", "kept", "usable"),
    [(1, 1, 1), (9, 2, 9), (17, 3, 17), (16384, 2048, 16384), (16385, 2048, 16377), (16393, 2048, 16377)],
)
def test_a2_candidate_arithmetic(length, kept, usable):
    blocks = -(-length // 8)
    pool = _candidates(np.zeros((1, 1, blocks), np.float32), np.int32([[length]]), 2048, 8)[0, 0]
    pool = pool[pool >= 0]
    assert len(pool) == len(set(pool)) == kept
    assert ((pool[:, None] * 8 + np.arange(8)) < length).sum() == usable


def test_a3_newest_block_stays():
    maxima = np.ones((1, 1, 2500), np.float32)
    maxima[..., -1] = -100
    pool = _candidates(maxima, np.int32([[20_000]]), 2048, 8)[0, 0]
    assert 2499 in pool and (np.diff(pool) > 0).all()


def test_a_query_that_sees_nothing_has_no_pool():
    pool = _candidates(np.zeros((1, 2, 10), np.float32), np.int32([[0, 5]]), 4, 4)
    np.testing.assert_array_equal(pool, [[[-1] * 4, [0, 1, -1, -1]]])
