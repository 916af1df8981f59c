"""How often a step is compiled and how much temporary memory it takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.models import batch_bucket, token_bucket
from dsv41.models.sharded import compiled_forward
from tests.models_for_tests import small_model

MAX_TOKENS = 512


def test_buckets():
    assert [token_bucket(n) for n in (1, 2, 6, 8, 9, 64, 65)] == [1, 8, 8, 8, 16, 64, 128]
    assert [batch_bucket(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]


def test_no_recompilation_while_a_sequence_grows():
    """Prefill of 60, then decode over a page border at 256 tokens: one program a bucket, however long the sequence."""
    model, ids = small_model(), np.random.default_rng(0).integers(3, 500, (2, 264))
    cache = model.init_cache(2, MAX_TOKENS, draft_tokens=5)
    compiled_forward().clear_cache()
    done = 0
    for size in [60, 61, 64, 33] + [6, 5, 3, 2] * 2 + [1] * 6:
        batch = model.make_batch(ids[:, done : done + size], ids[:, :done])
        _, cache, _ = model.forward(batch, cache, logits="all")
        done += size
    assert done > 250
    assert compiled_forward()._cache_size() == 3  # 64, 8 and 1 tokens


def _temporary_bytes(max_tokens: int, tokens: int) -> int:
    """Temporary memory of a compiled step for a pool of 8 pages, whatever a sequence may grow to."""
    model = small_model()
    limits = dataclasses.replace(model.config.text_config, max_position_embeddings=1 << 20)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, text_config=limits))
    batch = jax.tree.map(jnp.asarray, model.make_batch([[5] * tokens]))
    cache = model.init_cache(1, max_tokens, num_pages=8)
    lowered = compiled_forward().lower(model.params, batch, cache, None, config=model.config, logits="last", capture=())
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_case_a8_temporary_memory_does_not_depend_on_the_limit():
    """64 new tokens: scores for a limit of 1M would take 64 x 1M x 2 bytes = 128 MiB at once."""
    small, large = _temporary_bytes(1 << 13, 64), _temporary_bytes(1 << 20, 64)
    # The page table of the sequence itself (16 KiB at 1M) may be copied a few times.
    assert abs(large - small) < 1 << 20
    assert large < 64 << 20
