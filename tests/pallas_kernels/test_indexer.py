"""Index scores: golden values, a float64 oracle, and the running top-k."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import compat
from pallas_kernels.indexer import arg_specs, block_sizes, tpu, tpu_scores
from pallas_kernels.indexer import ops as indexer
from pallas_kernels.page_layout import PAGE_ENTRIES, IndexPageLayout
from pallas_kernels.topk import ops as topk
from tests.golden import primitives
from tests.pallas_kernels.indexer_cases import CASES, RELEASED, Shape
from tests.pallas_kernels.indexer_emulator import emulated_block_maxima, emulated_entry_scores

_HAS_GPU = jax.default_backend() == "gpu" and compat.gpu_problem() is None
_NEEDS_GPU = pytest.mark.skipif(not _HAS_GPU, reason="needs a CUDA device and jax 0.11")
SHAPES = {
    "tiny": Shape(),
    "released": RELEASED,
    "one_token": Shape(batch=2, tokens=1, heads=32, width=128, block_size=8, table=3, blocks=33),
    "many_tokens": Shape(batch=2, tokens=19, heads=32, width=128, block_size=8, table=2),
    "sixteen": Shape(heads=7, width=32, block_size=16, table=2, blocks=7),
    "pairs": Shape(heads=7, width=32, block_size=2, table=2, blocks=70),
}


def _bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def _dequantized(values, scales) -> np.ndarray:
    """float64 of MXFP4 codes in adjacent pairs; no program to compile for each size."""
    codes = np.stack([values & 0xF, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)
    factors = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * np.repeat(factors, 32, axis=-1)


def _oracle(case: dict) -> tuple[np.ndarray, np.ndarray]:
    """Scores float64 [B, T, M * 128] with -inf where not visible, and the size of the largest head's term.

    Dots and sums are exact up to float64, the three roundings are those of the definition.
    """
    q = _dequantized(np.asarray(case["q_values"]), np.asarray(case["q_scales"]))
    layout = IndexPageLayout(q.shape[-1])
    pages = np.asarray(case["pages"])
    pool = np.asarray(case["pool"])[np.maximum(pages, 0)]
    split = layout.value_rows

    def entries(rows: np.ndarray, count: int) -> np.ndarray:
        """[B, M * 128, count] of the transposed bytes [B, M, rows, 4, 128]."""
        lanes = rows.reshape(*pages.shape, -1, PAGE_ENTRIES)[:, :, :count]
        return np.moveaxis(lanes, 2, 3).reshape(pages.shape[0], -1, count)

    keys = _dequantized(
        entries(pool[:, :, :split], layout.value_bytes), entries(pool[:, :, split:], layout.scale_bytes)
    )
    with np.errstate(invalid="ignore", over="ignore"):
        dots = np.einsum("btnc,bsc->btns", q, keys)
        terms = _bf16(_bf16(np.maximum(dots, 0)) * np.asarray(case["weights"]).astype(np.float64)[..., None])
        scores = _bf16(terms.sum(axis=2))
    known = np.repeat(pages >= 0, PAGE_ENTRIES, axis=1)[:, None]
    usable = known & (np.arange(keys.shape[1]) < np.asarray(case["visible"])[..., None]) & ~np.isnan(scores)
    return np.where(usable, scores, -np.inf), np.where(usable, np.abs(terms).max(axis=2), 0)


def _at_blocks(values: np.ndarray, blocks: np.ndarray, block_size: int, missing: float) -> np.ndarray:
    """[B, T, S] at the entries of blocks [B, T, n]."""
    entries = (np.maximum(blocks, 0)[..., None] * block_size + np.arange(block_size)).reshape(*blocks.shape[:2], -1)
    return np.where(np.repeat(blocks >= 0, block_size, axis=2), np.take_along_axis(values, entries, axis=2), missing)


def _close(actual: jax.Array, scores: np.ndarray, terms: np.ndarray) -> None:
    """A dot product near a tie may round the other way, which moves a head's term by one bfloat16 step."""
    actual = np.asarray(actual, np.float64)
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(scores))
    assert not np.isnan(actual).any()
    seen = ~np.isneginf(scores)
    assert (np.abs(actual[seen] - scores[seen]) <= 2.0**-7 * (np.abs(scores) + terms)[seen]).all()
    assert not np.signbit(actual[actual == 0]).any()
    np.testing.assert_array_equal(_bf16(actual), actual)


@functools.cache
def _compiled(fn, **static):
    return jax.jit(functools.partial(fn, **static))


def _run(fn, case: dict, names: tuple[str, ...], **static) -> jax.Array:
    return _compiled(fn, **static)(*(case[name] for name in names))


