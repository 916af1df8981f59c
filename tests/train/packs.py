"""The small model and rows of documents for it."""

import functools

import jax
import numpy as np

from dsv41.ops.engram_hash import engram_hash_spec
from dsv41.train.forward import ForwardOptions, run_layers
from dsv41.train.master_weights import masters_from
from dsv41.train.pack import Document, PackedBatch, pack_documents, rope_tables
from pallas_kernels.fixed_order import compiler_options
from tests.models_for_tests import small_model

LENGTH = 64


@functools.cache
def masters():
    model = small_model()
    return masters_from(model.params, model.config, model.engram.tables)


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 500, count)


def pack(rows: list[list[Document]], length: int = LENGTH) -> PackedBatch:
    model = small_model()
    text = model.config.text_config
    hashing = engram_hash_spec(text, int(model.token_map[text.engram_pad_token_id]))
    batch = pack_documents(rows, length, model.config, hashing=hashing, token_map=model.token_map)
    return jax.tree.map(jax.numpy.asarray, batch)


@functools.cache
def compiled(options: ForwardOptions | None = None):
    """masters, pack -> `Hidden`."""
    model, options = small_model(), options or ForwardOptions()

    @functools.partial(jax.jit, compiler_options=compiler_options())
    def run(masters, pack):
        rope = rope_tables(model.config, pack.tokens.shape[1])
        return run_layers(masters, pack, rope, jax.random.key(0), config=model.config, options=options)

    return run


def logits(hidden: jax.Array) -> np.ndarray:
    head = masters()["head"]["weight"]
    return np.asarray(hidden, np.float32) @ np.asarray(head).T
