"""Index scores as Mosaic TPU kernels: `block_maxima` streams a sequence's pages, `entry_scores` gathers listed ones.

Both copy whole pages by hand, two steps in flight, and score 128 entries at a time, one on each lane, with the same
code (`tpu_scores`), so that a (query, entry) pair has the same bits in both.

A grid step of `block_maxima` is a tile of a sequence's queries; it goes over the pages that these see, however long the
page table is, and the first pages of the next grid step are on their way when it ends. Memory finer than 512 bytes
cannot be copied, so `entry_scores`, one query a grid step, copies the page of each block and moves the block's lanes
together with others' while they are still packed; then it scores them like a page.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat
from pallas_kernels.indexer.tpu_scores import (
    FORMS,
    LANES,
    channel_order,
    finished_scores,
    keys_of,
    raw_scores,
    weights_on_lanes,
)
from pallas_kernels.page_layout import PAGE_ENTRIES, ROW_BYTES, IndexPageLayout
from pallas_kernels.quantize.ref import dequantize_mxfp4
from pallas_kernels.tpu_formats import words_for_interpreter, words_of

_SUBLANES = 8
_GROUP = 4  # pages copied, waited for and scored between two jumps
_MAX_TOKENS = 8  # queries that share a dequantised page
_OUT_BYTES = 8 << 20  # of a grid step's maxima
# Leaves the compiler room in the 64 MiB of the smallest VMEM.
_VMEM_LIMIT = 48 << 20


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static sizes of one call.

    Attributes:
      heads: N padded to whole registers.
      tokens: queries of a grid step.
      pages: of a step of copies; for `entry_scores` one a block.
      steps: that cover the page table's line, or the list of blocks.
    """

    heads: int
    tokens: int
    width: int
    block_size: int
    pages: int
    steps: int
    form: str
    interpret: bool

    @property
    def layout(self) -> IndexPageLayout:
        return IndexPageLayout(self.width)

    @property
    def blocks_a_page(self) -> int:
        return PAGE_ENTRIES // self.block_size

    @property
    def page_scratch_bytes(self) -> int:
        return 2 * self.pages * pl.cdiv(self.layout.page_rows, _SUBLANES) * _SUBLANES * ROW_BYTES

    def vmem_bytes(self, out_rows: int) -> int:
        """Upper estimate: page buffers, double-buffered blocks, weights and scores on lanes, working arrays."""
        rows = self.tokens * self.heads
        blocks = 2 * (rows * self.width * 2 + _SUBLANES * pl.cdiv(rows, LANES) * ROW_BYTES)
        blocks += 2 * self.tokens * pl.cdiv(out_rows, _SUBLANES) * _SUBLANES * ROW_BYTES
        scores = (_SUBLANES * self.pages + rows) * ROW_BYTES
        return self.page_scratch_bytes + blocks + scores + (64 << 10) + 4 * rows * ROW_BYTES


def default_form() -> str:
    """The faster form of dequantisation on the device that is compiled for; "float32" where that is unknown."""
    kind = compat.tpu_device_kind()
    return "pairs" if kind is not None and any(name in kind for name in ("v6", "TPU7", "7x")) else "float32"


def problem(q_values: jax.Array, pages: jax.Array, block_size: int, num_blocks: int = 0) -> str | None:
    """What keeps the kernels from taking these shapes; None if nothing does.

    q_values, pages, block_size as in `block_maxima`; num_blocks: blocks that `entry_scores` gets for each query.
    """
    width = 2 * q_values.shape[-1]
    if not 32 <= width <= 256:
        return f"index keys must be 32 to 256 wide, got {width}"
    if not 1 <= block_size <= 16:
        return f"blocks of 1 to 16 entries are supported, got {block_size}"
    plans = _maxima_plan(q_values, pages, block_size), _entries_plan(q_values, max(1, num_blocks), block_size)
    for plan, rows in plans:
        if plan.vmem_bytes(rows) > _VMEM_LIMIT:
            return f"{pages.shape[1]} pages and {num_blocks} blocks need {plan.vmem_bytes(rows) >> 20} MiB of VMEM"
    return None


