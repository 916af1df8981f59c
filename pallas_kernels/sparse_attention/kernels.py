"""Mosaic GPU kernels of sparse attention; see gpu.py for the design. Only imported where one is traced."""

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx
from pallas_kernels.page_layout import WindowLayout
from pallas_kernels.sparse_attention import block_sizes, gather

HEADS = 64
_BLOCK = gather.BLOCK
_NEVER = -1e30
_LOG2E = math.log2(math.e)
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)
_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call: `queries` = B * T, `groups` of 64 heads, `window` and `selected` entries of a query."""

    queries: int
    tokens: int
    groups: int
    width: int
    window: int
    selected: int
    layout: WindowLayout

    @property
    def blocks(self) -> int:
        return -(-self.window // _BLOCK) + -(-self.selected // _BLOCK)


def _chunks(columns: int) -> list[int]:
    """Columns of a warpgroup cut into equal accumulators of at most 256."""
    count = -(-columns // 256)
    return [columns // count] * count if columns else []


def _over_columns(x, like):
    return lax.broadcast_in_dim(x, like.shape, [0])


def _zeros(columns: int):
    return plgpu.layout_cast(jnp.zeros((HEADS, columns), jnp.float32), plgpu.Layout.WGMMA)


def _value_product(acc, p, tile):
    def product(ref):
        plgpu.wgmma(ref, p, tile)

    return pl.run_state(product)(plgpu.ACC.init(acc))


def _turn(columns: int, pairs: int):
    """(chunk float32 [64, columns] of bfloat16 values, rope row [2 * pairs]) -> its last 2 * pairs columns turned back.

    In the accumulator's layout a thread holds columns 8i + 2c and 8i + 2c + 1, one pair, of two rows.
    """
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct((HEADS, columns), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=result)
    def turn(ctx, x, rope):
        base = ptx.global_address(rope)
        lane = ptx.and_(ptx.thread_in_warpgroup(), 3)
        f32 = ir.F32Type.get()
        registers = x.registers.copy()
        rows = registers.reshape(columns // 8, 2)
        first = (columns - 2 * pairs) // 8
        at = ptx.offset(base, ptx.mul(lane, 4))
        turns = [
            [
                utils.inline_ptx(f"ld.global.nc.f32 $0, [$1+{(4 * i + part * pairs) * 4}];", at, result_types=f32)
                for part in (0, 1)
            ]
            for i in range(pairs // 4)
        ]
        for i, (cos, sin) in enumerate(turns):
            for row in range(2):
                pair = rows[first + i, row]
                real, imag = (llvm.extractelement(pair, ptx.const(j)) for j in (0, 1))
                new = (
                    arith.addf(arith.mulf(real, cos), arith.mulf(imag, sin)),
                    arith.subf(arith.mulf(imag, cos), arith.mulf(real, sin)),
                )
                for j in (0, 1):
                    pair = llvm.insertelement(pair, new[j], ptx.const(j))
                rows[first + i, row] = pair
        return mgpu.FragmentedArray(_registers=rows.reshape(x.registers.shape), _layout=x.layout, _is_signed=None)

    return turn


class _Body:
    """The kernel's body for one shape and tuning."""

    def __init__(self, shape: Shape, tuning: block_sizes.Tuning, scale: float, rope_pairs: int):
        self.shape, self.tuning, self.rope_pairs = shape, tuning, rope_pairs
        self.share = -(-shape.blocks // tuning.splits)
        self.logit_scale = scale * _LOG2E / gather.VALUE_SCALE
        self.plan = gather.Plan(
            width=shape.width,
            window=shape.window,
            selected=shape.selected,
            blocks=self.share,
            ring_units=block_sizes.ring_units(shape.width, self.share),
            window_layout=shape.layout,
        )
        left = tuning.left_columns
        self.left, self.right = _chunks(left), _chunks(shape.width - left)
        self.offsets = list(np.cumsum([0, *self.left, *self.right])[:-1])

    def scratch(self):
        width = self.shape.width
        bf16, f32 = jnp.bfloat16, jnp.float32
        tiled = functools.partial(plgpu.SMEM, dtype=bf16, transforms=_TILED)
        barrier = plgpu.Barrier
        consumers = 2 if self.right else 1
        return {
            "q_or_out": plgpu.RefUnion(
                tiled((HEADS, width)), [tiled((HEADS, columns)) for columns in (*self.left, *self.right)]
            ),
            "tiles": tiled((2, _BLOCK, width)),
            "p_tile": tiled((HEADS, _BLOCK)),
            "rows": plgpu.SMEM((4, HEADS), f32),
            "table": plgpu.SMEM((self.plan.table_words,), jnp.int32),
            "ring": plgpu.SMEM((self.plan.ring_bytes,), jnp.uint8),
            "q_ready": barrier(),
            "table_ready": barrier(),
            "full": barrier(num_barriers=2),
            "empty": barrier(num_arrivals=consumers, num_barriers=2),
            "p_full": barrier(),
            "p_empty": barrier(),
            "final": barrier(),
        }

    def __call__(self, q, window, slot, window_index, pool, selected, sink, *rest, **s):
        rope, rest = (rest[0], rest[1:]) if self.rope_pairs else (None, rest)
        group, query, split = lax.axis_index("group"), lax.axis_index("query"), lax.axis_index("split")
        warpgroup = lax.axis_index("warpgroup")
        first = split * self.share
        count = jnp.minimum(self.shape.blocks - first, self.share)
        registers = self.tuning.registers
        heads = pl.ds(group * HEADS, HEADS)
        out = [r.at[query] if self.tuning.splits == 1 else r.at[query, split] for r in rest]

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(registers[2], action="decrease")
            ring_row = window.at[slot[lax.div(query, self.shape.tokens)]] if self.shape.window else window.at[0]
            self.gather(
                window_index.at[query] if self.shape.window else window_index.at[0],
                selected.at[query] if self.shape.selected else selected.at[0],
                pool,
                ring_row,
                first,
                count,
                s,
            )

        @pl.when(warpgroup == 0)
        def _():
            plgpu.set_max_registers(registers[0], action=_action(registers[0]))
            self.softmax(sink.at[heads], None if rope is None else rope.at[query], heads, out, s)

        @pl.when(warpgroup == 1)
        def _():
            plgpu.set_max_registers(registers[1], action=_action(registers[1]))
            plgpu.copy_gmem_to_smem(q.at[query, heads], s["q_or_out"][0], s["q_ready"])
            if self.right:
                self.values(None if rope is None else rope.at[query], heads, out, s)

    def gather(self, window_index, selected, pool, ring_row, first, count, s):
        start, block = gather.producer(self.plan)
        table, ring = s["table"], s["ring"]
        gather.index_loader(self.plan)(window_index, selected, table, first, count)
        plgpu.barrier_arrive(s["table_ready"])
        used = table[self.plan.count_at]
        sources = (pool, ring_row, table, ring)

        def step(j, cursor):
            place = lax.rem(j, 2)

            @pl.when(j >= 2)
            def _():
                plgpu.barrier_wait(s["empty"].at[place])

            number = table[self.plan.active_at + j]
            cursor = block(*sources, s["tiles"].at[place], s["rows"].at[place], first, number, *cursor)
            plgpu.commit_smem()
            plgpu.barrier_arrive(s["full"].at[place])
            return cursor

        lax.fori_loop(0, used, step, start(*sources, first))

    def softmax(self, sink, rope, heads, out, s):
        q, _ = s["q_or_out"]
        rows = s["rows"]
        alpha_at, final_at = 2, 3
        plgpu.barrier_wait(s["table_ready"])
        used = s["table"][self.plan.count_at]
        plgpu.barrier_wait(s["q_ready"])

        def step(j, carried):
            accs, maximum, total = carried
            place = lax.rem(j, 2)
            plgpu.barrier_wait(s["full"].at[place])
            tile = s["tiles"].at[place]

            def logits_product(ref):
                plgpu.wgmma(ref, q, tile.transpose((1, 0)))
                return ref[...]

            logits = pl.run_scoped(logits_product, plgpu.ACC((HEADS, _BLOCK), jnp.float32))
            mask = plgpu.load(rows.at[place], layout=_COLUMNS, optimized=False)
            logits = logits * self.logit_scale + lax.broadcast_in_dim(mask, logits.shape, [1])
            new_maximum = jnp.maximum(maximum, logits.max(axis=1))
            alpha = jnp.exp2(maximum - new_maximum)
            p = jnp.exp2(logits - _over_columns(new_maximum, logits))
            p_bf16 = p.astype(jnp.bfloat16)
            if self.right:

                @pl.when(j >= 1)
                def _():
                    plgpu.barrier_wait(s["p_empty"])

                s["p_tile"][...] = p_bf16
                rows.at[alpha_at][...] = alpha
                plgpu.commit_smem()
                plgpu.barrier_arrive(s["p_full"])
            total = total * alpha + p.sum(axis=1)
            accs = [acc * _over_columns(alpha, acc) for acc in accs]
            at = 0
            for i, columns in enumerate(self.left):
                accs[i] = _value_product(accs[i], p_bf16, tile.at[:, pl.ds(at, columns)])
                at += columns
            plgpu.barrier_arrive(s["empty"].at[place])
            return accs, new_maximum, total

        row = lambda value: plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), _ROWS)  # noqa: E731
        init = ([_zeros(columns) for columns in self.left], row(_NEVER), row(0.0))
        accs, maximum, total = lax.fori_loop(0, used, step, init)
        if self.tuning.splits == 1:
            sinks = plgpu.load(sink, layout=_ROWS, optimized=False) * _LOG2E
            factor = (1 / gather.VALUE_SCALE) / (total + jnp.exp2(sinks - maximum))
            if self.right:
                rows.at[final_at][...] = factor
                plgpu.commit_smem()
                plgpu.barrier_arrive(s["final"])
        else:
            factor = None
            out[1].at[heads][...] = maximum
            out[2].at[heads][...] = total
        self.finish(accs, 0, factor, rope, heads, out, s)

    def values(self, rope, heads, out, s):
        plgpu.barrier_wait(s["table_ready"])
        used = s["table"][self.plan.count_at]
        rows = s["rows"]

        def step(j, accs):
            place = lax.rem(j, 2)
            plgpu.barrier_wait(s["p_full"])
            alpha = plgpu.load(rows.at[2], layout=_ROWS, optimized=False)
            accs = [acc * _over_columns(alpha, acc) for acc in accs]
            at = sum(self.left)
            for i, columns in enumerate(self.right):
                accs[i] = _value_product(accs[i], s["p_tile"], s["tiles"].at[place, :, pl.ds(at, columns)])
                at += columns
            plgpu.barrier_arrive(s["p_empty"])
            plgpu.barrier_arrive(s["empty"].at[place])
            return accs

        accs = lax.fori_loop(0, used, step, [_zeros(columns) for columns in self.right])
        factor = None
        if self.tuning.splits == 1:
            plgpu.barrier_wait(s["final"])
            factor = plgpu.load(rows.at[3], layout=_ROWS, optimized=False)
        self.finish(accs, len(self.left), factor, rope, heads, out, s)

    def finish(self, accs, chunk: int, factor, rope, heads, out, s):
        """Writes a warpgroup's columns, the chunk-th and following, through what was q's shared memory."""
        if factor is None:
            for i, acc in enumerate(accs):
                out[0].at[heads, pl.ds(int(self.offsets[chunk + i]), acc.shape[1])][...] = acc
            return
        _, staged = s["q_or_out"]
        for i, acc in enumerate(accs):
            value = (acc * _over_columns(factor, acc)).astype(jnp.bfloat16)
            if self.rope_pairs and chunk + i == len(self.offsets) - 1:
                turned = _turn(acc.shape[1], self.rope_pairs)(value.astype(jnp.float32), rope)
                value = turned.astype(jnp.bfloat16)
            staged[chunk + i][...] = value
        plgpu.commit_smem()
        for i, acc in enumerate(accs):
            columns = pl.ds(int(self.offsets[chunk + i]), acc.shape[1])
            plgpu.copy_smem_to_gmem(staged[chunk + i], out[0].at[heads, columns])
        plgpu.wait_smem_to_gmem(0)


