"""Rounds with forced drafts against plain decoding: tokens, and every cache row below the committed length."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.cache import assign_pages
from dsv41.engine.speculative_step import (
    RoundInputs,
    VerifySchedule,
    compiled_prefill,
    compiled_round,
    request_state,
    verify_widths,
)
from dsv41.ops.sampling import NO_TOKEN, SamplingParams, filtered_logprobs, sampling_arrays
from dsv41.ops.verification import AcceptanceRule
from tests.models.cache_rows import committed_rows, same_rows
from tests.models_for_tests import small_model

BLOCK = 5
CAPACITY = 256
# One of even, one of odd length, so that a group of two is open in either row at some time.
PROMPTS = ([0, 17, 42, 99, 5, 6], [0, 5, 6, 7, 8, 9, 10])
LENGTH = 110  # tokens decoded plainly
# One program for all tests in which the drafter drafts.
UNFORCED = {"rule": AcceptanceRule.BLOCK, "schedule": VerifySchedule.BUDGET}


def _prefill(tokens, history, cache):
    model = small_model()
    batch = jax.tree.map(jnp.asarray, model.make_batch(tokens, history))
    return compiled_prefill()(model.params, model.drafter, batch, cache, config=model.config)


@functools.cache
def plain():
    """Greedy decoding one token at a time: all tokens of each row, and the committed rows at every length."""
    cache = small_model().init_cache(2, CAPACITY, draft_tokens=BLOCK)
    logits, cache = _prefill(PROMPTS, None, cache)
    tokens = [list(p) for p in PROMPTS]
    snapshots: list[dict[int, dict]] = [{}, {}]
    for _ in range(LENGTH):
        for slot, rows in enumerate(committed_rows(cache, [len(t) for t in tokens])):
            snapshots[slot][len(tokens[slot])] = rows
        newest = np.asarray(logits)[:, 0].argmax(-1)
        past = [list(t) for t in tokens]
        for row, token in zip(tokens, newest, strict=True):
            row.append(int(token))
        logits, cache = _prefill([[int(t)] for t in newest], past, cache)
    return tokens, snapshots


def start():
    """Requests whose first token is drawn, and the cache with their prompts."""
    tokens, _ = plain()
    cache = small_model().init_cache(2, CAPACITY, draft_tokens=BLOCK)
    _, cache = _prefill(PROMPTS, None, cache)
    known = [np.asarray(t[: len(p) + 1]) for t, p in zip(tokens, PROMPTS, strict=True)]
    return jax.tree.map(jnp.asarray, request_state(known, [LENGTH, LENGTH], 2, 3)), cache


def inputs(*, temperature=0.0, top_k=0, stop=(-1,), seeds=(0, 0), **fields) -> RoundInputs:
    params = [SamplingParams(temperature=temperature, top_p=1, top_k=top_k, seed=s) for s in seeds]
    return RoundInputs(
        sampling=jax.tree.map(jnp.asarray, sampling_arrays(params)),
        stop_ids=jnp.asarray(stop, jnp.int32),
        temperatures=jnp.ones(BLOCK),
        budget=jnp.int32(fields.pop("budget", 0)),
        steps_per_second=fields.pop("steps_per_second", None),
        **fields,
    )


def run_round(
    state, cache, given: RoundInputs, *, rule=AcceptanceRule.TOKEN, schedule=VerifySchedule.ALL, width=BLOCK + 1
):
    model = small_model()
    return compiled_round()(
        model.params, model.drafter, state, cache, given, model.step_lookup,
        config=model.config, rule=rule, schedule=schedule, width=width,
    )  # fmt: skip


def forced(tokens: list[list[int]], state, counts: list[int], rng: np.random.Generator) -> jnp.ndarray:
    """Drafts of which exactly the first `counts` are what plain decoding gives; the others are random."""
    rows = []
    for row, at, count in zip(tokens, np.asarray(state.start) + 1, counts, strict=True):
        drafts = rng.integers(3, 500, BLOCK)
        drafts[:count] = row[at : at + count]
        if count < BLOCK:
            drafts[count] = (row[at + count] + 1 + rng.integers(400)) % 500
        rows.append(drafts)
    return jnp.asarray(np.stack(rows), jnp.int32)


@pytest.mark.parametrize("rule", [AcceptanceRule.BLOCK, pytest.param(AcceptanceRule.TOKEN, marks=pytest.mark.slow)])
def test_every_acceptance_pattern_at_even_and_odd_lengths(rule):
    """Tokens and cache bytes are those of plain decoding after every round, whatever was rejected on the way."""
    tokens, snapshots = plain()
    state, cache = start()
    rng = np.random.default_rng(7)
    met = [set(), set()]
    while True:
        begin = np.asarray(state.start)
        # The pattern that this row has met least at this parity.
        counts = [
            min((m for m in range(BLOCK + 1)), key=lambda m, i=i: ((m, begin[i] % 2) in met[i], rng.random()))
            for i in range(2)
        ]
        if max(begin) + BLOCK + 2 >= LENGTH:
            break
        state, cache, out = run_round(state, cache, inputs(forced_drafts=forced(tokens, state, counts, rng)), rule=rule)
        np.testing.assert_array_equal(out.accepted, counts)
        np.testing.assert_array_equal(out.verified, [BLOCK, BLOCK])
        lengths = np.asarray(state.start)
        np.testing.assert_array_equal(lengths, begin + np.asarray(counts) + 1)
        for i, rows in enumerate(committed_rows(cache, lengths.tolist())):
            met[i].add((counts[i], begin[i] % 2))
            given = np.asarray(out.tokens)[i, : counts[i] + 1]
            np.testing.assert_array_equal(given, tokens[i][begin[i] + 1 : lengths[i] + 1])
            same_rows(rows, snapshots[i][int(lengths[i])])
            np.testing.assert_array_equal(np.asarray(state.history)[i], tokens[i][lengths[i] - 3 : lengths[i]])
            assert int(state.anchor[i]) == tokens[i][lengths[i]]
    assert all(len(m) == 2 * (BLOCK + 1) for m in met)


def at_round(remaining: int = LENGTH):
    """Tokens, state and cache with both requests at their first anchor."""
    tokens, _ = plain()
    state, cache = start()
    return tokens, dataclasses.replace(state, remaining=jnp.full(2, remaining, jnp.int32)), cache


def test_a_stop_id_cuts_the_accepted_prefix():
    tokens, state, cache = at_round()
    drafts = forced(tokens, state, [BLOCK, BLOCK], np.random.default_rng(0))
    begin = np.asarray(state.start)
    stop = tokens[0][begin[0] + 3]
    assert stop not in tokens[0][begin[0] + 1 : begin[0] + 3] and stop not in tokens[1][: begin[1] + BLOCK + 2]
    state, _, out = run_round(state, cache, inputs(forced_drafts=drafts, stop=[stop]), rule=AcceptanceRule.BLOCK)
    np.testing.assert_array_equal(out.accepted, [BLOCK, BLOCK])
    np.testing.assert_array_equal(out.count, [3, BLOCK + 1])
    np.testing.assert_array_equal(out.tokens[0], [*tokens[0][begin[0] + 1 : begin[0] + 4], -1, -1, -1])
    np.testing.assert_array_equal(np.asarray(state.remaining) > 0, [False, True])


@pytest.mark.parametrize("remaining", [1, 3, BLOCK + 1])
def test_no_more_tokens_than_remain(remaining):
    """The last token that a request may get is not drafted: nothing is verified in vain."""
    tokens, state, cache = at_round(remaining)
    begin = np.asarray(state.start)
    drafts = forced(tokens, state, [BLOCK, BLOCK], np.random.default_rng(0))
    state, _, out = run_round(state, cache, inputs(forced_drafts=drafts), rule=AcceptanceRule.BLOCK)
    np.testing.assert_array_equal(out.verified, [remaining - 1] * 2)
    np.testing.assert_array_equal(out.count, [remaining] * 2)
    for i in range(2):
        np.testing.assert_array_equal(out.tokens[i, :remaining], tokens[i][begin[i] + 1 : begin[i] + 1 + remaining])
    np.testing.assert_array_equal(state.remaining, [0, 0])


def test_a_finished_request_writes_nothing():
    _, state, cache = at_round()
    state = dataclasses.replace(state, remaining=jnp.asarray([0, LENGTH], jnp.int32))
    slot_0, slot_1 = committed_rows(cache, [CAPACITY, CAPACITY])
    after, cache, out = run_round(state, cache, inputs(budget=2 * BLOCK), **UNFORCED)
    np.testing.assert_array_equal(out.count == 0, [True, False])
    assert int(after.start[0]) == len(PROMPTS[0]) and int(after.round[0]) == 0
    rows = committed_rows(cache, [CAPACITY, CAPACITY])
    same_rows(rows[0], slot_0)
    with pytest.raises(AssertionError):
        same_rows(rows[1], slot_1)


def test_a_request_without_pages_gets_no_token():
    """Its logits are NaN, whatever was drafted; the other request is served."""
    tokens, state, cache = at_round()
    begin = np.asarray(state.start)
    cache = assign_pages(cache, 0, 0, [-1])
    _, _, out = run_round(state, cache, inputs(budget=2 * BLOCK), **UNFORCED)
    assert out.tokens[0, 0] == NO_TOKEN and out.count[0] == 1
    assert out.tokens[1, 0] == tokens[1][begin[1] + 1]


def test_a_budget_is_shared_by_the_requests():
    """Three drafts for two requests, given to the likeliest; the tokens are those of plain decoding all the same."""
    tokens, state, cache = at_round()
    begin = np.asarray(state.start)
    state, _, out = run_round(state, cache, inputs(budget=3), **UNFORCED)
    ranked = sorted((-out.survival[r, k], k, r) for r in range(2) for k in range(BLOCK))[:3]
    np.testing.assert_array_equal(out.verified, [sum(r == row for _, _, r in ranked) for row in range(2)])
    for i, count in enumerate(np.asarray(out.count)):
        np.testing.assert_array_equal(out.tokens[i, :count], tokens[i][begin[i] + 1 : begin[i] + 1 + count])


def test_widths():
    assert verify_widths(5) == (1, 2, 4, 6)
    assert verify_widths(4) == (1, 2, 4, 5)
    assert verify_widths(1) == (1, 2)
    assert verify_widths(7) == (1, 2, 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize("rule", AcceptanceRule)
def test_law_of_sampled_tokens(rule):
    """The first two tokens of many rounds are distributed as the model's own law, top-k applied.

    Of 3,000 draws over nine outcomes the total variation is 0.02 on average.
    """
    _, state, prompts = at_round()
    begin = jax.device_get(state)
    fields = {"temperature": 1.5, "top_k": 3}
    seen: collections.Counter = collections.Counter()
    for trial in range(1500):
        # A fresh cache too: two rounds may write further ahead than a rollback of one may go back.
        state, cache = jax.tree.map(jnp.asarray, begin), jax.tree.map(jnp.copy, prompts)
        got: list[list[int]] = [[], []]
        given = inputs(seeds=(2 * trial, 2 * trial + 1), **fields)
        while min(map(len, got)) < 2:
            state, cache, out = run_round(state, cache, given, rule=rule)
            for i, count in enumerate(np.asarray(out.count)):
                got[i] += np.asarray(out.tokens)[i, :count].tolist()
        seen.update((i, *row[:2]) for i, row in enumerate(got))
    for i in range(2):
        law = _law_of_two(i, begin, **fields)
        drawn = {pair: seen[(i, *pair)] / 1500 for pair in law}
        assert sum(drawn.values()) == pytest.approx(1)
        assert sum(abs(drawn[pair] - p) for pair, p in law.items()) / 2 < 0.05


def _law_of_two(row: int, begin, *, temperature: float, top_k: int) -> dict[tuple[int, int], float]:
    """Exact probabilities of the two tokens behind a request's first anchor."""
    params = SamplingParams(temperature=temperature, top_p=1, top_k=top_k)
    arrays = jax.tree.map(jnp.asarray, sampling_arrays([params] * 2))

    def law_after(*new: int) -> np.ndarray:
        tokens = [*PROMPTS[row], int(begin.anchor[row]), *new]
        cache = small_model().init_cache(2, CAPACITY, draft_tokens=BLOCK)
        history = tokens[:0]
        for part in (tokens[: len(PROMPTS[row])], *([t] for t in tokens[len(PROMPTS[row]) :])):
            logits, cache = _prefill([part] * 2, [history] * 2, cache)
            history = history + list(part)
        return np.exp(np.asarray(filtered_logprobs(logits, arrays))[0, 0].astype(np.float64))

    first = law_after()
    return {
        (int(a), int(b)): first[a] * second[b]
        for a in np.flatnonzero(first)
        for second in [law_after(int(a))]
        for b in np.flatnonzero(second)
    }
