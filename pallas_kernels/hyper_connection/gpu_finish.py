"""Thread-level code of the end of the GPU mHC step: sums, norm and Sinkhorn. Imported where a kernel is traced."""

import functools
import math

from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils

from pallas_kernels import ptx
from pallas_kernels.hyper_connection.block_sizes import MIX, STREAMS, SUMS, TOKENS, Plan

_THREADS = 128  # of a warpgroup
_WARPS = 4
_PITCH = 28  # words of a token's sums of a quarter of the chunks: the mixes, then squares of the streams and of u
_LOG2E = math.log2(math.e)


_TOKEN_BYTES = _WARPS * _PITCH * 4


def shared_bytes(tokens: int) -> int:
    """For `tokens` tokens a block."""
    return tokens * _TOKEN_BYTES


def finish_block(refs, block, plan: Plan, *, iters: int, norm_eps: float, hc_eps: float) -> None:
    """x in place of u, and the coefficients, of a block's tokens.

    Args:
      refs: GMEM sums, scale, base, gain, x, which holds u, pre, post, comb; SMEM of `shared_bytes(plan.finish_tokens)`.
      block: i32. The first block takes the last tokens, whose u is more likely to be in the cache.
      plan: see `Plan`.
      iters, norm_eps, hc_eps: as in `ops.residual_step`.
    """
    sums, scale, base, gain, x, pre, post, comb = (ptx.global_address(r) for r in refs[:-1])
    shared = ptx.shared_address(refs[-1])
    tokens, num_tokens, dim = plan.finish_tokens, plan.num_tokens, plan.dim
    thread = utils.thread_idx()
    first = ptx.mul(ptx.sub(ptx.const(plan.finish_blocks - 1), block), tokens)
    rows = _Rows(thread, x, dim, num_tokens)
    words = rows.load(first)
    gains = rows.load_gains(gain)
    _add_chunks(thread, sums, shared, first, plan)
    utils.warpgroup_barrier()

    def normalise(i, words) -> None:
        token = ptx.add(first, i)
        square = _total(ptx.add(shared, ptx.mul(i, _TOKEN_BYTES)), (MIX + 1) * 4)
        with ptx.when(ptx.less(token, num_tokens)):
            rows.normalise(token, words, gains, _inverse_rms(square, dim, norm_eps))

    @utils.fori(ptx.const(tokens - 1), [w for piece in words for w in piece])
    def others(i, words):
        ahead = rows.load(ptx.add(first, i, 1))
        normalise(i, [words[p : p + 4] for p in range(0, len(words), 4)])
        return [w for piece in ahead for w in piece]

    normalise(ptx.const(tokens - 1), [list(others.results)[p : p + 4] for p in range(0, 4 * len(words), 4)])
    token = ptx.add(first, thread)
    with ptx.when(arith.andi(ptx.less(thread, tokens), ptx.less(token, num_tokens))):
        quarters = ptx.add(shared, ptx.mul(thread, _TOKEN_BYTES))
        inverse = _inverse_rms(_total(quarters, MIX * 4), STREAMS * dim, norm_eps)
        mixes = [ptx.mul_f32(m, inverse) for m in _mixes(quarters)]
        _coefficients(mixes, scale, base, (pre, post, comb), token, iters, hc_eps)


def _unary(instruction: str, x):
    return ptx.asm(f"{instruction} $0, $1;", x, type=ptx.f32())


def _inverse_rms(square, count: int, eps: float):
    mean = ptx.asm("div.rn.f32 $0, $1, $2;", square, ptx.const_f32(count), type=ptx.f32())
    return _unary("rsqrt.approx.f32", ptx.add_f32(mean, ptx.const_f32(eps)))


