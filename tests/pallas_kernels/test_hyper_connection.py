"""The mHC step: the reference against golden values and float64, and every kernel against the reference."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.hyper_connection import block_sizes, gpu_finish, gpu_tiles, ops, ref
from pallas_kernels.hyper_connection.arg_specs import SPECS
from pallas_kernels.hyper_connection.block_sizes import SUMS, Plan
from pallas_kernels.norms import rms_norm
from tests.golden import primitives
from tests.pallas_kernels import hyper_connection_cases as cases
from tests.pallas_kernels import ptx_emulator

EPS = {"iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}

_split_mix = jax.jit(functools.partial(ops.split_mix, num_streams=4, iters=20, eps=1e-6))


def test_split_mix_golden():
    g = primitives()
    pre, post, comb = _split_mix(
        g["hc_split_sinkhorn.mixes"], g["hc_split_sinkhorn.scale"].astype(np.float32), g["hc_split_sinkhorn.base"]
    )
    # float32 exponentials differ by an ulp between libraries; 20 normalisations keep that size.
    np.testing.assert_allclose(pre, g["hc_split_sinkhorn.pre"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(post, g["hc_split_sinkhorn.post"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(comb, g["hc_split_sinkhorn.comb"], rtol=3e-6, atol=3e-7)


def test_whole_step_golden():
    g = primitives()
    x = jnp.asarray(g["hc.x"])
    pre, post, comb = jax.jit(lambda *a: ops.mix_coefficients(*a, **EPS))(
        x, g["hc.fn"], g["hc.scale"].astype(np.float32), g["hc.base"]
    )
    np.testing.assert_allclose(pre, g["hc.pre"], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(post, g["hc.post"], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(comb, g["hc.comb"], rtol=2e-5, atol=1e-6)
    # From the golden coefficients the bf16 results are exact.
    collapsed = jax.jit(ops.collapse)(x, jnp.asarray(g["hc.pre_mix_in"]))
    np.testing.assert_array_equal(np.asarray(collapsed, np.float32), g["hc.collapsed"].astype(np.float32))
    # operation by operation: one program would contract products and sums
    expanded = ops.update(x, jnp.asarray(g["hc.sub_out"]), jnp.asarray(g["hc.post"]), jnp.asarray(g["hc.comb"]))
    np.testing.assert_array_equal(np.asarray(expanded, np.float32), g["hc.expanded"].astype(np.float32))


def test_case_n1_mixing_axis():
    comb = np.zeros((4, 4), np.float32)
    comb[[0, 1, 2, 3], [1, 2, 3, 0]] = 1
    streams = np.array([1, 10, 100, 1000], ml_dtypes.bfloat16)[:, None]
    new = jax.jit(ops.update)(streams, np.zeros(1, ml_dtypes.bfloat16), np.zeros(4, np.float32), comb)
    np.testing.assert_array_equal(np.asarray(new, np.float32)[:, 0], [1000, 1, 10, 100])


def _comb_of(logits):
    mix = np.concatenate([np.zeros(8), np.reshape(logits, -1)]).astype(np.float32)
    return _split_mix(mix, np.ones(3, np.float32), np.zeros(24, np.float32))[2]


def test_case_n2_mixing_values():
    comb = _comb_of([[2, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 3], [-1, 0, 1, 0]])
    expected = [
        [0.706325, 0.123116, 0.117671, 0.052887],
        [0.159104, 0.557015, 0.195854, 0.088026],
        [0.068347, 0.088026, 0.084133, 0.759492],
        [0.066223, 0.231842, 0.602341, 0.099593],
    ]
    np.testing.assert_allclose(comb, expected, atol=1e-6)
    old = np.array([1, 10, 100, 1000], np.float32)
    np.testing.assert_allclose(old @ np.asarray(comb), [75.354965, 246.337884, 612.830424, 176.475622], rtol=1e-6)
    np.testing.assert_allclose(_comb_of(np.zeros((4, 4))), 0.24999975, atol=1e-8)


def test_doubly_stochastic():
    comb = _comb_of(np.random.default_rng(0).normal(size=(4, 4)))
    np.testing.assert_allclose(comb.sum(0), 1, atol=1e-4)
    np.testing.assert_allclose(comb.sum(1), 1, atol=1e-4)


@jax.jit
def _step_from_streams(x, fn, scale, base):
    pre, post, comb = ops.mix_coefficients(x, fn, scale, base, **EPS)
    u = ops.collapse(x, pre)
    return pre, post, comb, ops.update(x, u, post, comb), u


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_case_n5_any_magnitude(factor):
    g = primitives()
    x = g["hc.x"].astype(np.float32) * factor
    x[0, 0] = 0
    x[0, 1, 0, 3] = 3e5 * factor
    *others, u = _step_from_streams(
        x.astype(ml_dtypes.bfloat16), g["hc.fn"], g["hc.scale"].astype(np.float32), g["hc.base"]
    )
    for value in (*others, u):
        assert np.isfinite(np.asarray(value, np.float32)).all()
    assert (np.asarray(u, np.float32)[0, 0] == 0).all()


on_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="the compiled GPU kernel needs a CUDA device")
KERNELS = [pytest.param("gpu", marks=on_gpu), "tpu_interpret"]


@functools.cache
def _compiled(implementation):
    return jax.jit(lambda *args: ops.residual_step(*args, **cases.STATIC, implementation=implementation))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="bits are the same however XLA cuts a program on CPU only")
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_step_is_its_parts(tokens):
    args = cases.make("random", 3, tokens, 256)
    new, x, *coefficients = _compiled("xla")(*args)
    step_by_step = jax.jit(lambda *a: ref.update(*a))(*args[:4])
    np.testing.assert_array_equal(new, step_by_step)
    np.testing.assert_array_equal(x, jax.jit(lambda n: rms_norm(ref.collapse(n, args[4]), args[8], 1e-20))(new))
    parts = jax.jit(lambda n: ref.mix_coefficients(n, *args[5:8], **cases.STATIC))(new)
    for got, want in zip(coefficients, parts, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", cases.CASES)
def test_ref_is_near_float64(case):
    args = cases.make(case, 4, 5, 256)
    out = _compiled("xla")(*args)
    new, x, pre, post, comb = (np.asarray(o, np.float64) for o in out)
    expected = cases.exact(args)
    # rounding to bfloat16 is relative to the terms: cancelling sums keep their terms' rounding
    size = np.abs(np.asarray(args[0], np.float64)).max(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(new, expected[0], rtol=2**-8, atol=1e-6 * size.max())
    if case != "cancelling":
        np.testing.assert_allclose(x, expected[1], rtol=2**-6, atol=2**-4)
    # the coefficients see streams that were rounded to bfloat16: 2^-9 each, averaged over 4 * 256 of them
    scale = 100 if case == "saturated" else 1
    for got, want in zip((pre, post, comb), expected[2:], strict=True):
        np.testing.assert_allclose(got, want, atol=5e-3 * scale)


@functools.cache
def _gradient(implementation):
    """(cotangents, args) -> the gradient of every argument."""

    def loss(args, cotangents):
        out = ops.residual_step(*args, **cases.STATIC, implementation=implementation)
        return sum(jnp.vdot(o.astype(jnp.float32), c) for o, c in zip(out, cotangents, strict=True))

    return jax.jit(jax.grad(loss))


def _cotangents(args, seed):
    streams, y, post, comb, pre = args[:5]
    rng = np.random.default_rng(seed)
    return [rng.normal(size=a.shape).astype(np.float32) for a in (streams, y, pre, post, comb)]


def test_gradient_is_the_slope_of_the_exact_step():
    """Against finite differences of the step in float64, along random directions of every array."""
    args = cases.make("random", 5, 5, 128)
    cotangents = _cotangents(args, 6)
    grads = _gradient("xla")(args, cotangents)
    rng = np.random.default_rng(7)
    wide = [np.asarray(a, np.float64) for a in args]

    def value(arrays):
        return sum((o * np.asarray(c, np.float64)).sum() for o, c in zip(cases.exact(arrays), cotangents, strict=True))

    for i, (name, grad) in enumerate(zip(cases.NAMES, grads, strict=True)):
        assert grad.shape == args[i].shape and grad.dtype == args[i].dtype, name
        # the gradient's own direction: its slope is far from zero, so that a relative tolerance means something
        direction = np.asarray(grad, np.float64) + 0.3 * np.asarray(grad, np.float64).std() * rng.normal(
            size=grad.shape
        )
        direction /= np.linalg.norm(direction)
        step = 1e-5 * max(1.0, np.linalg.norm(wide[i]))
        ends = [value([a + s * step * direction if j == i else a for j, a in enumerate(wide)]) for s in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * step)
        # the gradient is taken at bfloat16 streams and inputs, and passes through bfloat16 cotangents
        np.testing.assert_allclose((np.asarray(grad, np.float64) * direction).sum(), slope, rtol=2e-2, err_msg=name)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradient_of_a_kernel_is_that_of_the_reference(kernel):
    args = cases.make("random", 8, 5, 128)
    cotangents = _cotangents(args, 9)
    gradients = (_gradient(implementation)(args, cotangents) for implementation in (kernel, "xla"))
    for name, got, want in zip(cases.NAMES, *gradients, strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        # the same arithmetic; on a GPU XLA may cut it into other fusions, and a last bit of bfloat16 may turn
        tolerance = {} if jax.default_backend() == "cpu" else {"rtol": 2**-7, "atol": 2**-9 * np.abs(want).max()}
        compare = np.testing.assert_allclose if tolerance else np.testing.assert_array_equal
        compare(got, want, err_msg=name, **tolerance)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", cases.CASES)
def test_kernel_equals_ref_on_cases(kernel, case):
    # a size that is tested below: one program for both
    args = cases.make(case, 10, 17, 384)
    cases.check(_compiled(kernel)(*args), args)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens,dim", [(0, 128), (1, 128), (17, 384), pytest.param(33, 256, marks=pytest.mark.slow)])
def test_kernel_equals_ref_at_sizes(kernel, tokens, dim):
    args = cases.make("random", 11, tokens, dim)
    out = _compiled(kernel)(*args)
    if tokens:
        cases.check(out, args)
    else:
        assert [o.shape for o in out] == [(0, 4, dim), (0, dim), (0, 4), (0, 4), (0, 4, 4)]


def _emulated(monkeypatch, args, plan: Plan):
    """What the GPU kernels' thread-level code computes."""

    def empty(*shape, dtype):
        return np.full(np.prod(shape) * np.dtype(dtype).itemsize // 4, ptx_emulator.POISON, np.uint32).view(dtype)

    def run(module, entry, blocks, threads, shared_bytes, arrays, *rest, **options):
        for i in range(blocks):
            block = ptx_emulator.Block(threads, arrays, shared_bytes)
            for name in ("ptx", "arith", "utils"):
                monkeypatch.setattr(module, name, getattr(block, name))
            entry(block.refs, np.int32(i), *rest, **options)

    streams, y, post, comb, pre, fn, scale, base, gain = (np.ascontiguousarray(a) for a in args)
    new = empty(*streams.shape, dtype=streams.dtype)
    x = empty(*y.shape, dtype=y.dtype)
    sums = empty(plan.tiles, plan.chunks, SUMS, dtype=np.float32)
    coefficients = [empty(*a.shape, dtype=np.float32) for a in (pre, post, comb)]
    arrays = (streams, y, post, comb, pre, fn, new, x, sums)
    run(gpu_tiles, gpu_tiles.tiles_of_unit, plan.chunks * plan.groups, 512, block_sizes.BLOCK_BYTES, arrays, plan)
    arrays = (sums, scale, base, gain, x, *coefficients)
    shared_bytes = gpu_finish.shared_bytes(plan.finish_tokens)
    run(gpu_finish, gpu_finish.finish_block, plan.finish_blocks, 128, shared_bytes, arrays, plan, **cases.STATIC)
    shapes = (streams.shape, y.shape, pre.shape, post.shape, comb.shape)
    return [a.reshape(s) for a, s in zip((new, x, *coefficients), shapes, strict=True)]


@pytest.mark.parametrize(
    "case,tokens,dim,finish_tokens", [("one_huge", 5, 128, 1), ("cancelling", 37, 128, 16), ("random", 17, 384, 4)]
)
def test_emulated_gpu_code_equals_ref(monkeypatch, case, tokens, dim, finish_tokens):
    args = cases.make(case, 13, tokens, dim)
    plan = Plan(num_tokens=tokens, dim=dim, finish_tokens=finish_tokens)
    cases.check(_emulated(monkeypatch, args, plan), args)


def test_gpu_blocks_fit_a_multiprocessor():
    assert block_sizes.BLOCK_BYTES <= block_sizes.SHARED_BYTES
    assert 32 * block_sizes.WARPS * block_sizes.UNITS == 512  # 128 registers a thread


@pytest.mark.parametrize("dim", [128, 384, 5120, 7168, 1 << 15])
@pytest.mark.parametrize("tokens", [1, 16, 17, 4096, 100_000])
def test_gpu_plans_cover_the_arrays(tokens, dim):
    plan = block_sizes.plan(tokens, dim)
    assert plan.chunks * block_sizes.COLUMNS == dim
    assert plan.groups * plan.chunks <= max(block_sizes.MULTIPROCESSORS, plan.chunks)
    assert 1 <= plan.groups <= plan.tiles
    assert plan.finish_blocks * plan.finish_tokens >= tokens > (plan.finish_blocks - 1) * plan.finish_tokens


def test_gpu_problems():
    assert block_sizes.problem(5, 4, 5120) is None
    assert "4 streams" in block_sizes.problem(5, 2, 5120)
    assert "multiple of 128" in block_sizes.problem(5, 4, 192)
    assert "no tokens" in block_sizes.problem(0, 4, 128)


@on_gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 65, 511, 512, 1000, 4096])
def test_gpu_kernel_at_released_width(tokens):
    args = cases.make("random", 12 + tokens, tokens, 5120)
    cases.check(_compiled("gpu")(*args), args)


@pytest.mark.parametrize(
    "spec",
    # seven tokens are as one and as 37, apart from their number
    [pytest.param(s, marks=pytest.mark.slow if s.name == "tiny_t7" else ()) for s in SPECS if "ci" in s.tags],
    ids=lambda s: s.name,
)
def test_specs_run(spec):
    arrays = jax.jit(spec.make)(jax.random.key(0))
    shapes = {name: (x.shape, x.dtype) for name, x in arrays.items()}
    assert shapes == {name: (x.shape, x.dtype) for name, x in spec.abstract().items()}
    assert all(np.isfinite(np.asarray(o, np.float32)).all() for o in jax.jit(spec.bind("xla"))(arrays))


def test_bad_arguments():
    args = [np.asarray(a) for a in cases.make("random", 0, 2, 128)]
    with pytest.raises(ValueError, match=r"streams must be \[T, R, D\]"):
        ops.residual_step(args[0][0], *args[1:], **cases.STATIC)
    with pytest.raises(ValueError, match="fn must be"):
        ops.residual_step(*args[:5], args[5][:, :-1], *args[6:], **cases.STATIC)
    with pytest.raises(TypeError, match="y must be bfloat16"):
        ops.residual_step(args[0], args[1].astype(np.float32), *args[2:], **cases.STATIC)
    with pytest.raises(ValueError, match="iters"):
        ops.residual_step(*args, **(cases.STATIC | {"iters": 0}))
    with pytest.raises(ValueError, match="unknown implementation"):
        ops.residual_step(*args, **cases.STATIC, implementation="fast")
