"""Profiled rounds: which points are measured, that nothing drifts while they are, and plans that cannot be."""

import dataclasses

import jax
import numpy as np
import pytest

from dsv41.config import DSV41Error
from dsv41.engine import Speculation, VerifySchedule, generate, profile_rounds
from dsv41.engine.profile_rounds import ProfilePlan, probes
from dsv41.engine.speculative_step import verify_widths
from tests.models_for_tests import small_model

# Programs of its own; what a round does is tested in test_speculative_round.
pytestmark = pytest.mark.slow

SMALL = ProfilePlan(requests=(1,), context=7, draft_tokens=1, steps=2, min_seconds=0, prefill_chunk=4)


@pytest.mark.parametrize("draft_tokens", range(1, 8))
@pytest.mark.parametrize("rows", [1, 4])
def test_points_are_the_first_number_of_tokens_of_each_width_and_the_largest(rows, draft_tokens):
    """The engine's rule: the least width above the number of drafts that may all fall to one request."""
    widths = verify_widths(draft_tokens)
    first = {}
    for budget in range(rows * draft_tokens + 1):
        first.setdefault(next(w for w in widths if w > min(budget, draft_tokens)), rows + budget)
    points = probes(rows, draft_tokens)
    assert points[: len(first)] == tuple(first.items())
    assert points[-1] == (draft_tokens + 1, rows * (draft_tokens + 1)) and len(points) <= len(first) + 1


@pytest.fixture(scope="module")
def profiled():
    """The table, what was reported, and every round that ran as (state before, output)."""
    rounds, points, curves = [], [], []
    plan = SMALL
    with pytest.MonkeyPatch.context() as patch:
        compiled_round = profile_rounds.compiled_round

        def watched(mesh, rules):
            compiled = compiled_round(mesh, rules)

            def run(params, drafter, state, *rest, **static):
                before = jax.device_get(state)
                result = compiled(params, drafter, state, *rest, **static)
                rounds.append((static["width"], before, jax.device_get(result[2])))
                return result

            return run

        patch.setattr(profile_rounds, "compiled_round", watched)
        table = profile_rounds.profile_rounds(
            small_model(),
            plan,
            model_name="tiny",
            command="by hand",
            on_point=lambda *p: points.append(p),
            on_curve=curves.append,
        )
    return table, rounds, points, curves


def test_table(profiled):
    table, _, points, curves = profiled
    assert [b for b, _ in table.curves[1]] == [1, 2] and list(table.curves) == [1]
    assert table.block_size == 5 and table.model == "tiny" and table.command == "by hand"
    assert table.device_kind == jax.devices()[0].device_kind and table.jax_version == jax.__version__
    assert points == [(1, 2), (2, 2)]
    assert curves == [table]


def test_rounds_verify_everything_and_do_not_drift(profiled):
    _, rounds, _, _ = profiled
    for width in (1, 2):
        ours = [(before, out) for w, before, out in rounds if w == width]
        assert len(ours) >= SMALL.steps + 2
        _, first = ours[0]
        for before, out in ours:
            assert before.start.tolist() == [7] and before.round.tolist() == [0]
            assert out.verified.tolist() == [width - 1]
            np.testing.assert_array_equal(out.tokens, first.tokens)


def test_generate_takes_the_table(profiled):
    speculation = Speculation(draft_tokens=1, schedule=VerifySchedule.BUDGET, throughput=profiled[0])
    (result,) = generate(small_model(), [[0, 17, 42]], max_new_tokens=4, stop_ids=(), speculate=speculation)
    assert len(result.token_ids) == 4


def test_resolved():
    config = small_model().config
    plan = ProfilePlan(requests=(3, 1, 4)).resolved(config)
    assert plan.requests == (1, 4) and plan.draft_tokens == 5 and plan.context == 4096 - 6
    assert plan.resolved(config) == plan


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"requests": ()}, "requests: expected at least one"),
        ({"requests": (1, 0)}, "requests: expected integers, 1 or more, got 0"),
        ({"context": 0}, "context: expected an integer, 1 or more, got 0"),
        ({"context": 4091}, "context: expected 4090 or less"),
        ({"draft_tokens": 0}, "draft_tokens: expected an integer, 1 or more, got 0"),
        ({"draft_tokens": 6}, "draft_tokens: expected 0 to 5"),
        ({"steps": 0}, "steps: expected an integer, 1 or more"),
        ({"min_seconds": float("nan")}, "min_seconds: expected a number, 0 or more, got nan"),
        ({"min_seconds": -1.0}, "min_seconds: expected a number, 0 or more, got -1.0"),
        ({"prefill_chunk": 0}, "prefill_chunk: expected an integer, 1 or more"),
    ],
)
def test_refused_plans(fields, message):
    with pytest.raises(DSV41Error, match=message):
        ProfilePlan(**fields).resolved(small_model().config)


def test_a_drafter_that_was_not_loaded():
    with pytest.raises(DSV41Error, match="the drafter was not loaded"):
        profile_rounds.profile_rounds(dataclasses.replace(small_model(), drafter=None), SMALL)


def test_a_batch_that_does_not_fit_keeps_the_curves_before_it(monkeypatch):
    def rate(self, width, tokens):
        if self._rows == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return 1.0

    curves = []
    monkeypatch.setattr(profile_rounds._Rounds, "_fill", lambda *_: None)
    monkeypatch.setattr(profile_rounds._Rounds, "rate", rate)
    plan = dataclasses.replace(SMALL, requests=(1, 2))
    with pytest.raises(DSV41Error, match="2 requests of 7 tokens do not fit into memory"):
        profile_rounds.profile_rounds(small_model(), plan, on_curve=curves.append)
    assert [list(table.curves) for table in curves] == [[1]]
