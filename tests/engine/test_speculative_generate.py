"""generate(speculate=): the same tokens as plain decoding, what is counted, and what is refused."""

import dataclasses

import numpy as np
import pytest

from dsv41.config import DSV41Error, with_overrides
from dsv41.engine import (
    ConfidenceTemperatures,
    Speculation,
    ThroughputTable,
    VerifySchedule,
    generate,
    init_run_cache,
)
from dsv41.ops.sampling import SamplingParams
from dsv41.ops.verification import AcceptanceRule
from tests.models_for_tests import small_model

# Programs of its own; what a round does is tested in test_speculative_round.
pytestmark = pytest.mark.slow

# The shapes of test_generate.
PROMPTS = [[0], [0, 5, 9, 100, 101, 102, 33], [0, *range(40, 47)], [0, *range(200, 232)]]
WARM = SamplingParams(temperature=1.0, top_p=0.95, top_k=40, seed=7)
# Cheap up to 6 tokens of a step, dear from there on.
STAIRCASE = ThroughputTable(block_size=5, curves={4: ((4, 100.0), (7, 60.0), (17, 30.0))})


def run(prompts=PROMPTS, *, speculate=Speculation(), model=None, **options):  # noqa: B008  it is frozen
    options = {"max_new_tokens": 12, "stop_ids": (), "prefill_chunk": 8} | options
    return generate(model or small_model(), prompts, speculate=speculate, **options)


def ids(results) -> list[tuple[int, ...]]:
    return [r.token_ids for r in results]


def test_greedy_gives_the_tokens_of_plain_decoding():
    plain = run(speculate=None)
    seen = []
    results = run(on_token=lambda i, t: seen.append((i, t)))
    assert ids(results) == ids(plain)
    for i, r in enumerate(results):
        assert tuple(t for row, t in seen if row == i) == r.token_ids
        assert r.finish_reason == "length"
    # A stop id that plain decoding meets on the way, and one that it never meets.
    stop = [plain[1].token_ids[4], plain[2].token_ids[7]]
    stopped = run(stop_ids=stop)
    assert ids(stopped) == ids(run(speculate=None, stop_ids=stop))
    assert {r.finish_reason for r in stopped} == {"stop", "length"} or all(r.finish_reason == "stop" for r in stopped)


@pytest.mark.parametrize("new", [1, 2, 3])
def test_few_new_tokens(new):
    assert ids(run(max_new_tokens=new)) == [t[:new] for t in ids(run(speculate=None))]


def test_one_possible_token_is_greedy_at_any_temperature():
    assert ids(run(sampling=SamplingParams(temperature=1.5, top_k=1, seed=3))) == ids(run(speculate=None))


def test_sampling_repeats_depends_on_the_seed_and_not_on_the_other_rows():
    one, two = run(sampling=WARM), run(sampling=WARM)
    other = run(sampling=dataclasses.replace(WARM, seed=8))
    assert ids(one) == ids(two)
    assert all(a != b for a, b in zip(ids(one), ids(other), strict=True))
    mixed = run(
        [PROMPTS[3][:5], PROMPTS[1], PROMPTS[0], PROMPTS[3]],
        sampling=[SamplingParams(seed=99), WARM, SamplingParams(temperature=0), WARM],
    )
    assert ids(mixed)[1] == ids(one)[1] and ids(mixed)[3] == ids(one)[3]


def test_what_is_counted():
    for result in run(sampling=WARM, max_new_tokens=20):
        record = result.speculation
        # The first token comes from the prompt.
        assert record.emitted.sum() == len(result.token_ids) - 1
        assert record.confidence.shape == (record.rounds, 5)
        assert (record.accepted <= record.verified).all() and (record.verified <= 5).all()
        assert (record.emitted[:-1] == record.accepted[:-1] + 1).all()
        assert record.acceptance_length == 1 + record.accepted.sum() / record.rounds
        assert record.mean_verified == record.verified.mean()
        assert record.tokens_per_forward == 19 / record.rounds
        by_position = record.acceptance_by_position()
        assert by_position[0] == (record.accepted >= 1).sum() / (record.verified >= 1).sum()


