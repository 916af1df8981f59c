"""Only a prompt's tail in the decoder; prefill behind a cached prefix (serving.md sections 3 and 4)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.cache import take_rows
from dsv41.config import layer_schedule
from dsv41.engine import step_batch
from dsv41.layers import Residual
from dsv41.models import ForcedChoices, bind
from tests.golden import expected, replay
from tests.models.cache_rows import committed_rows, same_rows
from tests.models.parity import CAPACITY, PROMPT, error_figures
from tests.models_for_tests import small_model, tiny_model

WINDOW = 16
# Rows that the last token's logits depend on: a window at the last layer, and one less than a window for each before.
HALO = 1 + 3 * (WINDOW - 1)
ROWS = [[0, *range(40, 150)], [0, *range(200, 310)]]  # 111 tokens


def chunk(tokens, history=None, *, model=None, tail=None, window_floor=0, write_from=0):
    """A step of 64 or 128 tokens, whatever the rows have, so that few programs are compiled."""
    history = [r[:0] for r in tokens] if history is None else history
    length = 64 if len(tokens[0]) <= 64 else 128
    pairs = {i: (np.asarray(new), np.asarray(past)) for i, (new, past) in enumerate(zip(tokens, history, strict=True))}
    batch = step_batch(model or small_model(), (2, length), pairs)
    if tail is None:
        return batch
    fields = {"tail": tail, "window_floor": window_floor, "write_from": write_from}
    return dataclasses.replace(batch, **{k: np.full(2, v, np.int32) for k, v in fields.items()})


def width(batch) -> int:
    """Rows of the tail's step."""
    return 0 if not batch.tail.any() else HALO if batch.tokens.shape[1] == 128 else WINDOW


def prefill(rows, cache, *, sizes=None, tail=WINDOW, at=0, **fields):
    """Logits of the last tokens and the cache after a prompt in chunks from position `at`; the last has the tail."""
    begin, length = at, len(rows[0])
    for size in sizes or [length - at]:
        end = begin + size
        mine = None if tail is None else min(tail, length - at) if end == length else 0
        batch = chunk([r[begin:end] for r in rows], [r[:begin] for r in rows], tail=mine, **fields)
        static = None if tail is None else width(batch)
        logits, cache, _ = small_model().forward(batch, cache, logits="all", tail=static)
        begin = end
    last = (batch.num_new if tail is None else batch.tail) - 1
    return np.asarray(logits)[[0, 1], last], cache


@functools.cache
def full(length: int):
    rows = [r[:length] for r in ROWS]
    logits, cache = prefill(rows, small_model().init_cache(2, 256), tail=None)
    return logits, committed_rows(cache, [length] * 2)


def only(rows, *kinds):
    return [{n: x for n, x in row.items() if n.partition(".")[0] in kinds} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("length", [7, WINDOW])
def test_a_prompt_within_the_window_is_prefilled_exactly(length):
    """Bit for bit: logits, pages, rings."""
    logits, cache = prefill([r[:length] for r in ROWS], small_model().init_cache(2, 256))
    expected_logits, rows = full(length)
    np.testing.assert_array_equal(logits, expected_logits)
    for actual, wanted in zip(committed_rows(cache, [length] * 2), rows, strict=True):
        same_rows(actual, wanted)


@functools.cache
def with_tail(tail: int, sizes: tuple[int, ...] | None = None):
    logits, cache = prefill(ROWS, small_model().init_cache(2, 256), sizes=sizes, tail=tail)
    return logits, committed_rows(cache, [111] * 2)


@pytest.mark.slow
def test_pages_of_all_sources_are_those_of_full_prefill():
    schedule = layer_schedule(small_model().config.text_config)
    last = f"window.{len(schedule.layers) - 1}"
    for actual, wanted in zip(with_tail(WINDOW)[1], full(111)[1], strict=True):
        same_rows(actual, only([wanted], "main", "index", "pending")[0])
        for layer in range(schedule.decoder_start):
            same_rows(actual, {f"window.{layer}": wanted[f"window.{layer}"]})
        with pytest.raises(AssertionError):
            same_rows(actual, {last: wanted[last]})


@pytest.mark.slow
def test_a_tail_with_a_full_halo_is_exact():
    """Case C8. A tail of one window is an approximation, how good a one is printed."""
    logits, _ = full(111)
    exact, _ = with_tail(HALO)
    np.testing.assert_array_equal(exact, logits)
    near, _ = with_tail(WINDOW)
    largest, mean = error_figures(near, logits)
    print(f"\ntail of {WINDOW} tokens against full prefill of 111: logits max {largest:.4f}, mean {mean:.4f}")
    assert 0 < mean < 0.3
    short, _ = with_tail(HALO - WINDOW)
    assert 0 < np.abs(short - logits).mean() < mean


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(64, 47), (1, 63, 31, 16), (50, 45, 16)])
def test_chunks(sizes):
    """Any chunks of which the last holds the tail."""
    logits, rows = with_tail(WINDOW)
    cut_logits, cut_rows = with_tail(WINDOW, sizes)
    np.testing.assert_array_equal(cut_logits, logits)
    for actual, wanted in zip(cut_rows, rows, strict=True):
        same_rows(actual, wanted)


# Golden data


