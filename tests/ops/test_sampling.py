"""Sampling: the filtered distribution against a float64 oracle, and the draws against the distribution."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.config import DSV41Error
from dsv41.ops.sampling import (
    NO_TOKEN,
    SamplingParams,
    filter_logits,
    has_distribution,
    sample,
    sampling_arrays,
    step_keys,
)

INF, NAN = np.inf, np.nan


@jax.jit
def draw(logits, params, steps):
    return sample(logits, step_keys(params.seed, steps), params)


def draw_rows(logits, params, steps=None):
    """`draw` on at most 64 x 64, padded with rows and forbidden tokens to one compiled shape; list of ids."""
    rows, vocabulary = np.shape(logits)
    padded = np.full((64, 64), -INF, np.float32)
    padded[:rows, :vocabulary] = logits
    padded_steps = np.zeros(64, np.int32)
    padded_steps[:rows] = 0 if steps is None else steps
    params = list(params) + [SamplingParams()] * (64 - rows)
    ids = draw(padded, sampling_arrays(params), padded_steps)
    assert ids.dtype == np.int32
    return ids[:rows].tolist()


def filtered(logits, temperature=1.0, top_k=0, top_p=1.0):
    """One row through the batched function, as float64; short ones padded with forbidden tokens to one shape."""
    row = np.full((1, max(len(logits), 30)), -INF, np.float32)
    row[0, : len(logits)] = logits
    row = jax.jit(filter_logits)(row, np.float32([temperature]), np.int32([top_k]), np.float32([top_p]))
    return np.asarray(row[0, : len(logits)], np.float64)


def kept(*args, **kwargs):
    return np.flatnonzero(filtered(*args, **kwargs) > -INF).tolist()


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Float64 oracle by sorting: (probabilities, ids kept in order, mass before each of them)."""
    logits = np.asarray(logits, np.float64)
    scaled = (logits - logits.max()) / temperature
    order = np.argsort(-scaled, kind="stable")
    order = order[scaled[order] > -INF][: top_k or None]
    mass = np.exp(scaled[order])
    before = np.cumsum(mass) / mass.sum() - mass / mass.sum()
    order = order[before < top_p] if top_p < 1 else order
    result = np.zeros(len(logits))
    result[order] = np.exp(scaled[order])
    return result / result.sum(), order, before


@pytest.mark.parametrize(
    "field,value",
    [
        ("temperature", -0.1), ("temperature", NAN), ("temperature", INF), ("temperature", "1"), ("temperature", True),
        ("top_p", 0), ("top_p", 1.01), ("top_p", NAN), ("top_p", None), ("top_k", -1), ("top_k", 2**31), ("top_k", 1.5),
        ("top_k", True), ("seed", -1), ("seed", 2**32), ("seed", 0.5),
    ],
)  # fmt: skip
def test_bad_parameter_is_named(field, value):
    with pytest.raises(DSV41Error, match=rf"^{field}: expected .* got "):
        SamplingParams(**{field: value})


def test_defaults_are_the_published_ones():
    assert SamplingParams() == SamplingParams(temperature=1.0, top_p=0.95, top_k=0, seed=0)
    SamplingParams(temperature=0, top_p=1, top_k=2**31 - 1, seed=2**32 - 1)
    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3))


@pytest.mark.parametrize(
    "arguments,ids",
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [2]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 4}, [1, 2, 3, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 1000}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-9}, [2]),
        ({"top_p": 0.39}, [2]),
        ({"top_p": 0.41}, [1, 2]),
        ({"top_p": 0.71}, [1, 2, 4]),
        ({"top_p": 0.89}, [1, 2, 3, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        # top_p counts within what top_k left: .4 + .3 of .7.
        ({"top_k": 2, "top_p": 0.56}, [2]),
        ({"top_k": 2, "top_p": 0.58}, [1, 2]),
        ({"temperature": 0}, [2]),
        ({"temperature": 0, "top_k": 3, "top_p": 0.9}, [2]),
        ({"temperature": 1e-30}, [2]),
    ],
)
def test_which_tokens_are_kept(arguments, ids):
    assert kept(np.log([0.05, 0.3, 0.4, 0.1, 0.15]), **arguments) == ids


