"""The verify schedule: its choices against the cases and plain loops, and that none of them leaks a draft."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.config import DSV41Error
from dsv41.ops.sampling import SamplingParams
from dsv41.ops.verification import AcceptanceRule
from dsv41.ops.verify_schedule import (
    BudgetHistory,
    admit_top,
    admit_while_improving,
    best_budget,
    expected_tokens,
    survival,
)
from tests.ops.enumeration import context_index, joint_error, random_laws

NAN = np.nan
FIRST, SECOND = [0.95, 0.9, 0.8, 0.6, 0.4], [0.6, 0.5, 0.4, 0.3, 0.2]
BOTH = np.cumprod(np.float32([FIRST, SECOND]), axis=1)

top = jax.jit(admit_top)
# Of many pairs of survivals, each with its budget or rates.
top_of_each = jax.jit(jax.vmap(admit_top, in_axes=(0, None, 0)))
improving_each = jax.jit(jax.vmap(admit_while_improving, in_axes=(0, None, None, None)))
improving = jax.jit(admit_while_improving)


def top_lengths(a, caps, budget):
    return top(np.float32(a), np.int32(caps), np.int32(budget)).tolist()


def logit(confidence):
    confidence = np.float32(confidence)
    return np.log(confidence) - np.log1p(-confidence)


def staircase(batch_tokens):
    """Seconds a step in cases D7 and D8."""
    return 1 / 10 if batch_tokens <= 8 else 1 / 16


def test_survival_is_the_product():
    """Case D6."""
    a = jax.jit(survival)(logit([FIRST, SECOND]), np.ones(5, np.float32))
    np.testing.assert_allclose(a[0], [0.95, 0.855, 0.684, 0.4104, 0.16416], rtol=1e-5)
    full = np.int32([5, 5])
    np.testing.assert_allclose(expected_tokens(a, full), [4.06356, 2.0632], rtol=1e-5)
    np.testing.assert_allclose(expected_tokens(a, np.int32([0, 2])), [1, 1.9], rtol=1e-5)


def test_expected_tokens_of_forced_acceptance():
    """Case D4: rates 1, 1, .51, 0, 0 give 3.51 tokens a round."""
    rates = np.cumprod(np.float32([[1, 1, 0.51, 0, 0]]), axis=1)
    np.testing.assert_allclose(expected_tokens(rates, np.int32([5])), [3.51], rtol=1e-6)


def test_survival_uses_each_positions_temperature():
    z = np.float32([[2, -1, 0.5], [50, -200, NAN]])
    a = np.asarray(survival(z, np.float32([1, 0.5, 4])))
    np.testing.assert_allclose(a[0], np.cumprod(1 / (1 + np.exp([-2, 2, -0.125]))), rtol=1e-6)
    assert a[1, 0] == 1 and a[1, 1] < 1e-30 and np.isnan(a[1, 2])


def test_top_shares_the_budget():
    """Case D8: 6 drafts are 4 for the first request and 2 for the second."""
    assert top_lengths(BOTH, [5, 5], 6) == [4, 2]
    assert top_lengths(BOTH, [5, 5], 0) == top_lengths(BOTH, [5, 5], -3) == [0, 0]
    assert top_lengths(BOTH, [5, 5], 100) == [5, 5]
    assert top_lengths(BOTH, [0, 5], 3) == [0, 3]
    assert top_lengths(BOTH, [3, 1], 10) == [3, 1]
    assert top_lengths(BOTH, [9, -2], 10) == [5, 0]


def test_ties_go_to_the_position_then_to_the_row():
    ones = np.ones((3, 3))
    assert [top_lengths(ones, [3, 3, 3], n) for n in (1, 2, 4, 8)] == [[1, 0, 0], [1, 1, 0], [2, 1, 1], [3, 3, 2]]
    # The second row's first candidate equals the first row's third: earlier position first.
    assert top_lengths([[0.9, 0.5, 0.5], [0.5, 0.5, 0.1]], [3, 3], 2) == [1, 1]


def test_negligible_and_nan_survivals_are_left_out():
    a = [[1e-5, 9e-7, 1e-9], [0.5, NAN, NAN], [NAN, 1, 1]]
    assert top_lengths(a, [3, 3, 3], 9) == [1, 1, 0]


def brute_force_top(a, caps, budget):
    candidates = sorted((-p, k, r) for r, row in enumerate(a) for k, p in enumerate(row) if k < caps[r] and p >= 1e-6)
    chosen = [(r, k) for _, k, r in candidates[: max(budget, 0)]]
    lengths = [sum(r == row for r, _ in chosen) for row in range(len(a))]
    assert sorted(chosen) == [(r, k) for r, n in enumerate(lengths) for k in range(n)]
    return lengths


# Confidences on a coarse grid make ties common.
confidences = st.lists(
    st.lists(st.sampled_from([0.0, 1e-4, 0.25, 0.5, 0.75, 1.0]), min_size=4, max_size=4), min_size=3, max_size=3
)
some_caps = st.lists(st.integers(-1, 6), min_size=3, max_size=3)


@given(c=confidences, caps=some_caps, budget=st.integers(-2, 15))
def test_top_against_a_plain_sort(c, caps, budget):
    a = np.cumprod(np.float32(c), axis=1)
    lengths = top_lengths(a, caps, budget)
    assert lengths == brute_force_top(a.tolist(), caps, budget)
    assert sum(lengths) <= max(budget, 0) and all(0 <= n <= max(min(c, 4), 0) for n, c in zip(lengths, caps))


def algorithm_1(a, caps, rates, active):
    rows = [r for r, on in enumerate(active) if on]
    candidates = sorted((-a[r][k], k, r) for r in rows for k in range(len(a[r])) if k < caps[r])
    lengths, batch, tokens = [0] * len(a), len(rows), np.float32(len(rows))
    at = lambda b: np.float32(rates[min(b, len(rates) - 1)])  # noqa: E731
    best = tokens * at(batch)
    for negative, k, r in candidates:
        batch, tokens = batch + 1, tokens - np.float32(negative)
        if not tokens * at(batch) > best:
            break
        lengths[r], best = k + 1, tokens * at(batch)
    return lengths


@given(
    c=confidences,
    caps=some_caps,
    rates=st.lists(st.sampled_from([1.0, 2.0, 4.0, 8.0]), min_size=9, max_size=9),
    active=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_algorithm_1_against_its_text(c, caps, rates, active):
    """Powers of two, so that sums and products are exact in any order."""
    a = np.cumprod(np.float32(np.where(np.array(c) == 1e-4, 0.125, c)), axis=1)
    rates = sorted(rates, reverse=True)
    got = improving(a, np.int32(caps), np.float32(rates), np.array(active)).tolist()
    assert got == algorithm_1(a.tolist(), caps, rates, active)


def test_step_shaped_cost():
    """Case D7: the search passes the step at 3 tokens and takes all 5; Algorithm 1 stops at 1 before it."""
    a, caps = np.float32([[0.95, 0.9, 0.85, 0.8, 0.75]]), np.int32([5])
    rates = 1 / np.float32([10, 10, 10, 16])  # by batch tokens; beyond the last, the same
    value = (1 + np.cumsum([0, *a[0]])) * [*rates[1:], *[rates[-1]] * 3]
    np.testing.assert_allclose(value, [0.1, 0.195, 0.178, 0.231, 0.281, 0.328], atol=5e-4)
    assert best_budget(a, caps, rates, 1) == 5
    assert best_budget(a, caps, lambda b: float(rates[min(b, 3)]), 1) == 5
    assert improving(a, caps, rates, np.array([True])).tolist() == [1]


def test_shared_budget():
    """Case D8: 6 drafts, worth .57994."""
    caps = np.int32([5, 5])
    assert best_budget(BOTH, caps, staircase, 2) == 6
    lengths = top_lengths(BOTH, caps, 6)
    assert lengths == [4, 2]
    np.testing.assert_allclose(np.sum(expected_tokens(BOTH, np.int32(lengths))) * staircase(8), 0.57994, rtol=1e-5)


def test_flat_cost_verifies_everything():
    a, caps = np.float32([[0.9, 0.1, 1e-5], [0.5, 0.2, 1e-7]]), np.int32([3, 3])
    flat = np.ones(1, np.float32)
    assert best_budget(a, caps, flat, 2) == 5  # all but the negligible one
    assert top_lengths(a, caps, 5) == [3, 2]
    assert improving(a, caps, flat, np.ones(2, bool)).tolist() == [3, 3]
    assert best_budget(a, np.int32([0, 0]), flat, 2) == best_budget(a[:0], caps[:0], flat, 0) == 0


def test_rows_not_in_use_bring_nothing():
    """Neither an anchor nor a draft, however confident."""
    a = np.float32([[1, 1, 1], [0.9, 0.8, 0.1]])
    rates = np.float32([9, 9, 9, 9, 1])
    assert improving(a, np.int32([3, 3]), rates, np.array([False, True])).tolist() == [0, 2]
    assert improving(a, np.int32([3, 3]), rates, np.zeros(2, bool)).tolist() == [0, 0]


# By batch tokens. A step, behind which throughput over the number of drafts may rise to a second peak; and a slope.
STEP = np.float32([1, 1, 1, 0.8, 0.54, 0.54, 0.54, 0.54, 0.54])
SLOPE = np.float32([1, 1, 1, 0.9, 0.81, 0.73, 0.66, 0.6, 0.5])


def pairs_of_requests(seed):
    """Two requests' laws and the survivals [V^K, V^K, 2, K] of every pair of drafts; confidence k sees drafts < k."""
    params = SamplingParams(top_p=1)
    requests = [random_laws(2 * seed + i, target=params, draft=params, near=0.3) for i in range(2)]
    rng = np.random.default_rng(seed)
    each = []
    for laws in requests:
        tables = [rng.uniform(*((0.4, 0.9) if t == 0 else (0.05, 1)), 3**t).astype(np.float32) for t in range(3)]
        c = [tables[t][context_index(laws.all_drafts[:, :t], 3)] for t in range(3)]
        each.append(np.cumprod(np.stack(c, axis=1), axis=1))
    n = len(each[0])
    return *requests, np.stack(np.broadcast_arrays(each[0][:, None], each[1][None, :]), axis=2).reshape(n * n, 2, 3)


