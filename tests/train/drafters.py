"""Drafters with weights, rows of documents for them, and features that no backbone made."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import ModelConfig, load_config, with_overrides
from dsv41.data import TINY_MODEL
from dsv41.models import Model
from dsv41.train.drafter_step import Features
from dsv41.train.pack import Document, PackedBatch, pack_documents, rope_tables

LENGTH = 64


# Two sliding layers and a stage: of a backbone only taps, final states, embedding and head matter here.
MINI = {
    "vision_config": "null",
    "text_config.hc_sinkhorn_iters": "3",
    "text_config.num_hidden_layers": "2",
    "text_config.compress_ratios": "[0, 0, 0]",
    "text_config.kv_source_layer_ids": "[]",
    "text_config.index_source_layer_ids": "[]",
    "text_config.candidate_source_layer_id": "null",
    "text_config.engram_layer_ids": "[]",
    "text_config.engram_num_embeddings": "[]",
    "text_config.num_nextn_predict_layers": "1",
    "text_config.dspark_target_layer_ids": "[0, 1]",
}


@functools.cache
def mini_config() -> ModelConfig:
    return with_overrides(load_config(TINY_MODEL), MINI)


@functools.cache
def _without_engram(config: ModelConfig) -> ModelConfig:
    return with_overrides(config, {"text_config.engram_layer_ids": "[]", "text_config.engram_num_embeddings": "[]"})


def pack(config: ModelConfig, rows: list[list[Document]], length: int = LENGTH) -> PackedBatch:
    """Rows without Engram, which the drafter has none of."""
    return jax.tree.map(jnp.asarray, pack_documents(rows, length, _without_engram(config)))


def features(model: Model, shape: tuple[int, int], seed: int = 0) -> Features:
    """Normal taps and final states of [B, T] tokens, beside the model's embedding and head."""
    config, rng = model.config.text_config, np.random.default_rng(seed)
    return Features(
        jnp.asarray(rng.normal(size=(*shape, len(config.dspark_target_layer_ids) * config.hidden_size)), jnp.bfloat16),
        jnp.asarray(rng.normal(size=(*shape, config.hidden_size)), jnp.bfloat16),
        model.params["embed"]["weight"],
        model.params["head"]["weight"],
    )


def rope(config: ModelConfig, length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    return rope_tables(config, length + config.text_config.dspark_block_size)
