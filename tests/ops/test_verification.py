"""Verification: the output law against the target's by enumeration, and the edges of each function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.config import DSV41Error
from dsv41.ops.sampling import (
    NO_TOKEN,
    SamplingParams,
    draw,
    filtered_logprobs,
    has_distribution,
    round_keys,
    sampling_arrays,
    step_keys,
)
from dsv41.ops.verification import (
    AcceptanceRule,
    acceptance_length,
    acceptance_probabilities,
    accepted_count,
    emitted_tokens,
    next_token_logits,
)
from tests.ops.enumeration import Laws, random_laws

INF, NAN = np.inf, np.nan
TOKEN, BLOCK = AcceptanceRule.TOKEN, AcceptanceRule.BLOCK
both_rules = pytest.mark.parametrize("rule", [TOKEN, BLOCK])

PLAIN = SamplingParams(top_p=1)
TOP_K = SamplingParams(top_p=1, top_k=2)
TOP_P = SamplingParams(top_p=0.7, temperature=1.3)
GREEDY = SamplingParams(temperature=0)

bounds = jax.jit(acceptance_probabilities, static_argnames="rule")
count = jax.jit(accepted_count, static_argnames="rule")
next_law = jax.jit(next_token_logits, static_argnames="rule")
emit = jax.jit(emitted_tokens)
filtered = jax.jit(filtered_logprobs)
jitted_draw = jax.jit(draw)


def logs(probabilities):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probabilities, np.float32))


@both_rules
@pytest.mark.parametrize(
    "target,draft",
    [
        (PLAIN, PLAIN), (TOP_K, PLAIN), (PLAIN, TOP_K), (TOP_K, TOP_K), (TOP_P, TOP_P), (TOP_P, TOP_K),
        (PLAIN, GREEDY), (GREEDY, PLAIN), (GREEDY, GREEDY), (TOP_P, GREEDY),
    ],
)  # fmt: skip
def test_output_law_is_the_targets(rule, target, draft):
    """Any drafter, any cuts, any fixed length."""
    for seed in range(3):
        laws = random_laws(seed, target=target, draft=draft, near=0.4 * seed)
        for length in range(4):
            assert laws.error(length, rule) < 1e-6


@both_rules
def test_output_law_when_the_drafter_is_the_target(rule):
    laws = random_laws(0, target=TOP_P, draft=TOP_P, near=1)
    lengths = np.full(27, 3)
    target = np.stack(laws.behind(laws.target, laws.all_drafts), axis=1)
    draft = np.stack(laws.behind(laws.draft, laws.all_drafts), axis=1)
    h = np.asarray(bounds(target, draft, laws.all_drafts, lengths, rule=rule))
    drawn = laws.draft_weights > 0
    assert 0 < drawn.sum() < 27 and (h[drawn] == 1).all()
    largest = np.full((27, 3), np.nextafter(np.float32(1), np.float32(0)))
    assert (np.asarray(count(h, largest, lengths, rule=rule))[drawn] == 3).all()
    assert laws.error(3, rule) < 1e-6


@both_rules
def test_length_may_depend_on_earlier_drafts(rule):
    """dspark.md section 6.4: stopping at the first confidence below a constant."""
    for seed in range(4):
        laws = random_laws(seed, target=PLAIN, draft=PLAIN)
        rng = np.random.default_rng(seed)
        confident = [rng.random(3**t) < (1, 0.6, 0.6)[t] for t in range(3)]
        passed = np.stack([confident[t][np.arange(27) // 3 ** (3 - t)] for t in range(3)], axis=1)
        assert len(set(passed.cumprod(axis=1).sum(axis=1))) > 1
        assert laws.error(passed.cumprod(axis=1).sum(axis=1), rule) < 1e-6


@both_rules
def test_length_may_not_depend_on_the_draft_itself(rule):
    """The same harness sees it: verifying only where the first draft is token 0."""
    laws = random_laws(0, target=PLAIN, draft=PLAIN)
    assert laws.error(np.where(laws.all_drafts[:, 0] == 0, 3, 0), rule) > 0.01


def greedy_match(target, draft, drafts, lengths, rule):
    return (target[:, :-1].argmax(axis=-1) == drafts).astype(np.float32)


def target_after_rejection(target, draft, drafts, accepted, lengths, rule):
    return np.take_along_axis(target, np.asarray(accepted)[:, None, None], axis=1)[:, 0]


def test_wrong_rules_are_seen():
    laws = random_laws(0, target=PLAIN, draft=PLAIN)
    assert laws.error(3, TOKEN, bounds=greedy_match) > 0.01
    assert laws.error(3, TOKEN, next_law=target_after_rejection) > 0.01
    assert laws.error(3, BLOCK, next_law=target_after_rejection) > 0.01
    # Bounds of a longer block than the one that is verified.
    whole = [np.full(27 * 8, 3, np.int32)]
    wrong = lambda t, q, d, lengths, rule: bounds(t, q, d, *whole, rule=rule)  # noqa: E731
    assert laws.error(2, BLOCK, bounds=wrong) > 0.01


def test_sampling_case():
    """Case D5: acceptance .7, a rejection always gives token 0, and the outputs follow the target."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
    laws = Laws(target=[logs([p]), logs([p] * 3)], draft=[logs([q])])
    target = np.tile(logs(p), (3, 2, 1))
    arguments = target, np.tile(logs(q), (3, 1, 1)), np.arange(3, dtype=np.int32)[:, None]
    for rule in (TOKEN, BLOCK):
        h = bounds(*arguments, np.ones(3, np.int32), rule=rule)
        np.testing.assert_allclose(h[:, 0] @ np.array(q), 0.7, rtol=1e-6)
        rejected = next_law(*arguments, np.zeros(3, np.int32), np.ones(3, np.int32), rule=rule)
        assert (np.isfinite(rejected) == [True, False, False]).all()
        assert laws.error(1, rule) < 1e-6
        assert laws.error(1, rule, bounds=greedy_match) > 0.01


def mean_accepted(laws, rule):
    n, k = laws.all_drafts.shape
    lengths = np.full(n, k)
    target = np.stack(laws.behind(laws.target, laws.all_drafts), axis=1)
    draft = np.stack(laws.behind(laws.draft, laws.all_drafts), axis=1)
    h = np.asarray(bounds(target, draft, laws.all_drafts, lengths, rule=rule), np.float64)
    # At least k of them: TOKEN, all of the first k pass; BLOCK, any from the k-th on passes.
    reached = h.cumprod(axis=1) if rule is TOKEN else 1 - (1 - h)[:, ::-1].cumprod(axis=1)
    return laws.draft_weights @ reached.sum(axis=1)


def test_block_rule_keeps_more():
    gains = []
    for seed in range(12):
        laws = random_laws(seed, target=(PLAIN, TOP_K, TOP_P)[seed % 3], draft=PLAIN, near=0.1 * (seed % 8))
        gains.append(mean_accepted(laws, BLOCK) - mean_accepted(laws, TOKEN))
    assert min(gains) > -1e-6 and max(gains) > 0.01


tokens = st.integers(0, 3)


@jax.jit
def any_key(seed):
    return round_keys(jnp.array([seed], jnp.uint32), jnp.array([0]))


@both_rules
@given(
    best=st.lists(tokens, min_size=4, max_size=4),
    drafts=st.lists(tokens, min_size=3, max_size=3),
    length=st.integers(0, 3),
    seed=st.integers(0, 2**31 - 1),
)
def test_greedy_rows_accept_the_common_prefix(rule, best, drafts, length, seed):
    rng = np.random.default_rng(seed)
    logits = rng.random((1, 4, 4), np.float32)
    logits[0, np.arange(4), best] += 2
    target = filtered(logits, sampling_arrays([GREEDY]))
    draft = logs(rng.dirichlet(np.ones(4), (1, 3)))
    drafts, lengths = np.int32([drafts]), np.int32([length])
    h = bounds(target, draft, drafts, lengths, rule=rule)
    m = count(h, rng.random((1, 3), np.float32), lengths, rule=rule)
    law = next_law(target, draft, drafts, m, lengths, rule=rule)
    expect = next((k for k in range(length) if drafts[0, k] != best[k]), length)
    assert m.tolist() == [expect]
    assert jitted_draw(law, any_key(seed)).tolist() == [best[expect]]


@both_rules
def test_one_hot_drafter_takes_its_token_out_of_the_rest(rule):
    p = [0.5, 0.3, 0.2]
    arguments = logs([[p, p]]), logs([[[0, 1, 0]]]), np.int32([[1]])
    assert bounds(*arguments, np.int32([1]), rule=rule)[0, 0] == np.float32(0.3)
    law = np.exp(next_law(*arguments, np.int32([0]), np.int32([1]), rule=rule)[0])
    np.testing.assert_allclose(law, [0.5, 0, 0.2], rtol=1e-6)


def verify_one(target, draft, drafts, length, rule, uniforms=0.0):
    """(bounds, accepted, exp of the next law) of one row."""
    target, draft = np.asarray(target, np.float32)[None], np.asarray(draft, np.float32)[None]
    drafts, lengths = np.int32([drafts]), np.int32([length])
    h = bounds(target, draft, drafts, lengths, rule=rule)
    m = count(h, np.full_like(h, uniforms), lengths, rule=rule)
    law = next_law(target, draft, drafts, m, lengths, rule=rule)
    return np.asarray(h[0]), int(m[0]), np.exp(np.asarray(law[0]))


