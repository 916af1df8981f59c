"""The models of the tests, loaded once a process.

Compiling takes most of the tests' time. Tests that share a model should also share (batch, length) buckets: rows and
lengths are rounded up to powers of two, and a cache of another size is another program.
"""

import dataclasses
import functools

import dsv41
from dsv41.config import with_overrides
from dsv41.engram_store import EngramStore
from dsv41.models import Model
from tests.golden import DATA

# More context than the file allows, so that tests may go beyond its 128 positions.
OVERRIDES = {"text_config.max_position_embeddings": "4096"}

# One layer of each role: sliding; full at ratio 2, with Engram; full, reindex and reuse at ratio 1.
_SMALL_LAYERS = (0, 4, 6, 8, 9)
_SMALL = {
    "text_config.num_hidden_layers": "5",
    "text_config.compress_ratios": "[0, 2, 1, 1, 1, 0]",
    "text_config.kv_source_layer_ids": "[1, 2]",
    "text_config.index_source_layer_ids": "[1, 2, 3]",
    "text_config.candidate_source_layer_id": "2",
    "text_config.engram_layer_ids": "[1]",
    "text_config.engram_num_embeddings": "[834]",
    "text_config.num_nextn_predict_layers": "1",
    "text_config.dspark_target_layer_ids": "[2, 3, 4]",
}


@functools.cache
def tiny_model() -> Model:
    """`tests/data/tiny_text` with room for 4,096 positions."""
    return dsv41.load(DATA / "tiny_text", overrides=OVERRIDES)


@functools.cache
def small_model() -> Model:
    """Five layers and a stage out of the tiny model, text only: what has no golden data compiles in half the time."""
    tiny = tiny_model()
    layers, stages = tiny.params["layers"], tiny.drafter["mtp"]
    heads = {name: stages[2][name] for name in ("norm", "markov_head", "confidence_head")}
    return dataclasses.replace(
        tiny,
        config=with_overrides(tiny.config, _SMALL),
        params=tiny.params | {"layers": {i: layers[n] for i, n in enumerate(_SMALL_LAYERS)}},
        drafter={"mtp": {0: stages[0] | heads}},
        engram=EngramStore(tiny.engram.tables[:1]),
        vision=None,
    )


@functools.cache
def seeing_model() -> Model:
    """`small_model` behind the tiny model's vision tower."""
    return dataclasses.replace(small_model(), vision=tiny_model().vision)