@pytest.mark.parametrize(
    "logits,arguments,ids",
    [
        ([1, 1, 1, 1], {"top_k": 2}, [0, 1]),
        ([1, 1, 1, 1], {"top_p": 0.5}, [0, 1]),
        ([1, 1, 1, 1], {"top_p": 0.51}, [0, 1, 2]),
        ([1, 1, 1, 1], {"temperature": 0}, [0]),
        ([0, 5, 0, 5, 0], {"top_k": 3}, [0, 1, 3]),
        ([-3, 0, -3, -3], {"top_p": 0.9}, [0, 1]),
        ([0.0, -0.0, 0.0], {"top_k": 2}, [0, 1]),
    ],
)
def test_ties_go_to_the_lower_id(logits, arguments, ids):
    assert kept(logits, **arguments) == ids


def test_forbidden_tokens_stay_forbidden():
    logits = [-INF, 2, -INF, 1, -INF]
    assert kept(logits) == kept(logits, top_k=4) == kept(logits, top_p=0.999) == [1, 3]
    assert kept(logits, temperature=0) == [1]
    assert kept([-INF, -INF, -1e30], top_p=0.5) == [2]


@pytest.mark.parametrize("bad", [[0, NAN, 1], [NAN] * 3, [-INF] * 3, [INF, 0, 1], [INF, -INF, NAN]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_without_a_distribution(bad, temperature):
    """Reported, and harmless to the rows beside them."""
    logits = np.array([[0, 3, 1], bad, [5, 3, 1]], np.float32)
    params = [SamplingParams(temperature=temperature, top_k=1, top_p=0.5)] * 3
    assert draw_rows(logits, params) == [1, NO_TOKEN, 0]
    assert np.isnan(filtered(bad, temperature, top_k=1, top_p=0.5)).all()
    assert has_distribution(logits).tolist() == [True, False, True]


logit_rows = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(
    logits=logit_rows,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 35),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]),
)
def test_distribution_against_the_oracle(logits, temperature, top_k, top_p):
    """Quarter steps make ties common."""
    padded = logits + [-INF] * (30 - len(logits))  # one compiled shape
    got = filtered(padded, temperature, top_k, top_p)
    expect, order, before = probabilities(padded, np.float32(temperature), top_k, np.float32(top_p))
    if top_p < 1 and np.abs(before - top_p).min() < 1e-5:
        return  # float32 sums may put the cut on either side
    np.testing.assert_array_equal(np.flatnonzero(got > -INF), np.sort(order))
    np.testing.assert_allclose(np.exp(got) / np.exp(got).sum(), expect, rtol=2e-5, atol=1e-9)


def chi_square(counts, expect):
    expect = expect * counts.sum()
    assert not counts[expect == 0].any()
    seen = expect > 0
    return ((counts[seen] - expect[seen]) ** 2 / expect[seen]).sum()


# 99.99 % points of the chi-square distribution by degrees of freedom.
CRITICAL = {2: 18.42, 3: 21.11, 4: 23.51, 7: 29.88}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=1),
        SamplingParams(top_p=1, temperature=0.5),
        SamplingParams(top_p=1, temperature=2.5),
        SamplingParams(top_p=1, top_k=3),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.75, top_k=5, temperature=1.5),
    ],
)
@pytest.mark.parametrize("vary", ["seed", "step"])
def test_draws_follow_the_distribution(params, vary):
    """Over seeds at one step, and over steps of one seed."""
    draws = 8192
    logits = np.array([1.0, 0.2, 2.0, -1.0, 0.9, 0.1, 1.7, -0.5], np.float32)
    batch = sampling_arrays([params] * draws)
    steps = np.full(draws, 7, np.int32)
    if vary == "seed":
        batch.seed[:] = np.arange(draws)
    else:
        steps = np.arange(draws, dtype=np.int32)
    ids = np.asarray(draw(np.tile(logits, (draws, 1)), batch, steps))
    expect, order, _ = probabilities(logits, params.temperature, params.top_k, params.top_p)
    assert chi_square(np.bincount(ids, minlength=8), expect) < CRITICAL[len(order) - 1]


