"""The mHC step as one Mosaic TPU kernel: each stream is read once and written once.

A tile of tokens lies in VMEM whole, and is worked on in chunks of lanes (whole rows would not fit the registers):

1. the update of the streams, the collapsed input and the sums of squares;
2. the products with the mix weights. The new streams hold bfloat16 values, so float32 weights cut into three bfloat16
   parts give exact products in one bfloat16 matmul, with float32 sums; the parts are cut once and stay in VMEM;
3. the norm of the collapsed input.

The Sinkhorn rounds of few numbers a token are a long chain of dependent steps, so they wait until the last tile and are
done for all tokens together, with tokens on sublanes and lanes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compat import tpu_interpret_params

_LANES = 128
_ROWS = 16  # tokens whose coefficients are kept in registers
_MAX_TILE = 128
_VMEM_LIMIT = 48 << 20


def tile_tokens(num_tokens: int) -> int:
    """Tokens a grid step: enough steps to overlap copies with arithmetic, few enough to amortise their start."""
    return max(_ROWS, min(_MAX_TILE, pl.cdiv(num_tokens, 4 * _ROWS) * _ROWS))


def _chunk(dim: int, limit: int) -> int:
    """Lanes worked on at a time: the largest multiple of 128 up to `limit` that divides dim."""
    return max(c for c in range(_LANES, limit + 1, _LANES) if dim % c == 0)


def _vmem_bytes(tile: int, num_streams: int, dim: int) -> int:
    """VMEM of the double-buffered blocks and the cut mix weights."""
    mix = (2 + num_streams) * num_streams
    blocks = 2 * tile * (num_streams + 1) * dim * 2 + mix * num_streams * dim * 4 + 2 * tile * _LANES * 4
    return 2 * blocks + (3 * mix + 8) * num_streams * dim * 2


def problem(streams: jax.Array) -> str | None:
    """What keeps the kernel from taking streams of this shape [T, R, D]; None if nothing does."""
    num_tokens, num_streams, dim = streams.shape
    if dim % _LANES:
        return f"the width of a stream must be a multiple of {_LANES}, got {dim}"
    if not 2 <= num_streams <= 8:
        return f"2 to 8 streams are supported, got {num_streams}"
    if num_tokens == 0:
        return "there are no tokens"
    if _vmem_bytes(_ROWS, num_streams, dim) > _VMEM_LIMIT:
        return f"{num_streams} streams of width {dim} do not fit VMEM"
    return None


def _update_and_collapse(refs, r: int, tile: int, dim: int, lanes: int) -> None:
    """Writes the new streams and u; leaves sums of squares of u [tile, 1] and, by lane, of the streams [tile, 128]."""
    x_ref, y_ref, coef_ref, new_ref, u_ref, stream_squares, u_squares = refs

    def rows_body(i, _):
        rows = pl.ds(pl.multiple_of(i * _ROWS, _ROWS), _ROWS)
        coef = coef_ref[rows]
        column = [jax.lax.broadcast_in_dim(coef[:, k], (_ROWS, lanes), (0,)) for k in range((2 + r) * r)]
        post, comb, pre = column[:r], column[r : r + r * r], column[r + r * r :]

        def lanes_body(q, sums):
            at = pl.ds(pl.multiple_of(q * lanes, _LANES), lanes)
            x = [x_ref[rows, k, at].astype(jnp.float32) for k in range(r)]
            y = y_ref[rows, at].astype(jnp.float32)
            u, squares = None, sums[0]
            for j in range(r):
                mixed = comb[j] * x[0]
                for k in range(1, r):
                    mixed = mixed + comb[k * r + j] * x[k]
                new_ref[rows, j, at] = (post[j] * y + mixed).astype(jnp.bfloat16)
                # Read back: the rounding must not be optimised away.
                new = new_ref[rows, j, at].astype(jnp.float32)
                squares = squares + new * new
                u = pre[j] * new if u is None else u + pre[j] * new
            u_ref[rows, at] = u.astype(jnp.bfloat16)
            u = u_ref[rows, at].astype(jnp.float32)
            return squares, sums[1] + u * u

        zero = jnp.zeros((_ROWS, lanes), jnp.float32)
        squares, u_square = jax.lax.fori_loop(0, dim // lanes, lanes_body, (zero, zero))
        stream_squares[rows] = sum(squares[:, c : c + _LANES] for c in range(0, lanes, _LANES))
        u_squares[rows] = jnp.broadcast_to(u_square.sum(axis=1, keepdims=True), (_ROWS, _LANES))
        return 0

    jax.lax.fori_loop(0, tile // _ROWS, rows_body, 0)


def _cut_weights(fn_ref, parts_ref, width: int, lanes: int) -> None:
    """float32 [mix, R * D] -> bfloat16 [3 * mix, R * D] whose three parts add up to it exactly."""

    def body(q, _):
        at = pl.ds(pl.multiple_of(q * lanes, _LANES), lanes)
        rest, parts = fn_ref[:, at], []
        for _ in range(3):
            # Truncated by its bits: a cast forth and back may be taken for the identity.
            bits = jax.lax.bitcast_convert_type(rest, jnp.int32) & jnp.int32(-65536)
            parts.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
            rest = rest - parts[-1]
        parts_ref[:, at] = jnp.concatenate(parts, axis=0).astype(jnp.bfloat16)
        return 0

    jax.lax.fori_loop(0, width // lanes, body, 0)


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
    scale_ref, base_ref, x_ref, y_ref, coef_ref, fn_ref, gain_ref,
    new_ref, out_ref, raw_ref,
    parts_ref, stream_squares, u_squares,
    *, iters: int, norm_eps: float, hc_eps: float,
):  # fmt: skip
    tile, r, dim = x_ref.shape
    mix = (2 + r) * r
    step, steps = pl.program_id(1), raw_ref.shape[1]

    @pl.when(step == 0)
    def _():
        _cut_weights(fn_ref, parts_ref, r * dim, _chunk(dim, 512))

    refs = (x_ref, y_ref, coef_ref, new_ref, out_ref, stream_squares, u_squares)
    _update_and_collapse(refs, r, tile, dim, _LANES)

    lanes = _chunk(dim, 512)

    def mix_body(q, raw):
        for j in range(r):
            w = parts_ref[:, pl.ds(pl.multiple_of(j * dim + q * lanes, _LANES), lanes)]
            x = new_ref[:, j, pl.ds(pl.multiple_of(q * lanes, _LANES), lanes)]
            raw += jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return raw

    raw = jax.lax.fori_loop(0, dim // lanes, mix_body, jnp.zeros((3 * mix, tile), jnp.float32))
    mean_square = jnp.transpose(stream_squares[...]).sum(axis=0, keepdims=True) / (r * dim)
    raw = (raw[:mix] + raw[mix : 2 * mix] + raw[2 * mix :]) * jax.lax.rsqrt(mean_square + norm_eps)
    raw_ref[:, pl.ds(step, 1)] = raw[:, None]

    lanes = _chunk(dim, 256)

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
    coef = jnp.concatenate([post, comb.reshape(t, r * r), pre], axis=1)

    def tile_of(h, s):
        return h * steps + s

    new, x, raw = pl.pallas_call(
        functools.partial(_kernel, iters=iters, norm_eps=norm_eps, hc_eps=hc_eps),
        name="residual_step",
        grid=(halves, steps),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((tile, r, dim), lambda h, s: (tile_of(h, s), 0, 0)),
            pl.BlockSpec((tile, dim), lambda h, s: (tile_of(h, s), 0)),
            pl.BlockSpec((tile, mix), lambda h, s: (tile_of(h, s), 0)),
            pl.BlockSpec((mix, r * dim), lambda h, s: (0, 0)),
            pl.BlockSpec((1, dim), lambda h, s: (0, 0)),
        ],
        out_specs=[
            pl.BlockSpec((tile, r, dim), lambda h, s: (tile_of(h, s), 0, 0)),
            pl.BlockSpec((tile, dim), lambda h, s: (tile_of(h, s), 0)),
            pl.BlockSpec((mix, steps, tile), lambda h, s: (0, h, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((t, r, dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((t, dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((mix, tiles, tile), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((3 * mix, r * dim), jnp.bfloat16),
            pltpu.VMEM((tile, _LANES), jnp.float32),
            pltpu.VMEM((tile, _LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * t * r * dim * (mix + r + 2),
            transcendentals=t * mix,
            bytes_accessed=2 * t * dim * (2 * r + 2) + 4 * mix * (r * dim + 2 * t),
        ),
        interpret=tpu_interpret_params() if interpret else False,
    )(scale, base, streams, y, coef, fn, gain.reshape(1, dim))
    made = raw.reshape(mix, tiles * tile)[:, :t].T
    return new, x, made[:, :r], made[:, r : 2 * r], made[:, 2 * r :].reshape(t, r, r)
