"""Device arithmetic of the index score on Hopper, the same for every kernel that scores a (query, entry) pair.

MXFP4 codes are exact E4M3 values, and the products of one scale group (32 channels, one FP8 `wgmma` step) add up
exactly in the tensor core. So a dot product is the sum of its groups' exact dots times powers of two, in float32, group
0 first; no other order of summation occurs, whatever the tile shapes. The heads' terms are summed by `mma` with ones.

Keys stay in registers as the A operand, 16 rows (entries) a warp; the 32 heads of a query are the columns of B:

| operand | rows | columns |
|---|---|---|
| A, keys x 2^-6 | entries, in any assignment | channels, permuted as `group_bytes` says |
| B, queries x 2^6 | heads, padded with zeros to 32 | the same channels |

A query's scales: the four groups of a head are shifted against the head's largest scale, which fits E4M3 exactly while
they are at most 2^14 apart; that largest scale multiplies the head's weight, because rounding to bfloat16 and ReLU
commute with powers of two. A query with a wider head ("wide") takes a slower path that scales every group's dot.
Key scale bytes of 0 (2^-127, which the quantiser never writes) count as 0, those of 255 (NaN) hide the entry.
"""

import dataclasses
from typing import Any

from jax.experimental.mosaic.gpu import utils

from pallas_kernels import ptx
from pallas_kernels.simt import Flag, Simt, Word

HEADS = 32  # of a query, as columns of a product
GROUP = 32  # channels with one scale
# Offsets in a query's parameters: weights, column scales of the wide path, whether it is wide (a word a warp), visible.
WEIGHTS, COLUMN_SCALES, WIDE, VISIBLE = 0, 64, 576, 592
_MOST_SHIFT = 14
# E4M3 codes of the eight E2M1 magnitudes x 2^6.
_MAGNITUDES = (0x6C686000, 0x7C787470)
_ONES = 0x3F803F80


@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries in global memory: q_values u8 [Q, N, C/2], q_scales u8 [Q, N, C/32], weights bf16 [Q, N], visible [Q]."""

    values: Any
    scales: Any
    weights: Any
    visible: Any
    heads: int
    width: int


class Program(Simt):
    """Builds a block's program; adds what the copies and products need."""

    def shared_to_async(self) -> None:
        """The thread's stores to shared memory before this are seen by wgmma after the next barrier."""
        utils.inline_ptx("fence.proxy.async.shared::cta;")

    def copy_16_bytes(self, shared: Word, source: Any, displacement: int) -> None:
        """cp.async from global (i64 address) to shared memory, both displaced."""
        text = f"cp.async.cg.shared.global.L2::128B [$0+{displacement}], [$1+{displacement}], 16;"
        utils.inline_ptx(text, shared.value, source)

    def load_matrices_transposed(self, address: Word, displacement: int) -> list[Word]:
        """ldmatrix.x4.trans; lane 8 i + j has the address of row j of the 8 x 8 matrix i of 16-bit elements."""
        text = f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$0,$1,$2,$3}}, [$4+{displacement}];"
        out = utils.inline_ptx(
            text, address.value, result_types=(ptx.i32(),) * 4, has_side_effects=True, convergent=True
        )
        return [Word(x) for x in out]

    def store_4(self, row: Any, offset: Word, values: list[Word]) -> None:
        """Four words to global memory at a 16-byte boundary."""
        ptx.store_words(ptx.offset(row, offset.value), [x.value for x in values])

    def store_2(self, row: Any, offset: Word, values: list[Word]) -> None:
        """Two words to global memory at an 8-byte boundary."""
        ptx.store_words(ptx.offset(row, offset.value), [x.value for x in values])


class Lane:
    """Where a thread stands in its warpgroup: warp 0..3, row 0..7 and quad 0..3 of the fragments of `mma`."""

    def __init__(self, s: Simt):
        self.thread = s.thread() & 127
        self.lane = self.thread & 31
        self.warp = self.thread >> 5
        self.row = self.lane >> 2
        self.quad = self.lane & 3


