"""Thread-level code of the pass over the streams: what `gpu` runs for every tile. Imported where a kernel is traced.

In shared memory a stream of a tile is [row half][column half][8 rows][64 columns] bfloat16, the 16-byte pieces of a row
exchanged by row number, so that neither copies nor fragments meet in one bank.
"""

import dataclasses

from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils

from pallas_kernels import ptx
from pallas_kernels.hyper_connection.block_sizes import (
    COEF_OFFSET,
    COEF_PITCH,
    COLUMNS,
    LOW_BYTES,
    MIX,
    STAGE_BYTES,
    STAGES,
    STREAM_BYTES,
    STREAMS,
    SUMS,
    TOKENS,
    UNIT_BYTES,
    UNITS,
    WARPS,
    Y_OFFSET,
    Plan,
)

_THREADS = 32 * WARPS  # of a unit
_BLOCKS_OF_8 = MIX // 8  # outputs of one matrix instruction


@dataclasses.dataclass(frozen=True)
class _Thread:
    """Where a thread stands; all i32.

    In copies it owns 16 bytes of every stream: row `copy_row`, piece `copy_piece`. In arithmetic it owns four columns
    of rows `row` and 8 + `row`: lane (g, t) = (lane / 4, lane % 4) has columns 4 t .. 4 t + 3 of its warp's 16. Rows
    are numbered so that the rows of half a warp differ in the bits that exchange pieces.
    """

    unit: ptx.Value
    index: ptx.Value  # in the unit
    warp: ptx.Value  # in the unit
    g: ptx.Value
    t: ptx.Value
    row: ptx.Value
    copy_row: ptx.Value
    copy_piece: ptx.Value

    def copy_offset(self):
        """Of its 16 bytes in a stream of a tile."""
        row8 = ptx.and_(self.copy_row, 7)
        return ptx.add(
            ptx.mul(ptx.shr(self.copy_row, 3), STREAM_BYTES // 2),
            ptx.mul(ptx.shr(self.copy_piece, 3), 1024),
            ptx.mul(row8, 128),
            ptx.mul(ptx.xor(ptx.and_(self.copy_piece, 7), row8), 16),
        )

    def fragment_offset(self):
        """Of its four columns of `row` in a stream of a tile; those of 8 + `row` are half a stream on."""
        piece = ptx.add(ptx.mul(ptx.and_(self.warp, 3), 2), ptx.shr(self.t, 1))
        return ptx.add(
            ptx.mul(ptx.shr(self.warp, 2), 1024),
            ptx.mul(self.row, 128),
            ptx.mul(ptx.xor(piece, self.row), 16),
            ptx.mul(ptx.and_(self.t, 1), 8),
        )


def _thread() -> _Thread:
    thread = utils.thread_idx()
    index = ptx.and_(thread, _THREADS - 1)
    lane = ptx.and_(index, 31)
    g = ptx.shr(lane, 2)
    return _Thread(
        unit=ptx.div(thread, _THREADS),
        index=index,
        warp=ptx.shr(index, 5),
        g=g,
        t=ptx.and_(lane, 3),
        row=ptx.add(ptx.mul(ptx.and_(g, 3), 2), ptx.shr(g, 2)),
        copy_row=ptx.div(index, COLUMNS // 8),
        copy_piece=ptx.rem(index, COLUMNS // 8),
    )


def tiles_of_unit(refs, block, plan: Plan) -> None:
    """All tiles of this thread's unit.

    Args:
      refs: GMEM streams, y, post, comb, pre, fn, new streams, u, sums; SMEM of BLOCK_BYTES.
      block: i32, the thread block.
      plan: see `Plan`.
    """
    streams, y, post, comb, pre, fn, new, u, sums, shared = refs
    at = _thread()
    chunk, group = ptx.rem(block, plan.chunks), ptx.div(block, plan.chunks)
    stride = plan.groups * UNITS
    worker = ptx.add(ptx.mul(at.unit, plan.groups), group)
    count = ptx.div(ptx.sub(ptx.const(plan.tiles + stride - 1), worker), stride)
    low = ptx.shared_address(shared)
    stages = ptx.add(low, LOW_BYTES, ptx.mul(at.unit, UNIT_BYTES))
    partials = ptx.add(stages, STAGES * STAGE_BYTES)
    copier = _Copier(at, plan, stages, chunk, [ptx.global_address(a) for a in (streams, y, post, comb, pre)])
    out = _Out(*(ptx.global_address(a) for a in (new, u, sums)))

    def tile_at(k):
        return ptx.add(worker, ptx.mul(k, stride))

    with ptx.when(ptx.less(worker, plan.tiles)):
        for k in map(ptx.const, range(STAGES - 1)):
            copier.start(tile_at(k), k)
        high, middle = _cut_weights(at, ptx.global_address(fn), low, chunk, plan.dim)

        @utils.fori(count, [])
        def _(k, carry):
            ptx.wait_copies(STAGES - 2)
            # The tile is there for every thread, and every thread is done with the slot that is filled next.
            _sync(at)
            later = ptx.add(k, STAGES - 1)
            copier.start(tile_at(later), later)
            stage = copier.stage(k)
            _compute(at, stage, partials, low, high, middle)
            _sync(at)
            out.write(copier, stage, partials, tile_at(k))
            return carry


def _sync(at: _Thread) -> None:
    ptx.barrier(ptx.add(at.unit, 8), _THREADS)


@dataclasses.dataclass(frozen=True)
class _Copier:
    """Brings tiles of streams, y and coefficients to shared memory; rows past the last token become zero."""

    at: _Thread
    plan: Plan
    stages: ptx.Value
    chunk: ptx.Value
    addresses: list[ptx.Value]  # of streams, y, post, comb, pre

    def stage(self, k):
        """Shared address of the k-th tile of the unit."""
        return ptx.add(self.stages, ptx.mul(ptx.rem(k, STAGES), STAGE_BYTES))

    def column(self):
        """Byte of this thread's piece within a row of D."""
        return ptx.add(ptx.mul(self.chunk, COLUMNS * 2), ptx.mul(self.at.copy_piece, 16))

    def token(self, tile):
        return ptx.add(ptx.mul(tile, TOKENS), self.at.copy_row)

    def start(self, tile, k) -> None:
        """Starts copies of a tile as the unit's k-th and closes their group, which is empty past the last tile."""
        streams, y, post, comb, pre = self.addresses
        at, plan = self.at, self.plan
        with ptx.when(ptx.less(tile, plan.tiles)):
            token = self.token(tile)
            size = arith.select(ptx.less(token, plan.num_tokens), ptx.const(16), ptx.const(0))
            stage = self.stage(k)
            to = ptx.add(stage, at.copy_offset())
            source = ptx.offset(ptx.row_address(streams, token, STREAMS * plan.dim * 2), self.column())
            for s in range(STREAMS):
                self._copy(to, source, size, s * STREAM_BYTES, s * plan.dim * 2)
            source = ptx.offset(ptx.row_address(y, token, plan.dim * 2), self.column())
            self._copy(to, source, size, Y_OFFSET)
            piece = at.copy_piece
            with ptx.when(ptx.less(piece, STREAMS + 2)):
                source = ptx.offset(ptx.row_address(comb, token, STREAMS * STREAMS * 4), ptx.mul(piece, 16))
                is_post = arith.cmpi(arith.CmpIPredicate.eq, piece, ptx.const(STREAMS))
                other = arith.select(is_post, post, pre)
                other = ptx.row_address(other, token, STREAMS * 4)
                source = arith.select(ptx.less(piece, STREAMS), source, other)
                to = ptx.add(stage, COEF_OFFSET, ptx.mul(at.copy_row, COEF_PITCH), ptx.mul(piece, 16))
                self._copy(to, source, size)
        ptx.commit_copies()

    @staticmethod
    def _copy(to, source, size, to_displacement: int = 0, displacement: int = 0) -> None:
        if displacement:
            source = ptx.offset(source, ptx.const(displacement))
        ptx.copy_16_bytes_async(to, source, size, to_displacement)


def _cut_weights(at: _Thread, fn, low, chunk, dim: int):
    """Cuts this thread's weights into bfloat16 parts that add up to them.

    Returns:
      the high and the middle parts: two words by (stream, block of 8 outputs); the low parts lie in shared memory.
    """
    column = ptx.add(ptx.mul(chunk, COLUMNS), ptx.mul(at.warp, 16), ptx.mul(at.t, 4))
    mine = ptx.offset(ptx.row_address(fn, at.g, STREAMS * dim * 4), ptx.mul(column, 4))
    high, middle = {}, {}
    for s in range(STREAMS):
        for block in range(_BLOCKS_OF_8):
            words = ptx.load_16_bytes(ptx.offset(mine, ptx.const((block * 8 * STREAMS + s) * dim * 4)))
            rest = [ptx.as_f32(w) for w in words]
            parts = []
            for _ in range(3):
                pairs = [ptx.pack_bf16(*rest[:2]), ptx.pack_bf16(*rest[2:])]
                parts.append(pairs)
                cut = [*ptx.unpack_bf16(pairs[0]), *ptx.unpack_bf16(pairs[1])]
                rest = [ptx.sub_f32(a, b) for a, b in zip(rest, cut, strict=True)]
            high[s, block], middle[s, block], lowest = parts
            ptx.store_shared(_low_address(at, low), *lowest, displacement=_low_displacement(s, block))
    return high, middle


def _low_address(at: _Thread, low):
    """Of this thread's low parts; a stream's block of outputs lies `_low_displacement` bytes on."""
    return ptx.add(low, ptx.mul(ptx.add(ptx.mul(at.warp, STREAMS * _BLOCKS_OF_8 * 32), _lane(at)), 8))


def _low_displacement(stream: int, block: int) -> int:
    return (stream * _BLOCKS_OF_8 + block) * 32 * 8


def _lane(at: _Thread):
    return ptx.add(ptx.mul(at.g, 4), at.t)


def _compute(at: _Thread, stage, partials, low, high, middle) -> None:
    """Updates the tile in place, leaves u in y's place, and this warp's sums in `partials`."""
    mine = ptx.add(stage, at.fragment_offset())
    rows = [_update_row(at, stage, mine, half) for half in range(2)]
    acc = [[ptx.const_f32(0.0)] * 4 for _ in range(_BLOCKS_OF_8)]
    low = _low_address(at, low)

    def low_part(place):
        return ptx.load_shared(low, _low_displacement(*place), words=2)

    # Small parts first: what they leave is not lost beside the large ones.
    for part in (low_part, middle.get, high.get):
        for s in range(STREAMS):
            (first, second), (first8, second8) = rows[0].words[s], rows[1].words[s]
            for block in range(_BLOCKS_OF_8):
                acc[block] = ptx.mma_bf16(acc[block], [first, first8, second, second8], part((s, block)))

    to = ptx.add(partials, ptx.mul(at.warp, SUMS * 4))
    mixes = ptx.add(to, ptx.mul(at.g, MIX * 4), ptx.mul(at.t, 8))
    for block in range(_BLOCKS_OF_8):
        ptx.store_shared(mixes, *acc[block][:2], displacement=block * 32)
        ptx.store_shared(mixes, *acc[block][2:], displacement=block * 32 + 8 * MIX * 4)
    # Squares of four lanes; lane t keeps the t-th of (row: streams, u; 8 + row: streams, u).
    squares = [x for row in rows for x in row.squares]
    for mask in (1, 2):
        squares = [ptx.add_f32(x, ptx.shuffle_xor(x, mask)) for x in squares]
    kept = squares[3]
    for i in range(3):
        kept = arith.select(arith.cmpi(arith.CmpIPredicate.eq, at.t, ptx.const(i)), squares[i], kept)
    row = ptx.add(at.g, ptx.mul(ptx.shr(at.t, 1), 8))
    ptx.store_shared(ptx.add(to, ptx.mul(row, 8), ptx.mul(ptx.and_(at.t, 1), 4)), kept, displacement=TOKENS * MIX * 4)


@dataclasses.dataclass(frozen=True)
class _Row:
    words: list[list[ptx.Value]]  # [stream][2] the new streams' bfloat16 pairs
    squares: tuple[ptx.Value, ptx.Value]  # sums over the thread's columns: of the new streams, of u


def _update_row(at: _Thread, stage, mine, half: int) -> _Row:
    """Four columns of one token: new streams and u, in registers and in place."""
    coef = ptx.add(stage, COEF_OFFSET + half * 8 * COEF_PITCH, ptx.mul(at.row, COEF_PITCH))
    down = half * STREAM_BYTES // 2

    def load(displacement):
        a, b = ptx.load_shared(mine, displacement + down, words=2)
        return [*ptx.unpack_bf16(a), *ptx.unpack_bf16(b)]

    # In the order in which XLA contracts the reference's products and sums for few tokens: source 1 rounded, then 0, 2,
    # 3, then y. For many it contracts others; the last bit of about one in 25,000 new streams differs then.
    mixed = None
    for i in (1, 0, 2, 3):
        x = load(i * STREAM_BYTES)
        to_targets = ptx.load_shared(coef, i * 16, words=4, type=ptx.f32())
        if mixed is None:
            mixed = [[ptx.mul_f32(c, v) for v in x] for c in to_targets]
        else:
            mixed = [[ptx.fma(c, v, m) for v, m in zip(x, mixed[j], strict=True)] for j, c in enumerate(to_targets)]
    y = load(Y_OFFSET)
    post = ptx.load_shared(coef, STREAMS * 16, words=4, type=ptx.f32())
    pre = ptx.load_shared(coef, STREAMS * 16 + 16, words=4, type=ptx.f32())
    words, square, new = [], None, []
    for j in range(STREAMS):
        out = [ptx.fma(post[j], v, m) for v, m in zip(y, mixed[j], strict=True)]
        words.append([ptx.pack_bf16(*out[:2]), ptx.pack_bf16(*out[2:])])
        ptx.store_shared(mine, *words[j], displacement=j * STREAM_BYTES + down)
        new.append([*ptx.unpack_bf16(words[j][0]), *ptx.unpack_bf16(words[j][1])])
        for v in new[j]:
            square = ptx.mul_f32(v, v) if square is None else ptx.fma(v, v, square)
    u = [ptx.mul_f32(v, pre[1]) for v in new[1]]
    for k in (0, 2, 3):
        u = [ptx.fma(v, pre[k], a) for v, a in zip(new[k], u, strict=True)]
    u_words = [ptx.pack_bf16(*u[:2]), ptx.pack_bf16(*u[2:])]
    ptx.store_shared(mine, *u_words, displacement=Y_OFFSET + down)
    u_square = None
    for v in [*ptx.unpack_bf16(u_words[0]), *ptx.unpack_bf16(u_words[1])]:
        u_square = ptx.mul_f32(v, v) if u_square is None else ptx.fma(v, v, u_square)
    return _Row(words, (square, u_square))


@dataclasses.dataclass(frozen=True)
class _Out:
    """GMEM addresses of new streams, u and sums."""

    new: ptx.Value
    u: ptx.Value
    sums: ptx.Value

    def write(self, copier: _Copier, stage, partials, tile) -> None:
        """Writes a tile that lies in shared memory, and its sums over the unit's warps, added in their order."""
        at, plan = copier.at, copier.plan
        token = copier.token(tile)
        with ptx.when(ptx.less(token, plan.num_tokens)):
            source = ptx.add(stage, at.copy_offset())
            to = ptx.offset(ptx.row_address(self.new, token, STREAMS * plan.dim * 2), copier.column())
            for s in range(STREAMS):
                words = ptx.load_shared(source, s * STREAM_BYTES, words=4)
                ptx.store_global(ptx.offset(to, ptx.const(s * plan.dim * 2)), *words)
            to = ptx.offset(ptx.row_address(self.u, token, plan.dim * 2), copier.column())
            ptx.store_global(to, *ptx.load_shared(source, Y_OFFSET, words=4))

        to = ptx.row_address(self.sums, ptx.add(ptx.mul(tile, plan.chunks), copier.chunk), SUMS * 4)
        self._add_warps(at.index, partials, to)
        with ptx.when(ptx.less(at.index, SUMS - _THREADS)):
            self._add_warps(ptx.add(at.index, _THREADS), partials, to)

    @staticmethod
    def _add_warps(word, partials, to) -> None:
        source = ptx.add(partials, ptx.mul(word, 4))
        parts = [ptx.load_shared(source, w * SUMS * 4, type=ptx.f32()) for w in range(WARPS)]
        total = parts[0]
        for part in parts[1:]:
            total = ptx.add_f32(total, part)
        ptx.store_global(ptx.offset(to, ptx.mul(word, 4)), total)