def test_plain_decoding_when_nothing_may_be_drafted():
    results = run(speculate=Speculation(draft_tokens=0))
    assert ids(results) == ids(run(speculate=None))
    assert all(r.speculation is None for r in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "speculate",
    [
        Speculation(rule=AcceptanceRule.TOKEN),
        Speculation(draft_tokens=2),
        Speculation(schedule=VerifySchedule.BUDGET, throughput=STAIRCASE),
        Speculation(
            schedule=VerifySchedule.GREEDY,
            throughput=STAIRCASE,
            temperatures=ConfidenceTemperatures(
                values=(0.5, 1.0, 1.0, 2.0, 2.0), samples=1, ece_before=(0.1,) * 5, ece_after=(0.1,) * 5
            ),
        ),
    ],
    ids=["token", "two drafts", "budget", "greedy"],
)
def test_every_way_to_speculate_gives_the_same_tokens(speculate):
    results = run(speculate=speculate)
    assert ids(results) == ids(run(speculate=None))
    most = 2 if speculate.draft_tokens else 5
    assert max(r.speculation.verified.max() for r in results) <= most
    if speculate.schedule is not VerifySchedule.ALL:
        verified = np.concatenate([r.speculation.verified for r in results])
        assert verified.mean() < 4  # the staircase makes some drafts not worth it


def refused(message: str, **options) -> None:
    with pytest.raises(DSV41Error, match=message):
        run(**options)


def test_refusals():
    refused(
        "draft_tokens: expected 0 to 5, the model's dspark_block_size, got 6", speculate=Speculation(draft_tokens=6)
    )
    refused("draft_tokens: expected 0 to 5.*got -1", speculate=Speculation(draft_tokens=-1))
    refused("the drafter was not loaded", model=dataclasses.replace(small_model(), drafter=None))
    with pytest.raises(DSV41Error, match="schedule 'budget' needs a throughput table"):
        Speculation(schedule=VerifySchedule.BUDGET)
    other = ThroughputTable.flat(7)
    refused("throughput table is for blocks of 7 drafts, the model's have 5", speculate=Speculation(throughput=other))
    seven = ConfidenceTemperatures(values=(1.0,) * 7, samples=1, ece_before=(0.1,) * 7, ece_after=(0.1,) * 7)
    refused("temperature table is for blocks of 7", speculate=Speculation(temperatures=seven))


def test_a_model_without_a_drafter():
    text = small_model().config.text_config
    ratios = list(text.compress_ratios[: text.num_hidden_layers])
    changes = {"text_config.num_nextn_predict_layers": "0", "text_config.compress_ratios": str(ratios)}
    config = with_overrides(small_model().config, changes)
    model = dataclasses.replace(small_model(), config=config, drafter=None)
    refused("the model has no drafter", model=model)


def test_a_block_of_drafts_fits_behind_the_last_token():
    """All of a block is rotated together: cut at the cache's end, it would depend on what else sizes the cache."""
    model = small_model()
    assert init_run_cache(model, 1, 251, draft_tokens=5).max_tokens == 256
    assert init_run_cache(model, 1, 252, draft_tokens=5).max_tokens == 512
    assert init_run_cache(model, 1, 256).max_tokens == 256


def test_a_batch_that_shares_a_budget_loses_a_request_on_the_way():
    """Case D12 in the loop: rows end by a stop id of their own at different rounds, the others get the budget."""
    plain = run(speculate=None)
    stop = [plain[0].token_ids[2], plain[2].token_ids[5]]
    speculate = Speculation(draft_tokens=1, schedule=VerifySchedule.BUDGET, throughput=ThroughputTable.flat(5))
    results = run(speculate=speculate, stop_ids=stop)
    assert ids(results) == ids(run(speculate=None, stop_ids=stop))
    assert len({len(r.token_ids) for r in results}) > 1
    for r in results:
        assert r.speculation.verified.max() <= 1 and r.speculation.emitted.sum() == len(r.token_ids) - 1


def test_more_drafts_than_a_table_was_measured_with():
    table = ThroughputTable(block_size=5, draft_tokens=2, curves={1: ((1, 1.0),)})
    refused("measured with 2 drafts a request, 5 are to be verified", speculate=Speculation(throughput=table))
