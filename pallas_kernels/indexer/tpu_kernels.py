"""Bodies of the TPU kernels of the indexer; `tpu.py` says what they do."""

import types

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer.tpu_plans import LANES, SUBLANES, Plan
from pallas_kernels.indexer.tpu_scores import finished_scores, keys_of, raw_scores, weights_on_lanes
from pallas_kernels.page_layout import PAGE_ENTRIES
from pallas_kernels.tpu_formats import words_of

GROUP = 4  # pages copied, waited for and scored between two jumps


class _Pages:
    """Copies of the pages of one step into one of two slots, `size` pages at a time with a semaphore and a wait."""

    def __init__(self, plan: Plan, r, size: int):
        self.plan, self.size, self.pool = plan, size, words_of(r.pool)
        self.buffer, self.ready = r.buffer, r.ready

    def start_group(self, slot, group, page_of):
        """page_of: number in the step -> page of the pool."""
        for u in range(self.size):
            at = group * self.size + u
            page = self.pool.at[page_of(at), :, 0]
            pltpu.make_async_copy(page, self.buffer.at[slot, at], self.ready.at[slot, group]).start()

    def start(self, slot, groups, page_of):
        jax.lax.fori_loop(0, groups, lambda g, _: self.start_group(slot, g, page_of) or 0, 0)

    def wait(self, slot, group):
        pages = self.buffer.at[slot, pl.ds(group * self.size, self.size)]
        pltpu.make_async_copy(pages, pages, self.ready.at[slot, group]).wait()

    def keys(self, words):
        """int32 [page rows, 128] -> bfloat16 [C, 128]."""
        rows = self.plan.layout.value_rows
        return keys_of(words[: self.plan.width // 8], words[rows:], self.plan.layout, self.plan.form)


def _maxima_of_step(plan: Plan, r, token: int, first_entry, limit):
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


def maxima_kernel(*refs, plan: Plan, names: tuple[str, ...]):
    r = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
    step, steps = pl.program_id(1), pl.num_programs(1)
    entries = plan.pages * PAGE_ENTRIES
    copies = _Pages(plan, r, GROUP)
    # Entries that some query of this grid step, and of the next one, sees.
    limit = r.visible[0, 0, plan.tokens]
    next_limit = jnp.where(step + 1 < steps, r.visible[0, 0, plan.tokens + 1], 0)

    def groups_of(s, limit):
        pages = jnp.minimum(pl.cdiv(limit - s * entries, PAGE_ENTRIES), plan.pages)
        return pl.cdiv(pages, GROUP)

    def pages_of(s, pages_ref):
        return lambda at: jnp.maximum(pages_ref[0, 0, s * plan.pages + at], 0)

    def start(s, slot, limit, pages_ref):
        copies.start(slot, groups_of(s, limit), pages_of(s, pages_ref))

    @pl.when(step == 0)
    def _():
        r.slot[0] = 0
        start(0, 0, limit, r.pages)

    live, first_slot = pl.cdiv(limit, entries), r.slot[0]
    r.weights_on_lanes[...] = weights_on_lanes(r.weights[0], *r.weights_on_lanes.shape[:1], r.weights_on_lanes.dtype)

    def store(s, maxima):
        """maxima: those of each query, float32 [8, 128]."""
        rows = pl.ds(pl.multiple_of(s * SUBLANES, SUBLANES), SUBLANES)
        for token, best in enumerate(maxima):
            r.out[0, token, rows] = best

    unseen = [jnp.full((SUBLANES, LANES), -jnp.inf, jnp.float32)] * plan.tokens
    jax.lax.fori_loop(live, plan.steps, lambda s, _: store(s, unseen) or 0, 0)

    def body(s, _):
        slot = (first_slot + s) % 2
        last = s + 1 == live
        next_is_full = jnp.logical_not(last) & (groups_of(s + 1, limit) == plan.pages // GROUP)

        @pl.when(jnp.logical_not(last | next_is_full))
        def _():
            start(s + 1, 1 - slot, limit, r.pages)

        @pl.when(last)
        def _():
            start(0, 1 - slot, next_limit, r.next_pages)

        def score(g, _):
            copies.wait(slot, g)
            for u in range(GROUP):
                at = g * GROUP + u
                keys = copies.keys(r.buffer[slot, at])
                raw = raw_scores(r.q[0], r.weights_on_lanes[...], keys, plan.heads, plan.interpret)
                raw = jnp.where(r.pages[0, 0, s * plan.pages + at] < 0, jnp.nan, raw)
                stride = r.raw.shape[0] // plan.pages
                r.raw[pl.ds(pl.multiple_of(at * stride, stride), plan.tokens)] = raw
            return 0

        def score_and_start(g, _):
            score(g, _)
            copies.start_group(1 - slot, g, pages_of(s + 1, r.pages))
            return 0

        # In straight code, starting copies hides behind the arithmetic.
        @pl.when(next_is_full)
        def _():
            jax.lax.fori_loop(0, plan.pages // GROUP, score_and_start, 0)

        @pl.when(jnp.logical_not(next_is_full))
        def _():
            jax.lax.fori_loop(0, groups_of(s, limit), score, 0)

        limits = [r.visible[0, 0, token] for token in range(plan.tokens)]
        store(s, [_maxima_of_step(plan, r, token, s * entries, limits[token]) for token in range(plan.tokens)])
        return 0

    jax.lax.fori_loop(0, live, body, 0)

    @pl.when(live == 0)
    def _():
        start(0, first_slot, next_limit, r.next_pages)

    r.slot[0] = (first_slot + live) % 2


def entries_kernel(*refs, plan: Plan, names: tuple[str, ...]):
    r = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
    step, steps = pl.program_id(1), pl.num_programs(1)
    a_row, in_page = plan.blocks_a_page, plan.blocks_a_page.bit_length() - 1
    out_rows = plan.pages // a_row
    copies = _Pages(plan, r, a_row)
    r.weights_on_lanes[...] = weights_on_lanes(r.weights[0], *r.weights_on_lanes.shape[:1], r.weights_on_lanes.dtype)

    def used(s, blocks_ref):
        return blocks_ref[0, 0, s * plan.pages] >= 0

    def pages_of(s, blocks_ref):
        return lambda at: blocks_ref[0, 0, s * plan.pages + at] >> in_page

    def start(s, slot, blocks_ref):
        copies.start(slot, out_rows, pages_of(s, blocks_ref))

    @pl.when((step == 0) & used(0, r.blocks))
    def _():
        start(0, 0, r.blocks)

    def body(s, _):
        slot = (step * plan.steps + s) % 2
        here, last = used(s, r.blocks), s + 1 == plan.steps
        more = jnp.logical_not(last) & used(jnp.minimum(s + 1, plan.steps - 1), r.blocks)

        @pl.when(last & (step + 1 < steps) & used(0, r.next_blocks))
        def _():
            start(0, 1 - slot, r.next_blocks)

        @pl.when(more & jnp.logical_not(here))
        def _():
            start(s + 1, 1 - slot, r.blocks)

        block_of_lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1) // plan.block_size

        def score(row, _):
            copies.wait(slot, row)
            words = r.buffer[slot, row * a_row]
            for j in range(a_row):
                at = row * a_row + j
                block = r.blocks[0, 0, s * plan.pages + at]
                shift = ((j - block) & (a_row - 1)) * plan.block_size
                moved = pltpu.roll(r.buffer[slot, at], shift, 1)
                words = moved if j == 0 else jnp.where(block_of_lane == j, moved, words)
            keys = copies.keys(words)
            raw = raw_scores(r.q[0], r.weights_on_lanes[...], keys, plan.heads, plan.interpret)
            r.raw[pl.ds(row, 1)] = raw
            return 0

        def score_and_start(row, _):
            score(row, _)
            copies.start_group(1 - slot, row, pages_of(s + 1, r.blocks))
            return 0

        # In straight code, starting copies hides behind the arithmetic.
        @pl.when(here & more)
        def _():
            jax.lax.fori_loop(0, out_rows, score_and_start, 0)

        @pl.when(here & jnp.logical_not(more))
        def _():
            jax.lax.fori_loop(0, out_rows, score, 0)

        rows = pl.ds(pl.multiple_of(s * out_rows, out_rows), out_rows)
        scores = finished_scores(r.raw[...])
        r.out[0, rows] = jnp.where(here, scores, -jnp.inf)
        return 0

    jax.lax.fori_loop(0, plan.steps, body, 0)