_COMMON = ("q_values", "q_scales", "weights", "pool", "pages", "visible")


# The plain implementation has no paths that depend on the other shapes; the kernels take no blocks of two entries.
_SCORES = [
    *(
        pytest.param(n, s, "xla", marks=pytest.mark.slow if s in ("one_token", "many_tokens") else ())
        for s in SHAPES
        for n in CASES
        if s in ("tiny", "released") or n == "random"
    ),
    *(pytest.param(n, s, "gpu", marks=_NEEDS_GPU) for s in SHAPES for n in CASES if s != "pairs"),
]


@pytest.mark.parametrize("name,shape,implementation", _SCORES)
def test_scores(name, shape, implementation):
    shape = SHAPES[shape]
    case = CASES[name](np.random.default_rng(len(name)), shape)
    static = {"block_size": shape.block_size, "implementation": implementation}
    maxima = _run(indexer.block_maxima, case, _COMMON, **static)
    entries = _run(indexer.entry_scores, case, (*_COMMON, "blocks"), **static)
    _check(case, shape.block_size, maxima, entries)


def _check(case: dict, block_size: int, maxima: jax.Array, entries: jax.Array) -> None:
    scores, terms = _oracle(case)
    runs = (*scores.shape[:2], -1, block_size)
    _close(maxima, scores.reshape(runs).max(-1), terms.reshape(runs).max(-1))
    blocks = np.asarray(case["blocks"])
    _close(entries, _at_blocks(scores, blocks, block_size, -np.inf), _at_blocks(terms, blocks, block_size, 0))
    # The same bits in both, so that the two levels of a selection agree.
    of_entries = np.asarray(entries).reshape(*blocks.shape, block_size).max(axis=-1)
    np.testing.assert_array_equal(of_entries, _at_blocks(np.asarray(maxima), blocks, 1, -np.inf))


@pytest.mark.parametrize(
    "shape,name",
    [
        pytest.param(
            s, n, marks=() if s == "tiny" or n in ("random", "one_outlier", "spread_keys") else pytest.mark.slow
        )
        for s in SHAPES
        for n in CASES
        if s in ("tiny", "released") or (n == "random" and s != "pairs")
    ],
)
def test_gpu_programs(shape, name):
    """The kernels' programs on the emulator, few blocks and two warpgroups, so that the work wraps around."""
    shape = SHAPES[shape]
    case = CASES[name](np.random.default_rng(len(name)), shape)
    maxima = emulated_block_maxima(case, shape.block_size, blocks=3, warpgroups=2)
    _check(case, shape.block_size, maxima, emulated_entry_scores(case, shape.block_size, warpgroups=2))


# The interpreter takes seconds for a new shape: the quick run has one of each kind.
_QUICK = {
    ("tiny", "nan_query"), ("tiny", "no_blocks"), ("tiny", "unassigned_pages"),
    ("one_token", "random"), ("one_token", "one_outlier"),
}  # fmt: skip


@pytest.mark.parametrize(
    "shape,name",
    [
        pytest.param(s, n, marks=() if (s, n) in _QUICK else pytest.mark.slow)
        for s in SHAPES
        for n in CASES
        if s != "pairs" or n == "random"
    ],
)
def test_scores_of_the_tpu_kernels(shape, name):
    test_scores(name, shape, "tpu_interpret")


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "released"])
def test_both_forms_of_the_tpu_kernels_agree(shape):
    shape = SHAPES[shape]
    case = CASES["random"](np.random.default_rng(8), shape)
    for fn, names in ((tpu.block_maxima, _COMMON), (tpu.entry_scores, (*_COMMON, "blocks"))):
        static = {"block_size": shape.block_size, "interpret": True}
        np.testing.assert_array_equal(*(_run(fn, case, names, form=form, **static) for form in tpu_scores.FORMS))


def test_block_maxima_from_pairs_of_bfloat16():
    case = CASES["one_outlier"](np.random.default_rng(8))
    maxima = _run(tpu.block_maxima, case, _COMMON, block_size=Shape().block_size, form="pairs", interpret=True)
    scores, terms = (x.reshape(*x.shape[:2], -1, Shape().block_size).max(-1) for x in _oracle(case))
    _close(maxima, scores, terms)


def test_tpu_kernels_refuse_a_page_table_beyond_their_memory():
    q = jax.ShapeDtypeStruct((1, 1, 32, 64), jnp.uint8)
    assert tpu.problem(q, 8, num_pages=1 << 13, num_blocks=2048) is None
    assert "SMEM" in tpu.problem(q, 8, num_pages=1 << 16)
    assert "VMEM" in tpu.problem(q, 1, num_pages=3 << 14)


