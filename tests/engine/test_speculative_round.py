"""Rounds with forced drafts against plain decoding: tokens, and every cache row below the committed length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.cache import KVCache
from dsv41.engine.speculative_step import (
    RoundInputs,
    VerifySchedule,
    compiled_prefill,
    compiled_round,
    request_state,
)
from dsv41.ops.sampling import SamplingParams, sampling_arrays
from dsv41.ops.verification import AcceptanceRule
from pallas_kernels.page_layout import PAGE_ENTRIES
from tests.models_for_tests import tiny_model

BLOCK = 5
CAPACITY = 256
# One of even, one of odd length, so that a group of two is open in either row at some time.
PROMPTS = ([0, 17, 42, 99, 5, 6], [0, 5, 6, 7, 8, 9, 10])
LENGTH = 110  # tokens decoded plainly


@jax.jit
def _entries(cache: KVCache) -> dict:
    """All entries of the pools by slot and entry number, and the rings, as (values, scales)."""
    layout, slots = cache.layout, jnp.arange(cache.num_slots)
    found = {}
    for k, ratio in enumerate(layout.ratios):
        page, entry = layout.address(
            cache.page_table, jnp.broadcast_to(jnp.arange(CAPACITY // ratio), (2, CAPACITY // ratio)), ratio
        )
        found[f"main.{k}"] = layout.main.gather(cache.main[k], page, entry)
        keys = layout.index.read_pages(cache.index[k], page[:, ::PAGE_ENTRIES])
        found[f"index.{k}"] = tuple(x.reshape(2, -1, x.shape[-1]) for x in keys)
    for name in ("window", "draft_window"):
        for n, ring in enumerate(getattr(cache, name)):
            found[f"{name}.{n}"] = layout.window.read(ring, slots)
    return found


def committed_rows(cache: KVCache, lengths: list[int]) -> list[dict[str, np.ndarray]]:
    """Everything that a sequence's next token may read, by name, for each slot."""
    layout, window = cache.layout, tiny_model().config.text_config.sliding_window
    entries, pending = jax.device_get((_entries(cache), cache.pending))
    rows = []
    for slot, length in enumerate(lengths):
        found = {}
        last = np.arange(max(length - window, 0), length) % layout.window.length
        for name, pair in entries.items():
            kind, _, k = name.partition(".")
            keep = last if "window" in kind else slice(length // layout.ratios[int(k)])
            found[name] = [x[slot, keep] for x in pair]
        for k, ratio in enumerate(layout.ratios):
            if ratio > 1:
                open_group = np.arange(length // ratio * ratio, length)
                found[f"pending.{k}"] = [pending[k][slot, open_group % layout.pending_rows]]
        rows.append(found)
    return rows


def _prefill(tokens, history, cache):
    model = tiny_model()
    batch = jax.tree.map(jnp.asarray, model.make_batch(tokens, history))
    return compiled_prefill()(model.params, model.drafter, batch, cache, config=model.config)


@functools.cache
def plain():
    """Greedy decoding one token at a time: all tokens of each row, and the committed rows at every length."""
    cache = tiny_model().init_cache(2, CAPACITY, draft_tokens=BLOCK)
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
    cache = tiny_model().init_cache(2, CAPACITY, draft_tokens=BLOCK)
    _, cache = _prefill(PROMPTS, None, cache)
    known = [np.asarray(t[: len(p) + 1]) for t, p in zip(tokens, PROMPTS, strict=True)]
    return jax.tree.map(jnp.asarray, request_state(known, [LENGTH, LENGTH], 2, 3)), cache


def inputs(*, temperature=0.0, stop=(-1,), seeds=(0, 0), **fields) -> RoundInputs:
    params = [SamplingParams(temperature=temperature, top_p=1, seed=s) for s in seeds]
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
    model = tiny_model()
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


def same_rows(actual: dict, expected: dict) -> None:
    for name, arrays in expected.items():
        for a, b in zip(actual[name], arrays, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("rule", AcceptanceRule)
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
