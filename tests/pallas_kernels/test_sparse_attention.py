"""Sparse attention: the reference against the golden primitives and float64, the kernels against the reference."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import compat, formats
from pallas_kernels.page_layout import PAGE_ENTRIES, ROW_BYTES, MainPageLayout, WindowLayout
from pallas_kernels.sparse_attention import block_sizes, gpu, ops, ref, tpu
from pallas_kernels.sparse_attention.gpu_plan import Shape
from pallas_kernels.tuning import combinations, trial
from tests.golden import primitives
from tests.pallas_kernels import sparse_attention_cases

_attend = jax.jit(ref.attend, static_argnums=4)


@pytest.mark.parametrize("case", ["small", "twoblock", "dup"])
def test_golden(case):
    g = primitives()
    q, kv, idx, sink = (g[f"sparse_attn.{case}.{k}"] for k in ("q", "kv", "idx", "sink"))
    batch = np.arange(kv.shape[0])[:, None, None]
    gathered = kv[batch, np.maximum(idx, 0)]
    o = _attend(q, gathered, idx >= 0, sink, q.shape[-1] ** -0.5)
    actual, expected = np.asarray(o, np.float32), g[f"sparse_attn.{case}.o"].astype(np.float32)
    # Exponentials and the summation order of q.k may differ in the last float32 bit, which flips a few bf16 roundings.
    np.testing.assert_allclose(actual, expected, rtol=2**-7, atol=2**-9)
    assert (actual == expected).mean() > 0.98
    assert (actual[(idx < 0).all(-1)] == 0).all()


def test_case_n12_nothing_visible_gives_zero():
    q = np.ones((1, 2, 32), ml_dtypes.bfloat16)
    kv = np.ones((1, 5, 32), ml_dtypes.bfloat16)
    o = _attend(q, kv, np.zeros((1, 5), bool), np.float32([0.3, -5.0]), 1.0)
    assert (np.asarray(o, np.float32) == 0).all()


def test_unused_entries_may_hold_anything():
    rng = np.random.default_rng(3)
    q = rng.normal(size=(2, 4, 32)).astype(ml_dtypes.bfloat16)
    kv = rng.normal(size=(2, 70, 32)).astype(ml_dtypes.bfloat16)
    valid = rng.random((2, 70)) < 0.5
    dirty = np.where(valid[..., None], kv, ml_dtypes.bfloat16(np.nan))
    clean, poisoned = (_attend(q, x, valid, np.zeros(4, np.float32), 1.0) for x in (kv, dirty))
    np.testing.assert_array_equal(np.asarray(clean, np.float32), np.asarray(poisoned, np.float32))


def test_sink_only_enters_the_denominator():
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(3, 4, 32)), jnp.bfloat16)
    kv = jnp.asarray(rng.normal(size=(3, 70, 32)), jnp.bfloat16)
    sink = jnp.asarray(rng.normal(size=4), jnp.float32)
    q64, kv64 = np.asarray(q, np.float64), np.asarray(kv, np.float64)
    logits = np.einsum("bnh,bsh->bns", q64, kv64) * 0.2
    p = np.exp(logits)
    p = p / (p.sum(-1, keepdims=True) + np.exp(np.asarray(sink, np.float64))[:, None])
    o = _attend(q, kv, np.ones((3, 70), bool), sink, 0.2)
    # bf16 probabilities and output: 2^-8 of the largest value summed.
    np.testing.assert_allclose(np.asarray(o, np.float64), np.einsum("bns,bsh->bnh", p, kv64), atol=2e-2)


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_case_n5_any_magnitude_is_finite(factor):
    rng = np.random.default_rng(2)
    kv = rng.normal(size=(2, 40, 32)).astype(np.float32) * factor
    kv[0, :, 0] = 0
    kv[1, 3, 3] = 3e5 * factor
    q = (rng.normal(size=(2, 4, 32)) * factor).astype(ml_dtypes.bfloat16)
    kv = kv.astype(ml_dtypes.bfloat16)
    o = _attend(q, kv, np.ones((2, 40), bool), np.zeros(4, np.float32), 32**-0.5)
    assert np.isfinite(np.asarray(o, np.float32)).all()


def _pool_rows(pool: np.ndarray, width: int) -> np.ndarray:
    """float64 [entries, H]; NaN where a scale is NaN."""
    layout = MainPageLayout(width)
    linear = pool.reshape(pool.shape[0], -1)
    split = layout.value_rows * ROW_BYTES
    values = linear[:, : PAGE_ENTRIES * layout.value_bytes].reshape(-1, layout.value_bytes)
    scales = linear[:, split : split + PAGE_ENTRIES * layout.scale_bytes].reshape(-1, layout.scale_bytes)
    codes = np.concatenate([values & 0xF, values >> 4], axis=1)
    magnitudes = formats.E2M1_MAGNITUDES[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    return magnitudes * np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, axis=1)


def _ring_rows(rings: np.ndarray, layout: WindowLayout) -> np.ndarray:
    """float64 [slots, length, H]."""
    linear = rings.reshape(rings.shape[0], -1)
    split = layout.value_rows * ROW_BYTES
    values = linear[:, : layout.length * layout.head_dim].reshape(-1, layout.length, layout.head_dim)
    scales = linear[:, split : split + layout.length * layout.scale_bytes].reshape(*values.shape[:2], -1)
    return values.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.repeat(2.0 ** (scales - 127.0), 32, axis=2)


def _dense(args: dict) -> np.ndarray:
    """The op in float64, without blocks, written apart from the packed layouts' own code."""
    q = np.asarray(args["q"], np.float64)
    b, t, _, h = q.shape
    out = np.zeros(q.shape)
    rings = _ring_rows(np.asarray(args["window"]), args["window_layout"])
    pool = None if args["pool"] is None else _pool_rows(np.asarray(args["pool"]), h)
    for i, j in np.ndindex(b, t):
        index = np.asarray(args["window_index"])[i, j]
        kv = rings[np.asarray(args["slot"])[i], index[index >= 0]]
        if pool is not None:
            entry = np.asarray(args["selected"])[i, j]
            kv = np.concatenate([kv, pool[entry[entry >= 0]]])
        if not len(kv):
            continue
        logits = q[i, j] @ kv.T * args["scale"]
        maximum = logits.max(-1, keepdims=True)
        p = np.exp(logits - maximum)
        p /= p.sum(-1, keepdims=True) + np.exp(np.asarray(args["sink"], np.float64)[:, None] - maximum)
        out[i, j] = p @ kv
    if args["rope"] is not None:
        r = args["rope"].shape[-1]
        cos, sin = np.moveaxis(np.asarray(args["rope"], np.float64), 2, 0)
        turn = (cos - 1j * sin)[:, :, None]
        pairs = (out[..., h - 2 * r :: 2] + 1j * out[..., h - 2 * r + 1 :: 2]) * turn
        out[..., h - 2 * r :: 2], out[..., h - 2 * r + 1 :: 2] = pairs.real, pairs.imag
    return out


