"""Short rows first, long ones later: each stage's own batches, and the same from any step on."""

import json

import pytest

from dsv41.config import DSV41Error
from dsv41.train.data import BatchOptions, TrainingBatches
from dsv41.train.stages import StagedBatches
from tests.train.test_data import TOKEN_MAP, assert_same, source


def stage(length, rows):
    return TrainingBatches(source(length=length), BatchOptions(rows=rows), token_map=TOKEN_MAP)


def staged(steps=3):
    return StagedBatches([stage(128, 4), stage(256, 2)], [steps])


def test_each_stage_gives_its_own_batches():
    whole, short, long = staged(), stage(128, 4), stage(256, 2)
    for expected in (short, short, short, long, long):
        assert_same(next(whole), next(expected))


@pytest.mark.parametrize("before", [0, 2, 3, 4])
def test_continued_from_any_step(before):
    whole = staged()
    for _ in range(before):
        next(whole)
    state = json.loads(json.dumps(whole.state()))
    again = staged()
    next(again)
    again.restore(state)
    for _ in range(3):
        assert_same(next(again), next(whole))


def test_refusals():
    with pytest.raises(DSV41Error, match="2 pipelines need the steps of all but the last"):
        StagedBatches([stage(128, 4), stage(256, 2)], [])
    with pytest.raises(DSV41Error, match=r"stages of \[3\] steps, not \[2\]"):
        staged(2).restore(staged(3).state())
    with pytest.raises(DSV41Error, match="not the state of batches in stages"):
        staged().restore(stage(128, 4).state())