@pytest.mark.slow
def test_golden_replay_from_the_encoder_output():
    """The decoder alone, from golden streams: the sharp comparison of the golden README (0.005 and 0.023 there)."""
    model, g, r = tiny_model(), expected("tiny_text"), replay()
    backbone = bind(model.config, model.params)
    batch = jax.tree.map(jnp.asarray, chunk(g["input_ids"][:, :PROMPT], model=model, tail=WINDOW))

    @jax.jit
    def decoder(residual, cache):
        cache = backbone.layers[6].compress(residual, batch, cache)
        begin, tail = batch.num_new - batch.tail, batch.tail_batch(WINDOW)
        residual = jax.tree.map(lambda x: take_rows(x, begin, WINDOW), residual)
        residual, *_ = backbone.run(residual, tail, cache, None, range(6, 12), ForcedChoices(), ())
        return backbone.finish(residual, tail, "all")

    def padded(x):
        return jnp.pad(jnp.asarray(x), [(0, 0), (0, batch.tokens.shape[1] - PROMPT)] + [(0, 0)] * (x.ndim - 2))

    residual = Residual(padded(g["prefill.block_in.6"]), padded(g["prefill.pre_mix_out.5"]))
    logits = decoder(residual, model.init_cache(2, CAPACITY))
    mean = np.abs(np.asarray(logits) - r["tail.logits"]).mean(axis=(1, 2))
    print(f"\ntail from golden encoder output: mean {mean}")
    assert mean[0] < 0.01 and mean[1] < 0.04


@pytest.mark.slow
def test_golden_replay_from_tokens():
    """The golden README: 0.05 from tokens; the decode steps follow from the rings that the tail has filled."""
    model, g, r = tiny_model(), expected("tiny_text"), replay()
    ids = g["input_ids"]
    batch = chunk(ids[:, :PROMPT], model=model, tail=WINDOW)
    logits, cache, _ = model.forward(batch, model.init_cache(2, CAPACITY), logits="all", tail=WINDOW)
    _, mean = error_figures(np.asarray(logits), r["tail.logits"])
    steps = []
    for end in range(PROMPT, PROMPT + 6):
        step, cache, _ = model.forward(model.make_batch(ids[:, end : end + 1], ids[:, :end]), cache, logits="all")
        steps.append(np.asarray(step)[:, 0])
    _, decode_mean = error_figures(np.stack(steps), r["decode.logits"])
    print(f"\ntail from tokens: mean {mean:.4f}, decode behind it: mean {decode_mean:.4f}")
    assert mean < 0.06 and decode_mean < 0.06


# Behind a cached prefix


AT = 60


@functools.cache
def hit(sizes=None):
    """A prompt of which the pages of the first 60 tokens are there; the window before them is replayed."""
    model, floor = small_model(), AT - WINDOW
    _, cache = prefill([r[:AT] for r in ROWS], model.init_cache(2, 256))
    # What another request left in the rings: garbage that decodes to NaN.
    cache = dataclasses.replace(cache, window=tuple(jnp.full_like(x, 0xFF) for x in cache.window))
    logits, cache = prefill(ROWS, cache, sizes=sizes or (51, 16), at=floor, window_floor=floor, write_from=AT)
    return logits, committed_rows(cache, [111] * 2)


def test_replay_leaves_the_prefix_as_it_is_and_needs_no_ring():
    logits, rows = hit()
    assert np.isfinite(logits).all()
    prefix = committed_rows(prefill([r[:AT] for r in ROWS], small_model().init_cache(2, 256))[1], [AT] * 2)
    for actual, wanted in zip(rows, prefix, strict=True):
        for name, arrays in only([wanted], "main", "index")[0].items():
            same_rows({name: [x[: len(w)] for x, w in zip(actual[name], arrays, strict=True)]}, {name: arrays})
    largest, mean = error_figures(logits, full(111)[0])
    print(f"\nhit at {AT} of 111: logits max {largest:.4f}, mean {mean:.4f}")
    assert mean < 0.3


@pytest.mark.parametrize("sizes", [(3, 48, 16), (33, 34), (8, 8, 20, 31)])
def test_replay_in_chunks(sizes):
    """The window's floor holds from chunk to chunk."""
    logits, rows = hit()
    cut_logits, cut_rows = hit(sizes)
    np.testing.assert_array_equal(cut_logits, logits)
    for actual, wanted in zip(cut_rows, rows, strict=True):
        same_rows(actual, wanted)


def test_replay_sees_its_first_row_for_one_window():
    """An independent look at the truncation: which rows of the next layer a change of the replay's first token moves.

    Layer 0 carries it as far as its window reaches, query i to keys from max(first, i - 15) on, and no further.
    """
    model, first = small_model(), AT - WINDOW
    seen = []
    for token in (ROWS[0][first], 300):
        _, cache = prefill([r[:AT] for r in ROWS], model.init_cache(2, 256))
        cache = dataclasses.replace(cache, window=tuple(jnp.full_like(x, 0xFF) for x in cache.window))
        rows = [[*r[:first], token, *r[first + 1 : AT + 1]] for r in ROWS]
        _, cache = prefill(rows, cache, at=first, window_floor=first, write_from=AT)
        seen.append(committed_rows(cache, [AT + 1] * 2)[0]["window.1"][0])
    moved = (seen[0] != seen[1]).any(axis=-1)  # positions first + 1 to first + 16
    assert moved[:-1].all() and not moved[-1]