def _maxima_plan(q_values, pages, block_size: int, form: str = FORMS[0], interpret: bool = False):
    """The plan, and the rows of 128 maxima that a query has."""
    _, t, n, half = q_values.shape
    rows = pl.cdiv(pages.shape[1], _SUBLANES * block_size) * _SUBLANES
    tokens = max(1, min(_MAX_TOKENS, _OUT_BYTES // (rows * ROW_BYTES)))
    tokens = pl.cdiv(t, max(1, pl.cdiv(t, tokens)))
    plan = _Plan(
        heads=pl.cdiv(n, _SUBLANES) * _SUBLANES,
        tokens=tokens,
        width=2 * half,
        block_size=block_size,
        pages=_SUBLANES * block_size,
        steps=rows // _SUBLANES,
        form=form,
        interpret=interpret,
    )
    return plan, rows


def _entries_plan(q_values, num_blocks: int, block_size: int, form: str = FORMS[0], interpret: bool = False):
    """The plan, and the rows of 128 scores that a query has."""
    n, half = q_values.shape[2:]
    blocks_a_row = PAGE_ENTRIES // block_size
    rows = pl.cdiv(num_blocks, blocks_a_row)
    # Half a register of rows where it would take too many pages.
    step_rows = min(rows, max(1, min(_SUBLANES, 128 // blocks_a_row)))
    rows = pl.cdiv(rows, step_rows) * step_rows
    plan = _Plan(
        heads=pl.cdiv(n, _SUBLANES) * _SUBLANES,
        tokens=1,
        width=2 * half,
        block_size=block_size,
        pages=step_rows * blocks_a_row,
        steps=rows // step_rows,
        form=form,
        interpret=interpret,
    )
    return plan, rows


class _Pages:
    """Copies of the pages of one step into one of two slots, `size` pages at a time with a semaphore and a wait."""

    def __init__(self, plan: _Plan, r, size: int):
        self.plan, self.size, self.pool = plan, size, words_of(r.pool)
        self.buffer, self.ready = r.buffer, r.ready

    def start(self, slot, groups, page_of):
        """page_of: number in the step -> page of the pool."""

        def body(g, _):
            for u in range(self.size):
                at = g * self.size + u
                page = self.pool.at[page_of(at), :, 0]
                pltpu.make_async_copy(page, self.buffer.at[slot, at], self.ready.at[slot, g]).start()
            return 0

        jax.lax.fori_loop(0, groups, body, 0)

    def wait(self, slot, group):
        pages = self.buffer.at[slot, pl.ds(group * self.size, self.size)]
        pltpu.make_async_copy(pages, pages, self.ready.at[slot, group]).wait()

    def keys(self, words):
        """int32 [page rows, 128] -> bfloat16 [C, 128]."""
        rows = self.plan.layout.value_rows
        return keys_of(words[: self.plan.width // 8], words[rows:], self.plan.layout, self.plan.form)


def _maxima_of_step(plan: _Plan, r, token: int, first_entry, limit):
    """Block maxima of a query's scores in this step: float32 [pages / block_size, 128]."""
    shape = (plan.pages, LANES)
    entry = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * PAGE_ENTRIES + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    stride = r.raw.shape[0] // plan.pages
    scores = r.raw[pl.ds(token, plan.pages, stride)] if stride > 1 else r.raw[...]
    best = finished_scores(scores, first_entry + entry < limit)
    run = 1
    while run < plan.block_size:
        best = jnp.maximum(best, pltpu.roll(best, LANES - run, 1))
        run *= 2
    if plan.block_size == 1:
        return best
    # The first lane of each block holds its maximum: bring those of block_size pages together in one row.
    r.best[...] = best
    shape = (plan.pages // plan.block_size, LANES)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    first_lanes = lane % plan.blocks_a_page * plan.block_size
    out = jnp.full(shape, -jnp.inf, jnp.float32)
    for i in range(plan.block_size):
        rows = r.best[pl.ds(i, shape[0], plan.block_size)]
        rows = jnp.take_along_axis(rows, first_lanes, axis=1)
        out = jnp.where(lane // plan.blocks_a_page == i, rows, out)
    return out


def _maxima_kernel(*refs, plan: _Plan, names: tuple[str, ...]):
    r = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
    step, steps = pl.program_id(1), pl.num_programs(1)
    entries = plan.pages * PAGE_ENTRIES
    copies = _Pages(plan, r, _GROUP)
    # Entries that some query of this grid step, and of the next one, sees.
    limit = r.visible[0, 0, plan.tokens]
    next_limit = jnp.where(step + 1 < steps, r.visible[0, 0, plan.tokens + 1], 0)

    def groups_of(s, limit):
        pages = jnp.minimum(pl.cdiv(limit - s * entries, PAGE_ENTRIES), plan.pages)
        return pl.cdiv(pages, _GROUP)

    def start(s, slot, limit, pages_ref):
        copies.start(slot, groups_of(s, limit), lambda at: jnp.maximum(pages_ref[0, 0, s * plan.pages + at], 0))

    @pl.when(step == 0)
    def _():
        r.slot[0] = 0
        start(0, 0, limit, r.pages)

    live, first_slot = pl.cdiv(limit, entries), r.slot[0]
    r.weights_on_lanes[...] = weights_on_lanes(r.weights[0], *r.weights_on_lanes.shape[:1], r.weights_on_lanes.dtype)

    def store(s, maxima):
        """maxima: those of each query, float32 [8, 128]."""
        rows = pl.ds(pl.multiple_of(s * _SUBLANES, _SUBLANES), _SUBLANES)
        for token, best in enumerate(maxima):
            r.out[0, token, rows] = best

    unseen = [jnp.full((_SUBLANES, LANES), -jnp.inf, jnp.float32)] * plan.tokens
    jax.lax.fori_loop(live, plan.steps, lambda s, _: store(s, unseen) or 0, 0)

    def body(s, _):
        slot = (first_slot + s) % 2
        last = s + 1 == live

        @pl.when(jnp.logical_not(last))
        def _():
            start(s + 1, 1 - slot, limit, r.pages)

        @pl.when(last)
        def _():
            start(0, 1 - slot, next_limit, r.next_pages)

        def score(g, _):
            copies.wait(slot, g)
            for u in range(_GROUP):
                at = g * _GROUP + u
                keys = copies.keys(r.buffer[slot, at])
                raw = raw_scores(r.q[0], r.weights_on_lanes[...], keys, plan.heads, plan.interpret)
                raw = jnp.where(r.pages[0, 0, s * plan.pages + at] < 0, jnp.nan, raw)
                stride = r.raw.shape[0] // plan.pages
                r.raw[pl.ds(pl.multiple_of(at * stride, stride), plan.tokens)] = raw
            return 0

        jax.lax.fori_loop(0, groups_of(s, limit), score, 0)
        limits = [r.visible[0, 0, token] for token in range(plan.tokens)]
        store(s, [_maxima_of_step(plan, r, token, s * entries, limits[token]) for token in range(plan.tokens)])
        return 0

    jax.lax.fori_loop(0, live, body, 0)

    @pl.when(live == 0)
    def _():
        start(0, first_slot, next_limit, r.next_pages)

    r.slot[0] = (first_slot + live) % 2


def _entries_kernel(*refs, plan: _Plan, names: tuple[str, ...]):
    r = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
    step, steps = pl.program_id(1), pl.num_programs(1)
    a_row = plan.blocks_a_page
    out_rows = plan.pages // a_row
    copies = _Pages(plan, r, a_row)
    r.weights_on_lanes[...] = weights_on_lanes(r.weights[0], *r.weights_on_lanes.shape[:1], r.weights_on_lanes.dtype)

    def start(s, slot, blocks_ref):
        @pl.when(blocks_ref[0, 0, s * plan.pages] >= 0)
        def _():
            copies.start(slot, out_rows, lambda at: blocks_ref[0, 0, s * plan.pages + at] // a_row)

    first_slot = step * plan.steps

    @pl.when(step == 0)
    def _():
        start(0, 0, r.blocks)

    def body(s, _):
        slot = (first_slot + s) % 2

        @pl.when(s + 1 < plan.steps)
        def _():
            start(s + 1, 1 - slot, r.blocks)

        @pl.when((s + 1 == plan.steps) & (step + 1 < steps))
        def _():
            start(0, 1 - slot, r.next_blocks)

        rows = pl.ds(pl.multiple_of(s * out_rows, out_rows), out_rows)

        @pl.when(r.blocks[0, 0, s * plan.pages] < 0)
        def _():
            r.out[0, rows] = jnp.full((out_rows, LANES), -jnp.inf, jnp.float32)

        @pl.when(r.blocks[0, 0, s * plan.pages] >= 0)
        def _():
            block_of_lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1) // plan.block_size

            def score(row, _):
                copies.wait(slot, row)
                words = r.buffer[slot, row * a_row]
                for j in range(a_row):
                    at = row * a_row + j
                    block = r.blocks[0, 0, s * plan.pages + at] % a_row
                    shift = (j - block) % a_row * plan.block_size
                    moved = pltpu.roll(r.buffer[slot, at], shift, 1)
                    words = moved if j == 0 else jnp.where(block_of_lane == j, moved, words)
                keys = copies.keys(words)
                raw = raw_scores(r.q[0], r.weights_on_lanes[...], keys, plan.heads, plan.interpret)
                r.raw[pl.ds(row, 1)] = raw
                return 0

            jax.lax.fori_loop(0, out_rows, score, 0)
            r.out[0, rows] = finished_scores(r.raw[...])

        return 0

    jax.lax.fori_loop(0, plan.steps, body, 0)


def _queries(plan: _Plan, q_values, q_scales, weights) -> tuple[jax.Array, jax.Array]:
    """Queries bfloat16 [B * tiles, tokens * N, C] in `channel_order`, and weights float32 [B * tiles, 1, 128 n]; T and
    N padded with zeros."""
    b, t, n = weights.shape
    tiles = pl.cdiv(t, plan.tokens)
    pad = ((0, 0), (0, tiles * plan.tokens - t), (0, plan.heads - n))
    q = dequantize_mxfp4(q_values, q_scales)[..., channel_order(plan.layout, plan.form)]
    q = jnp.pad(q, (*pad, (0, 0))).reshape(b * tiles, plan.tokens * plan.heads, plan.width)
    weights = jnp.pad(weights.astype(jnp.float32), pad).reshape(b * tiles, 1, -1)
    return q, jnp.pad(weights, ((0, 0), (0, 0), (0, -weights.shape[2] % LANES)))


def _call(kernel, plan: _Plan, name: str, inputs, scratch, out_shape, cost) -> jax.Array:
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
            return pl.BlockSpec(memory_space=pl.ANY)

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
            vmem_limit_bytes=_VMEM_LIMIT,
            disable_bounds_checks=True,
        ),
        cost_estimate=cost,
        interpret=compat.tpu_interpret_params() if plan.interpret else False,
    )(*(entry[0] for entry in inputs.values()))


def _scratch(plan: _Plan, group: int, raw_rows: int) -> dict:
    weights = jnp.float32 if plan.interpret else jnp.bfloat16
    return {
        "buffer": pltpu.VMEM((2, plan.pages, plan.layout.page_rows, LANES), jnp.int32),
        "ready": pltpu.SemaphoreType.DMA((2, plan.pages // group)),
        "raw": pltpu.VMEM((raw_rows, LANES), jnp.float32),
        "weights_on_lanes": pltpu.VMEM((plan.tokens * plan.heads, LANES), weights),
    }


def _pool_input(pool: jax.Array, interpret: bool):
    return words_for_interpreter(pool) if interpret else pool, None, 1, None


def _check(q_values, pages, block_size: int, num_blocks: int, form: str | None) -> str:
    if (why := problem(q_values, pages, block_size, num_blocks)) is not None:
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
    form = _check(q_values, pages, block_size, 0, form)
    b, t, n, _ = q_values.shape
    num_blocks = pages.shape[1] * PAGE_ENTRIES // block_size
    if 0 in (b, t, num_blocks):
        return jnp.zeros((b, t, num_blocks), jnp.float32)
    plan, rows = _maxima_plan(q_values, pages, block_size, form, interpret)
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
    scratch = _scratch(plan, _GROUP, plan.pages * (1 if plan.tokens == 1 else _SUBLANES))
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
    out = _call(_maxima_kernel, plan, "block_maxima", inputs, scratch, out_shape, cost)
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
    form = _check(q_values, pages, block_size, blocks.shape[2], form)
    b, t, n, _ = q_values.shape
    count = blocks.shape[2]
    if 0 in (b, t, count, pages.shape[1]):
        return jnp.full((b, t, count * block_size), -jnp.inf, jnp.float32)
    plan, rows = _entries_plan(q_values, count, block_size, form, interpret)
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
    out = _call(_entries_kernel, plan, "entry_scores", inputs, scratch, out_shape, cost)
    out = out.reshape(b, t, rows * LANES)[..., : count * block_size]
    entry = blocks[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
    usable = known[..., None] & (entry < visible[..., None, None])
    return jnp.where(usable.reshape(out.shape), out, -jnp.inf)
