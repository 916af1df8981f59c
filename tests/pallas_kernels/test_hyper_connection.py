"""The mHC step against the golden primitives and the published faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hyper_connection import ops
from tests.golden import primitives

EPS = {"iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}


def test_split_mix_golden():
    g = primitives()
    pre, post, comb = jax.jit(lambda m, s, b: ops.split_mix(m, s, b, num_streams=4, iters=20, eps=1e-6))(
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
    collapsed = ops.collapse(x, jnp.asarray(g["hc.pre_mix_in"]))
    np.testing.assert_array_equal(np.asarray(collapsed, np.float32), g["hc.collapsed"].astype(np.float32))
    expanded = ops.update(x, jnp.asarray(g["hc.sub_out"]), jnp.asarray(g["hc.post"]), jnp.asarray(g["hc.comb"]))
    np.testing.assert_array_equal(np.asarray(expanded, np.float32), g["hc.expanded"].astype(np.float32))


def test_case_n1_mixing_axis():
    comb = np.zeros((4, 4), np.float32)
    comb[[0, 1, 2, 3], [1, 2, 3, 0]] = 1
    streams = jnp.array([1, 10, 100, 1000], jnp.bfloat16)[:, None]
    new = ops.update(streams, jnp.zeros((1,), jnp.bfloat16), jnp.zeros(4), jnp.asarray(comb))
    np.testing.assert_array_equal(np.asarray(new, np.float32)[:, 0], [1000, 1, 10, 100])


def _comb_of(logits):
    mix = jnp.concatenate([jnp.zeros(8), jnp.asarray(logits, jnp.float32).reshape(-1)])
    return ops.split_mix(mix, jnp.ones(3), jnp.zeros(24), num_streams=4, iters=20, eps=1e-6)[2]


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


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_case_n5_any_magnitude(factor):
    g = primitives()
    x = g["hc.x"].astype(np.float32) * factor
    x[0, 0] = 0
    x[0, 1, 0, 3] = 3e5 * factor
    x = jnp.asarray(x).astype(jnp.bfloat16)
    pre, post, comb = ops.mix_coefficients(
        x, jnp.asarray(g["hc.fn"]), jnp.asarray(g["hc.scale"].astype(np.float32)), jnp.asarray(g["hc.base"]), **EPS
    )
    u = ops.collapse(x, pre)
    new = ops.update(x, u, post, comb)
    for value in (pre, post, comb, u, new):
        assert np.isfinite(np.asarray(value, np.float32)).all()
    assert (np.asarray(u, np.float32)[0, 0] == 0).all()
