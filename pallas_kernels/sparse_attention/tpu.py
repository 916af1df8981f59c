"""Sparse attention as one Mosaic TPU kernel: a grid step is one query token with all its heads.

Selected entries are gathered from the pool row by row (512 bytes are the smallest copy there is, so a row brings its
neighbours along), the next token's rows while this one's are worked on. A sequence's ring is copied once for all its
queries. Both are dequantised in VMEM, into tiles that serve as keys and as values. One softmax covers the selected
entries and a short ring; of a long one, the blocks that the query looks at are added one by one.

What is not there gets the scale 0. A ring is dequantised before it is known which rows a query will use, so there all
is kept finite, and an entry that is NaN carries a NaN beside the tile, which is added to the logits of those who look.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compat import tpu_interpret_params
from pallas_kernels.page_layout import PAGE_ENTRIES, ROW_BYTES, WindowLayout
from pallas_kernels.sparse_attention.tpu_kernel import kernel
from pallas_kernels.sparse_attention.tpu_plans import LANES, VMEM_LIMIT, Plan, make_plan
from pallas_kernels.sparse_attention.tpu_tiles import main_matrices, ring_matrices
from pallas_kernels.tpu_formats import cache_operand


def problem(q, window_index, selected, rope, *, window_layout: WindowLayout) -> str | None:
    """What keeps the kernel from taking these shapes (arguments of `sparse_attention`); None if nothing does."""
    width = q.shape[-1]
    if not 64 <= width <= 512 or width & (width - 1):
        return f"the head width must be 64, 128, 256 or 512, got {width}"
    need = make_plan(q, window_index, selected, rope, 1.0, window_layout).vmem_bytes()
    if need > VMEM_LIMIT:
        return f"a ring of {window_layout.length} and the selection need {need >> 20} MiB of VMEM"
    return None


def _gather_rows(plan: Plan, selected: jax.Array) -> tuple[jax.Array, jax.Array]:
    """selected int32 [Q, K] -> rows int32 [Q, 1, 2 * chunks * chunk] for `_Gather`, and the entries' numbers inside
    their pages int32 [Q, 1, chunks * 128], -1 for those that are not there."""
    layout = plan.main
    count = plan.chunks * plan.chunk
    padded = jnp.pad(selected, ((0, 0), (0, count - selected.shape[1])), constant_values=-1)
    page, entry = jnp.maximum(padded, 0) // PAGE_ENTRIES, jnp.maximum(padded, 0) % PAGE_ENTRIES
    value_row = page * layout.page_rows + entry // (ROW_BYTES // layout.value_bytes)
    scale_row = page * layout.page_rows + layout.value_rows + entry // (ROW_BYTES // layout.scale_bytes)
    unused = (padded < 0).reshape(-1, plan.chunks, plan.chunk).all(axis=-1, keepdims=True)
    value_row = jnp.where(unused, -1, value_row.reshape(-1, plan.chunks, plan.chunk)).reshape(padded.shape)
    entry = jnp.where(padded < 0, -1, entry)
    entry = jnp.pad(entry, ((0, 0), (0, plan.entries - count)), constant_values=-1)
    return jnp.concatenate([value_row, scale_row], axis=1)[:, None], entry[:, None]


def _ring_index(plan: Plan, window_index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """window_index int32 [Q, W] -> the same padded [Q, 1, window], and int32 [Q, 1, blocks]: is a block looked at."""
    pad = ((0, 0), (0, plan.window - window_index.shape[1]))
    block = jnp.where(window_index < 0, -1, window_index // plan.block)
    used = (block[:, :, None] == jnp.arange(plan.blocks)).any(axis=1)
    return jnp.pad(window_index, pad, constant_values=-1)[:, None], used.astype(jnp.int32)[:, None]


def _rotation(plan: Plan, rope: jax.Array) -> jax.Array:
    """float32 [Q, 2, r] cosine and sine -> [Q, 2, tail]: factors of a channel and of its neighbour."""
    cos, sin = rope[:, 0], rope[:, 1]
    factors = jnp.stack([jnp.repeat(cos, 2, axis=-1), jnp.stack([sin, -sin], axis=-1).reshape(cos.shape[0], -1)], 1)
    return jnp.pad(factors, ((0, 0), (0, 0), (plan.tail - plan.rotated, 0)))


def _cost(plan: Plan, queries: int, sequences: int) -> pl.CostEstimate:
    ring = ROW_BYTES * plan.ring.slot_rows * sequences if plan.blocks else 0
    seen = plan.entries + min(plan.window, plan.ring_rows)
    return pl.CostEstimate(
        flops=4 * queries * plan.heads * plan.width * seen,
        transcendentals=queries * plan.heads * seen,
        bytes_accessed=queries * (2 * ROW_BYTES * plan.chunks * plan.chunk + 4 * plan.heads * plan.width) + ring,
    )


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
    interpret: bool = False,
) -> jax.Array:
    """As `ops.sparse_attention`; `interpret` runs it on any backend, slowly.

    Raises:
      ValueError: `problem` has an answer for these shapes.
    """
    if (why := problem(q, window_index, selected, rope, window_layout=window_layout)) is not None:
        raise ValueError(f"sparse_attention: {why}")
    b, t, n, h = q.shape
    queries = b * t
    if 0 in q.shape or window_index.shape[-1] == 0 == (0 if selected is None else selected.shape[-1]):
        return jnp.zeros(q.shape, jnp.bfloat16)
    plan = make_plan(q, window_index, selected, rope, scale, window_layout, interpret)
    # A device with two cores gives each of them half of the queries; one core loses one start-up of the copies.
    cores = 2 if queries % 2 == 0 and queries >= 16 else 1
    steps = queries // cores

    def per_token(*shape, ahead: int = 0, **kwargs):
        def index(core, step, *_):
            return (core * steps + jnp.minimum(step + ahead, steps - 1), *(0 for _ in shape))

        return pl.BlockSpec((1, *shape), index, **kwargs)

    def constant(array):
        return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    vmem, f32, i32 = pltpu.VMEM, jnp.float32, jnp.int32
    inputs = {"q": (q.reshape(queries, n, h), per_token(n, h)), "sink": (sink.reshape(n, 1), None)}
    scratch = {}
    if plan.blocks > 1:
        scratch |= {"maximum": vmem((n, 1), f32), "denominator": vmem((n, 1), f32), "acc": vmem((n, h), f32)}
    if plan.chunks:
        rows, entry = _gather_rows(plan, selected.reshape(queries, -1))
        width, smem = rows.shape[-1], {"memory_space": pltpu.SMEM}
        first = pl.BlockSpec((1, 1, width), lambda core, step, *_: (core * steps, 0, 0), **smem)
        inputs |= {
            "first_rows": (rows, first),
            "rows": (rows, per_token(1, width, **smem)),
            "next_rows": (rows, per_token(1, width, ahead=1, **smem)),
            "entry": (entry, per_token(1, plan.entries)),
            "pool": (cache_operand(pool.reshape(-1, 4, LANES), interpret), hbm),
            "main_matrices": (jnp.asarray(main_matrices(plan.main)), None),
        }
        scratch |= {
            "values": vmem((2, plan.entries, LANES), i32),
            "scales": vmem((2, plan.entries, LANES), i32),
            "tile": vmem((plan.entries, h), jnp.bfloat16),
            "gathered": pltpu.SemaphoreType.DMA((2, plan.chunks)),
        }
    if plan.blocks:
        index, used = _ring_index(plan, window_index.reshape(queries, -1))
        inputs |= {
            "window": (cache_operand(window, interpret), hbm),
            "window_index": (index, per_token(1, plan.window)),
            "block_used": (used, per_token(1, plan.blocks, memory_space=pltpu.SMEM)),
            "ring_matrices": (jnp.asarray(ring_matrices(plan.ring)), None),
        }
        scratch |= {
            "ring": vmem((2, plan.ring_rows, LANES), i32),
            "ring_scales": vmem((2, plan.ring_scale_rows, LANES), i32),
            "ring_tile": vmem((plan.ring_rows, h), jnp.bfloat16),
            "ring_nan": vmem((1, plan.ring_rows), f32),
            "ring_ready": pltpu.SemaphoreType.DMA((2,)),
        }
    if plan.rotated:
        swap = np.eye(plan.tail, dtype=np.float32)[np.arange(plan.tail) ^ 1]
        inputs |= {
            "rope": (_rotation(plan, rope.reshape(queries, 2, -1)), per_token(2, plan.tail)),
            "swap": (jnp.asarray(swap, jnp.bfloat16), None),
        }
    names = ("slot", *inputs, "out", *scratch)
    out = pl.pallas_call(
        functools.partial(kernel, plan=plan, names=names),
        name="sparse_attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(cores, steps),
            in_specs=[constant(array) if spec is None else spec for array, spec in inputs.values()],
            out_specs=per_token(n, h),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=jax.ShapeDtypeStruct((queries, n, h), jnp.bfloat16),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
            disable_bounds_checks=True,
        ),
        cost_estimate=_cost(plan, queries, b),
        interpret=tpu_interpret_params() if interpret else False,
    )(jnp.clip(slot, 0, window.shape[0] - 1), *(array for array, _ in inputs.values()))
    return out.reshape(b, t, n, h)
