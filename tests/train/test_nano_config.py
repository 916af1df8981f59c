"""configs/nano.json: every mechanism of the release, small enough to ship, of sizes that the kernels take."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.checkpoint import tensor_inventory
from dsv41.checkpoint.random_model import random_model
from dsv41.checkpoint.token_map import engram_token_map, load_tokenizer
from dsv41.config import LayerMode, layer_schedule, load_config
from dsv41.ops.engram_hash import engram_hash_spec
from dsv41.train.pack import alignment
from pallas_kernels.experts import block_sizes as experts
from pallas_kernels.hyper_connection import block_sizes as hyper_connection
from pallas_kernels.indexer import block_sizes as indexer
from pallas_kernels.topk import block_sizes as topk

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
NANO, FLASH = load_config(CONFIGS / "nano.json"), load_config(CONFIGS / "flash.json")
TEXT = NANO.text_config
SHIPPED_BYTES = 20_000_000


def test_it_can_be_shipped():
    """Tensors, tokenizer, and 150 bytes of header a tensor."""
    inventory = tensor_inventory(NANO)
    tokenizer = (CONFIGS / "nano_tokenizer.json").stat().st_size
    assert sum(spec.nbytes for spec in inventory.values()) + 150 * len(inventory) + tokenizer <= SHIPPED_BYTES


def test_it_has_every_kind_of_layer_of_the_release():
    def kinds(config):
        layers = layer_schedule(config.text_config).layers
        return {
            (s.mode, s.ratio, s.in_decoder, s.builds_candidates, s.reads_candidates) for s in layers
        } | {("engram", s.engram, s.in_decoder) for s in layers if s.engram is not None}  # fmt: skip

    assert kinds(NANO) == kinds(FLASH)
    nano, flash = layer_schedule(TEXT), layer_schedule(FLASH.text_config)
    assert nano.tail_problem is flash.tail_problem is None
    # Halves, and taps of the last layers only.
    for schedule, text in ((nano, TEXT), (flash, FLASH.text_config)):
        assert 2 * schedule.decoder_start == text.num_hidden_layers
        taps = [s.index for s in schedule.layers if s.tap is not None]
        assert taps == list(range(text.num_hidden_layers - len(taps), text.num_hidden_layers))
    assert {s.mode for s in nano.layers} == set(LayerMode)
    same = ("hc_mult", "engram_max_ngram_size", "dspark_block_size", "candidate_block_size")
    assert all(getattr(TEXT, name) == getattr(FLASH.text_config, name) for name in same)
    assert NANO.quantization_config == FLASH.quantization_config


def test_selection_and_candidates_bite_inside_its_context():
    """Also where only half of the context is used."""
    half = TEXT.max_position_embeddings // 2
    pool = TEXT.candidate_topk_blocks * TEXT.candidate_block_size
    assert TEXT.index_topk < pool < half
    assert all(TEXT.index_topk < half // s.ratio for s in layer_schedule(TEXT).kv_sources)
    assert half % alignment(NANO) == 0
    assert TEXT.rope_scaling.original_max_position_embeddings < half


def test_hopper_kernels_take_its_sizes():
    """A decode step of four rows and a prompt chunk of 512; what the plans of the kernels look at, without a GPU."""
    d, f, e = TEXT.hidden_size, TEXT.moe_intermediate_size, TEXT.n_routed_experts
    for tokens in (4, 512):
        assert hyper_connection.problem(tokens, TEXT.hc_mult, d) is None
        sizes = TEXT.index_n_heads, TEXT.index_head_dim, TEXT.candidate_block_size
        assert indexer.problem(1, tokens, *sizes) is None
        assert topk.problem(tokens, TEXT.max_position_embeddings, TEXT.index_topk) is None
    for rows in (8, 64):
        x = jax.ShapeDtypeStruct((4, rows, d), jnp.bfloat16)
        w1, w2 = (jax.ShapeDtypeStruct((e, *shape), jnp.uint8) for shape in ((f, d // 2), (d, f // 2)))
        assert experts.problem(x, (w1, None), (w2, None)) is None
    # The widths of pallas_kernels/sparse_attention/gpu.py and of the fused cache writes, which need a GPU to ask.
    assert TEXT.head_dim in (64, 128, 256, 512) and TEXT.qk_rope_head_dim % 8 == 0
    assert 8 <= TEXT.qk_rope_head_dim <= 64


@pytest.mark.slow
def test_forward_is_finite():
    """Beyond the candidate pool, with the classes of its own tokenizer."""
    model = random_model(NANO, seed=1)
    tokenizer = load_tokenizer(CONFIGS / "nano_tokenizer.json")
    model = dataclasses.replace(model, token_map=engram_token_map(tokenizer, TEXT.vocab_size), tokenizer=tokenizer)
    engram_hash_spec(TEXT, int(model.token_map[TEXT.engram_pad_token_id]))
    tokens = np.random.default_rng(0).integers(3, 4000, 700).tolist()
    cache = model.init_cache(1, 1024)
    logits, _, _ = model.forward(model.make_batch([[0, *tokens]]), cache, logits="all")
    logits = np.asarray(logits, np.float32)[0, : len(tokens) + 1]
    assert np.isfinite(logits).all() and 0.1 < logits.std() < 10
    assert len(set(logits.argmax(-1).tolist())) > math.isqrt(len(tokens))
