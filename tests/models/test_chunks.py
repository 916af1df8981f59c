"""One forward serves prefill chunks, decode and verify: any split gives the bits of one pass, logits and cache."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dsv41.cache import KVCache
from tests.golden import expected
from tests.models_for_tests import small_model

LENGTH = 53
# One cache shape for all, two pages a sequence and rings with room for drafts: a length bucket is compiled once. The
# tests that are not slow use three: pieces of one token, of 2 to 8 and of more than 32.
MAX_TOKENS, DRAFT_TOKENS = 512, 5


def feed(ids: np.ndarray, sizes: list[int]) -> tuple[np.ndarray, KVCache]:
    """Feeds ids [B, T] in pieces of the given sizes; logits float32 [B, T, V] and the cache."""
    model = small_model()
    cache, done, out = model.init_cache(len(ids), MAX_TOKENS, draft_tokens=DRAFT_TOKENS), 0, []
    for size in sizes:
        batch = model.make_batch(ids[:, done : done + size], ids[:, :done])
        logits, cache, _ = model.forward(batch, cache, logits="all")
        out.append(np.asarray(logits)[: len(ids), : batch.num_new[0]])
        done += size
    return np.concatenate(out, axis=1), cache


def split(length: int, size: int) -> list[int]:
    return [min(size, length - i) for i in range(0, length, size)]


def same_bytes(a: KVCache, b: KVCache) -> bool:
    arrays = ((x, y) for name in ("main", "index", "window") for x, y in zip(getattr(a, name), getattr(b, name)))
    return all(np.array_equal(x, y) for x, y in arrays)


@functools.cache
def whole() -> tuple[np.ndarray, KVCache]:
    return feed(expected("tiny_text")["input_ids"][:, :LENGTH], [LENGTH])


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, *[pytest.param(n, marks=pytest.mark.slow) for n in (16, 17)]])
def test_chunks_equal_one_pass(size):
    """1 is decode, 6 the longest verify block; odd sizes leave ratio-2 groups open between steps."""
    logits, cache = feed(expected("tiny_text")["input_ids"][:, :LENGTH], split(LENGTH, size))
    np.testing.assert_array_equal(logits, whole()[0])
    assert same_bytes(cache, whole()[1])


def test_uneven_splits_equal_one_pass():
    sizes = [5, 1, 8, 3, 7, 1, 6, 4, 3, 8, 7]
    assert sum(sizes) == LENGTH
    logits, cache = feed(expected("tiny_text")["input_ids"][:, :LENGTH], sizes)
    np.testing.assert_array_equal(logits, whole()[0])
    assert same_bytes(cache, whole()[1])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 7, 127, 128, 129])
def test_case_a12_long_prompt_in_chunks(size):
    """300 tokens cross a page (256 tokens) and the window (16) many times over."""
    ids = np.random.default_rng(3).integers(3, 500, (2, 300))
    one_pass, reference = _long_prompt()
    logits, cache = feed(ids, split(300, size))
    np.testing.assert_array_equal(logits, one_pass)
    assert same_bytes(cache, reference)


@functools.cache
def _long_prompt() -> tuple[np.ndarray, KVCache]:
    return feed(np.random.default_rng(3).integers(3, 500, (2, 300)), [300])


def test_case_a12_pages_are_crossed_by_decode():
    """The same, short enough for every run: chunks of 128 against single tokens around the page border."""
    ids = np.random.default_rng(3).integers(3, 500, (2, 264))
    by_chunks, first = feed(ids, [64] * 4 + [8])
    by_tokens, second = feed(ids, [64] * 3 + [60] + [1] * 12)
    np.testing.assert_array_equal(by_tokens[:, -12:], by_chunks[:, -12:])
    assert same_bytes(first, second)


@pytest.mark.parametrize("rejected", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("start", [20, 21])
def test_rollback_is_a_smaller_start(rejected, start):
    """Rejected draft tokens leave nothing that a later step can see: rings, pages, open groups."""
    model, ids = small_model(), expected("tiny_text")["input_ids"][:, :LENGTH]
    reference, clean = feed(ids, [*split(start, 8), *[1] * 8])
    _, cache = feed(ids, split(start, 8))
    accepted = 6 - rejected
    wrong = (ids[:, start : start + 6] + np.arange(6) + 1) % 500 + 3
    verify = np.concatenate([ids[:, start : start + accepted], wrong[:, accepted:]], axis=1)
    _, cache, _ = model.forward(model.make_batch(verify, ids[:, :start]), cache, logits="all")
    for position in range(start + accepted, start + 8):
        batch = model.make_batch(ids[:, position : position + 1], ids[:, :position])
        logits, cache, _ = model.forward(batch, cache, logits="all")
        np.testing.assert_array_equal(np.asarray(logits)[:2, 0], reference[:, position])
    layout, committed = cache.layout, start + 8
    for source, ratio in enumerate(layout.ratios):
        entry = np.broadcast_to(np.arange(committed // ratio), (2, committed // ratio))
        page, offset = layout.address(cache.page_table, entry, ratio)
        for a, b in zip(
            layout.main.gather(cache.main[source], page, offset), layout.main.gather(clean.main[source], page, offset)
        ):
            np.testing.assert_array_equal(a, b)


def test_case_a13_length_one_equals_last_row_of_two():
    ids = expected("tiny_text")["input_ids"][:, :2]
    two, _ = feed(ids, [2])
    one, _ = feed(ids, [1, 1])
    np.testing.assert_array_equal(one, two)


def test_forward_does_not_read_what_lies_at_or_beyond_start():
    """Pages full of garbage beyond the committed length change nothing."""
    model, ids = small_model(), expected("tiny_text")["input_ids"][:, :LENGTH]
    poisoned = jax.tree.map(
        lambda x: jax.numpy.full_like(x, 0x7F) if x.dtype == np.uint8 else x,
        model.init_cache(2, MAX_TOKENS, draft_tokens=DRAFT_TOKENS),
    )
    nan_rows = tuple(None if x is None else jax.numpy.full_like(x, np.nan) for x in poisoned.pending)
    poisoned = dataclasses.replace(poisoned, pending=nan_rows)
    logits, _, _ = model.forward(model.make_batch(ids), poisoned, logits="all")
    np.testing.assert_array_equal(np.asarray(logits)[:, :LENGTH], whole()[0])