def _action(registers: int) -> str:
    # A kernel of three warpgroups starts with 168 registers a thread.
    return "increase" if registers > 168 else "decrease"


def _kernel(body: _Body, out_type, arrays):
    shape = body.shape

    def sparse_attention_gpu(*refs, **scratch):
        body(*refs, **scratch)

    return plgpu.kernel(
        sparse_attention_gpu,
        out_type=out_type,
        grid=(shape.groups, body.tuning.splits, shape.queries),
        grid_names=("group", "split", "query"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=body.scratch(),
        compiler_params=_PARAMS,
    )(*arrays)


def attend(shape: Shape, tuning: block_sizes.Tuning, scale: float, arrays: tuple, rope: jax.Array | None) -> jax.Array:
    """bfloat16 [queries, 64 * groups, H], turned back where rope float32 [queries, 2r] is given."""
    body = _Body(shape, tuning, scale, 0 if rope is None else rope.shape[-1] // 2)
    out = jax.ShapeDtypeStruct((shape.queries, HEADS * shape.groups, shape.width), jnp.bfloat16)
    return _kernel(body, out, (*arrays, *([] if rope is None else [rope])))


def attend_splits(shape: Shape, tuning: block_sizes.Tuning, scale: float, arrays: tuple) -> tuple[jax.Array, ...]:
    """Partial sums float32 [queries, splits, 64 * groups, H], then maxima (base 2) and totals without the last axis."""
    body = _Body(shape, tuning, scale, 0)
    lead = (shape.queries, tuning.splits, HEADS * shape.groups)
    out = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*lead, shape.width), lead, lead)]
    return tuple(_kernel(body, out, arrays))


def combine(
    partial: jax.Array, maximum: jax.Array, total: jax.Array, sink: jax.Array, rope: jax.Array | None
) -> jax.Array:
    """bfloat16 [queries, heads, H] of what `attend_splits` left. One row of 512 channels a CTA, four a thread."""
    queries, splits, heads, width = partial.shape
    threads_a_row = width // 4
    rows = gather.THREADS // threads_a_row
    pairs = 0 if rope is None else rope.shape[-1] // 2
    refs = (plgpu.RefType(),) * (5 + bool(pairs))

    @plgpu.inline_mgpu(arg_types=(*refs, gather.SPLAT, gather.SPLAT))
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
        factor = arith.divf(utils.c(1 / gather.VALUE_SCALE, f32), denominator)
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
                cos, sin = scalar(base[4], at, i * 4), scalar(base[4], at, (pairs + i) * 4)
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
        compiler_params=_PARAMS,
    )(partial, maximum, total, sink, *([] if rope is None else [rope]))
