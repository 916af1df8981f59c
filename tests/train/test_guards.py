"""What stops a run, and the batch that it leaves."""

import math

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from dsv41.config import DSV41Error
from dsv41.train.guards import GuardLimits, TrainingStopped, check_step, find_trouble, load_batch, save_bad_batch
from dsv41.train.pack import PackedBatch

ROWS = {"rows": "3f", "batch": 2, "position": {"next_index": 7}}


def batch(images=False, engram=True):
    rng = np.random.default_rng(0)
    ids = {name: rng.integers(0, 99, (2, 8), dtype=np.int32) for name in ("tokens", "document", "position", "targets")}
    masks = {name: rng.integers(0, 2, (2, 8)).astype(bool) for name in ("loss_mask", "image_mask")}
    embeds = rng.standard_normal((2, 8, 4)).astype(ml_dtypes.bfloat16) if images else None
    rows = rng.integers(0, 99, (2, 8, 1, 6), dtype=np.int32) if engram else None
    return PackedBatch(**ids, **masks, window_floor=ids["tokens"] + 1, engram_rows=rows, image_embeds=embeds)


def fields(pack):
    return {
        name: x if x is None else (str(x.dtype), x.shape, np.asarray(x).tobytes()) for name, x in vars(pack).items()
    }


GOOD = {"loss": 2.5, "lm_loss": 2.4, "grad_norm": 1.0, "recall": math.nan}


@pytest.mark.parametrize("metric", ["loss", "lm_loss", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(metric, value):
    trouble = find_trouble(GOOD | {metric: value})
    assert trouble[::2] == (metric, "a finite number") and (trouble.value == value or math.isnan(value))
    assert find_trouble(GOOD) is None


def course(norms, limits):
    """Number of the norm that stops a run; None: none does."""
    kept = []
    for number, norm in enumerate(norms):
        if find_trouble({"grad_norm": norm}, kept, limits):
            return number
        kept.append(norm)
    return None


def test_gradients_that_run_away():
    limits, calm = GuardLimits(spike=10, spike_steps=3, window=9), [1.0, 1.2, 0.8, 1.0, 1.1, 0.9, 1.0, 0.7, 1.3]
    assert course([*calm, 50, 50, 50], limits) == 11
    assert course([*calm, 50, 50, 9, 50, 50], limits) is None
    assert course([*calm, 50, 50, 9, 50, 50, 12], limits) == 14
    assert course([*calm, 9.9, 9.9, 9.9], limits) is None
    # The median is of the steps before the spike, and there must be enough of them.
    assert course([*calm[1:], 50, 50, 50], limits) is None
    assert course([*calm, 50, 50, 50], GuardLimits(spike_steps=3, window=9)) is None
    assert course([*calm, 50], GuardLimits(spike=10, spike_steps=1, window=9)) == 9
    assert course([100.0] * 9 + [1.0] * 9 + [11.0] * 3, GuardLimits(spike=10, spike_steps=3, window=9)) == 20


def test_a_step_that_stops_the_run(tmp_path):
    """It remembers as many norms as it needs, and no more, and stops where the whole course would."""
    limits, norms = GuardLimits(spike=10, spike_steps=2, window=4), []
    rates = [3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 20.0, 30.0]
    assert course(rates, limits) == 7
    for step, norm in enumerate(rates[:-1]):
        norms = check_step(tmp_path, step, GOOD | {"grad_norm": norm}, batch(), norms=norms, limits=limits)
        assert norms == rates[max(step - 4, 0) : step + 1]
    assert not list(tmp_path.iterdir())
    metrics = GOOD | {"grad_norm": rates[-1]}
    with pytest.raises(TrainingStopped) as stopped:
        check_step(tmp_path, 7, metrics, batch(), tokens=4096, rows=ROWS, norms=norms, limits=limits)
    file = tmp_path / "bad_batch_00000007.safetensors"
    expected = "at most 10 once in 2 steps (10 times the median before)"
    assert str(stopped.value) == f"step 7: grad_norm is 30, expected {expected}; its batch is in {file}"
    error = stopped.value
    assert (error.step, error.metric, error.value, error.batch) == (7, "grad_norm", 30, file)
    assert isinstance(error, DSV41Error)
    found = load_batch(file)
    assert found[:3] == (7, 4096, ROWS) and fields(found.pack) == fields(batch())
    assert math.isnan(found.metrics.pop("recall")) and found.metrics == {k: metrics[k] for k in found.metrics}


def test_nothing_is_remembered_without_need(tmp_path):
    assert check_step(tmp_path, 1, GOOD, batch()) == []
    with pytest.raises(TrainingStopped, match=r"step 2: loss is nan, expected a finite number; its batch is in .*bad_"):
        check_step(tmp_path, 2, GOOD | {"loss": math.nan}, batch())


@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize("engram", [True, False])
def test_batch_comes_back(tmp_path, images, engram):
    pack = batch(images, engram)
    file = save_bad_batch(tmp_path, 12, pack, {"loss": math.inf})
    found = load_batch(file)
    assert fields(found.pack) == fields(pack) and found.metrics == {"loss": math.inf} and found.rows is None
    assert [path.name for path in tmp_path.iterdir()] == ["bad_batch_00000012.safetensors"]


def test_other_files(tmp_path):
    with pytest.raises(DSV41Error, match="nothing: no such file"):
        load_batch(tmp_path / "nothing")
    (tmp_path / "text").write_text("no batch")
    safetensors.numpy.save_file({"tokens": np.zeros(3)}, tmp_path / "other")
    file = save_bad_batch(tmp_path, 1, batch(), {})
    (tmp_path / "cut").write_bytes(file.read_bytes()[:-10])
    for name in ("text", "other", "cut"):
        with pytest.raises(DSV41Error, match=f"{name}: not a batch that training saved"):
            load_batch(tmp_path / name)
    with pytest.raises(DSV41Error, match="no such directory"):
        save_bad_batch(tmp_path / "missing", 1, batch(), {})


@pytest.mark.parametrize("field,value", [("spike", 1), ("spike", math.nan), ("spike_steps", 0), ("window", 0)])
def test_limits(field, value):
    with pytest.raises(DSV41Error, match=f"{field}: expected"):
        GuardLimits(**{field: value})
