"""The mHC step for Hopper in Mosaic GPU: each stream is read once and written once.

The first kernel walks over tiles of 16 tokens by 128 columns of all streams. A thread block keeps its columns for life,
and with them its share of the mix weights: float32 weights cut into three bfloat16 parts, whose products with bfloat16
streams are exact in the matrix units. Two units of 256 threads work on tiles of their own, each fed by asynchronous
copies several tiles ahead. A thread holds the same four columns of two tokens in every stream, in
the order in which the matrix units read them, so the new streams go from the update to the mix in registers. Each tile
leaves its u (the collapsed input) and sums.

The second kernel adds the sums over the chunks of columns in a fixed order, normalises u in place and does the Sinkhorn
rounds, one thread a token.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.hyper_connection import block_sizes
from pallas_kernels.hyper_connection.block_sizes import BLOCK_BYTES, STREAMS, SUMS, UNITS, WARPS, Plan


def problem(streams: jax.Array) -> str | None:
    """What keeps the kernel from taking streams of this shape [T, R, D]; None if nothing does."""
    return block_sizes.problem(*streams.shape)


def residual_step(
    streams: jax.Array,
    y: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    fn: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    gain: jax.Array,
    *,
    iters: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """As `ops.residual_step`.

    Raises:
      ValueError: `problem` has an answer for these shapes.
    """
    if (why := problem(streams)) is not None:
        raise ValueError(f"residual_step: {why}")
    t, r, d = streams.shape
    plan = block_sizes.plan(t, d)
    new, u, sums = _pass_over_streams(plan)(streams, y, post, comb.reshape(t, r * r), pre, fn)
    x = jax.new_ref(u)
    next_pre, next_post, next_comb = _finish(plan, iters, norm_eps, hc_eps)(sums, scale, base, gain, x)
    return new, jax.freeze(x), next_pre, next_post, next_comb.reshape(t, r, r)


@functools.cache
def _pass_over_streams(plan: Plan):
    """(streams, y, post, comb, pre, fn) -> new streams, u bfloat16 [T, D], sums float32 [tiles, chunks, 416]."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.hyper_connection.gpu_tiles import tiles_of_unit

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs) + (plgpu.Layout.WG_SPLAT(()),))
        def run(ctx, *args):
            *refs, block = args
            tiles_of_unit(refs, block.registers.item(), plan)

        run(*refs, jax.lax.axis_index("block"))

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((plan.num_tokens, STREAMS, plan.dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((plan.num_tokens, plan.dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((plan.tiles, plan.chunks, SUMS), jnp.float32),
        ),
        scratch_types=[plgpu.SMEM((BLOCK_BYTES // 4,), jnp.uint32)],
        grid=(plan.chunks * plan.groups,),
        grid_names=("block",),
        kernel_name="residual_step_streams",
        num_threads=UNITS * WARPS // 4,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )


@functools.cache
def _finish(plan: Plan, iters: int, norm_eps: float, hc_eps: float):
    """(sums, scale, base, gain, ref of u, which becomes x) -> pre, post float32 [T, R], comb float32 [T, R * R]."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.hyper_connection.gpu_finish import finish_block, shared_bytes

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs) + (plgpu.Layout.WG_SPLAT(()),))
        def run(ctx, *args):
            *refs, block = args
            finish_block(refs, block.registers.item(), plan, iters=iters, norm_eps=norm_eps, hc_eps=hc_eps)

        run(*refs, jax.lax.axis_index("block"))

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((plan.num_tokens, STREAMS), jnp.float32),
            jax.ShapeDtypeStruct((plan.num_tokens, STREAMS), jnp.float32),
            jax.ShapeDtypeStruct((plan.num_tokens, STREAMS * STREAMS), jnp.float32),
        ),
        scratch_types=[plgpu.SMEM((shared_bytes(plan.finish_tokens) // 4,), jnp.uint32)],
        grid=(plan.finish_blocks,),
        grid_names=("block",),
        kernel_name="residual_step_finish",
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )
