"""The kernel that combines the splits of sparse attention; only imported where it is traced."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx
from pallas_kernels.sparse_attention.gpu_unpack import VALUE_SCALE

_LOG2E = math.log2(math.e)
_SPLAT = plgpu.Layout.WG_SPLAT(())


def combine(
    partial: jax.Array, maximum: jax.Array, total: jax.Array, sink: jax.Array, rope: jax.Array | None
) -> jax.Array:
    """bfloat16 [queries, heads, H] of what `attend_splits` left. One row of 512 channels a CTA, four a thread."""
    queries, splits, heads, width = partial.shape
    threads_a_row = width // 4
    rows = 128 // threads_a_row
    pairs = 0 if rope is None else rope.shape[-1] // 2
    refs = (plgpu.RefType(),) * (5 + bool(pairs))

    @plgpu.inline_mgpu(arg_types=(*refs, _SPLAT, _SPLAT))
    def one_cta(ctx, *args):
        *refs, query, row = args
        base = [ptx.global_address(ref) for ref in refs]
        query, row = query.registers.item(), row.registers.item()
        thread = ptx.thread_in_warpgroup()
        head = ptx.add(ptx.mul(row, rows), ptx.shr(thread, int(math.log2(threads_a_row))))
        lane = ptx.and_(thread, threads_a_row - 1)
        f32, load = ir.F32Type.get(), "ld.global.nc.f32"
        first = ptx.add(ptx.mul(query, splits * heads), head)

        def scalar(address, index, at=0):
            text = f"{load} $0, [$1+{at}];"
            return utils.inline_ptx(text, ptx.row_address(address, index, 4), result_types=f32, has_side_effects=True)

        def vector(index):
            text = "ld.global.nc.v4.f32 {$0,$1,$2,$3}, [$4];"
            address = ptx.offset(ptx.row_address(base[0], index, width * 4), ptx.mul(lane, 16))
            return utils.inline_ptx(text, address, result_types=(f32,) * 4, has_side_effects=True)

        places = [ptx.add(first, s * heads) for s in range(splits)]
        maxima = [scalar(base[1], place) for place in places]
        totals = [scalar(base[2], place) for place in places]
        sums = [vector(place) for place in places]
        logit = arith.mulf(scalar(base[3], head), utils.c(_LOG2E, f32))
        exp2 = lambda x: utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", x, result_types=f32)  # noqa: E731
        highest = functools.reduce(arith.maximumf, maxima)
        weights = [exp2(arith.subf(x, highest)) for x in maxima]
        denominator = exp2(arith.subf(logit, highest))
        for weight, value in zip(weights, totals):
            denominator = arith.addf(denominator, arith.mulf(weight, value))
        factor = arith.divf(utils.c(1 / VALUE_SCALE, f32), denominator)
        values = []
        for i in range(4):
            value = functools.reduce(arith.addf, [arith.mulf(w, x[i]) for w, x in zip(weights, sums)])
            values.append(arith.mulf(value, factor))
        bf16 = ir.BF16Type.get()
        rounded = [arith.truncf(bf16, x) for x in values]
        if pairs:
            exact = [arith.extf(f32, x) for x in rounded]
            # The first of this thread's two pairs, counted from the first rotated channel.
            pair = ptx.add(ptx.mul(lane, 2), -(width // 2 - pairs))
            inside = arith.cmpi(arith.CmpIPredicate.sge, pair, ptx.const(0))
            at = ptx.add(ptx.mul(query, 2 * pairs), arith.select(inside, pair, ptx.const(0)))
            for i in range(2):
                cos, sin = (scalar(base[4], at, i * 4), scalar(base[4], at, (pairs + i) * 4))
                real, imag = exact[2 * i], exact[2 * i + 1]
                new = (
                    arith.addf(arith.mulf(real, cos), arith.mulf(imag, sin)),
                    arith.subf(arith.mulf(imag, cos), arith.mulf(real, sin)),
                )
                for j in range(2):
                    rounded[2 * i + j] = arith.select(inside, arith.truncf(bf16, new[j]), rounded[2 * i + j])
        out = ptx.add(ptx.mul(query, heads), head)
        address = ptx.offset(ptx.row_address(base[-1], out, width * 2), ptx.mul(lane, 8))
        words = []
        for i in range(2):
            pair = llvm.mlir_undef(ir.VectorType.get((2,), bf16))
            for j in range(2):
                pair = llvm.insertelement(pair, rounded[2 * i + j], ptx.const(j))
            words.append(llvm.bitcast(ptx.i32(), pair))
        utils.inline_ptx("st.global.v2.b32 [$0], {$1,$2};", address, *words)

    def sparse_attention_combine_gpu(*refs):
        one_cta(*refs, lax.axis_index("query"), lax.axis_index("row"))

    return plgpu.kernel(
        sparse_attention_combine_gpu,
        out_type=jax.ShapeDtypeStruct((queries, heads, width), jnp.bfloat16),
        grid=(heads // rows, queries),
        grid_names=("row", "query"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(partial, maximum, total, sink, *([] if rope is None else [rope]))
