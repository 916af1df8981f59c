"""A round of the released model at a serving batch: traced whole, nothing computed."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41.cache import CacheLayout, abstract_cache
from dsv41.config import ModelConfig
from dsv41.engine.speculative_step import RequestState, RoundInputs, VerifySchedule, speculative_round
from dsv41.engram_store import EngramStore, EngramTable, step_lookup
from dsv41.models import abstract_drafter_params, abstract_params
from dsv41.ops.engram_hash import engram_hash_spec
from dsv41.ops.sampling import SamplingArrays
from dsv41.ops.verification import AcceptanceRule

CONFIG = ModelConfig()
ROWS = 256


def _ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.slow
def test_shapes():
    """256 requests, six tokens each, Engram rows through the callback: shapes and dtypes of all that comes out."""
    text = CONFIG.text_config
    layout = CacheLayout.from_config(text, draft_tokens=5)
    cache = abstract_cache(text, layout, num_slots=ROWS, max_tokens=4096, num_pages=ROWS * 16)
    values, scales = np.zeros((8, 256), ml_dtypes.float8_e4m3fn), np.zeros((8, 8), np.uint8)
    store = EngramStore([EngramTable(layer=n, values=values, scales=scales) for n in text.engram_layer_ids])
    lookup = step_lookup(
        store, engram_hash_spec(text, 2), np.zeros(text.vocab_size, np.int32), CONFIG.image_token_id, device_bytes=0
    )
    each = _ints(ROWS)
    state = RequestState(anchor=each, start=each, history=_ints(ROWS, 3), round=each, remaining=each, slot=each)
    seeds = jax.ShapeDtypeStruct((ROWS,), jnp.uint32)
    inputs = RoundInputs(
        sampling=SamplingArrays(temperature=_floats(ROWS), top_p=_floats(ROWS), top_k=each, seed=seeds),
        stop_ids=_ints(ROWS, 8),
        temperatures=_floats(5),
        budget=_ints(),
        steps_per_second=None,
    )
    step = functools.partial(
        speculative_round, config=CONFIG, rule=AcceptanceRule.BLOCK, schedule=VerifySchedule.BUDGET, width=6
    )
    parts = abstract_params(CONFIG), abstract_drafter_params(CONFIG)
    after, new_cache, output = jax.eval_shape(step, *parts, state, cache, inputs, lookup)

    def kinds(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    assert kinds(after) == kinds(state) and kinds(new_cache) == kinds(cache)
    assert output.tokens.shape == (ROWS, 6) and output.survival.shape == (ROWS, 5)
