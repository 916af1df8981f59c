"""Body of the TPU kernel of sparse attention; `tpu.py` says what it does."""

import functools
import types

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.page_layout import ROW_BYTES
from pallas_kernels.sparse_attention.tpu_plans import LANES, TILE, Plan
from pallas_kernels.sparse_attention.tpu_tiles import dot, store_main, store_ring
from pallas_kernels.tpu_formats import words_of

_RING_STEP = 32  # ring entries that are dequantised together at least: one row of scales at the widest
# Below any real logit, finite so that no difference of two of them is NaN.
_NEVER = -1e30


class _Gather:
    """Copies of a token's selected rows, a chunk at a time: one semaphore and one wait for all rows of a chunk."""

    def __init__(self, plan: Plan, r):
        self.plan, self.pool = plan, words_of(r.pool)
        self.buffers, self.done = (r.values, r.scales), r.gathered

    def _rows(self, chunk):
        return pl.ds(pl.multiple_of(chunk * TILE, TILE), self.plan.chunk)

    def wanted(self, chunk, rows_ref):
        """rows_ref int32 [1, 1, 2 * chunks * chunk]: rows of the values, then of the scales; -1 at first: skip it."""
        return rows_ref[0, 0, chunk * self.plan.chunk] >= 0

    def start(self, chunk, rows_ref, slot: int):
        """Straight code and a slot known in advance: four instruction words a copy, the least there is."""
        first = chunk * self.plan.chunk
        scales = self.plan.chunks * self.plan.chunk
        values_to, scales_to = self.buffers

        def some(i, _):
            for u in range(self.plan.unroll):
                at = i * self.plan.unroll + u
                to = pl.ds(chunk * TILE + at, 1)
                for row_at, buffer in ((first + at, values_to), (scales + first + at, scales_to)):
                    row = self.pool.at[rows_ref[0, 0, row_at]]
                    pltpu.make_async_copy(row, buffer.at[slot, to], self.done.at[slot, chunk]).start()
            return 0

        if self.plan.unroll == self.plan.chunk:
            some(0, 0)
        else:
            jax.lax.fori_loop(0, self.plan.chunk // self.plan.unroll, some, 0)

    def wait(self, chunk, rows_ref, slot):
        @pl.when(self.wanted(chunk, rows_ref))
        def _():
            for buffer in self.buffers:
                rows = buffer.at[slot, self._rows(chunk)]
                pltpu.make_async_copy(rows, rows, self.done.at[slot, chunk]).wait()


def _ring_copies(plan: Plan, r, ring, slot):
    """One copy for all values if an entry is a row, else the row of each entry; and one for the scales."""
    layout, window, done = plan.ring, words_of(r.window), r.ring_ready.at[slot]
    per_row, count = ROW_BYTES // plan.width, layout.slot_rows - layout.value_rows
    scales = window.at[ring, pl.ds(layout.value_rows, count), 0]
    yield pltpu.make_async_copy(scales, r.ring_scales.at[slot, pl.ds(0, count)], done)
    if per_row == 1:
        rows = pl.ds(0, layout.length)
        yield pltpu.make_async_copy(window.at[ring, rows, 0], r.ring.at[slot, rows], done)
    else:
        for entry in range(layout.length):
            row = window.at[ring, entry // per_row]
            yield pltpu.make_async_copy(row, r.ring.at[slot, pl.ds(entry, 1)], done)


def _load_ring(plan: Plan, r, sequence, last, first_here) -> None:
    """Dequantises the ring of `sequence` and starts the copy of the next one's, up to `last`."""
    slot = sequence % 2

    @pl.when(first_here)
    def _():
        for copy in _ring_copies(plan, r, r.slot[sequence], slot):
            copy.start()

    @pl.when(sequence < last)
    def _():
        for copy in _ring_copies(plan, r, r.slot[sequence + 1], 1 - slot):
            copy.start()

    for copy in _ring_copies(plan, r, 0, slot):
        copy.wait()
    per_scale_row = ROW_BYTES // plan.ring.scale_bytes

    def dequantise(first, count):
        rows = pl.ds(first, count)
        scale_rows = [
            r.ring_scales[slot, pl.ds((first + s) // per_scale_row, 1)] for s in range(0, count, per_scale_row)
        ]
        r.ring_nan[:, rows] = store_ring(
            r.ring_tile, rows, first, r.ring[slot, rows], scale_rows, r.ring_matrices, plan.ring
        )

    def body(i, _):
        dequantise(pl.multiple_of(i * TILE, TILE), TILE)
        return 0

    whole = plan.ring.length // TILE
    rest = pl.cdiv(plan.ring.length % TILE, _RING_STEP) * _RING_STEP
    jax.lax.fori_loop(0, whole, body, 0)
    if rest:
        dequantise(whole * TILE, rest)
    if whole * TILE + rest < plan.ring_rows:
        # Never attended to, but a probability of 0 would not silence what is not a number.
        rows = pl.ds(whole * TILE + rest, plan.ring_rows - whole * TILE - rest)
        r.ring_tile[rows] = jnp.zeros((rows.size, plan.width), jnp.bfloat16)
        r.ring_nan[:, rows] = jnp.zeros((1, rows.size), jnp.float32)


def _on_sublanes(row):
    """[1, n] int32 -> [n, 128]: value i on all lanes of sublane i."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))


def _softmax(plan: Plan, r, parts):
    """Softmax over some tiles at once: maximum and denominator float32 [N, 1], unnormalised output float32 [N, H].

    parts: tile bfloat16 [S, H], how often each of its entries occurs float32 [1, S], and what is added to the logits
    float32 [1, S]; None there means that entries occur at most once, too.
    """
    logits = []
    for tile, count, nan in parts:
        x = dot(r.q[0], tile, ((1,), (1,))) * plan.scale
        logits.append(jnp.where(count > 0, x if nan is None else x + nan, _NEVER))
    maximum = functools.reduce(jnp.maximum, [jnp.max(x, axis=1, keepdims=True) for x in logits])
    denominators, outputs = [], []
    for (tile, count, nan), x in zip(parts, logits, strict=True):
        p = jnp.where(count > 0, jnp.exp(x - maximum), 0.0)
        weight = p.astype(jnp.bfloat16)
        if nan is not None:
            p, weight = p * count, (weight.astype(jnp.float32) * count).astype(jnp.bfloat16)
        denominators.append(jnp.sum(p, axis=1, keepdims=True))
        outputs.append(dot(weight, tile))
    return maximum, functools.reduce(jnp.add, denominators), functools.reduce(jnp.add, outputs)


def _selected_part(r):
    return r.tile[...], jnp.where(r.entry[0] >= 0, 1.0, 0.0), None


def _ring_part(plan: Plan, r, block):
    first = pl.multiple_of(block * plan.block, LANES)
    rows = pl.ds(first, plan.block)
    wanted = [_on_sublanes(r.window_index[0, :, w : w + LANES]) for w in range(0, plan.window, LANES)]
    counts = []
    for lanes in range(0, plan.block, LANES):
        entry = first + lanes + jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        hits = [jnp.where(w == entry, 1.0, 0.0) for w in wanted]
        counts.append(jnp.sum(functools.reduce(jnp.add, hits), axis=0, keepdims=True))
    return r.ring_tile[rows], jnp.concatenate(counts, axis=1), r.ring_nan[:, rows]


def _attend(plan: Plan, r) -> None:
    """Output of a query, or if its ring has many blocks, its softmax up to them."""
    parts = [_selected_part(r)] if plan.chunks else []
    if plan.blocks == 1:
        parts.append(_ring_part(plan, r, 0))
    state = _softmax(plan, r, parts) if parts else (_NEVER, 0.0, 0.0)
    if plan.blocks <= 1:
        _finish(plan, r, *state)
    else:
        for ref, value in zip(r.state, state, strict=True):
            ref[...] = jnp.broadcast_to(value, ref.shape)


def _attend_blocks(plan: Plan, r) -> None:
    def body(i, _):
        @pl.when(r.block_used[0, 0, i] > 0)
        def _():
            before, denominator, acc = (ref[...] for ref in r.state)
            own, own_denominator, own_acc = _softmax(plan, r, [_ring_part(plan, r, i)])
            maximum = jnp.maximum(before, own)
            before, own = jnp.exp(before - maximum), jnp.exp(own - maximum)
            merged = maximum, denominator * before + own_denominator * own, acc * before + own_acc * own
            for ref, value in zip(r.state, merged, strict=True):
                ref[...] = value

        return 0

    jax.lax.fori_loop(0, plan.blocks, body, 0)
    _finish(plan, r, *(ref[...] for ref in r.state))


def _finish(plan: Plan, r, maximum, denominator, acc) -> None:
    """The quotient, rounded; then the inverse rotation of its last channels, rounded again."""
    with_sink = denominator + jnp.exp(r.sink[...] - maximum)
    r.out[0] = jnp.where(denominator == 0, 0.0, acc * (1 / with_sink)).astype(jnp.bfloat16)
    if plan.rotated:
        # Read back: the first rounding must not be optimised away.
        channels = slice(plan.width - plan.tail, plan.width)
        tail = r.out[0, :, channels]
        swapped, x = dot(tail, r.swap[...]), tail.astype(jnp.float32)
        rotated = x * r.rope[0, :1] + swapped * r.rope[0, 1:]
        channel = jax.lax.broadcasted_iota(jnp.int32, (1, plan.tail), 1)
        r.out[0, :, channels] = jnp.where(channel < plan.tail - plan.rotated, x, rotated).astype(jnp.bfloat16)


def _dequantise_selected(plan: Plan, r) -> None:
    """Makes the tile of the selected entries, while the rows of the next token's are gathered.

    Starting copies occupies the scalar unit only, so it hides vector work in the same straight code.
    """
    step, steps = pl.program_id(1), pl.num_programs(1)
    slot, gather = step % 2, _Gather(plan, r)

    def first(chunk, _):
        @pl.when(gather.wanted(chunk, r.first_rows))
        def _():
            gather.start(chunk, r.first_rows, 0)

        return 0

    @pl.when(step == 0)
    def _():
        jax.lax.fori_loop(0, plan.chunks, first, 0)

    def body(chunk, _):
        def dequantise(slot):
            rows = pl.ds(pl.multiple_of(chunk * TILE, TILE), TILE)
            entry = _on_sublanes(r.entry[0, :, rows])
            store_main(r.tile, rows, r.values[slot, rows], r.scales[slot, rows], entry, r.main_matrices, plan.main)

        ahead = (step + 1 < steps) & gather.wanted(chunk, r.next_rows)
        gather.wait(chunk, r.rows, slot)
        for known in range(2):

            @pl.when(ahead & (slot == known))
            def _(known=known):
                dequantise(known)
                gather.start(chunk, r.next_rows, 1 - known)

        @pl.when(jnp.logical_not(ahead))
        def _():
            dequantise(slot)

        return 0

    jax.lax.fori_loop(0, plan.chunks, body, 0)


def kernel(*refs, plan: Plan, names: tuple[str, ...]):
    r = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
    if plan.blocks > 1:
        r.state = r.maximum, r.denominator, r.acc
    if plan.blocks:
        core, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
        token = core * steps + step

        @pl.when((step == 0) | (token % plan.tokens == 0))
        def _():
            last = (core * steps + steps - 1) // plan.tokens
            _load_ring(plan, r, token // plan.tokens, last, step == 0)

    if plan.chunks:
        _dequantise_selected(plan, r)
    _attend(plan, r)
    if plan.blocks > 1:
        _attend_blocks(plan, r)
