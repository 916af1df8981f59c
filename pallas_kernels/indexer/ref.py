"""The meaning of the index score in plain jnp (architecture.md section 3)."""

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_order import contract
from pallas_kernels.page_layout import PAGE_ENTRIES, IndexPageLayout
from pallas_kernels.quantize.ref import dequantize_mxfp4
from pallas_kernels.rounding import round_bf16

# Bytes that the intermediates of one tile of keys may take, and the most pages in it.
_TILE_BYTES = 256 << 20
_TILE_PAGES = 16


def index_scores(q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """sum over heads of relu(q_h . k) * w_h, rounded to bfloat16 after the product, the weighting and the sum.

    Args:
      q: bfloat16 [B, T, N, C] dequantised index queries.
      weights: bfloat16 [B, T, N] head weights, their scale included.
      keys: bfloat16 [B, S, C] shared by the queries of a sequence, or [B, T, S, C] a query's own.

    Returns:
      float32 [B, T, S] holding bfloat16 values; never -0, so that equal scores compare equal.
    """
    b, t, n, c = q.shape
    if keys.ndim == 3:
        dots = jax.vmap(contract)(q.reshape(b, t * n, c), keys).reshape(b, t, n, -1)
    else:
        dots = jnp.einsum("btnc,btsc->btns", q, keys, preferred_element_type=jnp.float32)
    weighted = round_bf16(jax.nn.relu(round_bf16(dots)) * weights.astype(jnp.float32)[..., None])
    return round_bf16(weighted.sum(axis=-2)) + 0.0


def run_maxima(scores: jax.Array, length: int) -> jax.Array:
    """float [..., S] -> [..., S / length]: the largest score of each run of consecutive positions."""
    return scores.reshape(*scores.shape[:-1], -1, length).max(axis=-1)


def block_maxima(
    q_values: jax.Array,
    q_scales: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    visible: jax.Array,
    *,
    block_size: int,
) -> jax.Array:
    """See `ops.block_maxima`. Keys beyond the last visible one are not read; memory does not depend on M."""
    b, t, n = weights.shape
    q = dequantize_mxfp4(q_values, q_scales)
    layout = IndexPageLayout(q.shape[-1])
    num_pages = pages.shape[1]
    tile = _tile(b * t * n * PAGE_ENTRIES * 8, min(num_pages, _TILE_PAGES))
    padded = jnp.pad(pages, ((0, 0), (0, -num_pages % tile)), constant_values=-1)
    blocks = tile * PAGE_ENTRIES // block_size

    def body(i, out):
        page = jax.lax.dynamic_slice_in_dim(padded, i * tile, tile, axis=1)
        keys = dequantize_mxfp4(*layout.read_pages(pool, jnp.maximum(page, 0))).reshape(b, -1, q.shape[-1])
        entry = i * tile * PAGE_ENTRIES + jnp.arange(tile * PAGE_ENTRIES, dtype=jnp.int32)
        usable = (entry < visible[..., None]) & jnp.repeat(page >= 0, PAGE_ENTRIES, axis=1)[:, None]
        scores = _usable_scores(index_scores(q, weights, keys), usable)
        return jax.lax.dynamic_update_slice_in_dim(out, run_maxima(scores, block_size), i * blocks, axis=2)

    steps = jnp.minimum(-(-visible.max() // (tile * PAGE_ENTRIES)), padded.shape[1] // tile)
    out = jnp.full((b, t, padded.shape[1] * PAGE_ENTRIES // block_size), -jnp.inf, jnp.float32)
    return jax.lax.fori_loop(0, steps, body, out)[..., : num_pages * PAGE_ENTRIES // block_size]


def entry_scores(
    q_values: jax.Array,
    q_scales: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    visible: jax.Array,
    blocks: jax.Array,
    *,
    block_size: int,
) -> jax.Array:
    """See `ops.entry_scores`."""
    b, t, n = weights.shape
    q = dequantize_mxfp4(q_values, q_scales)
    width, count = q.shape[-1], blocks.shape[-1]
    layout = IndexPageLayout(width)
    tile = _tile(b * t * block_size * (n + width) * 8, min(count, _TILE_PAGES * PAGE_ENTRIES // block_size))
    padded = jnp.pad(blocks, ((0, 0), (0, 0), (0, -count % tile)), constant_values=-1)

    def body(i, out):
        block = jax.lax.dynamic_slice_in_dim(padded, i * tile, tile, axis=2)
        first = block * block_size
        logical = first // PAGE_ENTRIES
        known = (block >= 0) & (logical < pages.shape[1])
        page = jnp.take_along_axis(pages[:, None], jnp.where(known, logical, 0), axis=2)
        known &= page >= 0
        in_page = jnp.where(known, first % PAGE_ENTRIES, 0) // block_size
        keys = layout.gather_blocks(pool, jnp.where(known, page, 0), in_page, block_size)
        keys = dequantize_mxfp4(*keys).reshape(b, t, -1, width)
        entry = first[..., None] + jnp.arange(block_size, dtype=jnp.int32)
        usable = (known[..., None] & (entry < visible[..., None, None])).reshape(b, t, -1)
        scores = _usable_scores(index_scores(q, weights, keys), usable)
        return jax.lax.dynamic_update_slice_in_dim(out, scores, i * tile * block_size, axis=2)

    out = jnp.full((b, t, padded.shape[2] * block_size), -jnp.inf, jnp.float32)
    return jax.lax.fori_loop(0, padded.shape[2] // tile, body, out)[..., : count * block_size]


def _tile(bytes_each: int, most: int) -> int:
    return max(1, min(most, _TILE_BYTES // bytes_each))


def _usable_scores(scores: jax.Array, usable: jax.Array) -> jax.Array:
    return jnp.where(usable & ~jnp.isnan(scores), scores, -jnp.inf)