P, Q = logs([[0.5, 0.3, 0.2]] * 3), logs([[0.5, 0.4, 0.1], [0.2, 0.3, 0.5]])


@both_rules
@pytest.mark.parametrize("draft", [NO_TOKEN, 3, 1000])
def test_draft_that_is_no_token_ends_the_block(rule, draft):
    h, m, law = verify_one(P, Q, [0, draft], 2, rule)
    assert h.tolist() == [1, 0] and m == 1
    np.testing.assert_allclose(law, [0.5, 0.3, 0.2], rtol=1e-6)


@both_rules
@pytest.mark.parametrize("row", [[0.5, 0, 0.5], [NAN] * 3])
def test_draft_that_its_law_cannot_give_ends_the_block(rule, row):
    """Then the next token comes from the target's law, whole."""
    h, m, law = verify_one(P, np.stack([Q[0], logs(row)]), [1, 1], 2, rule)
    np.testing.assert_allclose(h, [0.75, 0], rtol=1e-6)
    assert m == 1
    np.testing.assert_allclose(law, [0.5, 0.3, 0.2], rtol=1e-6)
    assert verify_one(P, np.stack([logs(row), Q[1]]), [1, 1], 2, rule)[:2] == (pytest.approx([0, 0]), 0)


@both_rules
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("drafts", [[0, 1], [1, 1], [1, 2]])
def test_target_without_a_distribution_is_refused_where_it_is_reached(rule, bad, drafts):
    """Whether the drafts before it are certain to stand or not."""
    target = P.copy()
    target[bad] = NAN
    _, m, law = verify_one(target, Q, drafts, 2, rule)
    assert m == bad and np.isnan(law).all()
    assert not has_distribution(law[None])[0]
    # Behind the end of what is verified it harms nothing.
    _, m, law = verify_one(target, Q, drafts, max(bad - 1, 0), rule)
    assert m == max(bad - 1, 0) and np.isnan(law).any() == (bad == 0)


@both_rules
def test_draft_that_the_target_forbids_is_never_kept(rule):
    target = logs([[0, 0.5, 0.5], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]])
    h, m, law = verify_one(target, Q, [0, 2], 2, rule)
    assert m == 0 and h[0] == 0 and law[0] == 0
    if rule is BLOCK:
        assert h[1] == 0


@both_rules
@pytest.mark.parametrize("length", [-3, 0, 2, 9])
def test_lengths_out_of_range(rule, length):
    assert verify_one(P, P[:2], [0, 1], length, rule)[1] == np.clip(length, 0, 2)


@both_rules
def test_nothing_left_of_the_difference_falls_back_to_the_target(rule):
    law = next_law(P[None], P[None, :2], np.int32([[0, 1]]), np.int32([1]), np.int32([2]), rule=rule)
    np.testing.assert_array_equal(law[0], P[1])


@both_rules
def test_no_drafts_at_all_is_plain_decoding(rule):
    arguments = P[None, :1], np.zeros((1, 0, 3), np.float32), np.zeros((1, 0), np.int32)
    lengths = np.int32([0])
    h = bounds(*arguments, lengths, rule=rule)
    assert count(h, np.zeros((1, 0), np.float32), lengths, rule=rule).tolist() == [0]
    np.testing.assert_array_equal(next_law(*arguments, lengths, lengths, rule=rule)[0], P[0])


@both_rules
def test_tiny_probabilities_keep_their_ratio(rule):
    """Laws far below what float32 holds as probabilities."""
    target, draft = np.full((2, 3), -200, np.float32), np.full((1, 3), -200, np.float32)
    target[:, 0] = draft[:, 0] = 0
    target[0, 1] = -200 + np.log(0.25)
    h, _, _ = verify_one(target, draft, [1], 1, rule)
    np.testing.assert_allclose(h, [0.25], rtol=1e-4)
    target[0, 2] = -199
    law = np.asarray(next_law(target[None], draft[None], np.int32([[1]]), np.int32([0]), np.int32([1]), rule=rule)[0])
    np.testing.assert_allclose(law, [-INF, -INF, -200 + np.log(np.e - 1)], rtol=1e-5)


def emit_one(drafts, accepted, next_token, stop=(-1,), remaining=100):
    ids, number, stopped = emit(
        np.int32([drafts]), np.int32([accepted]), np.int32([next_token]), np.int32(stop), np.int32([remaining])
    )
    assert ids.shape == (1, len(drafts) + 1) and ids.dtype == number.dtype == np.int32
    assert (np.asarray(ids)[0, int(number[0]) :] == -1).all()
    return ids[0, : int(number[0])].tolist(), bool(stopped[0])


