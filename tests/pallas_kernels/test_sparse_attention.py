"""Sparse attention against the golden primitives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_attention import ops
from tests.golden import primitives


@pytest.mark.parametrize("case", ["small", "twoblock", "dup"])
def test_golden(case):
    g = primitives()
    q, kv, idx, sink = (g[f"sparse_attn.{case}.{k}"] for k in ("q", "kv", "idx", "sink"))
    batch = np.arange(kv.shape[0])[:, None, None]
    gathered = kv[batch, np.maximum(idx, 0)]
    o = jax.jit(ops.attend, static_argnums=4)(q, gathered, idx >= 0, sink, q.shape[-1] ** -0.5)
    actual, expected = np.asarray(o, np.float32), g[f"sparse_attn.{case}.o"].astype(np.float32)
    # Exponentials and the summation order of q.k may differ in the last float32 bit, which flips a few bf16 roundings.
    np.testing.assert_allclose(actual, expected, rtol=2**-7, atol=2**-9)
    assert (actual == expected).mean() > 0.98
    assert (actual[(idx < 0).all(-1)] == 0).all()


def test_case_n12_nothing_visible_gives_zero():
    q = jnp.ones((1, 2, 32), jnp.bfloat16)
    kv = jnp.ones((1, 5, 32), jnp.bfloat16)
    o = ops.attend(q, kv, jnp.zeros((1, 5), bool), jnp.array([0.3, -5.0]), 1.0)
    assert (np.asarray(o, np.float32) == 0).all()


def test_unused_entries_may_hold_anything():
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.normal(size=(2, 4, 32)), jnp.bfloat16)
    kv = rng.normal(size=(2, 70, 32)).astype(np.float32)
    valid = rng.random((2, 70)) < 0.5
    dirty = np.where(valid[..., None], kv, np.nan)
    clean = ops.attend(q, jnp.asarray(kv, jnp.bfloat16), jnp.asarray(valid), jnp.zeros(4), 1.0)
    poisoned = ops.attend(q, jnp.asarray(dirty, jnp.bfloat16), jnp.asarray(valid), jnp.zeros(4), 1.0)
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
    o = ops.attend(q, kv, jnp.ones((3, 70), bool), sink, 0.2)
    # bf16 probabilities and output: 2^-8 of the largest value summed.
    np.testing.assert_allclose(np.asarray(o, np.float64), np.einsum("bns,bsh->bnh", p, kv64), atol=2e-2)


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_case_n5_any_magnitude_is_finite(factor):
    rng = np.random.default_rng(2)
    kv = rng.normal(size=(2, 40, 32)).astype(np.float32) * factor
    kv[0, :, 0] = 0
    kv[1, 3, 3] = 3e5 * factor
    q = jnp.asarray(rng.normal(size=(2, 4, 32)) * factor, jnp.bfloat16)
    o = ops.attend(q, jnp.asarray(kv, jnp.bfloat16), jnp.ones((2, 40), bool), jnp.zeros(4), 32**-0.5)
    assert np.isfinite(np.asarray(o, np.float32)).all()
