"""The mHC step as one Mosaic TPU kernel: each stream is read once and written once.

A tile of tokens is copied into VMEM by hand, three tiles under way, 128 channels of one pair of streams at a time: so
the tokens that lie apart in HBM (the streams of a token are neighbours there) come to lie on sublanes, two bfloat16
streams in one 32-bit word. Then

1. the update of the streams in place, the collapsed input and the sums of squares;
2. the products with the mix weights. The new streams hold bfloat16 values, so float32 weights cut into three bfloat16
   parts give exact products in one bfloat16 matmul, with float32 sums; the parts are cut once and stay in VMEM. A word
   is two rows of the matmul, one a stream, each multiplied by the weights of both;
3. the norm of the collapsed input.

The Sinkhorn rounds of few numbers a token are a long chain of dependent steps, so they wait until the last tile and are
done for all tokens together, with tokens on sublanes and lanes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES = 128
_ROWS = 16  # tokens worked on together
_MAX_TILE = 128
_SLOTS = 3  # tiles coming in, worked on, going out
_HIGH = -65536  # the upper half of a word
_VMEM_LIMIT = 48 << 20


def tile_tokens(num_tokens: int) -> int:
    """Tokens a grid step: enough steps to overlap copies with arithmetic, few enough to amortise their start."""
    return max(_ROWS, min(_MAX_TILE, pl.cdiv(num_tokens, 4 * _ROWS) * _ROWS))


def _chunk(dim: int, limit: int) -> int:
    """Lanes worked on at a time: the largest multiple of 128 up to `limit` that divides dim."""
    return max(c for c in range(_LANES, limit + 1, _LANES) if dim % c == 0)


def _vmem_bytes(tile: int, num_streams: int, dim: int) -> int:
    """VMEM of the tiles, the double-buffered blocks and the cut mix weights."""
    mix = (2 + num_streams) * num_streams
    tiles = _SLOTS * tile * num_streams * dim * 2
    blocks = 2 * (2 * tile * dim * 2 + mix * num_streams * dim * 4 + tile * _LANES * 4)
    return tiles + blocks + 3 * mix * num_streams * dim * 2 + 2 * tile * _LANES * 4


def problem(streams: jax.Array) -> str | None:
    """What keeps the kernel from taking streams of this shape [T, R, D]; None if nothing does."""
    num_tokens, num_streams, dim = streams.shape
    if dim % _LANES:
        return f"the width of a stream must be a multiple of {_LANES}, got {dim}"
    if num_streams not in (2, 4, 6, 8):
        return f"2, 4, 6 or 8 streams are supported, got {num_streams}"
    if num_tokens == 0:
        return "there are no tokens"
    if _vmem_bytes(_ROWS, num_streams, dim) > _VMEM_LIMIT:
        return f"{num_streams} streams of width {dim} do not fit VMEM"
    return None


def _as_f32(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _as_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _round(x: jax.Array) -> jax.Array:
    """Bits of float32 rounded to bfloat16 (ties to even) in the upper half; the lower half is to be cut off.

    By integers: a cast forth and back may be taken for the identity.
    """
    bits = _as_bits(x)
    return bits + 0x7FFF + ((bits >> 16) & 1)


def _words_of(streams, interpret: bool):
    """A ref bfloat16 [T, R, D] as words int32 [T, R / 2, D], even streams low; to interpret, it holds words already."""
    return streams if interpret else streams.bitcast(jnp.int32)


def _words_outside(streams: jax.Array) -> jax.Array:
    t, r, dim = streams.shape
    return jax.lax.bitcast_convert_type(jnp.swapaxes(streams.reshape(t, r // 2, 2, dim), 2, 3), jnp.int32)


def _streams_outside(words: jax.Array) -> jax.Array:
    t, pairs, dim = words.shape
    return jnp.swapaxes(jax.lax.bitcast_convert_type(words, jnp.bfloat16), 2, 3).reshape(t, 2 * pairs, dim)


class _Tiles:
    """Copies of whole tiles between HBM [T, R / 2, D] and VMEM slots [chunks * R / 2, tile, 128]."""

    def __init__(self, source, target, slots, arriving, leaving, num_tokens: int):
        self.source, self.target, self.slots = source, target, slots
        self.arriving, self.leaving, self.num_tokens = arriving, leaving, num_tokens
        self.tile = slots.shape[2]

    def _for_size(self, step, action) -> None:
        """`action(tokens)` with the number of tokens in the tile, which only the last one may not fill."""
        rest = self.num_tokens % self.tile
        if rest == 0 or self.num_tokens < self.tile:
            action(rest or self.tile)
            return
        last = step == self.num_tokens // self.tile

        @pl.when(last)
        def _():
            action(rest)

        @pl.when(jnp.logical_not(last))
        def _():
            action(self.tile)

    def _start(self, step, slot, array, semaphore, inward: bool) -> None:
        pairs, dim = array.shape[1:]

        def copy(tokens: int):
            def body(q, _):
                lanes = pl.ds(pl.multiple_of(q * _LANES, _LANES), _LANES)
                for pair in range(pairs):
                    far = array.at[pl.ds(step * self.tile, tokens), pair, lanes]
                    near = self.slots.at[slot, q * pairs + pair, pl.ds(0, tokens)]
                    source, target = (far, near) if inward else (near, far)
                    pltpu.make_async_copy(source, target, semaphore.at[slot]).start()
                return 0

            jax.lax.fori_loop(0, dim // _LANES, body, 0)

        self._for_size(step, copy)

    def _wait(self, step, slot, semaphore) -> None:
        def wait(tokens: int):
            whole = self.slots.at[slot, :, pl.ds(0, tokens)]
            pltpu.make_async_copy(whole, whole, semaphore.at[slot]).wait()

        self._for_size(step, wait)

    def fetch(self, step, slot):
        self._start(step, slot, self.source, self.arriving, True)

    def wait_fetched(self, step, slot):
        self._wait(step, slot, self.arriving)

    def put(self, step, slot):
        self._start(step, slot, self.target, self.leaving, False)

    def wait_put(self, step, slot):
        self._wait(step, slot, self.leaving)


def _update_and_collapse(words, y_ref, coef_ref, u_ref, stream_squares, u_squares, r: int) -> None:
    """New streams in place of the old ones; u; sums of squares of u [tile, 1] and, by lane, of the streams [tile, 128].

    words: ref int32 [chunks * R / 2, tile, 128].
    """
    tile, dim = y_ref.shape
    pairs = r // 2

    def rows_body(i, _):
        rows = pl.ds(pl.multiple_of(i * _ROWS, _ROWS), _ROWS)
        coef = coef_ref[rows]
        column = [jnp.broadcast_to(coef[:, k : k + 1], (_ROWS, _LANES)) for k in range((2 + r) * r)]
        post, comb, pre = column[:r], column[r : r + r * r], column[r + r * r :]

        def lanes_body(q, sums):
            at = pl.ds(pl.multiple_of(q * _LANES, _LANES), _LANES)
            old = [words[q * pairs + pair, rows] for pair in range(pairs)]
            x = [half for word in old for half in (_as_f32(word << 16), _as_f32(word & _HIGH))]
            y = y_ref[rows, at].astype(jnp.float32)
            new, u, squares = [], None, sums[0]
            for j in range(r):
                mixed = comb[j] * x[0]
                for k in range(1, r):
                    mixed = mixed + comb[k * r + j] * x[k]
                new.append(_round(post[j] * y + mixed))
                value = _as_f32(new[j] & _HIGH)
                squares = squares + value * value
                u = pre[j] * value if u is None else u + pre[j] * value
            for pair in range(pairs):
                low = jax.lax.shift_right_logical(new[2 * pair], 16)
                words[q * pairs + pair, rows] = low | (new[2 * pair + 1] & _HIGH)
            u = _as_f32(_round(u) & _HIGH)
            u_ref[rows, at] = u.astype(jnp.bfloat16)
            return squares, sums[1] + u * u

        zero = jnp.zeros((_ROWS, _LANES), jnp.float32)
        squares, u_square = jax.lax.fori_loop(0, dim // _LANES, lanes_body, (zero, zero))
        stream_squares[rows] = squares
        u_squares[rows] = jnp.broadcast_to(u_square.sum(axis=1, keepdims=True), (_ROWS, _LANES))
        return 0

    jax.lax.fori_loop(0, tile // _ROWS, rows_body, 0)


def _cut_weights(fn_ref, parts_ref, r: int, dim: int) -> None:
    """float32 [mix, R * D] -> bfloat16 [2 * 3 * mix, R / 2 * D]: of an even and an odd stream, three parts that add up
    to the weight exactly."""
    lanes = _chunk(dim, 256)

    def body(q, _):
        for pair in range(r // 2):
            parts = []
            for stream in (2 * pair, 2 * pair + 1):
                rest = fn_ref[:, pl.ds(pl.multiple_of(stream * dim + q * lanes, _LANES), lanes)]
                for _ in range(3):
                    parts.append(_as_f32(_as_bits(rest) & _HIGH))
                    rest = rest - parts[-1]
            at = pl.ds(pl.multiple_of(pair * dim + q * lanes, _LANES), lanes)
            parts_ref[:, at] = jnp.concatenate(parts, axis=0).astype(jnp.bfloat16)
        return 0

    jax.lax.fori_loop(0, dim // lanes, body, 0)


def _raw_mixes(words, parts_ref, r: int, dim: int, tokens) -> jax.Array:
    """Products of the streams with the mix weights: float32 [mix, tile], 0 behind the tile's `tokens`."""
    mix, tile, pairs = (2 + r) * r, words.shape[1], r // 2
    lanes = _chunk(dim, 512)
    chunks = lanes // _LANES

    def body(q, sums):
        for pair in range(pairs):
            # Row 2t of the matmul operand is token t of the even stream, row 2t + 1 of the odd one.
            x = [pltpu.bitcast(words[(q * chunks + c) * pairs + pair], jnp.bfloat16) for c in range(chunks)]
            w = parts_ref[:, pl.ds(pl.multiple_of(pair * dim + q * lanes, _LANES), lanes)]
            sums += jax.lax.dot_general(
                w, jnp.concatenate(x, axis=1), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
        return sums

    sums = jax.lax.fori_loop(0, dim // lanes, body, jnp.zeros((6 * mix, 2 * tile), jnp.float32))
    even, odd = (
        sums[first : first + mix] + sums[first + mix : first + 2 * mix] + sums[first + 2 * mix : first + 3 * mix]
        for first in (0, 3 * mix)
    )
    lane = jax.lax.broadcasted_iota(jnp.int32, even.shape, 1)
    row = jax.lax.broadcasted_iota(jnp.int32, (2 * tile, tile), 0)
    token = jax.lax.broadcasted_iota(jnp.int32, (2 * tile, tile), 1)
    both = jnp.where(row // 2 == token, 1.0, 0.0)
    return jax.lax.dot_general(
        # What lies behind the last token may be NaN and would reach every sum.
        jnp.where(lane < 2 * tokens, jnp.where(lane % 2 == 0, even, odd), 0), both, (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip


def _coefficients(raw_ref, scale_ref, base_ref, r: int, steps: int, iters: int, eps: float) -> None:
    """Turns raw mixes [(2 + R) * R, steps, tile] into pre, post, comb in place."""

    def sinkhorn_rows(rows):
        def mix(k: int, part: int):
            return raw_ref[k, rows] * scale_ref[part] + base_ref[k]

        for k in range(r):
            raw_ref[k, rows] = jax.nn.sigmoid(mix(k, 0)) + eps
            raw_ref[r + k, rows] = 2 * jax.nn.sigmoid(mix(r + k, 1))
        comb = [[mix(2 * r + r * i + j, 2) for j in range(r)] for i in range(r)]

        def over_targets(comb):
            return [[c * inverse for c in row] for row in comb for inverse in (1 / (sum(row[1:], row[0]) + eps),)]

        def over_sources(comb):
            inverse = [1 / (sum((row[j] for row in comb[1:]), comb[0][j]) + eps) for j in range(r)]
            return [[row[j] * inverse[j] for j in range(r)] for row in comb]

        for i, row in enumerate(comb):
            exps = [jnp.exp(c - functools.reduce(jnp.maximum, row)) for c in row]
            inverse = 1 / sum(exps[1:], exps[0])
            comb[i] = [e * inverse + eps for e in exps]
        comb = jax.lax.fori_loop(0, iters - 1, lambda _, c: over_sources(over_targets(c)), over_sources(comb))
        for i in range(r):
            for j in range(r):
                raw_ref[2 * r + r * i + j, rows] = comb[i][j]

    whole = steps - steps % 8

    def body(g, _):
        sinkhorn_rows(pl.ds(pl.multiple_of(g * 8, 8), 8))
        return 0

    if whole:
        jax.lax.fori_loop(0, whole // 8, body, 0)
    if steps % 8:
        sinkhorn_rows(pl.ds(whole, steps % 8))


def _kernel(
    scale_ref, base_ref, streams_ref, y_ref, coef_ref, fn_ref, gain_ref,
    new_ref, out_ref, raw_ref,
    slots, parts_ref, stream_squares, u_squares, arriving, leaving,
    *, r: int, num_tokens: int, iters: int, norm_eps: float, hc_eps: float, interpret: bool,
):  # fmt: skip
    tile, dim = y_ref.shape
    step, steps = pl.program_id(1), raw_ref.shape[1]
    first = pl.program_id(0) * steps
    tiles = _Tiles(
        _words_of(streams_ref, interpret), _words_of(new_ref, interpret), slots, arriving, leaving, num_tokens
    )
    slot = step % _SLOTS

    @pl.when(step == 0)
    def _():
        tiles.fetch(first, 0)
        _cut_weights(fn_ref, parts_ref, r, dim)

    @pl.when(step + 1 < steps)
    def _():
        following = (step + 1) % _SLOTS

        @pl.when(step + 1 >= _SLOTS)
        def _():
            tiles.wait_put(first + step + 1 - _SLOTS, following)

        tiles.fetch(first + step + 1, following)

    tiles.wait_fetched(first + step, slot)
    words = slots.at[slot]
    _update_and_collapse(words, y_ref, coef_ref, out_ref, stream_squares, u_squares, r)
    tiles.put(first + step, slot)

    raw = _raw_mixes(words, parts_ref, r, dim, num_tokens - (first + step) * tile)
    mean_square = jnp.transpose(stream_squares[...]).sum(axis=0, keepdims=True) / (r * dim)
    raw_ref[:, pl.ds(step, 1)] = (raw * jax.lax.rsqrt(mean_square + norm_eps))[:, None]

    lanes = _chunk(dim, 512)

    def norm_rows(i, _):
        rows = pl.ds(pl.multiple_of(i * _ROWS, _ROWS), _ROWS)
        inverse_rms = jax.lax.rsqrt(u_squares[rows][:, :1] / dim + norm_eps)

        def norm_lanes(q, _):
            at = pl.ds(pl.multiple_of(q * lanes, _LANES), lanes)
            u = out_ref[rows, at].astype(jnp.float32)
            out_ref[rows, at] = (u * inverse_rms * gain_ref[:, at].astype(jnp.float32)).astype(jnp.bfloat16)
            return 0

        return jax.lax.fori_loop(0, dim // lanes, norm_lanes, 0)

    jax.lax.fori_loop(0, tile // _ROWS, norm_rows, 0)

    @pl.when(step == steps - 1)
    def _():
        _coefficients(raw_ref, scale_ref, base_ref, r, steps, iters, hc_eps)
        for back in range(min(_SLOTS, steps)):
            tiles.wait_put(first + steps - 1 - back, (steps - 1 - back) % _SLOTS)


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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """As `ops.residual_step`; `interpret` runs it on any backend, slowly.

    Raises:
      ValueError: `problem` has an answer for these shapes.
    """
    if (why := problem(streams)) is not None:
        raise ValueError(f"residual_step: {why}")
    t, r, dim = streams.shape
    mix = (2 + r) * r
    tile = tile_tokens(t)
    while _vmem_bytes(tile, r, dim) > _VMEM_LIMIT:
        tile -= _ROWS
    tiles = pl.cdiv(t, tile)
    # Chips whose device has two cores give each of them half of the tiles, if the halves are whole registers.
    halves = 2 if tiles % 16 == 0 else 1
    steps = tiles // halves
    stored = _words_outside(streams) if interpret else streams
    coef = jnp.concatenate([post, comb.reshape(t, r * r), pre], axis=1)

    def tile_of(h, s):
        return h * steps + s

    new, x, raw = pl.pallas_call(
        functools.partial(
            _kernel, r=r, num_tokens=t, iters=iters, norm_eps=norm_eps, hc_eps=hc_eps, interpret=interpret
        ),
        name="residual_step",
        grid=(halves, steps),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.HBM),
            pl.BlockSpec((tile, dim), lambda h, s: (tile_of(h, s), 0)),
            pl.BlockSpec((tile, mix), lambda h, s: (tile_of(h, s), 0)),
            pl.BlockSpec((mix, r * dim), lambda h, s: (0, 0)),
            pl.BlockSpec((1, dim), lambda h, s: (0, 0)),
        ],
        out_specs=[
            pl.BlockSpec(memory_space=pltpu.HBM),
            pl.BlockSpec((tile, dim), lambda h, s: (tile_of(h, s), 0)),
            pl.BlockSpec((mix, steps, tile), lambda h, s: (0, h, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(stored.shape, stored.dtype),
            jax.ShapeDtypeStruct((t, dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((mix, tiles, tile), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((_SLOTS, dim // _LANES * r // 2, tile, _LANES), jnp.int32),
            pltpu.VMEM((6 * mix, r // 2 * dim), jnp.bfloat16),
            pltpu.VMEM((tile, _LANES), jnp.float32),
            pltpu.VMEM((tile, _LANES), jnp.float32),
            pltpu.SemaphoreType.DMA((_SLOTS,)),
            pltpu.SemaphoreType.DMA((_SLOTS,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM_LIMIT,
            # They cost more than the copies' issue; every address is a tile's.
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * t * r * dim * (mix + r + 2),
            transcendentals=t * mix,
            bytes_accessed=2 * t * dim * (2 * r + 2) + 4 * mix * (r * dim + 2 * t),
        ),
        interpret=interpret,
    )(scale, base, stored, y, coef, fn, gain.reshape(1, dim))
    made = raw.reshape(mix, tiles * tile)[:, :t].T
    new = _streams_outside(new) if interpret else new
    return new, x, made[:, :r], made[:, r : 2 * r], made[:, 2 * r :].reshape(t, r, r)
