"""Sparse attention on Hopper GPUs, in Pallas Mosaic GPU.

One CTA computes one query (64 heads of it) or, when there are few queries, a share of its entries (a *split*). Three
warpgroups: `Plan`'s producer gathers packed rows and dequantises them into bfloat16 tiles of 64 entries (gather.py),
the first consumer computes logits, softmax and the left columns of the value product, the second one the right columns,
with probabilities and rescaling factors handed over in shared memory. The tile is key and value at once. Splits leave
float32 partial sums, which a second kernel combines.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.page_layout import WindowLayout
from pallas_kernels.sparse_attention import block_sizes

HEADS = 64  # rows of a wgmma tile
_BLOCK = 64
_WIDTHS = (64, 128, 256, 512)


def problem(
    q, window, slot, window_index, pool, selected, sink, rope, *, scale: float, window_layout: WindowLayout
) -> str | None:
    """Why the kernel does not take these arguments; None if it does."""
    del window, slot, pool, sink, scale, window_layout
    h = q.shape[-1]
    if (missing := compat.gpu_problem()) is not None:
        return missing
    if h not in _WIDTHS:
        return f"head dim {h} is not one of {_WIDTHS}"
    if rope is not None and (2 * rope.shape[-1]) % 8:
        return f"{2 * rope.shape[-1]} rotated channels are not a multiple of 8"
    if rope is not None and 2 * rope.shape[-1] > min(h, 64):
        return f"{2 * rope.shape[-1]} rotated channels are more than the kernel turns, {min(h, 64)}"
    entries = window_index.shape[-1] + (0 if selected is None else selected.shape[-1])
    if entries > block_sizes.MAX_ENTRIES:
        return f"{entries} entries a query are more than {block_sizes.MAX_ENTRIES}"
    return None


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
    tuning: block_sizes.Tuning | None = None,
) -> jax.Array:
    """`ops.sparse_attention` on the GPU; `tuning` None: by `block_sizes.choose`."""
    from pallas_kernels.sparse_attention import kernels

    b, t, n, h = q.shape
    queries, w = b * t, window_index.shape[-1]
    k = 0 if selected is None else selected.shape[-1]
    if queries == 0 or n == 0:
        return jnp.zeros(q.shape, q.dtype)
    if w + k == 0:
        return jnp.zeros(q.shape, q.dtype)
    groups = -(-n // HEADS)
    blocks = -(-w // _BLOCK) + -(-k // _BLOCK)
    if tuning is None:
        tuning = block_sizes.choose(queries=queries * groups, blocks=blocks, width=h)
    q = q.reshape(queries, n, h)
    if n % HEADS:
        q = jnp.pad(q, ((0, 0), (0, groups * HEADS - n), (0, 0)))
        sink = jnp.pad(sink, (0, groups * HEADS - n))
    # A source without entries is never read; any array stands in for it.
    none = jnp.zeros((1, 1), jnp.int32)
    arrays = (
        q,
        window,
        slot,
        window_index.reshape(queries, w) if w else none,
        pool if k else window,
        selected.reshape(queries, k) if k else none,
        sink,
    )
    shape = kernels.Shape(queries=queries, tokens=t, groups=groups, width=h, window=w, selected=k, layout=window_layout)
    table = None if rope is None else rope.reshape(queries, 2 * rope.shape[-1])
    if tuning.splits == 1:
        out = kernels.attend(shape, tuning, scale, arrays, table)
    else:
        partial = kernels.attend_splits(shape, tuning, scale, arrays)
        out = kernels.combine(*partial, sink, table)
    return out[:, :n].reshape(b, t, n, h)