@pytest.mark.parametrize(
    "arguments,ids,stopped",
    [
        ({"accepted": 0}, [9], False),
        ({"accepted": 2}, [5, 6, 9], False),
        ({"accepted": 3}, [5, 6, 7, 9], False),
        ({"accepted": 3, "stop": [6]}, [5, 6], True),
        ({"accepted": 3, "stop": [7, 6, -1]}, [5, 6], True),
        ({"accepted": 1, "stop": [6]}, [5, 9], False),
        ({"accepted": 1, "stop": [9, -1]}, [5, 9], True),
        ({"accepted": 3, "stop": [9]}, [5, 6, 7, 9], True),
        ({"accepted": 3, "remaining": 2}, [5, 6], False),
        ({"accepted": 3, "remaining": 4}, [5, 6, 7, 9], False),
        ({"accepted": 3, "remaining": 2, "stop": [6]}, [5, 6], True),
        ({"accepted": 3, "remaining": 1, "stop": [6]}, [5], False),
        ({"accepted": 3, "remaining": 0}, [], False),
        ({"accepted": 0, "remaining": -2, "stop": [9]}, [], False),
        ({"accepted": 1, "next_token": NO_TOKEN}, [5, NO_TOKEN], False),
        ({"accepted": 1, "stop": []}, [5, 9], False),
    ],
)
def test_emitted_tokens(arguments, ids, stopped):
    assert emit_one([5, 6, 7], **{"next_token": 9, **arguments}) == (ids, stopped)


def test_acceptance_length():
    """Case D4."""
    assert acceptance_length(25, 10) == 3.5
    assert acceptance_length(0, 4) == 1
    for bad in ((25, 0), (-1, 3)):
        with pytest.raises(DSV41Error, match="acceptance length"):
            acceptance_length(*bad)


def test_filtered_logprobs_filter_every_position_by_its_row():
    logits = np.random.default_rng(0).normal(size=(3, 2, 5)).astype(np.float32)
    logits[0, 1, 2] = NAN
    cut = np.asarray(filtered(logits, sampling_arrays([PLAIN, TOP_K, GREEDY])))
    np.testing.assert_allclose(cut[0, 0], jax.nn.log_softmax(logits[0, 0]), rtol=1e-5)
    assert np.isnan(cut[0, 1]).all()
    assert ((cut[1] > -INF).sum(axis=-1) == 2).all()
    np.testing.assert_allclose(np.exp(cut[1:]).sum(axis=-1), 1, rtol=1e-6)
    assert (cut[2].argmax(axis=-1) == logits[2].argmax(axis=-1)).all()
    assert set(np.unique(cut[2])) == {-INF, 0}


def test_rounds_have_keys_of_their_own():
    """None shared between seeds, rounds and purposes, or with the steps."""
    seeds, indices = (x.reshape(-1) for x in np.meshgrid(np.arange(5, dtype=np.uint32), np.arange(7, dtype=np.int32)))
    streams = [step_keys(seeds, indices), *(round_keys(seeds, indices, purpose) for purpose in range(4))]
    data = np.concatenate([jax.random.key_data(s) for s in streams])
    assert len(np.unique(data, axis=0)) == 5 * len(seeds)
    again = jax.random.key_data(round_keys(seeds[3:4], indices[3:4], 2))
    np.testing.assert_array_equal(again[0], jax.random.key_data(streams[3])[3])


@both_rules
def test_drawn_rounds_follow_the_target(rule):
    """With real keys, drafts included; the first token and whether the round gave two, against their exact law."""
    rounds = 1 << 15
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])

    @jax.jit
    def first_tokens(index):
        seed = np.full(rounds, 11, np.uint32)
        target, draft = (np.tile(logs(x), (rounds, n, 1)) for x, n in ((p, 2), (q, 1)))
        drafts = draw(draft[:, 0], round_keys(seed, index, 0))[:, None]
        uniforms = jax.vmap(lambda key: jax.random.uniform(key, (1,)))(round_keys(seed, index, 1))
        lengths = np.ones(rounds, np.int32)
        m = accepted_count(acceptance_probabilities(target, draft, drafts, lengths, rule), uniforms, lengths, rule)
        following = draw(next_token_logits(target, draft, drafts, m, lengths, rule), round_keys(seed, index, 2))
        return emitted_tokens(drafts, m, following, np.int32([-1]), np.full(rounds, 9))[0]

    ids = np.asarray(first_tokens(np.arange(rounds, dtype=np.int32)))
    share = np.bincount(ids[:, 0], minlength=3) / rounds
    assert np.abs(share - p).max() < 4 * 0.5 / np.sqrt(rounds)
    both = ids[ids[:, 1] >= 0]
    assert abs(len(both) / rounds - 0.7) < 4 * 0.5 / np.sqrt(rounds)
    pairs = np.zeros((3, 3))
    np.add.at(pairs, (both[:, 0], both[:, 1]), 1 / rounds)
    assert np.abs(pairs - np.outer(np.minimum(p, q), p)).max() < 4 * 0.5 / np.sqrt(rounds)
