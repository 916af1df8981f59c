"""The released model's shapes, without its memory: traced, never run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.cache import CacheLayout, ForwardBatch, abstract_cache, cache_bytes
from dsv41.checkpoint import tensor_inventory
from dsv41.config import ModelConfig
from dsv41.models import abstract_params, forward

CONFIG = ModelConfig()
CONTEXT = CONFIG.text_config.max_position_embeddings


def _cache(max_tokens: int = CONTEXT, slots: int = 1):
    layout = CacheLayout.from_config(CONFIG.text_config)
    pages = slots * layout.pages_for(max_tokens)
    return abstract_cache(CONFIG.text_config, layout, num_slots=slots, max_tokens=max_tokens, num_pages=pages)


def test_cache_bytes_of_a_token_and_a_sequence():
    """890 bytes a token of global KV and 2,703,360 bytes of window KV, counted on the arrays themselves."""
    cache = _cache()
    count = cache_bytes(cache)
    assert (count["main"] + count["index"]) / CONTEXT == 890
    assert count["window"] == 2_703_360
    assert [c.shape for c in cache.main] == [(4096, 72, 4, 128)] * 3 + [(8192, 72, 4, 128)]
    assert [c.shape for c in cache.index] == [(4096, 17, 4, 128)] * 3 + [(8192, 17, 4, 128)]
    assert {c.shape for c in cache.window} == {(1, 132, 4, 128)}
    assert {c.dtype for c in (*cache.main, *cache.index, *cache.window)} == {jnp.dtype(jnp.uint8)}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 356), (2, 1780), (3, 2136), (4, 3560), (1000, 890_000), (131_072, 116_654_080), (1_048_576, 933_232_640)],
)
def test_case_c11_record_bytes(tokens, expected):
    assert CacheLayout.from_config(CONFIG.text_config).record_bytes(tokens) == expected


def test_drafting_widens_the_rings_only():
    plain, drafting = (CacheLayout.from_config(CONFIG.text_config, draft_tokens=n) for n in (0, 5))
    assert drafting.window.length == 160
    assert drafting.window.length >= 128 + 5
    assert drafting.global_bytes_per_token == plain.global_bytes_per_token
    assert plain.pending_rows >= 5 + 2


def _names(params) -> dict[str, jax.ShapeDtypeStruct]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(k.key) for k in path): leaf for path, leaf in leaves}


def test_parameters_are_exactly_the_backbone_of_the_inventory():
    """Names, shapes and stored dtypes of every parameter; experts are stacked, Engram tables stay outside."""
    dtypes = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "uint8", "I8": "uint8", "BF16": "bfloat16", "F32": "float32"}
    expected = {}
    for name, spec in tensor_inventory(CONFIG).items():
        if spec.part not in ("backbone", "engram") or ".engram.embed." in name or name.startswith("image_"):
            continue
        head, _, tail = name.partition(".experts.")
        if tail:
            _, _, tail = tail.partition(".")
            name, shape = f"{head}.experts.{tail}", (CONFIG.text_config.n_routed_experts, *spec.shape)
        else:
            shape = spec.shape
        expected[name] = (tuple(shape), dtypes[spec.dtype])
    actual = {n: (tuple(s.shape), s.dtype.name) for n, s in _names(abstract_params(CONFIG)).items()}
    assert actual == expected


def test_nothing_is_widened_in_memory():
    """The parameters take the bytes of the files' backbone: FP4 packed, FP8 with scales."""
    count = sum(int(np.prod(s.shape)) * s.dtype.itemsize for s in _names(abstract_params(CONFIG)).values())
    files = sum(
        s.nbytes
        for n, s in tensor_inventory(CONFIG).items()
        if s.part in ("backbone", "engram") and ".engram.embed." not in n and not n.startswith("image_")
    )
    assert count == files


@functools.cache
def _traced(rows: int, tokens: int):
    text = CONFIG.text_config
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads
    engram = (rows, tokens, len(text.engram_layer_ids), columns)

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    batch = ForwardBatch(
        tokens=struct((rows, tokens), jnp.int32),
        num_new=struct((rows,), jnp.int32),
        start=struct((rows,), jnp.int32),
        slot=struct((rows,), jnp.int32),
        image_mask=struct((rows, tokens), jnp.bool_),
        engram_values=struct((*engram, text.engram_head_dim), jnp.float8_e4m3fn),
        engram_scales=struct((*engram, text.engram_head_dim // 32), jnp.uint8),
    )
    cache = _cache(slots=rows)
    step = functools.partial(forward, config=CONFIG, logits="last")
    return cache, jax.eval_shape(step, abstract_params(CONFIG), batch, cache)


def test_released_step_has_the_right_shapes():
    cache, (logits, after, _) = _traced(2, 8)
    assert logits.shape == (2, 1, 129_280)
    assert logits.dtype == jnp.float32
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)
