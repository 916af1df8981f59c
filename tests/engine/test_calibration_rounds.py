"""Recording rounds for a calibration: which of them count, and what is refused."""

import dataclasses

import numpy as np
import pytest

from dsv41.config import DSV41Error
from dsv41.engine import SpeculationRecord, fit_temperatures
from dsv41.engine.calibration_rounds import check_calibration, full_rounds, record_rounds
from dsv41.ops.sampling import SamplingParams
from tests.models_for_tests import small_model

# Programs of its own; what a round does is tested in test_speculative_round.
pytestmark = pytest.mark.slow

PROMPTS = [[0, 17, 42], [0, 5, 6, 7], [0, 9], [0, 1, 2, 3, 4]]


def record(verified, accepted):
    rounds = len(verified)
    return SpeculationRecord(
        confidence=np.arange(rounds * 2, dtype=np.float32).reshape(rounds, 2),
        verified=np.array(verified, np.int32),
        accepted=np.array(accepted, np.int32),
        emitted=np.array(accepted, np.int32) + 1,
    )


def test_full_rounds_are_those_that_verified_a_whole_block():
    logits, accepted = full_rounds([record([2, 1, 2], [0, 1, 2]), record([], []), record([0, 2], [0, 1])])
    assert logits.tolist() == [[0, 1], [4, 5], [2, 3]] and accepted.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    "records, message",
    [
        ([], "no recorded rounds"),
        ([record([], [])], "of 0 rounds none verified all 2 drafts"),
        ([record([1, 0], [1, 0])], "of 2 rounds none verified all 2 drafts"),
    ],
)
def test_no_usable_rounds(records, message):
    with pytest.raises(DSV41Error, match=message):
        full_rounds(records)


def test_recorded_rounds():
    """Two batches of two rows; every round verifies all that its request may still use."""
    seen = []
    options = {"max_new_tokens": 12, "batch": 2, "stop_ids": ()}
    records = record_rounds(small_model(), PROMPTS, progress=lambda *p: seen.append(p), **options)
    assert len(records) == 4
    for found in records:
        # The first token comes with the prompt.
        before = 12 - 1 - np.concatenate([[0], np.cumsum(found.emitted)[:-1]])
        np.testing.assert_array_equal(found.verified, np.minimum(before - 1, 5))
        assert found.emitted.sum() == 11
    assert seen[-1] == (48, 48) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    logits, accepted = full_rounds(records)
    assert fit_temperatures(logits, accepted).samples == len(logits) >= 4
    again = record_rounds(small_model(), PROMPTS[2:], sampling=SamplingParams(seed=2), **options)
    for found, expected in zip(again, records[2:], strict=True):
        np.testing.assert_array_equal(found.confidence, expected.confidence)


@pytest.mark.parametrize(
    "prompts, fields, message",
    [
        (PROMPTS, {"max_new_tokens": 6, "batch": 1}, "max_new_tokens: expected 7 or more"),
        (PROMPTS, {"max_new_tokens": 8, "batch": 0}, "batch: expected 1 or more, got 0"),
        ([[0, 512]], {"max_new_tokens": 8, "batch": 1}, "prompt 0: token 1 is 512"),
        (
            [[0, small_model().config.image_token_id]],
            {"max_new_tokens": 8, "batch": 1},
            "prompt 0: position 1 is the image",
        ),
        ([], {"max_new_tokens": 8, "batch": 1}, "no prompts"),
    ],
)
def test_refused(prompts, fields, message):
    with pytest.raises(DSV41Error, match=message):
        check_calibration(small_model().config, prompts, **fields)


def test_a_drafter_that_was_not_loaded():
    with pytest.raises(DSV41Error, match="the drafter was not loaded"):
        record_rounds(dataclasses.replace(small_model(), drafter=None), PROMPTS, max_new_tokens=8)