@pytest.mark.parametrize(
    "sizes,message",
    [
        ((1, 1, 33, 128, 8), "33 index heads"),
        ((1, 1, 32, 256, 8), "256 channels"),
        ((1, 1, 32, 128, 2), "block_size"),
        ((64, 1 << 14, 32, 128, 8), "too many"),
    ],
)
def test_what_the_gpu_kernels_do_not_take(sizes, message):
    assert message in block_sizes.problem(*sizes)


def test_gpu_plans_fit():
    for spec in arg_specs.SPECS:
        arrays = spec.abstract()
        batch, tokens, heads, half = arrays["q_values"].shape
        assert block_sizes.problem(batch, tokens, heads, 2 * half, spec.static["block_size"]) is None
        key, knobs = block_sizes.knobs(**arrays, **spec.static)
        assert key and all(knobs.values())


@pytest.mark.parametrize("spec", [s for s in arg_specs.SPECS if "ci" in s.tags], ids=lambda s: s.name)
def test_arg_specs(spec):
    out = jax.eval_shape(spec.bind("xla"), spec.abstract())
    assert out.dtype == jnp.float32
    assert out.shape[:2] == spec.abstract()["visible"].shape


def test_released_specs_trace():
    for spec in arg_specs.SPECS:
        jax.eval_shape(spec.bind("xla"), spec.abstract())


@pytest.mark.parametrize(
    "change,message",
    [
        ({"block_size": 3}, "must divide"),
        ({"visible": jnp.zeros((3, 2), jnp.float32)}, "visible must be int32"),
        ({"weights": jnp.zeros((3, 2, 5), jnp.bfloat16)}, "weights must be bfloat16"),
        ({"pool": jnp.zeros((2, 17, 4, 128), jnp.uint8)}, "pool must be uint8"),
        ({"blocks": jnp.zeros((3, 1, 2), jnp.int32)}, "blocks must be int32"),
    ],
)
def test_wrong_arguments(change, message):
    case = CASES["random"](np.random.default_rng(0)) | {"block_size": 4} | change
    with pytest.raises(ValueError, match=message):
        indexer.entry_scores(**case)


def test_no_pages_and_no_blocks():
    case = CASES["random"](np.random.default_rng(0))
    case["pages"], case["blocks"] = case["pages"][:, :0], case["blocks"][..., :3]
    assert np.isneginf(indexer.entry_scores(**case, block_size=4)).all()
    del case["blocks"]
    assert indexer.block_maxima(**case, block_size=4).shape == (3, 2, 0)


_index_scores = jax.jit(indexer.index_scores)


def test_index_scores_golden():
    g = primitives()
    heads, dim = g["indexer.q"].shape[-2:]
    weights = (g["indexer.w_raw"].astype(np.float32) * (dim**-0.5 * heads**-0.5)).astype(g["indexer.w_raw"].dtype)
    scores = _index_scores(g["indexer.q"], weights, g["indexer.k"])
    np.testing.assert_array_equal(scores, g["indexer.score"].astype(np.float32))


def test_keys_of_a_query_agree_with_shared_keys():
    g = primitives()
    shared = _index_scores(g["indexer.q"], g["indexer.w_raw"], g["indexer.k"])
    own = np.broadcast_to(g["indexer.k"][:, None], (2, 5, *g["indexer.k"].shape[1:]))
    np.testing.assert_array_equal(_index_scores(g["indexer.q"], g["indexer.w_raw"], own), shared)


_merge_topk = jax.jit(topk.merge_topk)


def _merge_in_pieces(scores, k, piece, width=None):
    """The running top-k; with a width every piece is filled up to it with scores that are never taken."""
    best = topk.empty_topk(scores.shape[:-1], k)
    for start in range(0, scores.shape[-1], piece):
        part = scores[..., start : start + piece]
        if width is not None:
            part = np.pad(part, ((0, 0), (0, width - part.shape[-1])), constant_values=-np.inf)
        best = _merge_topk(best, part, start + np.arange(part.shape[-1], dtype=np.int32))
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


@given(st.integers(1, 20), st.lists(st.integers(0, 3), min_size=1, max_size=60), st.sampled_from([1, 3, 8]))
def test_ties_do_not_depend_on_the_split(piece, values, k):
    scores = np.array([values], np.float32)
    whole = _merge_in_pieces(scores, k, len(values), width=60)
    np.testing.assert_array_equal(_merge_in_pieces(scores, k, piece, width=20)[1], whole[1])
    expected = np.argsort(-scores[0], kind="stable")[:k]
    np.testing.assert_array_equal(np.asarray(whole[1])[0, : len(expected)], expected)
