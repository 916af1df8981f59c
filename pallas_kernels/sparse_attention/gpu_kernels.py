"""Mosaic GPU kernels of sparse attention; see gpu.py for the design. Only imported where one is traced."""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, scf, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx
from pallas_kernels.sparse_attention import gpu_gather, gpu_unpack
from pallas_kernels.sparse_attention.block_sizes import Tuning
from pallas_kernels.sparse_attention.gpu_plan import BLOCK, HEADS, Shape, Table

_NEVER = -1e30
_FACTORS = 2  # row behind the masks of the two tiles: rescaling factors, in the end the normalising ones
_SLACK = 8.0  # powers of two by which probabilities may exceed 1
_LOG2E = math.log2(math.e)
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)
_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)


def _chunks(columns: int, widest: int) -> list[int]:
    """Columns of a warpgroup cut into accumulators of whole column tiles."""
    tiles, count = columns // 64, -(-columns // widest)
    return [64 * (tiles // count + (i < tiles % count)) for i in range(count)]


def _over_columns(x, like):
    return lax.broadcast_in_dim(x, like.shape, [0])


def _zeros(columns: int):
    return plgpu.layout_cast(jnp.zeros((HEADS, columns), jnp.float32), plgpu.Layout.WGMMA)


def _read_row(s, row, layout):
    """One of the rows of 64 float32 in the CTA's words."""
    words = plgpu.load(s["words"].at[pl.ds(row * HEADS, HEADS)], layout=layout, optimized=False)
    return lax.bitcast_convert_type(words, jnp.float32)


def _write_row(s, row: int, value) -> None:
    s["words"].at[pl.ds(row * HEADS, HEADS)][...] = lax.bitcast_convert_type(value, jnp.int32)


def _value_products(accs, p, tiles):
    """Adds p times each tile to its accumulator; all products are under way together."""

    def products(refs):
        for ref, tile in zip(refs, tiles, strict=True):
            plgpu.wgmma(ref, p, tile)

    return pl.run_state(products)([plgpu.ACC.init(acc) for acc in accs])


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


def _store(columns: int, offset: int, width: int):
    """(chunk float32 [64, columns], rows of the output bfloat16 [64, width]) -> writes it to columns from `offset` on.

    Four neighbouring lanes hold eight columns of a row, two each; they trade words so that each writes 16 bytes.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(ctx, x, out):
        thread = ptx.thread_in_warpgroup()
        warp, lane = ptx.shr(thread, 5), ptx.and_(thread, 31)
        quad = ptx.and_(lane, 3)
        row = ptx.add(ptx.mul(warp, 16), ptx.shr(lane, 2))
        address = ptx.row_address(ptx.global_address(out), row, 2 * width)
        address = ptx.offset(address, ptx.add(ptx.mul(quad, 16), 2 * offset))
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        words = [llvm.bitcast(ptx.i32(), arith.truncf(pair, r)) for r in x.registers.flat]
        bits = [arith.cmpi(arith.CmpIPredicate.ne, ptx.and_(quad, 1 << bit), ptx.const(0)) for bit in (0, 1)]
        for group in range(0, columns // 8, 4):
            for half in (0, 1):
                four = [words[2 * (group + i) + half] for i in range(4)]
                for bit, odd in enumerate(bits):
                    # Lanes whose numbers differ in this bit swap the words whose numbers do.
                    for low in (i for i in range(4) if not i & (1 << bit)):
                        high = low | (1 << bit)
                        sent = arith.select(odd, four[low], four[high])
                        text = f"shfl.sync.bfly.b32 $0, $1, {1 << bit}, 31, 0xffffffff;"
                        got = utils.inline_ptx(
                            text, sent, result_types=ptx.i32(), has_side_effects=True, convergent=True
                        )
                        four[low], four[high] = arith.select(odd, got, four[low]), arith.select(odd, four[high], got)
                at = 8 * half * 2 * width + group * 16
                utils.inline_ptx(f"st.global.v4.b32 [$0+{at}], {{$1,$2,$3,$4}};", address, *four)

    return store


def _rescale(columns: int):
    """(accumulator [64, columns], factors of its rows [64]) -> their product; a warp skips it where all are 1."""
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct((HEADS, columns), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, _ROWS), return_type=result)
    def rescale(ctx, acc, factors):
        factors = [llvm.extractelement(x, ptx.const(0)) for x in factors.registers.flat]
        text = """{.reg .pred p, q; setp.neu.f32 p, $1, 0f3F800000; setp.neu.f32 q, $2, 0f3F800000; or.pred p, p, q;
        vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p;}"""
        some = utils.inline_ptx(text, *factors, result_types=ptx.i32(), has_side_effects=True, convergent=True)
        registers = acc.registers.reshape(columns // 8, 2)
        branch = scf.IfOp(
            arith.cmpi(arith.CmpIPredicate.ne, some, ptx.const(0)), [x.type for x in registers.flat], has_else=True
        )
        with ir.InsertionPoint(branch.then_block):
            both = [vector.broadcast(registers.flat[0].type, x) for x in factors]
            scf.yield_([arith.mulf(x, both[i % 2]) for i, x in enumerate(registers.flat)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(registers.flat))
        out = np.array(list(branch.results), dtype=object).reshape(acc.registers.shape)
        return mgpu.FragmentedArray(_registers=out, _layout=acc.layout, _is_signed=None)

    return rescale


class _Body:
    """The kernel's body for one shape and tuning: each CTA takes every `ctas`-th item, in all roles alike.

    Items are queries' groups of heads and their shares of the entries. Tiles of 64 entries go round two slots without
    regard to where an item begins.
    """

    def __init__(self, shape: Shape, tuning: Tuning, scale: float, rope_pairs: int):
        self.shape, self.tuning, self.rope_pairs = shape, tuning, rope_pairs
        self.plan = shape.plan(tuning)
        self.items, self.ctas = shape.items(tuning), shape.ctas(tuning)
        self.logit_scale = scale * _LOG2E / gpu_unpack.VALUE_SCALE
        left = tuning.left_columns
        # One wgmma may not need more registers than a thread starts with: 168 with three warpgroups, 128 with four.
        widest = {1: 256, 2: 128}[tuning.gatherers]
        self.left, self.right = (_chunks(left, widest), _chunks(shape.width - left, widest))
        self.offsets = [int(x) for x in np.cumsum([0, *self.left, *self.right])[:-1]]

    def scratch(self):
        width = self.shape.width
        tiled = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=_TILED)
        barrier = plgpu.Barrier
        consumers = 2 if self.right else 1
        return {
            "q_tile": tiled((HEADS, width)),
            "tiles": tiled((2, BLOCK, width)),
            "p_tile": tiled((HEADS, BLOCK)),
            "words": plgpu.SMEM((self.plan.words,), jnp.int32),
            "ring": plgpu.SMEM((self.plan.ring_bytes,), jnp.uint8),
            "q_full": barrier(),
            "q_empty": barrier(),
            "full": barrier(num_arrivals=self.tuning.gatherers, num_barriers=2),
            "empty": barrier(num_arrivals=consumers, num_barriers=2),
            "p_full": barrier(),
            "p_empty": barrier(),
            "final": barrier(),
        }

    def __call__(self, q, window, slot, window_index, pool, selected, sink, *rest, **s):
        rope, out = (rest[0], rest[1:]) if self.rope_pairs else (None, rest)
        registers = self.tuning.registers
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        # ceil((items - cta) / ctas), at least one.
        items = lax.div(self.items - 1 - cta, self.ctas) + 1

        def gathering():
            self.claim(registers[2])
            self.gather(cta, items, window, slot, window_index, pool, selected, s)

        def softmax():
            self.claim(registers[0])
            self.softmax(cta, items, sink, rope, out, s)

        def values():
            self.claim(registers[1])
            self.values(cta, items, q, rope, out, s)

        # One tree of branches: ptxas gives each role its own registers only then.
        lax.cond(warpgroup >= 2, gathering, lambda: lax.cond(warpgroup == 0, softmax, values))

    def claim(self, registers: int) -> None:
        # What each thread starts with: 65,536 by the threads, in steps of 8.
        initial = 65536 // (128 * (2 + self.tuning.gatherers)) // 8 * 8
        plgpu.set_max_registers(registers, action="increase" if registers > initial else "decrease")

    def item(self, number):
        """(query, first head of the group, split) of an item."""
        split, rest = (lax.rem(number, self.tuning.splits), lax.div(number, self.tuning.splits))
        return (lax.div(rest, self.shape.groups), lax.rem(rest, self.shape.groups) * HEADS, split)

    def gather(self, cta, items, window, slot, window_index, pool, selected, s):
        load, publish, close = gpu_gather.index_loader(self.plan)
        start, block = gpu_gather.producer(self.plan)
        words = s["words"]
        sources = (pool, window, words, s["ring"])

        def load_item(i):
            # Behind the last item the last one's indices are loaded once more, and not used.
            query, _, split = self.item(jnp.minimum(cta + i * self.ctas, self.items - 1))
            sequence = lax.div(query, self.shape.tokens)
            return load(window_index, selected, slot, query, sequence, split * self.plan.blocks)

        def publish_item(i, loaded):
            _, _, split = self.item(jnp.minimum(cta + i * self.ctas, self.items - 1))
            first = split * self.plan.blocks
            # A tuned number of splits may leave the last ones without blocks.
            count = jnp.maximum(jnp.minimum(self.shape.blocks - first, self.plan.blocks), 0)
            publish(words, lax.rem(i, 2), (i < items).astype(jnp.int32), first, count, *loaded)

        first_item, second_item = jnp.int32(0), jnp.int32(1)
        loaded = load_item(first_item)
        following = None if self.plan.single else load_item(second_item)
        publish_item(first_item, loaded)
        cursor = start(*sources)
        if self.plan.single:
            close(words)
        else:
            publish_item(second_item, following)

        def one_item(i, carried):
            done, cursor = carried
            table = lax.rem(i, 2)
            loaded = None if self.plan.single else load_item(i + 2)

            def one_block(j, cursor):
                place = lax.rem(done + j, 2)

                @pl.when(done + j >= 2)
                def _():
                    plgpu.barrier_wait(s["empty"].at[place])

                cursor = block(*sources, s["tiles"].at[place], table, j, place, *cursor)
                plgpu.commit_smem()
                plgpu.barrier_arrive(s["full"].at[place])
                return cursor

            count = words[self.plan.tables_at + table * self.plan.table_words + Table.COUNT]
            cursor = lax.fori_loop(0, count, one_block, cursor)
            if not self.plan.single:
                publish_item(i + 2, loaded)
            return done + count, cursor

        lax.fori_loop(0, items, one_item, (jnp.int32(0), cursor))

    def blocks_of(self, done, s):
        """An item's number of blocks, known once its first tile is there; `done`: blocks before it."""
        return s["words"][self.plan.counts_at + lax.rem(done, 2)]

    def softmax(self, cta, items, sink, rope, out, s):
        def one_item(i, done):
            query, head, split = self.item(cta + i * self.ctas)
            heads = pl.ds(head, HEADS)
            plgpu.barrier_wait(s["q_full"])
            plgpu.barrier_wait(s["full"].at[lax.rem(done, 2)])
            count = self.blocks_of(done, s)
            step = functools.partial(self.softmax_block, done, count, s)
            row = lambda value: plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), _ROWS)  # noqa: E731
            init = ([_zeros(columns) for columns in self.left], row(_NEVER), row(0.0))
            accs, maximum, total = lax.fori_loop(0, count, step, init)
            if self.right:
                plgpu.barrier_wait(s["p_empty"])
            if self.tuning.splits == 1:
                target = [out[0].at[query]]
                sinks = plgpu.load(sink.at[heads], layout=_ROWS, optimized=False) * _LOG2E
                factor = (1 / gpu_unpack.VALUE_SCALE) / (total + jnp.exp2(sinks - maximum))
                if self.right:
                    _write_row(s, _FACTORS, factor)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(s["final"])
            else:
                factor = None
                target = [r.at[query, split] for r in out]
                target[1].at[heads][...] = maximum
                target[2].at[heads][...] = total
            self.finish(accs, 0, factor, None if rope is None else rope.at[query], heads, target[0])
            return done + count

        lax.fori_loop(0, items, one_item, jnp.int32(0))

    def softmax_block(self, done, count, s, j, carried):
        accs, maximum, total = carried
        q = s["q_tile"]
        place = lax.rem(done + j, 2)

        @pl.when(j >= 1)
        def _():
            plgpu.barrier_wait(s["full"].at[place])

        tile = s["tiles"].at[place]
        mask = _read_row(s, place, _COLUMNS)

        def logits_product(ref):
            plgpu.wgmma(ref, q, tile.transpose((1, 0)))
            return ref[...]

        logits = pl.run_scoped(logits_product, plgpu.ACC((HEADS, BLOCK), jnp.float32))

        @pl.when(j == count - 1)
        def _():
            plgpu.barrier_arrive(s["q_empty"])

        logits = logits * self.logit_scale + lax.broadcast_in_dim(mask, logits.shape, [1])
        highest = logits.max(axis=1)
        # A maximum that is a little too low serves as well, and spares the accumulators a rescaling.
        new_maximum = jnp.where(highest > maximum + _SLACK, highest, maximum)
        alpha = jnp.exp2(maximum - new_maximum)
        p = jnp.exp2(logits - _over_columns(new_maximum, logits))
        p_bf16 = p.astype(jnp.bfloat16)
        if self.right:

            @pl.when(j >= 1)
            def _():
                plgpu.barrier_wait(s["p_empty"])

            s["p_tile"][...] = p_bf16
            _write_row(s, _FACTORS, alpha)
            plgpu.commit_smem()
            plgpu.barrier_arrive(s["p_full"])
        total = total * alpha + p.sum(axis=1)
        accs = [_rescale(acc.shape[1])(acc, alpha) for acc in accs]
        columns = zip(self.offsets, self.left, strict=False)
        accs = _value_products(accs, p_bf16, [tile.at[:, pl.ds(at, width)] for at, width in columns])
        plgpu.barrier_arrive(s["empty"].at[place])
        return accs, new_maximum, total

    def values(self, cta, items, q, rope, out, s):
        def load_q(i):
            query, head, _ = self.item(cta + i * self.ctas)
            plgpu.copy_gmem_to_smem(q.at[query, pl.ds(head, HEADS)], s["q_tile"], s["q_full"])

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), gpu_gather.SPLAT, gpu_gather.SPLAT))
        def prefetch_q(ctx, q, query, head):
            row = ptx.add(ptx.mul(query.registers.item(), self.shape.groups * HEADS), head.registers.item())
            address = ptx.row_address(ptx.global_address(q), row, self.shape.width * 2)
            is_first = arith.cmpi(arith.CmpIPredicate.eq, ptx.thread_in_warpgroup(), ptx.const(0))
            text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
            utils.inline_ptx(text, address, ptx.const(HEADS * self.shape.width * 2), predicate=is_first)

        def one_block(done, j, accs):
            place = lax.rem(done + j, 2)

            @pl.when(j >= 1)
            def _():
                plgpu.barrier_wait(s["p_full"])

            alpha = _read_row(s, _FACTORS, _ROWS)
            accs = [_rescale(acc.shape[1])(acc, alpha) for acc in accs]
            columns = zip(self.offsets[len(self.left) :], self.right, strict=True)
            tiles = [s["tiles"].at[place, :, pl.ds(at, width)] for at, width in columns]
            accs = _value_products(accs, s["p_tile"], tiles)
            plgpu.barrier_arrive(s["p_empty"])
            plgpu.barrier_arrive(s["empty"].at[place])
            return accs

        def one_item(i, done):
            count = jnp.int32(0)
            if not self.plan.single:

                @pl.when(i + 1 < items)
                def _():
                    prefetch_q(q, *self.item(cta + (i + 1) * self.ctas)[:2])

            if self.right:
                plgpu.barrier_wait(s["p_full"])
                count = self.blocks_of(done, s)
                step = functools.partial(one_block, done)
                accs = lax.fori_loop(0, count, step, [_zeros(columns) for columns in self.right])

            query, head, split = self.item(cta + i * self.ctas)
            factor = None
            if self.right and self.tuning.splits == 1:
                plgpu.barrier_wait(s["final"])
                factor = _read_row(s, _FACTORS, _ROWS)

            # Behind that, so that the next item's factors come after these have been read.
            @pl.when(i + 1 < items)
            def _():
                plgpu.barrier_wait(s["q_empty"])
                load_q(i + 1)

            if self.right:
                target = out[0].at[query, split] if self.tuning.splits > 1 else out[0].at[query]
                turn = None if rope is None else rope.at[query]
                self.finish(accs, len(self.left), factor, turn, pl.ds(head, HEADS), target)
            return done + count

        load_q(0)
        lax.fori_loop(0, items, one_item, jnp.int32(0))

    def finish(self, accs, chunk: int, factor, rope, heads, out):
        """Writes a warpgroup's columns, the chunk-th and following."""
        for i, acc in enumerate(accs):
            offset, columns = self.offsets[chunk + i], acc.shape[1]
            if factor is None:
                out.at[heads, pl.ds(offset, columns)][...] = acc
                continue
            value = acc * _over_columns(factor, acc)
            if self.rope_pairs and chunk + i == len(self.offsets) - 1:
                rounded = value.astype(jnp.bfloat16).astype(jnp.float32)
                value = _turn(columns, self.rope_pairs)(rounded, rope)
            _store(columns, offset, self.shape.width)(value, out.at[heads])