def test_uniform_draws_over_a_large_vocabulary_do_not_tie():
    """Coarse noise would favour low ids: half of the draws must come from each half, to about 3 sigma."""
    draws, vocabulary = 256, 16384
    batch = sampling_arrays([SamplingParams(top_p=1)] * draws)
    ids = np.asarray(draw(np.zeros((draws, vocabulary), np.float32), batch, np.arange(draws, dtype=np.int32)))
    assert abs((ids < vocabulary // 2).mean() - 0.5) < 0.1
    assert len(np.unique(ids)) > draws * 0.97


def mixed_batch():
    """As wide as `draw_rows` pads: one program for these and its rows."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(6, 64)).astype(np.float32) * 2
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=1, temperature=0),
        SamplingParams(seed=2**32 - 1, top_k=5),
        SamplingParams(seed=4, top_p=0.3),
        SamplingParams(seed=5, top_p=1, temperature=1.7),
        SamplingParams(seed=6, top_k=1),
    ]
    return logits, params, np.array([0, 1, 2, 3, 1000, 5], np.int32)


def test_draw_depends_on_the_row_alone():
    """Whatever shares the batch, and wherever in it the row is."""
    logits, params, steps = mixed_batch()
    whole = draw_rows(logits, params, steps)
    assert whole[1] == logits[1].argmax() and whole[5] == logits[5].argmax()
    for i in range(6):
        alone = draw(logits[i : i + 1], sampling_arrays(params[i : i + 1]), steps[i : i + 1])
        assert alone.tolist() == [whole[i]]
    assert draw_rows(logits[::-1], params[::-1], steps[::-1]) == whole[::-1]


def test_draw_changes_with_seed_and_step():
    logits = np.zeros((64, 64), np.float32)
    params = [SamplingParams(seed=i // 8, top_p=1) for i in range(64)]
    ids = draw_rows(logits, params, np.arange(64) % 8)
    assert len(set(ids)) > 30  # 41 expected of 64 free draws; 8 if seed or step did not count
    assert draw_rows(logits, params, np.arange(64) % 8) == ids


def test_one_compiled_function_serves_all_parameters():
    logits, params, steps = mixed_batch()
    draw_rows(logits, params, steps)
    compiled = draw._cache_size()
    draw_rows(logits, params[::-1], steps)
    draw_rows(logits, [SamplingParams(temperature=0)] * 6, steps + 1)
    assert draw._cache_size() == compiled


def test_greedy_is_argmax_and_takes_the_lowest_id():
    logits = np.random.default_rng(0).integers(-3, 3, (64, 40)).astype(np.float32)
    params = [SamplingParams(temperature=0, seed=i) for i in range(64)]
    assert draw_rows(logits, params, np.arange(64)) == logits.argmax(axis=1).tolist()
    # The same rows beside one that is drawn.
    mixed = [*params[:63], SamplingParams()]
    assert draw_rows(logits, mixed)[:63] == logits.argmax(axis=1)[:63].tolist()


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e30])
def test_extreme_logits_and_temperatures_stay_finite(temperature):
    logits = np.array([[3e38, -3e38, 2.9e38], [1e-38, 0, -1e-38], [-3e38, -3.1e38, -INF]], np.float32)
    ids = draw_rows(logits, [SamplingParams(temperature=temperature, seed=i) for i in range(3)])
    assert all(0 <= i < 3 for i in ids) and ids[2] != 2


def test_released_vocabulary_against_sorting():
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=129280) * 2.5).astype(np.float32)
    for top_k, top_p in ((512, 1.0), (0, 0.95), (1000, 0.7)):
        got = filtered(logits, 1.0, top_k, top_p)
        _, order, before = probabilities(logits, 1.0, top_k, np.float32(top_p))
        # float32 sums of the whole vocabulary place the cut to a few parts in a million.
        mass = before[min(len(order), len(before) - 1)] - before[min((got > -INF).sum(), len(before) - 1)]
        assert abs(mass) < 5e-6
        assert (got > -INF).sum() == len(order) or top_p < 1


def test_no_rows():
    empty = np.zeros((0, 5), np.float32)
    assert draw(empty, sampling_arrays([]), np.zeros(0, np.int32)).shape == (0,)
