"""Muon against float64 and against optax's own (training.md sections 3.2 and 9)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from dsv41.train import muon, orthogonalize, scale_by_muon
from tests.train import reference

# float32 products against float64: ten steps amplify a rounding error of 1e-7 by the slope at zero, some hundred times
# for the singular values of these matrices.
FLOAT32 = {"rtol": 0, "atol": 2e-4}


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _updates(gradients, blocks, **options):
    options = {"dtype": jnp.float32} | options
    rule = scale_by_muon(lambda name: blocks, **options)
    state, update = rule.init({"w": gradients[0]}), jax.jit(rule.update)
    for g in gradients:
        updates, state = update({"w": g}, state)
    return np.asarray(updates["w"])


def _orthogonalize(matrices, blocks):
    results = jax.jit(lambda m: orthogonalize(m, blocks))([jnp.asarray(m) for m in matrices])
    return [np.asarray(result) for result in results]


@pytest.mark.parametrize("shape, blocks", [((24, 40), 1), ((40, 24), 1), ((96, 40), 4), ((3, 16, 24), 1), ((1, 30), 1)])
def test_updates_equal_the_reference(shape, blocks):
    gradients = [_normal(*shape, seed=i) for i in range(3)]
    expected = reference.muon_update([g.astype(np.float64) for g in gradients], blocks)
    np.testing.assert_allclose(_updates(gradients, blocks), expected, **FLOAT32)


@pytest.mark.parametrize("spectrum", [np.ones(32), np.geomspace(1, 1e-3, 32)])
def test_singular_values_end_near_one(spectrum):
    """Over [1e-4, 1] of the norm, the ten polynomials end between 1 and 1.0020. Measured here: within 0.0006 of one."""
    u, v = (np.linalg.qr(_normal(n, 32, seed=n).astype(np.float64))[0] for n in (32, 48))
    x = jnp.asarray((u * spectrum) @ v.T, jnp.float32)
    values = np.linalg.svd(np.asarray(muon.newton_schulz(x[None])[0], np.float64), compute_uv=False)
    assert abs(values - 1).max() < 0.0021
    np.testing.assert_allclose(np.asarray(muon.newton_schulz(x[None])[0]), u @ v.T, atol=0.0021)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape, blocks", [((256, 128), 4), ((64, 256), 1), ((48, 16), 1), ((4, 32, 96), 1)])
def test_block_rms_is_018_within_2_percent(shape, blocks, dtype):
    updates = _updates([_normal(*shape)], blocks, dtype=dtype).reshape(-1, shape[-2] // blocks, shape[-1])
    rms = np.sqrt((updates**2).mean(axis=(1, 2)))
    np.testing.assert_allclose(rms, 0.18, rtol=0.02)


def test_head_wise_equals_a_loop_over_heads():
    g = _normal(4 * 32, 48)
    whole = _updates([g], 4)
    one_by_one = np.concatenate([_updates([head], 1) for head in np.split(g, 4)])
    np.testing.assert_allclose(whole, one_by_one, rtol=0, atol=1e-5)  # batched products may sum in another order
    assert abs(whole - _updates([g], 1)).max() > 0.01  # and that is another direction than the whole matrix's


def test_matrices_of_one_shape_share_a_stack_and_keep_their_places():
    """Three of them are the same up to transposition, one is cut; each result is its own."""
    matrices = [
        _normal(16, 24, seed=1),
        _normal(24, 16, seed=2),
        _normal(32, 24, seed=3),
        _normal(2, 3, 16, 24, seed=4),
    ]
    blocks = [1, 1, 2, 1]
    for matrix, count, result in zip(matrices, blocks, _orthogonalize(matrices, blocks), strict=True):
        (alone,) = _orthogonalize([matrix], [count])
        np.testing.assert_allclose(result, alone, rtol=0, atol=2e-5)


def test_stacks_are_bounded(monkeypatch):
    monkeypatch.setattr(muon, "_STACK_BYTES", 4 * 2 * 8 * 8)
    sizes = []
    iterate = muon._iterate
    monkeypatch.setattr(muon, "_iterate", lambda stack, *rest: sizes.append(stack.shape[0]) or iterate(stack, *rest))
    matrices = [_normal(*shape, seed=i) for i, shape in enumerate([(8, 8), (8, 8), (8, 8), (5, 8, 8), (8, 8)])]
    results = _orthogonalize(matrices, [1] * 5)
    assert sizes == [2, 2, 5]
    for matrix, result in zip(matrices, results, strict=True):
        np.testing.assert_allclose(result, _orthogonalize([matrix], [1])[0], rtol=0, atol=2e-5)


def test_size_of_a_gradient_is_nothing():
    g = _normal(16, 24)
    (expected,) = _orthogonalize([g], [1])
    for size in (1e15, 1e-15, 1e-30):
        (found,) = _orthogonalize([(g * size).astype(np.float32)], [1])
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_a_block_without_gradient_stands_still():
    g = np.concatenate([_normal(16, 24), np.zeros((16, 24), np.float32)])
    updates = _updates([g], 2)
    assert np.isfinite(updates).all() and abs(updates[:16]).max() > 0
    assert (updates[16:] == 0).all()


def test_a_gradient_that_is_not_finite_is_not_hidden():
    g = _normal(16, 24)
    g[3, 5] = np.nan
    assert np.isnan(_updates([g], 1)).all()


def test_equals_optax_where_optax_does_the_same():
    """Without Nesterov its bias correction cancels, and its epsilon is nothing beside these norms."""
    gradients = [_normal(24, 40, seed=i) for i in range(3)]
    theirs = optax.chain(
        contrib.scale_by_muon(muon.NEWTON_SCHULZ, 10, 0.95, nesterov=False),
        contrib._muon.scale_by_shape(contrib.MuonDimensionNumbers(), consistent_rms=0.18),
    )
    state = theirs.init(jnp.asarray(gradients[0]))
    momentum = np.zeros_like(gradients[0])
    for g in gradients:
        momentum = 0.95 * momentum + g
        expected, state = theirs.update(jnp.asarray(g), state)
    (ours,) = _orthogonalize([momentum], [1])
    np.testing.assert_allclose(0.18 * ours, np.asarray(expected), rtol=0, atol=2e-5)


def test_momentum_may_be_stored_in_bfloat16():
    gradients = [_normal(24, 40, seed=i) for i in range(3)]
    expected = _updates(gradients, 1)
    # bfloat16 keeps 8 bits of the momentum: relative errors of 2^-9, amplified as FLOAT32 says.
    np.testing.assert_allclose(_updates(gradients, 1, momentum_dtype=jnp.bfloat16), expected, rtol=0, atol=0.05)
    state = scale_by_muon(lambda name: 1, momentum_dtype=jnp.bfloat16).init({"w": gradients[0]})
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.bfloat16)}