def _kernel(body: _Body, out_type, arrays):
    def sparse_attention_gpu(*refs, **scratch):
        body(*refs, **scratch)

    return plgpu.kernel(
        sparse_attention_gpu,
        out_type=out_type,
        grid=(body.ctas,),
        grid_names=("cta",),
        num_threads=2 + body.tuning.gatherers,
        thread_name="warpgroup",
        scratch_types=body.scratch(),
        compiler_params=_PARAMS,
    )(*arrays)


def attend(shape: Shape, tuning: Tuning, scale: float, arrays: tuple, rope: jax.Array | None) -> jax.Array:
    """bfloat16 [queries, 64 * groups, H], turned back where rope float32 [queries, 2r] is given."""
    body = _Body(shape, tuning, scale, 0 if rope is None else rope.shape[-1] // 2)
    out = jax.ShapeDtypeStruct((shape.queries, HEADS * shape.groups, shape.width), jnp.bfloat16)
    return _kernel(body, out, (*arrays, *([] if rope is None else [rope])))


def attend_splits(shape: Shape, tuning: Tuning, scale: float, arrays: tuple) -> tuple[jax.Array, ...]:
    """Partial sums float32 [queries, splits, 64 * groups, H], then maxima (base 2) and totals without the last axis."""
    body = _Body(shape, tuning, scale, 0)
    lead = (shape.queries, tuning.splits, HEADS * shape.groups)
    out = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*lead, shape.width), lead, lead)]
    return tuple(_kernel(body, out, arrays))