def both_errors(seed, lengths_of):
    """The joint law's error, the larger of both rules', and how many different choices the drafts lead to."""
    one, other, a = pairs_of_requests(seed)
    lengths = np.asarray(lengths_of(a))
    n = len(one.all_drafts)
    errors = [joint_error(one, other, lengths.reshape(n, n, 2), rule) for rule in AcceptanceRule]
    return max(errors), len(np.unique(lengths, axis=0))


def top_with(all_pairs, budgets):
    budgets = np.broadcast_to(np.int32(budgets), len(all_pairs))
    return top_of_each(all_pairs, np.int32([3, 3]), budgets)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_top_is_lossless(seed, budget):
    """The joint law of both outputs is the product of the targets', though each length depends on both requests."""
    error, choices = both_errors(seed, lambda pairs: top_with(pairs, budget))
    assert error < 1e-6
    assert choices > 1 or budget < 3


@pytest.mark.parametrize("rates", [STEP, SLOPE])
def test_algorithm_1_is_lossless(rates):
    choose = lambda pairs: improving_each(pairs, np.int32([3, 3]), rates, np.ones(2, bool))  # noqa: E731
    results = [both_errors(seed, choose) for seed in range(4)]
    assert max(error for error, _ in results) < 1e-6
    assert max(choices for _, choices in results) > 2 or rates is STEP


