"""Sparse attention on Hopper GPUs, in Pallas Mosaic GPU.

An item of work is one query (64 heads of it) or, when there are few queries, a share of its entries (a *split*). A CTA
takes one item after another with three or four warpgroups. One or two gather packed rows and dequantise them into
bfloat16 tiles of 64 entries in shared memory, twice buffered; a tile is key and value at once. One computes logits,
softmax and the left columns of the value product, and hands probabilities and rescaling factors over to the one that
computes the right columns. Splits leave float32 partial sums, which a second kernel combines.

Files: gpu_plan.py (items and shared memory), gpu_gather.py and gpu_unpack.py (gathering), gpu_kernels.py (the rest of
the kernel), gpu_combine.py.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.page_layout import WindowLayout
from pallas_kernels.sparse_attention import block_sizes
from pallas_kernels.sparse_attention.gpu_plan import HEADS, Shape

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
    from pallas_kernels.sparse_attention import gpu_combine, gpu_kernels

    b, t, n, h = q.shape
    queries, w = b * t, window_index.shape[-1]
    k = 0 if selected is None else selected.shape[-1]
    if queries == 0 or n == 0 or w + k == 0:
        return jnp.zeros(q.shape, q.dtype)
    groups = -(-n // HEADS)
    shape = Shape(queries=queries, tokens=t, groups=groups, width=h, window=w, selected=k, layout=window_layout)
    if tuning is None:
        tuning = tuning_of(shape)
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
    table = None if rope is None else rope.reshape(queries, 2 * rope.shape[-1])
    if tuning.splits == 1:
        out = gpu_kernels.attend(shape, tuning, scale, arrays, table)
    else:
        partial = gpu_kernels.attend_splits(shape, tuning, scale, arrays)
        out = gpu_combine.combine(*partial, sink, table)
    return out[:, :n].reshape(b, t, n, h)


def tuning_of(shape: Shape) -> block_sizes.Tuning:
    """The chosen tuning, with more splits where an item's indices would not fit the shared memory."""
    tuning = block_sizes.choose(queries=shape.queries * shape.groups, blocks=shape.blocks, width=shape.width)
    # A single block always fits.
    while shape.plan(tuning) is None:
        tuning = dataclasses.replace(tuning, splits=tuning.splits + 1)
    return tuning
