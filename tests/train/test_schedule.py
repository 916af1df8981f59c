"""The schedule at its breakpoints (training.md section 1)."""

import math

import pytest

from dsv41.config import DSV41Error
from dsv41.train import TrainingSchedule

S = TrainingSchedule()
T = 10**12


def test_learning_rate_at_the_breakpoints():
    batch = 1536 * 65_536
    assert S.batch_tokens == batch == 96 * 1_048_576
    assert S.rate(0) == 0
    assert S.rate(batch) == pytest.approx(2.6e-4 / 2000, rel=1e-15)
    assert S.rate(1000 * batch) == pytest.approx(1.3e-4, rel=1e-15)
    assert S.rate(2000 * batch - 1) < 2.6e-4 == S.rate(2000 * batch) == S.rate(28 * T)
    assert S.rate(31 * T) == pytest.approx(
        2.6e-5 + 2.34e-4 * (0.5 + math.sqrt(0.125)), rel=1e-12
    )  # an eighth of a turn
    assert S.rate(34 * T) == pytest.approx((2.6e-4 + 2.6e-5) / 2, rel=1e-12)
    assert S.rate(40 * T - batch) > 2.6e-5 == S.rate(40 * T) == S.rate(45 * T)


def test_the_rate_has_no_jumps():
    points = [0, 2000 * S.batch_tokens, 28 * T, 40 * T]
    for point in points:
        assert abs(S.rate(point + 10**6) - S.rate(point)) < 1e-8


def test_steps_of_the_run():
    """The steps that training.md derives, of which the ends are rounded to the nearest."""
    assert [round(t * T / S.batch_tokens) for t in (28, 34, 40, 45)] == [278_155, 337_760, 397_364, 447_035]
    assert S.steps == 447_035


def test_vision_tower_is_frozen_first():
    assert S.vision_rate(28 * T) == 0
    assert S.vision_rate(28 * T + S.batch_tokens) == pytest.approx(0.1 * S.rate(28 * T + S.batch_tokens))


def test_sequences_become_long():
    assert [S.sequence_length(t * T) for t in (0, 28, 34, 45)] == [65_536] * 3 + [1_048_576]
    assert S.sequence_length(34 * T + 1) == 1_048_576


def test_a_run_without_warm_up_or_decay():
    s = TrainingSchedule(
        batch_tokens=64, warmup_steps=0, decay_from=100, decay_to=100, total=100, sequence=8, long_sequence=16
    )
    assert s.rate(0) == s.rate(100) == s.peak
    assert s.rate(101) == s.floor
    assert s.steps == 2


@pytest.mark.parametrize(
    "field, value",
    [
        ("peak", 0.0), ("peak", math.inf), ("floor", 1.0), ("warmup_steps", -1), ("batch_tokens", 100),
        ("batch_tokens", 0), ("decay_from", 10**11), ("decay_to", 27 * T), ("total", 39 * T), ("vision_factor", 1.5),
        ("sequence", 0), ("long_sequence", 1024), ("vision_from", -1), ("long_from", -1),
    ],
)  # fmt: skip
def test_a_contradiction_names_its_field(field, value):
    with pytest.raises(DSV41Error, match=f"^{field}: expected .*, got {value!r}"):
        TrainingSchedule(**{field: value})
