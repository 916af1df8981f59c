"""Sequences of different lengths in one batch, padding rows, slots and capacity."""

import jax
import numpy as np
import pytest

from dsv41.cache import PagePool, assign_pages, init_cache
from dsv41.config import DSV41Error
from tests.models_for_tests import small_model

LENGTHS = (1, 7, 8, 33)


def empty_cache(slots: int):
    """The shape that test_chunks uses too, so that programs are shared through the disk cache."""
    return small_model().init_cache(slots, 512, draft_tokens=5)


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, 500, n) for n in LENGTHS]


def entries(cache, slot: int, length: int) -> list[np.ndarray]:
    """Every stored byte of a sequence: main KV, index keys and window rows."""
    layout, out = cache.layout, []
    for source, ratio in enumerate(layout.ratios):
        number = np.arange(length // ratio)[None]
        page, entry = layout.address(cache.page_table[slot][None], number, ratio)
        out += layout.main.gather(cache.main[source], page, entry)
        out += layout.index.gather_blocks(cache.index[source], page, entry, 1)
    for ring in cache.window:
        values, scales = layout.window.read(ring, np.array(slot))
        last = np.arange(max(0, length - 16), length) % layout.window.length
        out += [values[last], scales[last]]
    return [np.asarray(x) for x in out]


def test_a_batch_equals_separate_runs():
    """Lengths 1, 7, 8, 33 (cases A10, A11): logits and stored bytes of each are those of its solo run."""
    model, rows = small_model(), prompts()
    logits, cache, _ = model.forward(model.make_batch(rows), empty_cache(4), logits="all")
    for i, row in enumerate(rows):
        # Another batch size, another length bucket and another place in the batch, beside one token of its own.
        alone, own, _ = model.forward(model.make_batch([row[:1], row]), empty_cache(2), logits="all")
        np.testing.assert_array_equal(np.asarray(logits)[i, : len(row)], np.asarray(alone)[1, : len(row)])
        for a, b in zip(entries(cache, i, len(row)), entries(own, 1, len(row))):
            np.testing.assert_array_equal(a, b)


def test_case_a11_incomplete_groups():
    """5 tokens at ratio 2 give 2 entries, the third only after token 6; ratio 1 gives 5."""
    model = small_model()
    ids = np.tile(np.arange(10, 16), (2, 1))
    _, five, _ = model.forward(model.make_batch(ids[:, :5]), empty_cache(2), logits="all")

    def written(cache, source):
        layout = cache.layout
        _, scales = layout.main.gather(cache.main[source], np.zeros(8, np.int32), np.arange(8))
        return int((np.asarray(scales) != 0).any(-1).sum())

    assert [written(five, s) for s in range(2)] == [2, 5]
    _, six, _ = model.forward(model.make_batch(ids[:, 5:], ids[:, :5]), five, logits="all")
    assert [written(six, s) for s in range(2)] == [3, 6]


def test_case_a10_neighbouring_lengths():
    """Lengths 7 and 8 at ratio 2 have 3 and 4 entries, each equal to its solo run (bytes compared above)."""
    model, rows = small_model(), prompts()
    cache = empty_cache(4)
    _, cache, _ = model.forward(model.make_batch(rows), cache, logits="all")
    layout = cache.layout
    for slot, count in ((1, 3), (2, 4)):
        page, entry = layout.address(cache.page_table[slot][None], np.arange(6)[None], 2)
        _, scales = layout.main.gather(cache.main[0], page, entry)
        assert int((np.asarray(scales) != 0).any(-1).sum()) == count


def test_rows_of_padding_write_nowhere():
    """A batch of 3 is padded to 4: the pages and rings of other slots keep every byte."""
    model, rows = small_model(), prompts()[1:]  # the longest is in, so that other tests' program serves
    marked = jax.tree.map(lambda x: jax.numpy.full_like(x, 0x5A) if x.dtype == np.uint8 else x, empty_cache(4))
    before = [np.asarray(x) for x in (*marked.main, *marked.index, *marked.window)]
    batch = model.make_batch(rows, slots=[3, 1, 2])
    assert batch.tokens.shape[0] == 4
    _, after, _ = model.forward(batch, marked, logits="all")
    arrays = [np.asarray(x) for x in (*after.main, *after.index, *after.window)]
    slot_pages = [2 * after.layout.pages_per_logical(r) for r in after.layout.ratios] * 2 + [1] * len(after.window)
    for old, new, pages in zip(before, arrays, slot_pages):
        np.testing.assert_array_equal(old[:pages], new[:pages])  # slot 0 owns the first ones
        assert not np.array_equal(old, new)


def test_slots_may_be_used_in_any_order():
    model, rows = small_model(), prompts()
    straight, _, _ = model.forward(model.make_batch(rows), empty_cache(4), logits="all")
    mixed, _, _ = model.forward(model.make_batch(rows, slots=[2, 0, 3, 1]), empty_cache(4), logits="all")
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(np.asarray(straight)[i, : len(row)], np.asarray(mixed)[i, : len(row)])


def test_pages_may_lie_anywhere():
    """The same numbers from pages that the pool handed out in a scattered order."""
    model, rows = small_model(), prompts()
    straight, _, _ = model.forward(model.make_batch(rows), empty_cache(4), logits="all")
    cache = init_cache(model.config.text_config, num_slots=4, max_tokens=512, num_pages=8, draft_tokens=5)
    pages = PagePool(8)
    for slot in (2, 0, 3, 1):
        cache = assign_pages(cache, slot, 0, pages.allocate(2))
    assert sorted(np.asarray(cache.page_table).reshape(-1)) == list(range(8))
    scattered, _, _ = model.forward(model.make_batch(rows), cache, logits="all")
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(np.asarray(straight)[i, : len(row)], np.asarray(scattered)[i, : len(row)])


def test_a_sequence_without_pages_gets_nan():
    """Slot 1 was never given a page: its logits are NaN, its neighbours' are not."""
    model, rows = small_model(), prompts()
    cache = init_cache(model.config.text_config, num_slots=4, max_tokens=512, num_pages=8, draft_tokens=5)
    for slot, pages in ((0, [4, 5]), (2, [0, 7]), (3, [1, 2])):
        cache = assign_pages(cache, slot, 0, pages)
    logits = np.asarray(model.forward(model.make_batch(rows), cache, logits="all")[0])
    assert np.isnan(logits[1]).all()
    assert np.isfinite(logits[[0, 2, 3]]).all()


def test_last_logits_are_those_of_the_last_real_token():
    model, rows = small_model(), prompts()
    every, _, _ = model.forward(model.make_batch(rows), empty_cache(4), logits="all")
    last, _, _ = model.forward(model.make_batch(rows), empty_cache(4), logits="last")
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(np.asarray(last)[i, 0], np.asarray(every)[i, len(row) - 1])


@pytest.mark.parametrize(
    ("tokens", "history", "slots", "message"),
    [
        ([], None, None, "no sequences"),
        ([[1], []], None, None, "row 1: no new tokens"),
        ([[1, 512]], None, None, r"row 0: token 1 is 512, expected an id in \[0, 512\)"),
        ([[1], [2, -1]], None, None, "row 1: token 1 is -1"),
        ([[1]], [[3, 900]], None, "row 0: history token 1 is 900"),
        ([[1], [2]], [[1]], None, "2 rows of tokens, 1 of history"),
        ([[1], [2]], None, [0, 0], "slot of its own"),
    ],
)
def test_bad_batches_are_refused(tokens, history, slots, message):
    with pytest.raises(DSV41Error, match=message):
        small_model().make_batch(tokens, history, slots=slots)


def test_a_step_beyond_the_cache_is_refused():
    model = small_model()
    cache = model.init_cache(1, 256)
    with pytest.raises(DSV41Error, match="3 tokens at position 254 exceed the cache's 256"):
        model.forward(model.make_batch([[1, 2, 3]], [[4] * 254]), cache)
    with pytest.raises(DSV41Error, match="not all in"):
        model.forward(model.make_batch([[1]], slots=[1]), cache)
    with pytest.raises(DSV41Error, match="exceeds max_position_embeddings=4096"):
        model.init_cache(1, 4097)