def permute(a: Word, b: Word, selector: int) -> Word:
    """Bytes of two words, the lowest nibble of the selector for the lowest byte."""
    return Word(ptx.asm(f"prmt.b32 $0, $1, $2, {selector};", a.value, b.value))


def _lookup(codes: Word, table: tuple[Word, Word]) -> Word:
    """Four table bytes for the magnitudes in the low four nibbles."""
    return Word(ptx.asm("prmt.b32 $0, $1, $2, $3;", table[0].value, table[1].value, (codes & 0x7777).value))


def group_bytes(quad: int) -> tuple[int, ...]:
    """Byte rows (of the 16 of a group) that a lane with this `quad` holds, in the order of the operand's channels."""
    return (2 * quad, 2 * quad + 1, 8 + 2 * quad, 9 + 2 * quad)


def expand(word: Word) -> tuple[Word, Word]:
    """Four bytes of E2M1 pairs -> E4M3 x 2^-6 of their low and of their high nibbles."""
    low = ((word << 2) & 0x1C1C1C1C) | ((word << 4) & 0x80808080)
    high = ((word >> 2) & 0x1C1C1C1C) | (word & 0x80808080)
    return low, high


def _shifted_table(s: Program, shift: Word) -> tuple[Word, Word]:
    """The magnitudes x 2^(6 - shift) as E4M3 codes."""
    scale = ptx.as_f32(((s.const(133) - shift) << 23).value)
    values = [ptx.mul_f32(ptx.const_f32(x), scale) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    halves = []
    for i in (0, 4):
        text = (
            "{.reg .b16 a,b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
            " mov.b32 $0, {a,b};}"
        )
        halves.append(Word(ptx.asm(text, *values[i : i + 4])))
    return halves[0], halves[1]


def prepare_query(s: Program, queries: Queries, query: Word, codes: Word, parameters: Word) -> None:
    """A warpgroup writes one query's operand and parameters to shared memory; a thread has one group of one head."""
    lane = Lane(s)
    head, group = lane.thread >> 2, lane.thread & 3
    num_groups = queries.width // GROUP
    used = (head < queries.heads) & (group < num_groups)
    row = s.select(used, query * queries.heads + head, 0)
    column = s.select(used, group, 0)
    base = s.row(queries.values, row, queries.width // 2)
    words = [s.select(used, x, 0) for x in s.load_4(base, column << 4)]
    scale_row = s.row(queries.scales, row, num_groups)
    exponent = s.select(used, Word(ptx.load_u8(ptx.offset(scale_row, column.value))), 0)
    weight = s.load_u16(s.row(queries.weights, row, 2), s.const(0))
    weight = s.select(used, weight << 16, 0)

    counts = (((words[0] | words[1] | words[2] | words[3]) & 0x77777777) != 0) | (exponent == 255)
    counted = s.select(counts, exponent, 0)
    largest = counted
    for mask in (1, 2):
        largest = s.max(largest, exchange(largest, mask))
    shift = s.select(counts, largest - counted, 0)
    wide = (shift > _MOST_SHIFT) & (largest != 255)
    any_wide = s.select(wide, 1, 0)
    for mask in (1, 2):
        any_wide = any_wide | exchange(any_wide, mask)
    wide_head = any_wide != 0
    table = _shifted_table(s, s.select(wide_head, 0, s.min(shift, 63)))

    low, high = [], []
    for quad in range(4):
        word = permute(words[quad // 2], words[2 + quad // 2], 0x7632 if quad % 2 else 0x5410)
        pairs = _lookup(word, table), _lookup(word >> 16, table)
        low.append(permute(*pairs, 0x6420) | ((word << 4) & 0x80808080))
        high.append(permute(*pairs, 0x7531) | (word & 0x80808080))
    line = codes + (head << 7)
    for part, values in enumerate((low, high)):
        chunk = ((group << 1) + part) ^ (head & 7)
        s.store_shared_4(line + (chunk << 4), values)

    # Columns of a quad: 8 i + 2 quad + {0, 1}, i = 0..3.
    quad, i = (head & 7) >> 1, head >> 3
    factor = s.select(wide_head, _power_of_two(s, exponent), 0x3F800000)
    address = parameters + COLUMN_SCALES + (group << 7) + ((i >> 1) << 6) + (quad << 4) + ((i & 1) << 3)
    s.store_shared(address + ((head & 1) << 2), factor)
    scaled = ptx.mul_f32(ptx.as_f32(weight.value), ptx.as_f32(_power_of_two(s, largest).value))
    rounded = Word(ptx.pack_bf16(scaled, scaled))
    rounded = s.select(wide_head, weight >> 16, rounded & 0xFFFF)
    with s.when(group == 0):
        s.store_shared_u16(parameters + WEIGHTS + (quad << 4) + (i << 2) + ((head & 1) << 1), rounded)
    warp_wide = s.ballot(wide_head)
    with s.when(lane.lane == 0):
        s.store_shared(parameters + WIDE + (lane.warp << 2), warp_wide)
    with s.when(lane.thread == 0):
        visible = s.load(s.row(queries.visible, query, 4), s.const(0))
        s.store_shared(parameters + VISIBLE, visible)


def exchange(x: Word, mask: int) -> Word:
    """The word of the lane whose number differs in these bits."""
    return Word(ptx.as_i32(ptx.shuffle_xor(x.value, mask)))


def _power_of_two(s: Program, exponent: Word) -> Word:
    """float32 bits of an E8M0 byte."""
    bits = s.max(exponent << 23, 0x00400000)
    return s.select(exponent == 255, 0x7FC00000, bits)


def row_scales(s: Program, packed: list[Word], byte: int) -> list[Word]:
    """float32 scales of an entry, whose E8M0 bytes are byte number `byte` of a word a group."""
    zero = s.const(0)
    return [permute(x, zero, 0x0444 | byte << 12) >> 1 for x in packed]


def nan_bytes(packed: list[Word]) -> Word:
    """Bit 7 of each byte that is 255 in any of the words; the other bits are 0."""
    found = None
    for x in packed:
        here = ((x & 0x7F7F7F7F) + 0x01010101) & x & 0x80808080
        found = here if found is None else found | here
    return found


def descriptor(s: Program, codes: Word) -> Any:
    """wgmma descriptor of a query's codes: rows of 128 bytes, K-major, 128-byte swizzle."""
    low = ((codes >> 4) & 0x3FFF) | (1 << 16)
    high = s.const(64 | 1 << 30)
    return ptx.asm("mov.b64 $0, {$1,$2};", low.value, high.value, type=ptx.i64())


def group_dots(a: list[list[Word]], b: Any) -> list[list[Any]]:
    """Exact dots of 64 entries with 32 heads, one list of 16 float32 a group.

    a: for each group the four registers of the operand; b: the descriptor. Waits for the result.
    """
    groups = len(a)
    lines = ["{.reg .pred p; .reg .b64 d;", "setp.ne.b32 p, 0, 0;", "wgmma.fence.sync.aligned;"]
    for g in range(groups):
        acc = ",".join(f"${16 * g + i}" for i in range(16))
        regs = ",".join(f"${16 * groups + 4 * g + i}" for i in range(4))
        lines.append(f"add.s64 d, ${20 * groups}, {2 * g};")
        lines.append(f"wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {{{acc}}}, {{{regs}}}, d, p, 1, 1;")
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
    operands = [x.value for regs in a for x in regs]
    out = _convergent("\n".join(lines), *operands, b, results=16 * groups)
    return [out[16 * g : 16 * g + 16] for g in range(groups)]


def _convergent(text: str, *operands: Any, results: int) -> list[Any]:
    types = (ptx.f32(),) * results
    return list(utils.inline_ptx(text, *operands, result_types=types, has_side_effects=True, convergent=True))


def scores(
    s: Program, dots: list[list[Any]], rows: list[list[Word]], weights: list[Word], columns: list[list[Any]] | None
) -> tuple[Any, Any]:
    """Scores of a thread's two entries (rows `row` and `row + 8` of its warp), float32 not yet rounded.

    dots: of `group_dots`; rows: for both entries the scales of their groups; weights: four pairs of bfloat16; columns:
    for the wide path, for each group the scales of the thread's eight heads.
    """
    scaled = []
    for i in range(16):
        total = None
        for g, dot in enumerate(dots):
            x = dot[i] if columns is None else ptx.mul_f32(dot[i], columns[g][i // 4 * 2 + i % 2])
            scale = ptx.as_f32(rows[i // 2 % 2][g].value)
            total = ptx.mul_f32(x, scale) if total is None else ptx.fma(x, scale, total)
        scaled.append(total)
    terms = []
    for k in range(4):
        for half in (0, 2):
            low, high = scaled[4 * k + half], scaled[4 * k + half + 1]
            text = "{.reg .b32 t; cvt.rn.relu.bf16x2.f32 t, $2, $1; mul.rn.bf16x2 $0, t, $3;}"
            terms.append(ptx.asm(text, low, high, weights[k].value))
    ones = [s.const(_ONES).value] * 2
    acc = [ptx.const_f32(0.0)] * 4
    for half in (0, 4):
        acc = ptx.mma_bf16(acc, terms[half : half + 4], ones)
    return acc[0], acc[2]


@dataclasses.dataclass(frozen=True)
class Parameters:
    """A prepared query's parameters in a thread's registers."""

    weights: list[Word]
    wide: Flag
    visible: Word


def load_parameters(s: Program, lane: Lane, parameters: Word) -> Parameters:
    flags = s.load_shared_4(parameters, WIDE)
    wide = (flags[0] | flags[1] | flags[2] | flags[3]) != 0
    weights = s.load_shared_4(parameters + (lane.quad << 4), WEIGHTS)
    return Parameters(weights, wide, s.load_shared(parameters, VISIBLE))


def tile_scores(
    s: Program,
    lane: Lane,
    a: list[list[Word]],
    rows: list[list[Word]],
    codes: Word,
    parameters: Word,
    query: Parameters,
) -> list[Word]:
    """float32 bits of the scores of a thread's two entries of a tile of 64, for one query, not yet rounded."""
    dots = group_dots(a, descriptor(s, codes))

    def plain():
        return [Word(ptx.as_i32(x)) for x in scores(s, dots, rows, query.weights, None)]

    def wide():
        columns = []
        for g in range(len(a)):
            words = [
                x
                for half in range(2)
                for x in s.load_shared_4(parameters + (lane.quad << 4), COLUMN_SCALES + 128 * g + 64 * half)
            ]
            columns.append([ptx.as_f32(x.value) for x in words])
        return [Word(ptx.as_i32(x)) for x in scores(s, dots, rows, query.weights, columns)]

    return s.if_else(query.wide, 2, wide, plain)


def masked_max(s: Program, values: list[Word], positions: list[Word], visible: Word) -> Word:
    """float32 bits of the largest score whose position is below `visible`; -inf if there is none, and for NaN."""
    best = s.const(0xFF800000)
    for value, position in zip(values, positions, strict=True):
        best = s.float_max(best, s.select(position < visible, value, 0xFF800000))
    return best


def pack(values: list[Word]) -> Word:
    """Two float32 rounded to bfloat16, the first one in the low half."""
    return Word(ptx.pack_bf16(*(ptx.as_f32(x.value) for x in values)))
