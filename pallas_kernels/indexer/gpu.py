"""Index scores on Hopper (Mosaic GPU): FP8 products of the packed keys, which never leave the block unscored."""

import jax
import jax.numpy as jnp

from pallas_kernels.compat import gpu_problem
from pallas_kernels.indexer import block_sizes
from pallas_kernels.thread_kernel import run_threads


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
    """See `ops.block_maxima`."""
    from pallas_kernels.indexer.gpu_maxima import BlockMaxima

    batch, tokens, heads, half = q_values.shape
    plan = block_sizes.maxima_plan(batch, tokens, pages.shape[1], 2 * half, block_size)
    shape = (batch * tokens, pages.shape[1] * plan.page_maxima)

    def program(s, queries, pool, pages, out, shared):
        BlockMaxima(s, plan, queries, pool, pages, out, shared).run()

    arrays = (q_values, q_scales, weights, visible, pool, pages)
    out = _launch(program, arrays, shape, heads, 2 * half, plan)
    return out.reshape(batch, tokens, -1)


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
    from pallas_kernels.indexer.gpu_entries import EntryScores

    batch, tokens, heads, half = q_values.shape
    plan = block_sizes.entries_plan(batch, tokens, pages.shape[1], 2 * half, block_size, blocks.shape[2])

    def program(s, queries, pool, pages, blocks, out, shared):
        EntryScores(s, plan, queries, pool, pages, blocks, out, shared).run()

    arrays = (q_values, q_scales, weights, visible, pool, pages, blocks)
    out = _launch(program, arrays, (batch * tokens, plan.entries), heads, 2 * half, plan)
    return out.reshape(batch, tokens, -1)


def problem(q_values: jax.Array, weights: jax.Array, pool: jax.Array, *, block_size: int) -> str | None:
    """Why the kernels do not take these arguments of `ops.block_maxima` and `ops.entry_scores`; None if they do."""
    if (reason := gpu_problem()) is not None:
        return reason
    if pool.shape[0] == 0:
        return "the pool has no pages"
    return block_sizes.problem(*weights.shape, 2 * q_values.shape[-1], block_size)


def _launch(program, arrays, shape: tuple[int, int], heads: int, width: int, plan) -> jax.Array:
    """Runs `program(s, queries, *other arrays, out, shared)` of one thread; returns out, float32 [shape]."""
    from pallas_kernels.indexer.gpu_program import Program
    from pallas_kernels.indexer.gpu_scores import Queries

    def run(values, scales, weights, visible, *rest):
        program(Program(), Queries(values, scales, weights, visible, heads, width), *rest)

    return run_threads(
        run, arrays, [jax.ShapeDtypeStruct(shape, jnp.float32)], blocks=plan.blocks, warpgroups=plan.warpgroups,
        shared_words=-(-plan.shared_bytes // 4),
    )[0]  # fmt: skip