@functools.cache
def _compiled(implementation: str, scale: float, window_layout: WindowLayout):
    static = {"scale": scale, "window_layout": window_layout, "implementation": implementation}
    return jax.jit(functools.partial(ops.sparse_attention, **static))


def _run(args: dict, implementation: str) -> np.ndarray:
    fn = _compiled(implementation, args["scale"], args["window_layout"])
    return np.asarray(fn(**{k: args[k] for k in sparse_attention_cases.ARRAYS}), np.float64)


def _assert_near(actual: np.ndarray, expected: np.ndarray):
    """Within 3 * 2^-8 of a query's largest value: the output is rounded twice to bfloat16, by up to 2^-8 each time, and
    rounded probabilities come on top; much less in the mean."""
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    if actual.size:
        size = np.abs(expected).max(axis=(-1, -2), keepdims=True) + 1e-30
        error = (actual - expected) / size
        assert np.abs(error).max() < 3 * 2**-8
        assert np.sqrt((error**2).mean()) < 2**-9


@pytest.mark.parametrize("case", sparse_attention_cases.CASES)
def test_packed_against_float64(case):
    args = sparse_attention_cases.make(case, seed=sum(case.encode()))
    _assert_near(_run(args, "xla"), _dense(args))


@pytest.mark.parametrize("width", [64, 128, 256, 512])
@pytest.mark.parametrize("queries", [1, 7, 64, 133, 4096])
@pytest.mark.parametrize("selected", [0, 1, 512, 2048])
def test_gpu_plans_fit(queries, selected, width):
    layout = WindowLayout(width, 134)
    shape = Shape(queries=queries, tokens=1, groups=1, width=width, window=128, selected=selected, layout=layout)
    q = jax.ShapeDtypeStruct((queries, 1, 64, width), jnp.bfloat16)
    index = [jax.ShapeDtypeStruct((queries, 1, n), jnp.int32) for n in (128, selected)]
    _, choices = block_sizes.knobs(q, None, None, index[0], None, index[1], None, None, 1.0, layout)
    for choice in [None, *combinations(choices)]:
        trial_values = tuple(("sparse_attention", name, value) for name, value in (choice or {}).items())
        with trial(trial_values):
            tuning = gpu.tuning_of(shape)
        plan = shape.plan(tuning)
        assert plan.shared_bytes <= 227 * 1024
        assert plan.blocks * tuning.splits >= shape.blocks
        softmax, values, gathering = tuning.registers
        assert softmax + values + tuning.gatherers * gathering <= {1: 504, 2: 512}[tuning.gatherers]


