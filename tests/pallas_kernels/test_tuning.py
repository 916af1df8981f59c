"""Where a kernel's sizes come from."""

import json

import jax
import pytest

from pallas_kernels import tuning
from pallas_kernels.tuning import HEURISTIC, combinations, data_file, knob, trial


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """A file for this device that says 4 splits for one shape."""
    monkeypatch.setattr(tuning, "DATA", tmp_path)
    kind = jax.devices()[0].device_kind
    data_file(kind).write_text(json.dumps({"device_kind": kind, "ops": {"topk": {"64x128": {"splits": 4}}}}))
    tuning._tuned.cache_clear()
    yield
    tuning._tuned.cache_clear()


def test_file_name():
    assert data_file("NVIDIA H200").name == "nvidia_h200.json"
    assert data_file("TPU v5 lite").name == "tpu_v5_lite.json"


def test_a_tuned_value_replaces_the_heuristics(tuned):
    assert knob("topk", "64x128", "splits", 1) == 4
    assert knob("topk", "64x129", "splits", 1) == 1
    assert knob("topk", "64x128", "threads", 256) == 256
    assert knob("indexer", "64x128", "splits", 1) == 1


def test_a_trial_comes_first_and_compiles_anew(tuned):
    seen = []

    @jax.jit
    def fn(x):
        seen.append(knob("topk", "64x128", "splits", 1))
        return x

    with trial((("topk", "splits", 2),)):
        fn(0.0)
    fn(0.0)
    with trial((("topk", "splits", 8), ("topk", "threads", 64))):
        fn(0.0)
    with trial(HEURISTIC):
        fn(0.0)
    assert seen == [2, 4, 8, 1]


def test_combinations():
    assert combinations({}) == [{}]
    assert combinations({"a": [1, 2], "b": [3]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
