"""Confidence calibration: the error against a plain loop, recovery of known temperatures, and the file."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.config import DSV41Error
from dsv41.engine.confidence_calibration import (
    ConfidenceTemperatures,
    calibrated_survival,
    expected_calibration_error,
    fit_temperatures,
    load_temperatures,
    reliability,
    save_temperatures,
)
from dsv41.ops.verify_schedule import survival


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rounds(count, temperatures, seed=0):
    """Logits whose sigmoid is right after division by the temperatures, and drafts accepted accordingly."""
    rng = np.random.default_rng(seed)
    true = rng.normal(1.0, 1.5, (count, len(temperatures)))
    passed = rng.random(true.shape) < sigmoid(true)
    return true * temperatures, passed.cumprod(axis=1).sum(axis=1)


def test_calibration_error_of_two_bins():
    """Four say .5 and two come true; two say .9 and none does: |.5 - .5| * 4/6 + |.9 - 0| * 2/6."""
    probability = np.array([0.5] * 4 + [0.9] * 2)
    assert expected_calibration_error(probability, [1, 0, 1, 0, 0, 0]) == pytest.approx(0.3)
    assert expected_calibration_error(np.array([1.0]), [True]) == 0
    assert expected_calibration_error(np.array([1.0]), [False]) == expected_calibration_error(np.array([0.0]), [1]) == 1


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_calibration_error_against_a_loop(pairs):
    bins = [[] for _ in range(15)]
    for p, y in pairs:
        bins[min(int(p * 15), 14)].append((p, y))
    expect = sum(len(b) / len(pairs) * abs(np.mean([p for p, _ in b]) - np.mean([y for _, y in b])) for b in bins if b)
    got = expected_calibration_error(np.array([p for p, _ in pairs]), np.array([y for _, y in pairs]))
    assert got == pytest.approx(expect, abs=1e-12)


def test_known_temperatures_are_found():
    """To a step or two of the grid, and the error falls to that of the sample."""
    true = 10.0 ** (np.array([6, -4, 10, 0, 3]) / 20)
    logits, accepted = rounds(200_000, true)
    fitted = fit_temperatures(logits, accepted)
    assert fitted.block_size == 5 and fitted.samples == 200_000
    assert np.abs(np.log10(fitted.values / true)).max() < 0.11
    assert max(fitted.ece_after) < 0.01 < min(fitted.ece_before[:3])
    # What the schedule makes of them is what was fitted.
    a = np.asarray(survival(logits.astype(np.float32), np.array(fitted.values, np.float32)))
    for k in range(5):
        assert expected_calibration_error(a[:, k], accepted > k) == pytest.approx(fitted.ece_after[k], abs=1e-3)


def test_fit_is_one_position_after_the_other():
    """Each the best of the grid, given those before it."""
    logits, accepted = rounds(400, np.array([3.0, 0.5]), seed=1)
    fitted = fit_temperatures(logits, accepted)
    grid = np.geomspace(0.1, 10, 41)
    before = np.ones(400)
    for k, value in enumerate(fitted.values):
        errors = [expected_calibration_error(before * sigmoid(logits[:, k] / t), accepted > k) for t in grid]
        assert value == pytest.approx(grid[np.argmin(errors)]) and fitted.ece_after[k] == pytest.approx(min(errors))
        before = before * sigmoid(logits[:, k] / value)
    ones = [expected_calibration_error(sigmoid(logits[:, : k + 1]).prod(axis=1), accepted > k) for k in range(2)]
    np.testing.assert_allclose(fitted.ece_before, ones, rtol=1e-12)


def test_equal_temperatures_go_to_the_nearest_to_1():
    """Logits of 0 say the same whatever they are divided by."""
    assert fit_temperatures(np.zeros((10, 3)), np.arange(10) % 4).values == (1.0, 1.0, 1.0)


def test_extreme_logits_do_not_overflow():
    fitted = fit_temperatures(np.array([[1e4, -1e4], [-1e4, 1e4]]), np.array([1, 0]))
    assert fitted.ece_after == (0.0, 0.0)


@pytest.mark.parametrize(
    "logits,accepted,message",
    [
        (np.zeros((0, 5)), np.zeros(0, int), "shapes: expected logits"),
        (np.zeros((3, 0)), np.zeros(3, int), "shapes: expected logits"),
        (np.zeros(3), np.zeros(3, int), "shapes: expected logits"),
        (np.zeros((3, 5)), np.zeros(4, int), "shapes: expected logits"),
        (np.array([[0.0, np.nan]]), np.array([1]), r"logits: expected finite numbers, got \[\[0, 1\]\]"),
        (np.array([[np.inf, 0.0]]), np.array([1]), "logits: expected finite numbers"),
        (np.zeros((2, 5)), np.array([0, 6]), r"accepted: expected integers in \[0, 5\], got \[0, 6\]"),
        (np.zeros((2, 5)), np.array([0, -1]), "accepted: expected integers"),
        (np.zeros((2, 5)), np.array([0.0, 1.0]), "accepted: expected integers"),
    ],
)
def test_bad_records_are_refused(logits, accepted, message):
    with pytest.raises(DSV41Error, match=f"^{message}"):
        fit_temperatures(logits, accepted)


TEMPERATURES = ConfidenceTemperatures(
    values=(0.5, 1.0, 2.0), samples=100, ece_before=(0.1, 0.2, 0.3), ece_after=(0.0, 0.01, 0.02)
)


def test_file_gives_the_temperatures_back(tmp_path):
    path = tmp_path / "temperatures.json"
    for temperatures in (TEMPERATURES, fit_temperatures(*rounds(50, np.ones(5)))):
        save_temperatures(temperatures, path)
        assert load_temperatures(path, temperatures.block_size) == temperatures
    assert [f.name for f in tmp_path.iterdir()] == ["temperatures.json"]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"format_version": 3}, "format_version: expected 1, got 3"),
        ({"block_size": 5}, "block_size: expected 3, got 5"),
        ({"block_size": 3.0}, "block_size: expected int"),
        ({"samples": -1}, "samples: expected 1 or more, got -1"),
        ({"temperatures": [1.0, 1.0]}, "temperatures: expected 3 numbers"),
        ({"temperatures": [1.0] * 4}, "temperatures: expected 3 numbers"),
        ({"temperatures": [1, 0, 1]}, r"temperatures\[1\]: expected a finite number above 0, got 0"),
        ({"temperatures": [1, 1, -2.0]}, r"temperatures\[2\]: expected a finite number above 0"),
        ({"temperatures": [float("nan"), 1, 1]}, r"temperatures\[0\]: expected a finite number above 0, got nan"),
        ({"temperatures": [1, float("inf"), 1]}, r"temperatures\[1\]: expected a finite number above 0"),
        ({"temperatures": [1, "1", 1]}, r"temperatures\[1\]: expected a finite number above 0"),
        ({"temperatures": [1, True, 1]}, r"temperatures\[1\]: expected a finite number above 0"),
        ({"ece_before": [0, 0]}, "ece_before: expected 3 numbers"),
        ({"ece_after": [0, 0, 1.5]}, r"ece_after\[2\]: expected a number in \[0, 1\]"),
        ({"more": 1}, "unknown field more"),
    ],
)
def test_bad_file_is_refused(tmp_path, change, message):
    path = tmp_path / "temperatures.json"
    save_temperatures(TEMPERATURES, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DSV41Error, match=rf"temperatures\.json: {message}"):
        load_temperatures(path, 3)


def test_another_block_size_is_refused(tmp_path):
    save_temperatures(TEMPERATURES, tmp_path / "t.json")
    with pytest.raises(DSV41Error, match=r"t\.json: block_size: expected 5, got 3$"):
        load_temperatures(tmp_path / "t.json", 5)


def test_reliability_says_where_the_error_is():
    probability = np.array([0.02, 0.04, 0.5, 1.0])
    said, happened, samples = reliability(probability, np.array([0, 1, 1, 1]))
    assert samples.tolist() == [2, *[0] * 6, 1, *[0] * 6, 1]
    np.testing.assert_allclose(said[samples > 0], [0.03, 0.5, 1.0])
    np.testing.assert_allclose(happened[samples > 0], [0.5, 1.0, 1.0])
    assert np.isnan(said[samples == 0]).all() and np.isnan(happened[samples == 0]).all()
    used = samples > 0
    error = (samples[used] * np.abs(said - happened)[used]).sum() / 4
    assert error == pytest.approx(expected_calibration_error(probability, np.array([0, 1, 1, 1])))


def test_calibrated_survival():
    logits = np.array([[0.0, np.log(3.0)], [-1000.0, 1000.0]])
    np.testing.assert_allclose(calibrated_survival(logits), [[0.5, 0.375], [0, 0]])
    np.testing.assert_allclose(calibrated_survival(logits[:1], (1, 0.5)), [[0.5, 0.45]])
