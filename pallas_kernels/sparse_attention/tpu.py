"""Sparse attention as one Mosaic TPU kernel: a grid step is one query token with all its heads.

Selected entries are gathered from the pool row by row (512 bytes are the smallest copy there is, so a row brings its
neighbours along), the next token's rows while this one's are worked on. A sequence's ring is copied once for all its
queries. Both are dequantised in VMEM, into tiles that serve as keys and as values, and the softmax runs over the
selected entries first and then over the blocks of the ring that the query looks at.

What is not there gets the scale 0. A ring is dequantised before it is known which rows a query will use, so there all
is kept finite, and an entry that is NaN carries a NaN beside the tile, which is added to the logits of those who look.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compat import tpu_interpret_params
from pallas_kernels.page_layout import PAGE_ENTRIES, ROW_BYTES, MainPageLayout, WindowLayout
from pallas_kernels.sparse_attention.tpu_tiles import (
    LANES,
    TILE,
    dot,
    main_matrices,
    ring_matrices,
    store_main,
    store_ring,
)
from pallas_kernels.tpu_formats import words_for_interpreter, words_of

_PAD = 8  # selected entries are padded to a multiple
_RING_STEP = 32  # ring entries that are dequantised together at least: one row of scales at the widest
_NEVER = -1e30
# Leaves the compiler room in the 64 MiB of the smallest VMEM.
_VMEM_LIMIT = 48 << 20


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static sizes of one call.

    Attributes:
      chunk, chunks: selected entries that are copied, waited for and skipped together, and how many times.
      unroll: how many of them are started in straight code; fewer than all spare the interpreter.
      window: W padded to whole registers.
      block, blocks: ring entries of one softmax update, and how many such blocks there are.
      tail: last channels, whole registers, that contain the `rotated` ones.
    """

    heads: int
    width: int
    tokens: int
    chunk: int
    chunks: int
    unroll: int
    window: int
    ring: WindowLayout
    block: int
    blocks: int
    tail: int
    rotated: int
    scale: float

    @property
    def main(self) -> MainPageLayout:
        return MainPageLayout(self.width)

    @property
    def entries(self) -> int:
        return self.chunks * TILE

    @property
    def ring_rows(self) -> int:
        return self.block * self.blocks

    @property
    def ring_scale_rows(self) -> int:
        return pl.cdiv(self.ring_rows * self.ring.scale_bytes, ROW_BYTES)

    def vmem_bytes(self) -> int:
        """Upper estimate: scratch, double-buffered blocks and constants, and the arrays of one softmax update."""
        lanes, heads = max(self.width, LANES), pl.cdiv(self.heads, 8) * 8
        packed = 2 * ROW_BYTES * (2 * self.entries + self.ring_rows + self.ring_scale_rows + 8)
        tiles = 2 * lanes * (self.entries + self.ring_rows)
        blocks = 2 * 2 * 2 * heads * lanes + 2 * 4 * 8 * (self.entries + self.window + 2 * self.tail)
        constants = 2 * 2 * (5 * LANES * lanes + self.tail**2)
        working = 4 * heads * (4 * max(self.entries, self.block) + 3 * lanes) + 8 * 4 * TILE * lanes
        return packed + tiles + blocks + constants + working


def _plan(q, window_index, selected, rope, scale: float, ring: WindowLayout, interpret: bool = False) -> _Plan:
    entries = 0 if selected is None else selected.shape[-1]
    chunk = min(TILE, pl.cdiv(entries, _PAD) * _PAD)
    block = pl.cdiv(ring.length, LANES) * LANES if ring.length <= 2 * LANES else LANES
    rotated = 0 if rope is None else 2 * rope.shape[-1]
    return _Plan(
        heads=q.shape[2],
        width=q.shape[3],
        tokens=q.shape[1],
        chunk=chunk,
        chunks=pl.cdiv(entries, TILE),
        unroll=min(chunk, _PAD) if interpret else chunk,
        window=pl.cdiv(window_index.shape[-1], LANES) * LANES,
        ring=ring,
        block=block,
        blocks=pl.cdiv(ring.length, block) if window_index.shape[-1] else 0,
        tail=min(q.shape[3], pl.cdiv(rotated, LANES) * LANES),
        rotated=rotated,
        scale=scale,
    )