def test_search_over_present_confidences_is_not_lossless():
    """Why the budget comes from old ones: the same search and the same admission, on the step's own confidences."""

    def choose(all_pairs):
        caps = np.int32([3, 3])
        budgets = np.array([best_budget(a, caps, STEP, 2) for a in all_pairs], np.int32)
        return top_with(all_pairs, budgets)

    assert max(both_errors(seed, choose)[0] for seed in range(2)) > 0.1


def test_budget_of_old_data_is_lossless():
    """Lengths that two other requests' confidences chose: any number does."""
    _, _, old = pairs_of_requests(9)
    budget = best_budget(old[0], np.int32([3, 3]), STEP, 2)
    assert both_errors(0, lambda pairs: top_with(pairs, budget))[0] < 1e-6


def history(rows=2, lag=2):
    h = BudgetHistory(rows, 5, lag)
    for row in range(rows):
        h.begin(row)
    return h


def test_history_lags():
    """Nothing known counts as certain; afterwards each step sees the one `lag` before it."""
    for lag in (1, 2, 3):
        h, seen = history(lag=lag), []
        for step in range(6):
            seen.append(h.budget(np.full(2, 5), np.ones(1)))
            h.record(np.float32([[step >= 1, step >= 2, 0, 0, 0], [step >= 3, 0, 0, 0, 0]]), h.stamp())
        assert seen == ([10] * lag + [0, 1, 2, 3, 3])[:6]