@pytest.mark.parametrize("change", ["width", "dtype", "pair", "rank"])
def test_arguments_that_do_not_fit_are_refused(change):
    args = sparse_attention_cases.make("tiny", seed=0)
    if change == "width":
        args["q"] = args["q"][..., :32]
    elif change == "dtype":
        args["selected"] = args["selected"].astype(jnp.int16)
    elif change == "pair":
        args["pool"] = None
    else:
        args["window_index"] = args["window_index"][0]
    with pytest.raises(ValueError, match="sparse_attention"):
        ops.sparse_attention(**args)


_GPU = pytest.param(
    "gpu",
    marks=pytest.mark.skipif(
        compat.gpu_problem() is not None or jax.default_backend() not in ("gpu", "cuda"),
        reason="Mosaic GPU kernels need jax 0.11 and a CUDA device",
    ),
)


@pytest.mark.parametrize("implementation", [_GPU])
@pytest.mark.parametrize("case", sparse_attention_cases.CASES)
def test_kernel_against_float64(case, implementation):
    args = sparse_attention_cases.make(case, seed=sum(case.encode()) + 1)
    _assert_near(_run(args, implementation), _dense(args))


# The interpreter takes seconds for a new shape: the quick run has one of each kind.
_QUICK = (
    "tiny", "tiny_absent", "tiny_window_only", "no_window", "tiny_nothing_visible", "no_sequences",
    "largest_scales", "smallest_scales", "zero_scales", "outlier", "huge_sink", "page_ends", "released_poisoned",
)  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in _QUICK else pytest.mark.slow) for c in sparse_attention_cases.CASES]
)
def test_tpu_kernel_against_float64(case):
    args = sparse_attention_cases.make(case, seed=sum(case.encode()) + 2)
    _assert_near(_run(args, "tpu_interpret"), _dense(args))


def test_nan_in_an_entry_that_is_seen_is_not_hidden():
    args = sparse_attention_cases.make("tiny", seed=5)
    layout = args["window_layout"]
    rings = np.array(args["window"]).reshape(args["window"].shape[0], -1)
    entry, slot = int(args["window_index"][0, 0, 0]), int(args["slot"][0])
    rings[slot, layout.value_rows * ROW_BYTES + entry * layout.scale_bytes] = 0xFF
    args["window"] = jnp.asarray(rings.reshape(args["window"].shape))
    window_index = np.array(args["window_index"])
    window_index[0, 1] = -1
    args["window_index"] = jnp.asarray(window_index)
    out = _run(args, "tpu_interpret")
    assert np.isnan(out[0, 0]).all()
    assert np.isfinite(out[0, 1]).all() and np.isfinite(out[1:]).all()


def test_tpu_kernel_walks_a_long_ring_in_blocks():
    shape = sparse_attention_cases.Shape(batch=1, tokens=2, heads=8, width=512, pages=1, selected=0, ring=300)
    args = sparse_attention_cases.random_case(np.random.default_rng(300), shape)
    _assert_near(_run(args, "tpu_interpret"), _dense(args))


def test_tpu_kernel_refuses_a_ring_beyond_its_memory():
    q = jax.ShapeDtypeStruct((1, 2, 8, 512), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((1, 2, 128), jnp.int32)
    assert tpu.problem(q, index, None, None, window_layout=WindowLayout(512, 4224)) is None
    assert "MiB of VMEM" in tpu.problem(q, index, None, None, window_layout=WindowLayout(512, 30000))