def _add_chunks(thread, sums, shared, first, plan: Plan) -> None:
    """Adds the sums of the chunks in four quarters, chunk c in quarter c mod 4, however many tokens a block has."""
    tokens, num_tokens, chunks = plan.finish_tokens, plan.num_tokens, plan.chunks
    warp, lane = ptx.shr(thread, 5), ptx.and_(thread, 31)

    def add(index, quarter_of):
        """One token of the block; `quarter_of` are the quarters that this warp adds."""
        token = ptx.add(first, index)
        row = ptx.and_(token, TOKENS - 1)
        # rows of a tile in the order of `gpu_tiles`: row g of eight holds token 2 (g mod 4) + g / 4
        row = ptx.add(ptx.and_(row, 8), ptx.shr(ptx.and_(row, 7), 1), ptx.mul(ptx.and_(row, 1), 4))
        square = ptx.add(ptx.mul(row, 2), TOKENS * MIX - MIX, lane)
        word = arith.select(ptx.less(lane, MIX), ptx.add(ptx.mul(row, MIX), lane), square)
        tile = ptx.shr(token, 4)
        source = ptx.row_address(sums, ptx.mul(tile, chunks), SUMS * 4)
        source = ptx.offset(source, ptx.mul(word, 4))
        to = ptx.add(shared, ptx.mul(index, _TOKEN_BYTES), ptx.mul(lane, 4))
        with ptx.when(arith.andi(ptx.less(lane, MIX + 2), ptx.less(token, num_tokens))):
            quarter_of(source, to)

    def quarter(source, to, start, last: int) -> None:
        """Chunks start, start + 4, ...; those past the end add nothing."""
        total = ptx.const_f32(0.0)
        for c in range(0, last, _WARPS):
            at = start if c == 0 else ptx.add(start, c)
            inside = ptx.less(at, chunks)
            at = ptx.offset(source, ptx.mul(arith.select(inside, at, ptx.const(0)), SUMS * 4))
            part = ptx.as_f32(ptx.load_word(at))
            total = ptx.add_f32(total, arith.select(inside, part, ptx.const_f32(0.0)))
        ptx.store_shared(ptx.add(to, ptx.mul(start, _PITCH * 4)), total)

    if tokens == 1:
        add(ptx.const(0), lambda source, to: quarter(source, to, warp, chunks))
        return

    @utils.fori(ptx.const(tokens // _WARPS), [])
    def _(i, carry):
        def all_quarters(source, to):
            for q in range(_WARPS):
                quarter(source, to, ptx.const(q), chunks)

        add(ptx.add(ptx.mul(i, _WARPS), warp), all_quarters)
        return carry


def _sum_quarters(parts):
    return ptx.add_f32(ptx.add_f32(parts[0], parts[1]), ptx.add_f32(parts[2], parts[3]))


def _total(quarters, displacement: int):
    parts = [ptx.load_shared(quarters, q * _PITCH * 4 + displacement, type=ptx.f32()) for q in range(_WARPS)]
    return _sum_quarters(parts)


def _mixes(quarters):
    out = []
    for w in range(0, MIX, 4):
        parts = [ptx.load_shared(quarters, (q * _PITCH + w) * 4, words=4, type=ptx.f32()) for q in range(_WARPS)]
        out += [_sum_quarters(p) for p in zip(*parts, strict=True)]
    return out


class _Rows:
    """Rows of x, before they are normalised u; a thread has the 16-byte pieces `_THREADS` apart from its number on."""

    def __init__(self, thread, x, dim: int, num_tokens: int):
        self.thread, self.x, self.dim, self.num_tokens = thread, x, dim, num_tokens
        self.pieces = dim // 8
        self.count = -(-self.pieces // _THREADS)

    def _bytes(self, i: int):
        """Of the i-th piece in its row; that of the last piece where there is none."""
        piece = ptx.add(self.thread, i * _THREADS)
        return ptx.mul(arith.minsi(piece, ptx.const(self.pieces - 1)), 16)

    def load_gains(self, gain):
        """Four words a piece."""
        return [ptx.load_16_bytes(ptx.offset(gain, self._bytes(i))) for i in range(self.count)]

    def load(self, token):
        """Four words a piece of u."""
        row = ptx.row_address(self.x, arith.minsi(token, ptx.const(self.num_tokens - 1)), self.dim * 2)
        return [ptx.load_global(ptx.offset(row, self._bytes(i)), words=4) for i in range(self.count)]

    def normalise(self, token, words, gains, inverse) -> None:
        row = ptx.row_address(self.x, token, self.dim * 2)
        for i, (piece, gain) in enumerate(zip(words, gains, strict=True)):
            out = []
            for word, g in zip(piece, gain, strict=True):
                pair = zip(ptx.unpack_bf16(word), ptx.unpack_bf16(g), strict=True)
                out.append(ptx.pack_bf16(*(ptx.mul_f32(ptx.mul_f32(v, inverse), w) for v, w in pair)))
            to = ptx.offset(row, self._bytes(i))
            if (i + 1) * _THREADS <= self.pieces:
                ptx.store_global(to, *out)
            else:
                with ptx.when(ptx.less(self.thread, self.pieces - i * _THREADS)):
                    ptx.store_global(to, *out)


def _exp(x):
    return _unary("ex2.approx.f32", ptx.mul_f32(x, ptx.const_f32(_LOG2E)))


def _inverse(x):
    return _unary("rcp.approx.ftz.f32", x)


def _plus(terms):
    return functools.reduce(ptx.add_f32, terms)


def _coefficients(mixes, scale, base, outs, token, iters: int, eps: float) -> None:
    """`ref.split_mix` of one token, written to rows `token` of outs (pre, post, comb)."""
    r = STREAMS
    words = [ptx.as_f32(w) for i in range(0, MIX, 4) for w in ptx.load_16_bytes(base, i * 4)]
    factors = [ptx.as_f32(ptx.load_word(scale, 4 * i)) for i in range(3)]
    logits = [ptx.fma(m, factors[min(i // r, 2)], b) for i, (m, b) in enumerate(zip(mixes, words, strict=True))]
    one, eps = ptx.const_f32(1.0), ptx.const_f32(eps)

    def sigmoid(x):
        return _inverse(ptx.add_f32(one, _exp(arith.negf(x))))

    pre, post, comb = outs
    row = ptx.row_address(pre, token, r * 4)
    ptx.store_global(row, *(ptx.add_f32(sigmoid(x), eps) for x in logits[:r]))
    row = ptx.row_address(post, token, r * 4)
    ptx.store_global(row, *(ptx.add_f32(s, s) for s in map(sigmoid, logits[r : 2 * r])))

    # comb = by_row[i] * k[i][j] * by_column[j]: the rounds change the factors only.
    k = []
    for i in range(r):
        row = logits[(2 + i) * r : (3 + i) * r]
        most = functools.reduce(arith.maximumf, row)
        exps = [_exp(ptx.sub_f32(x, most)) for x in row]
        inverse = _inverse(_plus(exps))
        k.append([ptx.fma(e, inverse, eps) for e in exps])
    by_row = [one] * r
    by_column = [_inverse(ptx.add_f32(_plus([k[i][j] for i in range(r)]), eps)) for j in range(r)]

    def weighted(values, weights):
        total = ptx.mul_f32(values[0], weights[0])
        for v, w in zip(values[1:], weights[1:], strict=True):
            total = ptx.fma(v, w, total)
        return total

    def rescaled(factors, sums):
        """factor / (factor * sum + eps)"""
        return [ptx.mul_f32(f, _inverse(ptx.fma(f, s, eps))) for f, s in zip(factors, sums, strict=True)]

    @utils.fori(ptx.const(iters - 1), [by_row, by_column])
    def rounds(_, factors):
        by_row, by_column = factors
        by_row = rescaled(by_row, [weighted(k[i], by_column) for i in range(r)])
        by_column = rescaled(by_column, [weighted([k[i][j] for i in range(r)], by_row) for j in range(r)])
        return [by_row, by_column]

    by_row, by_column = rounds.results
    row = ptx.row_address(comb, token, r * r * 4)
    for i in range(r):
        values = [ptx.mul_f32(ptx.mul_f32(k[i][j], by_row[i]), by_column[j]) for j in range(r)]
        ptx.store_global(row, *values, displacement=i * r * 4)
