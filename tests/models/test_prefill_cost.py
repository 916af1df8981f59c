"""What prefill computes at the released size: products counted in traces of whole chunks, nothing is run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.cache import CacheLayout, ForwardBatch, abstract_cache
from dsv41.config import ModelConfig
from dsv41.models import abstract_params, forward

CONFIG = ModelConfig()
TEXT = CONFIG.text_config
PROMPT, CHUNK = 32_768, 4_096
_TILE = 2_048  # entries that the indexer scores at a time


def _inner(value) -> list:
    """The programs inside an equation's parameter."""
    if isinstance(value, (tuple, list)):
        return [p for v in value for p in _inner(v)]
    value = getattr(value, "jaxpr", value)
    return [value] if hasattr(value, "eqns") else []


def _product(eqn) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    k = np.prod([eqn.invars[0].aval.shape[d] for d in contracted], dtype=float)
    return 2.0 * np.prod(eqn.outvars[0].aval.shape, dtype=float) * k


def _cost(program) -> tuple[float, list[float]]:
    """Floating point operations of all matrix products, and of one turn of each loop without a fixed length, in order.

    A scan counts as often as it turns, a condition as its costliest branch. The scan over blocks of expert rows has
    room for a partly filled block of every expert and passes over those that are empty; it counts as many as the rows
    fill.
    """
    fixed, turns = 0.0, []
    for eqn in program.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            fixed += _product(eqn)
            continue
        costs = [_cost(p) for v in eqn.params.values() for p in _inner(v)]
        if name == "cond":
            assert not any(more for _, more in costs)
            fixed += max(cost for cost, _ in costs)
            continue
        times = 1
        if name == "scan":
            times = eqn.params["length"]
            (body,) = _inner(eqn.params["jaxpr"])
            if "experts" in str(eqn.source_info.name_stack) and any(e.primitive.name == "cond" for e in body.eqns):
                times -= TEXT.n_routed_experts
        inside, more = sum(c for c, _ in costs), [m for _, each in costs for m in each]
        if name == "while":
            assert not more
            turns.append(inside)
        else:
            fixed += times * inside
            turns += [times * m for m in more]
    return fixed, turns


@functools.cache
def _chunk_cost(tail: int | None) -> tuple[float, list[float]]:
    def struct(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    row = struct(1)
    columns = (TEXT.engram_max_ngram_size - 1) * TEXT.engram_n_heads
    engram = (1, CHUNK, len(TEXT.engram_layer_ids), columns)
    batch = ForwardBatch(
        tokens=struct(1, CHUNK),
        num_new=row,
        start=row,
        slot=row,
        image_mask=struct(1, CHUNK, dtype=jnp.bool_),
        engram_values=struct(*engram, TEXT.engram_head_dim, dtype=jnp.float8_e4m3fn),
        engram_scales=struct(*engram, TEXT.engram_head_dim // 32, dtype=jnp.uint8),
        window_floor=row,
        write_from=row,
        tail=None if tail is None else row,
    )
    layout = CacheLayout.from_config(TEXT)
    cache = abstract_cache(TEXT, layout, num_slots=1, max_tokens=PROMPT, num_pages=layout.pages_for(PROMPT))
    step = functools.partial(forward, config=CONFIG, tail=tail)
    return _cost(jax.make_jaxpr(step)(abstract_params(CONFIG), batch, cache).jaxpr)


def _turns(first: int, last: int, decoder: tuple[int, int] | None) -> list[float]:
    """Mean turns of the loops that select entries, by selecting layer, for positions [first, last)."""

    def mean(a: int, b: int, ratio: int, limit: int) -> float:
        return float(np.mean(np.minimum(-(-((np.arange(a, b) + 1) // ratio) // _TILE), limit)))

    pool = TEXT.candidate_topk_blocks * TEXT.candidate_block_size // _TILE
    turns = [mean(first, last, 2, PROMPT)] * 3
    if decoder:
        turns += [mean(*decoder, 1, PROMPT)] + [mean(*decoder, 1, pool)] * 4
    return turns


def _chunk(first: int, tail: int | None) -> float:
    end = first + CHUNK
    decoder = None if tail == 0 else (first if tail is None else end - tail, end)
    fixed, each = _chunk_cost(tail)
    return fixed + sum(a * b for a, b in zip(each, _turns(first, end, decoder), strict=True))


@pytest.mark.slow
def test_tail_prefill_costs_little_more_than_half():
    """serving.md 3.1: of all but the last window only the encoder and one layer's KV are computed."""
    chunks = range(0, PROMPT, CHUNK)
    full = sum(_chunk(first, None) for first in chunks)
    ced = sum(_chunk(first, 0) for first in chunks[:-1]) + _chunk(chunks[-1], TEXT.sliding_window)
    print(f"\n{PROMPT} tokens: {full / 1e12:.1f} TFLOP full, {ced / 1e12:.1f} with a tail: {ced / full:.4f} of it")
    print(f"per token: {full / PROMPT / 1e9:.2f} GFLOP against {ced / PROMPT / 1e9:.2f}")
    assert 0.45 < ced / full <= 0.56
    # 16.1 billion active parameters, and the attention.
    assert 32.2 < full / PROMPT / 1e9 < 40
