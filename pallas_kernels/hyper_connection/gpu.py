"""The mHC step for Hopper in Mosaic GPU: each stream is read once and written once.

The first kernel walks over tiles of 16 tokens by 128 columns of all streams. A block keeps its columns for life, and
with them its share of the mix weights: float32 weights cut into three bfloat16 parts, whose products with bfloat16
streams are exact in the matrix units. Two units of 256 threads work on tiles of their own, each fed by cp.async several
tiles ahead. A thread holds the same four columns of two tokens in every stream, in the order in which the matrix units
read them, so the new streams go from the update to the mix in registers. Each tile leaves its u (the collapsed input)
and sums.

The second kernel adds the sums over the column chunks in a fixed order, normalises u and does the Sinkhorn rounds, one
thread a token.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hyper_connection.block_sizes import COLUMNS, STREAMS, TOKENS, UNITS, finish_tokens, groups


def problem(streams: jax.Array) -> str | None:
    """What keeps the kernel from taking streams of this shape [T, R, D]; None if nothing does."""
    num_tokens, num_streams, dim = streams.shape
    if num_streams != STREAMS:
        return f"{STREAMS} streams are supported, got {num_streams}"
    if dim % COLUMNS:
        return f"the width of a stream must be a multiple of {COLUMNS}, got {dim}"
    if num_tokens == 0:
        return "there are no tokens"
    return None


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
    new, u, sums = _pass_over_streams(t, d)(streams, y, post, comb.reshape(t, r * r), pre, fn)
    x, next_pre, next_post, next_comb = _finish(t, d, iters, norm_eps, hc_eps)(u, sums, scale, base, gain)
    return new, x, next_pre, next_post, next_comb.reshape(t, r, r)


@functools.cache
def _pass_over_streams(num_tokens: int, dim: int):
    """(streams, y, post, comb, pre, fn) -> new streams, u bfloat16 [T, D], sums float32 [tiles, chunks, 416]."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.hyper_connection.gpu_tiles import SHARED_BYTES, SUMS, tiles_of_unit

    tiles, chunks = pl.cdiv(num_tokens, TOKENS), dim // COLUMNS
    rows = groups(num_tokens, dim)

    def body(*refs):
        *arrays, shared = refs
        scalar = plgpu.Layout.WG_SPLAT(())

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (len(arrays) + 1) + (scalar, scalar))
        def run(ctx, *args):
            *refs, chunk, group = args
            tiles_of_unit(refs, chunk.registers.item(), group.registers.item(), num_tokens, dim, rows)

        run(*arrays, shared, jax.lax.axis_index("chunk"), jax.lax.axis_index("group"))

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_tokens, STREAMS, dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((num_tokens, dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((tiles, chunks, SUMS), jnp.float32),
        ),
        scratch_types=[plgpu.SMEM((SHARED_BYTES // 4,), jnp.uint32)],
        grid=(chunks, rows),
        grid_names=("chunk", "group"),
        kernel_name="residual_step_streams",
        num_threads=2 * UNITS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )


@functools.cache
def _finish(num_tokens: int, dim: int, iters: int, norm_eps: float, hc_eps: float):
    """(u, sums, scale, base, gain) -> x bfloat16 [T, D], pre, post float32 [T, R], comb float32 [T, R * R]."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.hyper_connection.gpu_finish import finish_tokens_of_block, shared_bytes

    tokens = finish_tokens(num_tokens)

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs) + (plgpu.Layout.WG_SPLAT(()),))
        def run(ctx, *args):
            *refs, block = args
            finish_tokens_of_block(
                refs, block.registers.item(), tokens, num_tokens, dim, iters, norm_eps, hc_eps
            )  # fmt: skip

        run(*refs, jax.lax.axis_index("block"))

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_tokens, dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((num_tokens, STREAMS), jnp.float32),
            jax.ShapeDtypeStruct((num_tokens, STREAMS), jnp.float32),
            jax.ShapeDtypeStruct((num_tokens, STREAMS * STREAMS), jnp.float32),
        ),
        scratch_types=[plgpu.SMEM((shared_bytes(tokens) // 4,), jnp.uint32)],
        grid=(pl.cdiv(num_tokens, tokens),),
        grid_names=("block",),
        kernel_name="residual_step_finish",
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )
