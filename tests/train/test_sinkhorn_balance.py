"""Sinkhorn-balanced updates against float64 (training.md sections 3.3 and 9)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.train import balance, scale_by_sinkhorn
from tests.train import reference

# float32 against float64: norms of some hundred values, in turn.
FLOAT32 = {"rtol": 2e-5, "atol": 1e-6}


def _gaussian():
    return np.random.default_rng(0).standard_normal((300, 32)).astype(np.float32)


def _power_law_rows():
    """As tokens come: the norm of row i falls with 1 / i, down to 1 / 300 of the first."""
    return (_gaussian() / np.arange(1, 301)[:, None]).astype(np.float32)


CASES = {"gaussian": _gaussian, "power_law_rows": _power_law_rows}


def _delta(g, **options):
    r, c = jax.jit(lambda g: balance(g, **options))(g)
    return np.asarray(np.sqrt(g.shape[1]) * r[:, None] * g * c)


@pytest.mark.parametrize("case", CASES)
def test_row_and_column_rms_are_one_after_11_steps(case):
    delta = _delta(CASES[case]())
    np.testing.assert_allclose(np.sqrt((delta**2).mean(axis=1)), 1, atol=1e-6)
    np.testing.assert_allclose(np.sqrt((delta**2).mean(axis=0)), 1, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("steps", [1, 3, 11])
def test_scaling_vectors_equal_the_direct_form(case, steps):
    g = CASES[case]()
    expected = reference.sinkhorn_direct(g.astype(np.float64), steps)
    np.testing.assert_allclose(_delta(g, steps=steps), expected, **FLOAT32)


def test_masked_rows_stand_still_and_the_mean_counts_all_rows():
    """One row in 100 is live: the threshold is a thousandth of a hundredth of its norm."""
    g = np.zeros((300, 32), np.float32)
    g[::100] = _gaussian()[::100]
    norm = np.linalg.norm(g, axis=1).mean()
    g[1], g[2] = np.full((2, 32), 32**-0.5) * norm * np.array([[0.9e-3], [1.1e-3]])
    delta = _delta(g)
    live = np.flatnonzero((delta != 0).any(axis=1))
    assert live.tolist() == [0, 2, 100, 200]
    np.testing.assert_allclose(np.sqrt((delta[live] ** 2).mean(axis=1)), 1, rtol=1e-5)
    np.testing.assert_allclose(delta, reference.sinkhorn_direct(g.astype(np.float64)), **FLOAT32)


def test_columns_and_tables_of_zeros_give_zeros():
    g = _gaussian()
    g[:, 5] = 0
    delta = _delta(g)
    assert np.isfinite(delta).all() and (delta[:, 5] == 0).all()
    np.testing.assert_allclose(delta, reference.sinkhorn_direct(g.astype(np.float64)), **FLOAT32)
    assert (_delta(np.zeros_like(g)) == 0).all()


@pytest.mark.parametrize("size", [1e-14, 1e15])
def test_size_of_a_gradient_is_nothing(size):
    g = _gaussian()
    np.testing.assert_allclose(_delta((g * size).astype(np.float32)), _delta(g), **FLOAT32)


def test_factors_of_many_rows_stay_in_range():
    """Column norms are 16 here, and dividing by them in each of 10 rounds would take c to 1e-12."""
    g = np.random.default_rng(0).standard_normal((1024, 4)).astype(np.float32)
    _, c = jax.jit(lambda g: balance(g, steps=21))(g)
    np.testing.assert_allclose(np.asarray(c), 1, rtol=0.2)
    np.testing.assert_allclose(_delta(g, steps=21), reference.sinkhorn_direct(g.astype(np.float64), 61), **FLOAT32)


@pytest.mark.parametrize("case", CASES)
def test_updates_equal_the_reference(case):
    gradients = [CASES[case]() * np.float32(f) for f in (1, -0.5, 0.25)]
    gradients[1][::2] = 0  # rows that are not touched in every step
    rule = scale_by_sinkhorn()
    state, update = rule.init({"w": gradients[0]}), jax.jit(rule.update)
    for g in gradients:
        updates, state = update({"w": g}, state)
    expected = reference.sinkhorn_update([g.astype(np.float64) for g in gradients])
    np.testing.assert_allclose(np.asarray(updates["w"]), expected, **FLOAT32)


def test_rows_freeze_some_time_after_their_last_gradient():
    """Its momentum falls by 0.95 a step, from 0.05 of the other row's to 1e-3 of the mean of both: 88 steps."""
    both, one = np.ones((2, 8), np.float32), np.array([[1.0], [0.0]], np.float32) * np.ones((1, 8), np.float32)
    rule = scale_by_sinkhorn()
    update = jax.jit(rule.update)
    _, state = update({"w": both}, rule.init({"w": both}))
    moved = []
    for _ in range(200):
        updates, state = update({"w": one}, state)
        moved.append(bool((updates["w"][1] != 0).any()))
    last = moved.index(False)
    assert all(moved[:last]) and not any(moved[last:])
    n = np.arange(1, 201)  # steps since; both rows in the spec's terms
    touched, other = 0.95 * (1 - 0.95 ** (n + 1)) + 0.05, 0.95 * 0.05 * 0.95**n
    assert last == np.flatnonzero(other <= 1e-3 * (touched + other) / 2)[0] == 88


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
def test_rows_on_several_devices_equal_one_device():
    """A column step sums one number a column over the devices, the mean norm is one number more; no rows travel."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    g = np.concatenate([_power_law_rows(), np.zeros((20, 32), np.float32)])
    rule = scale_by_sinkhorn()
    alone, _ = jax.jit(rule.update)({"w": jnp.asarray(g)}, rule.init({"w": g}))
    sharded = {"w": jax.device_put(g, rows)}
    state = jax.device_put(rule.init(sharded), rows)
    compiled = jax.jit(rule.update).lower(sharded, state).compile()
    updates, _ = compiled(sharded, state)
    assert updates["w"].sharding.is_equivalent_to(rows, 2)
    np.testing.assert_allclose(np.asarray(updates["w"]), np.asarray(alone["w"]), **FLOAT32)
    text = compiled.as_text()
    assert text.count(" all-reduce(") == 6
    assert not any(f" {kind}(" in text for kind in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"))
