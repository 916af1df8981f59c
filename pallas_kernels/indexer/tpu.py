"""Index scores as Mosaic TPU kernels: `block_maxima` streams a sequence's pages, `entry_scores` gathers listed ones.

Both copy whole pages by hand, two steps in flight, and score 128 entries at a time, one on each lane, with the same
code (`tpu_scores`), so that a (query, entry) pair has the same bits in both.

A grid step of `block_maxima` is a tile of a sequence's queries; it goes over the pages that these see, however long the
page table is, and the first pages of the next grid step are on their way when it ends. Memory finer than 512 bytes
cannot be copied, so `entry_scores`, one query a grid step, copies the page of each block and moves the block's lanes
together with others' while they are still packed; then it scores them like a page.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat
from pallas_kernels.indexer.tpu_kernels import GROUP, entries_kernel, maxima_kernel
from pallas_kernels.indexer.tpu_plans import (
    LANES,
    SMEM_BYTES_EACH,
    SMEM_LIMIT,
    SUBLANES,
    VMEM_LIMIT,
    Plan,
    entries_plan,
    maxima_plan,
)
from pallas_kernels.indexer.tpu_scores import FORMS, channel_order
from pallas_kernels.page_layout import PAGE_ENTRIES, ROW_BYTES
from pallas_kernels.quantize.ref import dequantize_mxfp4
from pallas_kernels.tpu_formats import cache_operand


def default_form() -> str:
    """The faster form of dequantisation on the device that is compiled for; "float32" where that is unknown."""
    kind = compat.tpu_device_kind()
    return "pairs" if kind is not None and any(name in kind for name in ("v6", "TPU7", "7x")) else "float32"


def problem(q_values: jax.Array, block_size: int, *, num_pages: int = 1, num_blocks: int = 1) -> str | None:
    """What keeps the kernels from taking these shapes; None if nothing does.

    q_values, block_size as in `block_maxima`; num_pages: of a sequence's line in the page table; num_blocks: those that
    `entry_scores` gets for each query.
    """
    width = 2 * q_values.shape[-1]
    if not 32 <= width <= 256:
        return f"index keys must be 32 to 256 wide, got {width}"
    if not 1 <= block_size <= 16:
        return f"blocks of 1 to 16 entries are supported, got {block_size}"
    if (need := SMEM_BYTES_EACH * max(num_pages, num_blocks)) > SMEM_LIMIT:
        return f"{num_pages} pages or {num_blocks} blocks need {need >> 10} KiB of SMEM"
    for plan, rows in (maxima_plan(q_values, num_pages, block_size), entries_plan(q_values, num_blocks, block_size)):
        if (need := plan.vmem_bytes(rows)) > VMEM_LIMIT:
            return f"{num_pages} pages or {num_blocks} blocks need {need >> 20} MiB of VMEM"
    return None


def _queries(plan: Plan, q_values, q_scales, weights) -> tuple[jax.Array, jax.Array]:
    """Queries bfloat16 [B * tiles, tokens * N, C] in `channel_order`, and weights float32 [B * tiles, 1, 128 n]; T and
    N padded with zeros."""
    b, t, n = weights.shape
    tiles = pl.cdiv(t, plan.tokens)
    pad = ((0, 0), (0, tiles * plan.tokens - t), (0, plan.heads - n))
    q = dequantize_mxfp4(q_values, q_scales)[..., channel_order(plan.layout, plan.form)]
    q = jnp.pad(q, (*pad, (0, 0))).reshape(b * tiles, plan.tokens * plan.heads, plan.width)
    weights = jnp.pad(weights.astype(jnp.float32), pad).reshape(b * tiles, 1, -1)
    return q, jnp.pad(weights, ((0, 0), (0, 0), (0, -weights.shape[2] % LANES)))


def _call(kernel, plan: Plan, name: str, inputs, scratch, out_shape, cost) -> jax.Array:
    """One grid step for each element of the output's first axis.

    inputs: name -> (array, grid steps it is ahead, grid steps that share a block, memory space); ahead is None for an
    array that stays in HBM, others are cut along their first axis.
    """
    grid_steps = out_shape.shape[0]
    # A device with two cores gives each of them half of the grid; one core loses one start-up of the copies.
    cores = 2 if grid_steps % 2 == 0 and grid_steps >= 16 else 1
    steps = grid_steps // cores

    def spec(array, ahead, divisor, memory_space):
        if ahead is None:
            return pl.BlockSpec(memory_space=pltpu.HBM)

        def index(core, step):
            at = core * steps + jnp.minimum(step + ahead, steps - 1)
            return (at // divisor, *(0 for _ in array.shape[1:]))

        return pl.BlockSpec((1, *array.shape[1:]), index, memory_space=memory_space)

    names = (*inputs, "out", *scratch)
    return pl.pallas_call(
        functools.partial(kernel, plan=plan, names=names),
        name=name,
        grid=(cores, steps),
        in_specs=[spec(*entry) for entry in inputs.values()],
        out_specs=spec(out_shape, 0, 1, pltpu.VMEM),
        out_shape=out_shape,
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
            disable_bounds_checks=True,
        ),
        cost_estimate=cost,
        interpret=compat.tpu_interpret_params() if plan.interpret else False,
    )(*(entry[0] for entry in inputs.values()))


def _scratch(plan: Plan, group: int, raw_rows: int) -> dict:
    weights = jnp.float32 if plan.interpret else jnp.bfloat16
    return {
        "buffer": pltpu.VMEM((2, plan.pages, plan.layout.page_rows, LANES), jnp.int32),
        "ready": pltpu.SemaphoreType.DMA((2, plan.pages // group)),
        "raw": pltpu.VMEM((raw_rows, LANES), jnp.float32),
        "weights_on_lanes": pltpu.VMEM((plan.tokens * plan.heads, LANES), weights),
    }


def _pool_input(pool: jax.Array, interpret: bool):
    return cache_operand(pool, interpret), None, 1, None


def _check(why: str | None, form: str | None) -> str:
    """The form to use; raises if there is a problem."""
    if why is not None:
        raise ValueError(f"index scores: {why}")
    form = default_form() if form is None else form
    if form not in FORMS:
        raise ValueError(f"index scores: unknown form {form!r}, expected one of {FORMS}")
    return form


def block_maxima(
    q_values: jax.Array,
    q_scales: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    visible: jax.Array,
    *,
    block_size: int,
    form: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As `ops.block_maxima`.

    Args:
      form: how keys are dequantised, of `tpu_scores.FORMS`; None: what suits the device.
      interpret: run on any backend, slowly.

    Raises:
      ValueError: `problem` has an answer for these shapes, or the form is unknown.
    """
    form = _check(problem(q_values, block_size, num_pages=pages.shape[1]), form)
    b, t, n, _ = q_values.shape
    num_blocks = pages.shape[1] * PAGE_ENTRIES // block_size
    if 0 in (b, t, num_blocks):
        return jnp.zeros((b, t, num_blocks), jnp.float32)
    plan, rows = maxima_plan(q_values, pages.shape[1], block_size, form, interpret)
    q, weights = _queries(plan, q_values, q_scales, weights)
    grid_steps, tiles = q.shape[0], q.shape[0] // b
    seen = jnp.clip(visible, 0, pages.shape[1] * PAGE_ENTRIES)
    seen = jnp.pad(seen, ((0, 0), (0, tiles * plan.tokens - t))).reshape(grid_steps, plan.tokens)
    limit = seen.max(axis=1, keepdims=True)
    seen = jnp.concatenate([seen, limit, jnp.roll(limit, -1, axis=0)], axis=1)[:, None]
    lines = jnp.pad(pages, ((0, 0), (0, plan.steps * plan.pages - pages.shape[1])), constant_values=-1)[:, None]
    inputs = {
        "visible": (seen, 0, 1, pltpu.SMEM),
        "pages": (lines, 0, tiles, pltpu.SMEM),
        "next_pages": (lines, 1, tiles, pltpu.SMEM),
        "q": (q, 0, 1, pltpu.VMEM),
        "weights": (weights, 0, 1, pltpu.VMEM),
        "pool": _pool_input(pool, interpret),
    }
    scratch = _scratch(plan, GROUP, plan.pages * (1 if plan.tokens == 1 else SUBLANES))
    scratch |= {"best": pltpu.VMEM((plan.pages, LANES), jnp.float32), "slot": pltpu.SMEM((1,), jnp.int32)}
    # Rows of 128 until the end: what then takes rows of 128 again (top-k does) needs no copy.
    out_shape = jax.ShapeDtypeStruct((grid_steps, plan.tokens, rows, LANES), jnp.float32)
    cost = pl.CostEstimate(
        flops=2 * b * t * n * plan.width * pages.shape[1] * PAGE_ENTRIES,
        transcendentals=0,
        bytes_accessed=grid_steps * pages.shape[1] * plan.layout.page_rows * ROW_BYTES
        + 4 * out_shape.size
        + 2 * q.size,
    )
    out = _call(maxima_kernel, plan, "block_maxima", inputs, scratch, out_shape, cost)
    return out.reshape(b, tiles * plan.tokens, rows * LANES)[:, :t, :num_blocks]


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
    form: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As `ops.entry_scores`; `form` and `interpret` as in `block_maxima`.

    Raises:
      ValueError: `problem` has an answer for these shapes, or the form is unknown.
    """
    form = _check(problem(q_values, block_size, num_blocks=max(1, blocks.shape[2])), form)
    b, t, n, _ = q_values.shape
    count = blocks.shape[2]
    if 0 in (b, t, count, pages.shape[1]):
        return jnp.full((b, t, count * block_size), -jnp.inf, jnp.float32)
    plan, rows = entries_plan(q_values, count, block_size, form, interpret)
    q, weights = _queries(plan, q_values, q_scales, weights)
    logical = blocks * block_size // PAGE_ENTRIES
    known = (blocks >= 0) & (logical < pages.shape[1]) & (blocks * block_size < visible[..., None])
    page = jnp.take_along_axis(pages[:, None], jnp.where(known, logical, 0), axis=2)
    known &= page >= 0
    listed = jnp.where(known, page * plan.blocks_a_page + blocks % plan.blocks_a_page, -1)
    listed = jnp.pad(listed.reshape(b * t, -1), ((0, 0), (0, plan.steps * plan.pages - count)), constant_values=-1)
    listed = listed.reshape(b * t, plan.steps, plan.pages)
    # -1 marks a step without any block; elsewhere a block that is not there is read from page 0 and dropped below.
    listed = jnp.where((listed < 0).all(axis=2, keepdims=True), -1, jnp.maximum(listed, 0)).reshape(b * t, 1, -1)
    inputs = {
        "blocks": (listed, 0, 1, pltpu.SMEM),
        "next_blocks": (listed, 1, 1, pltpu.SMEM),
        "q": (q, 0, 1, pltpu.VMEM),
        "weights": (weights, 0, 1, pltpu.VMEM),
        "pool": _pool_input(pool, interpret),
    }
    scratch = _scratch(plan, plan.blocks_a_page, plan.pages // plan.blocks_a_page)
    out_shape = jax.ShapeDtypeStruct((b * t, rows, LANES), jnp.float32)
    cost = pl.CostEstimate(
        flops=2 * b * t * n * plan.width * count * block_size,
        transcendentals=0,
        bytes_accessed=b * t * count * plan.layout.page_rows * ROW_BYTES + 4 * out_shape.size + 2 * q.size,
    )
    out = _call(entries_kernel, plan, "entry_scores", inputs, scratch, out_shape, cost)
    out = out.reshape(b, t, rows * LANES)[..., : count * block_size]
    entry = blocks[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
    usable = known[..., None] & (entry < visible[..., None, None])
    return jnp.where(usable.reshape(out.shape), out, -jnp.inf)