def test_history_keeps_its_own_copy():
    h, a = history(), BOTH.copy()
    for _ in range(2):
        h.record(a, h.stamp())
    a[:] = 0
    assert h.budget(np.full(2, 5), staircase) == 6


def test_row_of_a_new_request_counts_as_certain():
    h = history(rows=1)
    for _ in range(2):
        h.record(np.full((1, 5), 1e-9), h.stamp())
    assert h.budget(np.array([5]), np.ones(1)) == 0
    h.release(0)
    h.begin(0)
    assert h.budget(np.array([5]), np.ones(1)) == 5
    # Confidences that were under way when the row changed hands are the old request's.
    launched = h.stamp()
    h.release(0)
    h.begin(0)
    h.record(np.full((1, 5), 1e-9), launched)
    h.record(np.full((1, 5), 1e-9), launched)
    assert h.budget(np.array([5]), np.ones(1)) == 5


def test_request_that_finishes_meanwhile_is_released():
    """Case D12: the old confidences of a finished request neither widen the budget nor get drafts verified."""
    h, caps = history(), np.full(2, 5)
    for _ in range(2):
        h.record(np.ones((2, 5)), h.stamp())
    assert h.budget(caps, np.ones(1)) == 10
    h.release(1)
    budget = h.budget(caps, np.ones(1))
    assert budget == 5
    # A budget chosen before the end meets the rows as they are now: neither negative nor over-full.
    for stale in (10, budget, -1):
        lengths = top_lengths(np.ones((2, 5)), [3, 0], stale)
        assert lengths == [3 if stale > 0 else 0, 0]
    h.release(0)
    assert h.budget(caps, np.ones(1)) == 0


@given(
    events=st.lists(st.tuples(st.sampled_from(["begin", "release", "step"]), st.integers(0, 3)), max_size=30),
    seed=st.integers(0, 1000),
)
def test_budget_always_fits_the_active_rows(events, seed):
    rng = np.random.default_rng(seed)
    h, active = BudgetHistory(4, 5), set()
    for kind, row in events:
        if kind == "begin":
            h.begin(row)
            active.add(row)
        elif kind == "release":
            h.release(row)
            active.discard(row)
        else:
            caps = rng.integers(0, 6, 4)
            budget = h.budget(caps, np.sort(rng.random(30))[::-1])
            assert 0 <= budget <= sum(caps[list(active)])
            h.record(np.cumprod(rng.random((4, 5)), axis=1), h.stamp())


def test_bad_history_is_refused():
    for name, arguments in (("rows", (0, 5)), ("block_size", (2, 0)), ("lag", (2, 5, 0)), ("lag", (2, 5, 1.5))):
        with pytest.raises(DSV41Error, match=f"^{name}: expected an integer"):
            BudgetHistory(*arguments)
    with pytest.raises(DSV41Error, match=r"survival: expected shape \(2, 5\), got \(2, 4\)"):
        history().record(np.ones((2, 4)), np.zeros(2))
