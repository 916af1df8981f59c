"""The meaning of sparse attention in plain jnp (architecture.md section 3)."""

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.page_layout import PAGE_ENTRIES, MainPageLayout, WindowLayout
from pallas_kernels.quantize import ref as quantize
from pallas_kernels.rope import apply_rope
from pallas_kernels.rounding import round_to_bf16
from pallas_kernels.tiling import map_query_tiles, query_tile

BLOCK = 64
# Below any real logit, finite so that a block without valid entries leaves no NaN in the running maximum.
_NEVER = -1e30


def attend(q: jax.Array, kv: jax.Array, valid: jax.Array, sink: jax.Array, scale: float) -> jax.Array:
    """One softmax over each query's own entries; an entry is key and value at once.

    Entries are taken in blocks of 64 with a running maximum of the logits, the sink left out of it. Probabilities
    exp(logit - maximum) are not normalised and enter the value product rounded to bfloat16; the denominator sums them
    unrounded and finally adds exp(sink - maximum). The quotient is rounded once. A query without valid entries gives 0.

    Args:
      q: bfloat16 [..., N, H].
      kv: bfloat16 [..., S, H], entries of each query.
      valid: bool [..., S].
      sink: float32 [N], not scaled.
      scale: factor of the logits.

    Returns:
      bfloat16 [..., N, H].
    """
    lead, (n, h), s = q.shape[:-2], q.shape[-2:], kv.shape[-2]
    blocks = -(-s // BLOCK)
    pad = blocks * BLOCK - s
    # An unused entry may hold anything, NaN included, and a probability of 0 would not silence that.
    kv = jnp.where(valid[..., None], kv, 0)
    kv = jnp.pad(kv, [(0, 0)] * len(lead) + [(0, pad), (0, 0)]).reshape(*lead, blocks, BLOCK, h)
    valid = jnp.pad(valid, [(0, 0)] * len(lead) + [(0, pad)]).reshape(*lead, blocks, 1, BLOCK)

    def one_block(carry, block):
        maximum, denominator, acc = carry
        kv_b, valid_b = block
        logits = jnp.einsum("...nh,...sh->...ns", q, kv_b, preferred_element_type=jnp.float32) * scale
        logits = jnp.where(valid_b, logits, _NEVER)
        new_maximum = jnp.maximum(maximum, logits.max(axis=-1, keepdims=True))
        p = jnp.where(valid_b, jnp.exp(logits - new_maximum), 0.0)
        rescale = jnp.exp(maximum - new_maximum)
        product = jnp.einsum("...ns,...sh->...nh", round_to_bf16(p), kv_b, preferred_element_type=jnp.float32)
        return (new_maximum, denominator * rescale + p.sum(axis=-1, keepdims=True), acc * rescale + product), None

    init = (
        jnp.full((*lead, n, 1), _NEVER, jnp.float32),
        jnp.zeros((*lead, n, 1), jnp.float32),
        jnp.zeros((*lead, n, h), jnp.float32),
    )
    axis = len(lead)
    (maximum, denominator, acc), _ = jax.lax.scan(
        one_block, init, (jnp.moveaxis(kv, axis, 0), jnp.moveaxis(valid, axis, 0))
    )
    some = valid.any(axis=(-3, -1)).reshape(*lead, 1, 1)
    denominator = denominator + jnp.exp(sink[:, None] - jnp.where(some, maximum, sink[:, None]))
    return round_to_bf16(jnp.where(some, acc / denominator, 0.0))


def sparse_attention(
    q: jax.Array,
    window: jax.Array,
    slot: jax.Array,
    window_index: jax.Array,
    pool: jax.Array | None,
    selected: jax.Array | None,
    sink: jax.Array,
    rope: jax.Array | None,
    *,
    scale: float,
    window_layout: WindowLayout,
) -> jax.Array:
    """`attend` over window entries, then selected entries, read from the packed caches; arguments as in `ops`.

    Queries are taken in tiles that bound what is gathered at a time.
    """

    def tile(q, window_index, selected, rope):
        return _attend_gathered(q, window, slot, window_index, pool, selected, sink, rope, scale, window_layout)

    entries = window_index.shape[2] + (0 if selected is None else selected.shape[2])
    size = query_tile(q.shape[1], q.shape[0] * entries * q.shape[3] * 4)
    return map_query_tiles(tile, size, q, window_index, selected, rope)


def _attend_gathered(q, window, slot, window_index, pool, selected, sink, rope, scale, window_layout) -> jax.Array:
    rows = jnp.where(window_index >= 0, slot[:, None, None], 0)
    values, scales = window_layout.gather(window, rows, jnp.maximum(window_index, 0))
    kv = quantize.dequantize_fp8(formats.byte_to_e4m3(values), scales)
    valid = window_index >= 0
    if selected is not None:
        layout = MainPageLayout(q.shape[-1])
        entry = jnp.maximum(selected, 0)
        packed = layout.gather(pool, entry // PAGE_ENTRIES, entry % PAGE_ENTRIES)
        kv = jnp.concatenate([kv, quantize.dequantize_kv_fp4(*packed)], axis=-2)
        valid = jnp.concatenate([valid, selected >= 0], axis=-1)
    out = attend(q, kv, valid, sink, scale)
    return out if rope is None else apply_rope(out, rope[:, :, None], inverse=True)