def problem(q, window_index, selected, rope, *, window_layout: WindowLayout) -> str | None:
    """What keeps the kernel from taking these shapes (arguments of `sparse_attention`); None if nothing does."""
    width = q.shape[-1]
    if not 64 <= width <= 512 or width & (width - 1):
        return f"the head width must be 64, 128, 256 or 512, got {width}"
    need = _plan(q, window_index, selected, rope, 1.0, window_layout).vmem_bytes()
    if need > _VMEM_LIMIT:
        return f"a ring of {window_layout.length} and the selection need {need >> 20} MiB of VMEM"
    return None


class _Gather:
    """Copies of a token's selected rows, a chunk at a time: one semaphore and one wait for all rows of a chunk."""

    def __init__(self, plan: _Plan, r):
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


def _ring_copies(plan: _Plan, r, ring, slot):
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


def _load_ring(plan: _Plan, r, sequence, last, first_here) -> None:
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


def _softmax(plan: _Plan, r, parts):
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


def _ring_part(plan: _Plan, r, block):
    first = pl.multiple_of(block * plan.block, LANES)
    rows = pl.ds(first, plan.block)
    wanted = [_on_sublanes(r.window_index[0, :, w : w + LANES]) for w in range(0, plan.window, LANES)]
    counts = []
    for lanes in range(0, plan.block, LANES):
        entry = first + lanes + jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        hits = [jnp.where(w == entry, 1.0, 0.0) for w in wanted]
        counts.append(jnp.sum(functools.reduce(jnp.add, hits), axis=0, keepdims=True))
    return r.ring_tile[rows], jnp.concatenate(counts, axis=1), r.ring_nan[:, rows]


def _attend(plan: _Plan, r) -> None:
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


def _attend_blocks(plan: _Plan, r) -> None:
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


def _finish(plan: _Plan, r, maximum, denominator, acc) -> None:
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


def _dequantise_selected(plan: _Plan, r) -> None:
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


def _kernel(*refs, plan: _Plan, names: tuple[str, ...]):
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


def _gather_rows(plan: _Plan, selected: jax.Array) -> tuple[jax.Array, jax.Array]:
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


def _ring_index(plan: _Plan, window_index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """window_index int32 [Q, W] -> the same padded [Q, 1, window], and int32 [Q, 1, blocks]: is a block looked at."""
    pad = ((0, 0), (0, plan.window - window_index.shape[1]))
    block = jnp.where(window_index < 0, -1, window_index // plan.block)
    used = (block[:, :, None] == jnp.arange(plan.blocks)).any(axis=1)
    return jnp.pad(window_index, pad, constant_values=-1)[:, None], used.astype(jnp.int32)[:, None]


def _rotation(plan: _Plan, rope: jax.Array) -> jax.Array:
    """float32 [Q, 2, r] cosine and sine -> [Q, 2, tail]: factors of a channel and of its neighbour."""
    cos, sin = rope[:, 0], rope[:, 1]
    factors = jnp.stack([jnp.repeat(cos, 2, axis=-1), jnp.stack([sin, -sin], axis=-1).reshape(cos.shape[0], -1)], 1)
    return jnp.pad(factors, ((0, 0), (0, 0), (plan.tail - plan.rotated, 0)))


def _cost(plan: _Plan, queries: int, sequences: int) -> pl.CostEstimate:
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
    plan = _plan(q, window_index, selected, rope, scale, window_layout, interpret)
    # A device with two cores gives each of them half of the queries; one core loses one start-up of the copies.
    cores = 2 if queries % 2 == 0 and queries >= 16 else 1
    steps = queries // cores

    def per_token(*shape, ahead: int = 0, **kwargs):
        def index(core, step, *_):
            return (core * steps + jnp.minimum(step + ahead, steps - 1), *(0 for _ in shape))

        return pl.BlockSpec((1, *shape), index, **kwargs)

    def constant(array):
        return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

    in_rows = words_for_interpreter if interpret else lambda rows: rows
    hbm = pl.BlockSpec(memory_space=pl.ANY)
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
            "pool": (in_rows(pool.reshape(-1, 4, LANES)), hbm),
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
            "window": (in_rows(window), hbm),
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
        functools.partial(_kernel, plan=plan, names=names),
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
            vmem_limit_bytes=_VMEM_LIMIT,
            disable_bounds_checks=True,
        ),
        cost_estimate=_cost(plan, queries, b),
        interpret=tpu_interpret_params() if interpret else False,
    )(jnp.clip(slot, 0, window.shape[0] - 1), *(array for array, _ in inputs.values()))
    return out.reshape(b, t, n, h)
