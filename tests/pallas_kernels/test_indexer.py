"""Index scores and the running top-k."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.indexer import ops as indexer
from pallas_kernels.topk import ops as topk
from tests.golden import primitives


def test_index_scores_golden():
    g = primitives()
    heads, dim = g["indexer.q"].shape[-2:]
    weights = (g["indexer.w_raw"].astype(np.float32) * (dim**-0.5 * heads**-0.5)).astype(g["indexer.w_raw"].dtype)
    scores = jax.jit(indexer.index_scores)(g["indexer.q"], weights, g["indexer.k"])
    np.testing.assert_array_equal(scores, g["indexer.score"].astype(np.float32))


def test_keys_of_a_query_agree_with_shared_keys():
    g = primitives()
    shared = indexer.index_scores(g["indexer.q"], g["indexer.w_raw"], g["indexer.k"])
    own = np.broadcast_to(g["indexer.k"][:, None], (2, 5, *g["indexer.k"].shape[1:]))
    np.testing.assert_array_equal(indexer.index_scores(g["indexer.q"], g["indexer.w_raw"], own), shared)


def _merge_in_pieces(scores, k, piece):
    best = topk.empty_topk(scores.shape[:-1], k)
    for start in range(0, scores.shape[-1], piece):
        part = scores[..., start : start + piece]
        best = topk.merge_topk(best, jnp.asarray(part), start + jnp.arange(part.shape[-1]))
    return best


@pytest.mark.parametrize("length", [1000, 1023, 1025, 4097])
def test_case_a4_any_row_length(length):
    scores = np.random.default_rng(length).normal(size=(3, length)).astype(np.float32)
    ids = np.asarray(_merge_in_pieces(scores, 512, 1024)[1])
    for row in range(3):
        assert set(ids[row]) == set(np.argsort(-scores[row], kind="stable")[:512])


def test_case_a5_rows_shorter_than_k():
    scores = np.full((2, 40), -np.inf, np.float32)
    scores[0, :5] = [3, 1, 2, 5, 4]
    values, ids = _merge_in_pieces(scores, 16, 8)
    np.testing.assert_array_equal(ids[0], [3, 4, 0, 2, 1] + [-1] * 11)
    assert (np.asarray(ids[1]) == -1).all()
    assert (np.asarray(values[1]) == -np.inf).all()


@given(st.integers(1, 20), st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_ties_do_not_depend_on_the_split(piece, values, k):
    scores = np.array([values], np.float32)
    whole = _merge_in_pieces(scores, k, len(values))
    np.testing.assert_array_equal(_merge_in_pieces(scores, k, piece)[1], whole[1])
    expected = np.argsort(-scores[0], kind="stable")[:k]
    np.testing.assert_array_equal(np.asarray(whole[1])[0, : len(expected)], expected)
