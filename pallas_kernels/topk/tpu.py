"""Exact top-k on TPU: a Mosaic kernel that selects from short rows, under a pyramid of block maxima for long ones.

`lax.top_k` takes time in proportion to S * k there; the kernel takes it in proportion to S. Rows lie on sublanes:

1. scores become integers that order alike, and the k-th largest of each row is found bit by bit, counting the scores
   that are not below a candidate. Scores that hold bfloat16 values need 16 bits only, which is noticed at run time;
2. prefix sums (products with a triangle of ones) number the scores above it, and the first of those equal to it;
3. the taken positions move to their places in steps of 1, 2, 4, .. lanes, each by the bits of its distance. Distances
   never fall from left to right, so no two ever meet.

A longer row is cut down first: maxima over blocks of 8 positions until they are few enough, and then, from the top, the
children of the k best blocks (ref.py has the proof; among equal maxima any choice is exact, as a set of scores).
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES = 128
_BLOCK = 8
_DIRECT_WIDTH = 1 << 14  # scores that the kernel selects from at once
_MAX_DIRECT_WIDTH = 1 << 15  # a position and a distance share one int32
_LOWEST = -(2**31)


def problem(scores: jax.Array, k: int) -> str | None:
    """What keeps this implementation from taking these shapes; None if nothing does."""
    if k > _MAX_DIRECT_WIDTH // _BLOCK:
        return f"k must be at most {_MAX_DIRECT_WIDTH // _BLOCK}, got {k}"
    return None


def _tile_rows(rows: int, width: int) -> int:
    """Rows a grid step: several registers of them hide the latency of a reduction, if they are not long."""
    most = 64 if width <= 4096 else 16
    return min(most, pl.cdiv(rows, 16) * 16)


def _group(chunks: int) -> int:
    """Chunks worked on together, so that their latencies overlap."""
    return next(g for g in (8, 4, 2, 1) if chunks % g == 0)


def _load_keys(scores_ref, lengths_ref, keys_ref):
    """Writes int32 keys that order like the scores, the lowest where there is none.

    Returns how many bits of the keys differ: 16 if every score is a bfloat16 value, else 32; and the lowest key.
    """
    chunks, rows, _ = keys_ref.shape
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
    lengths = jnp.broadcast_to(lengths_ref[...], (rows, _LANES))

    def load(c, low_bits):
        x = scores_ref[:, pl.ds(pl.multiple_of(c * _LANES, _LANES), _LANES)].astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        usable = (x > -jnp.inf) & (lane + c * _LANES < lengths)
        keys_ref[c] = jnp.where(usable, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LOWEST)
        return low_bits | jnp.where(usable, bits & 0xFFFF, 0)

    low_bits = jax.lax.fori_loop(0, chunks, load, jnp.zeros((rows, _LANES), jnp.int32))
    short = jnp.max(low_bits) == 0

    @pl.when(short)
    def _():
        def shorten(c, _):
            keys_ref[c] = keys_ref[c] >> 16
            return 0

        jax.lax.fori_loop(0, chunks, shorten, 0)

    return jnp.where(short, 16, 32), jnp.where(short, _LOWEST >> 16, _LOWEST)


def _kth_largest(keys_ref, k: int, bits, lowest):
    """(The k-th largest key of each row, how many keys are larger), int32 [rows, 1] each."""
    chunks, rows, _ = keys_ref.shape
    group = _group(chunks)

    def count_from(least):
        least = jnp.broadcast_to(least, (rows, _LANES))

        def body(g, count):
            for i in range(group):
                count = count + (keys_ref[g * group + i] >= least).astype(jnp.int32)
            return count

        count = jax.lax.fori_loop(0, chunks // group, body, jnp.zeros((rows, _LANES), jnp.int32))
        return count.sum(axis=1, keepdims=True)

    def one_bit(i, carry):
        kth, larger = carry
        candidate = kth + (jnp.int32(1) << (bits - 1 - i))
        count = count_from(candidate)
        return jnp.where(count >= k, candidate, kth), jnp.where(count >= k, larger, count)

    start = jnp.broadcast_to(lowest, (rows, 1)), jnp.zeros((rows, 1), jnp.int32)
    return jax.lax.fori_loop(0, bits, one_bit, start)


def _number_taken(keys_ref, kth, larger, k: int, lowest) -> None:
    """Replaces keys by position << 16 | (how far to move left), the lowest int32 for those that are not taken."""
    chunks, rows, _ = keys_ref.shape
    group = _group(chunks)
    source = jax.lax.broadcasted_iota(jnp.int32, (_LANES, 2 * _LANES), 0)
    target = jax.lax.broadcasted_iota(jnp.int32, (_LANES, 2 * _LANES), 1)
    # Left half: sum over the lanes before. Right half: sum over all lanes.
    ones = ((source < target) | (target >= _LANES)).astype(jnp.bfloat16)
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
    wide = (rows, _LANES)
    kth, equal_taken = jnp.broadcast_to(kth, wide), jnp.broadcast_to(k - larger, wide)
    has_kth = kth > lowest

    def body(g, carry):
        above, equal = [], []
        for i in range(group):
            key = keys_ref[g * group + i]
            above.append(key > kth)
            equal.append((key == kth) & has_kth)
        # Both counts in one product: a chunk has at most 128 of each, so 1 and 256 do not mix.
        marks = [jnp.where(a, 1.0, jnp.where(e, 256.0, 0.0)) for a, e in zip(above, equal)]
        marks = jnp.concatenate(marks, axis=0).astype(jnp.bfloat16)
        sums = jnp.dot(marks, ones, preferred_element_type=jnp.float32).astype(jnp.int32)
        before, total = sums[:, :_LANES], sums[:, _LANES:]
        above_before, equal_before = carry
        for i in range(group):
            part = slice(i * rows, (i + 1) * rows)
            earlier_equal = equal_before + (before[part] >> 8)
            target = above_before + (before[part] & 0xFF) + jnp.minimum(earlier_equal, equal_taken)
            position = lane + (g * group + i) * _LANES
            taken = above[i] | (equal[i] & (earlier_equal < equal_taken))
            keys_ref[g * group + i] = jnp.where(taken, (position << 16) | (position - target), _LOWEST)
            above_before = above_before + (total[part] & 0xFF)
            equal_before = equal_before + (total[part] >> 8)
        return above_before, equal_before

    zero = jnp.zeros(wide, jnp.int32)
    jax.lax.fori_loop(0, chunks // group, body, (zero, zero))


def _move_left(keys_ref, chunks_out: int) -> None:
    """Moves every taken position to its place, in place."""
    chunks, rows, _ = keys_ref.shape
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
    nothing = jnp.full((rows, _LANES), _LOWEST, jnp.int32)
    steps = (chunks * _LANES - 1).bit_length()
    for step in range(steps):
        distance = 1 << step
        whole_chunks = distance // _LANES
        # What later steps cannot bring to the output need not be kept.
        needed = min(chunks, chunks_out + sum((1 << s) // _LANES for s in range(max(step + 1, 7), steps)) + 1)

        def settle(c, incoming, distance=distance):
            own = keys_ref[c]
            stays = jnp.where((own & distance) != 0, nothing, own)
            keys_ref[c] = jnp.where((incoming & distance) != 0, incoming, stays)

        if whole_chunks:

            def body(c, _, whole_chunks=whole_chunks, settle=settle):
                settle(c, keys_ref[c + whole_chunks])
                return 0

            inside = min(needed, chunks - whole_chunks)
            jax.lax.fori_loop(0, inside, body, 0)
            jax.lax.fori_loop(inside, needed, lambda c, _, settle=settle: (settle(c, nothing), 0)[1], 0)
        else:
            turn = _LANES - distance
            group = _group(chunks)
            groups = min(chunks // group, pl.cdiv(needed, group))

            def body(g, turned, turn=turn, settle=settle, group=group):
                # All turns of a group come before its first store, so that they overlap.
                after = [jnp.minimum(g * group + i + 1, chunks - 1) for i in range(group)]
                all_turned = [turned] + [pltpu.roll(keys_ref[c], turn, 1) for c in after]
                incoming = [jnp.where(lane < turn, mine, after) for mine, after in itertools.pairwise(all_turned)]
                last = g * group + group == chunks
                incoming[-1] = jnp.where((lane < turn) | jnp.logical_not(last), incoming[-1], nothing)
                for i in range(group):
                    settle(g * group + i, incoming[i])
                return all_turned[-1]

            jax.lax.fori_loop(0, groups, body, pltpu.roll(keys_ref[0], turn, 1))


def _look_up(blocks_ref, position):
    """Block b, child j of the row's list of blocks -> score 8 * blocks[b] + j. position int32 [rows, 128]."""
    found = jnp.zeros_like(position)
    place = position // _BLOCK
    for c in range(blocks_ref.shape[1] // _LANES):
        part = blocks_ref[:, c * _LANES : (c + 1) * _LANES]
        there = jnp.take_along_axis(part, place & (_LANES - 1), axis=1, mode="promise_in_bounds")
        found = jnp.where(place // _LANES == c, there, found)
    return found * _BLOCK + position % _BLOCK


def _select_kernel(scores_ref, lengths_ref, *refs, k: int):
    *blocks_ref, ids_ref, keys_ref = refs
    bits, lowest = _load_keys(scores_ref, lengths_ref, keys_ref)
    kth, larger = _kth_largest(keys_ref, k, bits, lowest)
    _number_taken(keys_ref, kth, larger, k, lowest)
    chunks_out = pl.cdiv(k, _LANES)
    _move_left(keys_ref, chunks_out)
    for c in range(chunks_out):
        taken = keys_ref[c]
        ids = jnp.maximum(taken, 0) >> 16
        if blocks_ref:
            ids = _look_up(blocks_ref[0], ids)
        ids_ref[:, c * _LANES : (c + 1) * _LANES] = jnp.where(taken < 0, -1, ids)


def _select(scores, k: int, lengths, blocks, interpret) -> jax.Array:
    """Positions of k best of each row, ascending.

    Args:
      scores: [rows, S], S <= 32,768.
      k: positions to take.
      lengths: int32 [rows].
      blocks: int32 [rows, a multiple of 128] ascending blocks of 8 that the scores are the children of, to answer with
        positions of the children; or None.
      interpret: of `pl.pallas_call`.

    Returns:
      int32 [rows, k rounded up to a multiple of 128], -1 at the end.
    """
    rows, size = scores.shape
    width = pl.cdiv(max(size, k), _LANES) * _LANES
    if width != size:
        scores = jnp.pad(scores, ((0, 0), (0, width - size)))
    width_out = pl.cdiv(k, _LANES) * _LANES
    tile = _tile_rows(rows, width)
    in_specs = [pl.BlockSpec((tile, width), lambda i: (i, 0)), pl.BlockSpec((tile, 1), lambda i: (i, 0))]
    arguments = [scores, jnp.minimum(lengths, size)[:, None]]
    if blocks is not None:
        in_specs.append(pl.BlockSpec((tile, blocks.shape[1]), lambda i: (i, 0)))
        arguments.append(blocks)
    return pl.pallas_call(
        functools.partial(_select_kernel, k=k),
        name="topk_select",
        grid=(pl.cdiv(rows, tile),),
        in_specs=in_specs,
        out_specs=pl.BlockSpec((tile, width_out), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, width_out), jnp.int32),
        scratch_shapes=[pltpu.VMEM((width // _LANES, tile, _LANES), jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            # Counting by bits, products with the triangle, moves.
            flops=rows * width * (2 * 32 + 2 * 2 * _LANES + 6 * (width - 1).bit_length()),
            transcendentals=0,
            bytes_accessed=rows * (width * scores.dtype.itemsize + width_out * 4),
        ),
        interpret=interpret,
    )(*arguments)


def _maxima_kernel(lengths_ref, scores_ref, maxima_ref):
    """Maxima over 8 neighbouring lanes: [1, n, 128] -> [1, n / 8, 128]."""
    group = 8 * _BLOCK  # chunks that fill one register of maxima
    first = pl.program_id(1) * scores_ref.shape[1] * _LANES
    length = lengths_ref[pl.program_id(0)]
    chunk = jax.lax.broadcasted_iota(jnp.int32, (group, _LANES), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (group, _LANES), 1)
    per_chunk = _LANES // _BLOCK
    mine = lane // per_chunk == chunk % _BLOCK

    def body(g, _):
        x = scores_ref[0, pl.ds(pl.multiple_of(g * group, group), group)].astype(jnp.float32)
        position = first + (g * group + chunk) * _LANES + lane
        x = jnp.where((x > -jnp.inf) & (position < length), x, -jnp.inf)
        for distance in (1, 2, 4):
            x = jnp.maximum(x, pltpu.roll(x, _LANES - distance, 1))
        x = jnp.take_along_axis(x, lane % per_chunk * _BLOCK, axis=1, mode="promise_in_bounds")
        x = jnp.where(mine, x, -jnp.inf).reshape(8, _BLOCK, _LANES).max(axis=1)
        maxima_ref[0, pl.ds(pl.multiple_of(g * 8, 8), 8)] = x
        return 0

    jax.lax.fori_loop(0, scores_ref.shape[1] // group, body, 0)


def _maxima(level: jax.Array, lengths: jax.Array, interpret) -> jax.Array:
    """[rows, chunks, 128] -> float32 [rows, chunks / 8 rounded up to a multiple of 8, 128], block maxima in order."""
    rows, chunks, _ = level.shape
    most, group = 512, 8 * _BLOCK
    tile = min(most, pl.cdiv(chunks, group) * group)
    tiles = pl.cdiv(chunks, tile)
    return pl.pallas_call(
        _maxima_kernel,
        name="topk_block_maxima",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, tiles),
            in_specs=[pl.BlockSpec((1, tile, _LANES), lambda r, c, _: (r, c, 0))],
            out_specs=pl.BlockSpec((1, tile // _BLOCK, _LANES), lambda r, c, _: (r, c, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((rows, tiles * tile // _BLOCK, _LANES), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=4 * level.size,
            transcendentals=0,
            bytes_accessed=level.size * level.dtype.itemsize + level.size // _BLOCK * 4,
        ),
        interpret=interpret,
    )(lengths, level)


def _children_kernel(lengths_ref, fetched_ref, blocks_ref, children_ref):
    """Of every fetched row of 128 scores the 8 of its block, sixteen blocks a row: [1, n, 128] -> [1, n / 16, 128]."""
    per_row = _LANES // _BLOCK
    length = lengths_ref[pl.program_id(0)]
    sublane = jax.lax.broadcasted_iota(jnp.int32, (_LANES, _LANES), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (_LANES, _LANES), 1)
    for g in range(fetched_ref.shape[1] // _LANES):
        part = slice(g * _LANES, (g + 1) * _LANES)
        block = jnp.transpose(jnp.broadcast_to(blocks_ref[0, :, part], (_LANES, _LANES)))
        fetched = fetched_ref[0, part].astype(jnp.float32)
        own = jnp.take_along_axis(
            fetched, (block & (per_row - 1)) * _BLOCK + lane % _BLOCK, axis=1, mode="promise_in_bounds"
        )
        kept = (lane // _BLOCK == sublane % per_row) & (block >= 0) & (block * _BLOCK + lane % _BLOCK < length)
        own = jnp.where(kept & (own > -jnp.inf), own, -jnp.inf)
        children_ref[0, g * 8 : (g + 1) * 8] = own.reshape(8, per_row, _LANES).max(axis=1)


def _children(level: jax.Array, blocks: jax.Array, lengths: jax.Array, interpret) -> jax.Array:
    """The 8 scores of each block: [rows, chunks, 128], int32 [rows, n] -> float32 [rows, 8 n]; -inf for a block -1.

    A whole row of 128 is fetched for a block: narrower gathers make a TPU rearrange all of the array.
    """
    rows, n = blocks.shape
    per_row = _LANES // _BLOCK
    fetched = jnp.take_along_axis(level, (jnp.maximum(blocks, 0) // per_row)[..., None], axis=1, mode="clip")
    return pl.pallas_call(
        _children_kernel,
        name="topk_children",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows,),
            in_specs=[
                pl.BlockSpec((1, n, _LANES), lambda r, _: (r, 0, 0)),
                pl.BlockSpec((1, 1, n), lambda r, _: (r, 0, 0)),
            ],
            out_specs=pl.BlockSpec((1, n // per_row, _LANES), lambda r, _: (r, 0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((rows, n // per_row, _LANES), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * n * _LANES,
            transcendentals=0,
            bytes_accessed=rows * n * (_LANES * level.dtype.itemsize + 4 + _BLOCK * 4),
        ),
        interpret=interpret,
    )(lengths, fetched, blocks[:, None]).reshape(rows, n * _BLOCK)


def topk(scores: jax.Array, k: int, *, lengths: jax.Array | None = None, interpret: bool = False) -> jax.Array:
    """As `ops.topk`; positions come in ascending order. `interpret` runs it on any backend, slowly.

    A producer that keeps long rows as [rows, S / 128, 128] and reshapes them to [rows, S] saves a copy: the reshape
    back cancels.

    Raises:
      ValueError: `problem` has an answer for these shapes.
    """
    if (why := problem(scores, k)) is not None:
        raise ValueError(f"topk: {why}")
    rows, size = scores.shape
    lengths = jnp.full((rows,), size, jnp.int32) if lengths is None else jnp.clip(lengths, 0, size)
    direct = max(_DIRECT_WIDTH, _BLOCK * pl.cdiv(k, _LANES) * _LANES)
    if size <= direct:
        return _select(scores, k, lengths, None, interpret)[:, :k]
    levels, limits = [jnp.pad(scores, ((0, 0), (0, -size % _LANES))).reshape(rows, -1, _LANES)], [lengths]
    while levels[-1].shape[1] * _LANES > direct:
        levels.append(_maxima(levels[-1], limits[-1], interpret))
        limits.append(pl.cdiv(limits[-1], _BLOCK))
    ids = _select(levels.pop().reshape(rows, -1), k, limits.pop(), None, interpret)
    for level, limit in zip(reversed(levels), reversed(limits)):
        children = _children(level, ids, limit, interpret)
        every = jnp.full((rows,), children.shape[1], jnp.int32)
        ids = _select(children, k, every, ids, interpret)
    return ids[:, :k]
