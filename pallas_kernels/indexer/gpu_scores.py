"""Device arithmetic of the index score on Hopper, the same for every kernel that scores a (query, entry) pair.

MXFP4 codes are exact E4M3 values, and the products of one scale group (32 channels, one FP8 `wgmma` step) add up
exactly in the tensor core. So a dot product is the sum of its groups' exact dots times powers of two, in float32, group
0 first; no other order of summation occurs, whatever the tile shapes. The heads' terms are summed by a product with
ones.

Keys stay in registers as the A operand, 16 rows (entries) a warp; the 32 heads of a query are the columns of B:

| operand | rows | columns |
|---|---|---|
| A, keys x 2^-6 | entries, in any assignment | of a group, bytes 2q, 2q + 1, 8 + 2q, 9 + 2q in lane q of a quad |
| B, queries x 2^6 | heads, padded with zeros to 32 | the same channels |

A query's scales: the four groups of a head are shifted against the head's largest scale, which fits E4M3 exactly while
they are at most 2^14 apart; that largest scale multiplies the head's weight, because rounding to bfloat16 and ReLU
commute with powers of two. For the same reason a key's scales are taken relative to that of its group 0, which
multiplies the score. Queries with a wider head ("wide") and entries with scales outside 2^-31 to 2^32 ("unusual") take
a slower path that multiplies every group's dot by both scales. Key scale bytes of 0 (2^-127, which the quantiser never
writes) count as 0, those of 255 (NaN) hide the entry.
"""

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.indexer.gpu_program import Program
from pallas_kernels.indexer.plans import ONES_BYTES
from pallas_kernels.simt import Flag, Word

GROUP = 32  # channels with one scale
# Offsets in a query's parameters: weights, column scales of the slow path, whether it is wide (a word a warp), visible.
WEIGHTS, COLUMN_SCALES, WIDE, VISIBLE = 0, 64, 576, 592
_MOST_SHIFT = 14
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ONE = 0x3F800000  # float32 bits
_NEGATIVE_INFINITY = 0xFF800000


@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries in global memory: values u8 [Q, N, C/2], scales u8 [Q, N, C/32], weights bf16 [Q, N], visible [Q]."""

    values: Any
    scales: Any
    weights: Any
    visible: Any
    heads: int
    width: int


class Lane:
    """Where a thread stands in its warpgroup: warp 0..3, row 0..7 and quad 0..3 of the products' registers."""

    def __init__(self, s: Program):
        self.thread = s.thread() & 127
        self.lane = self.thread & 31
        self.warp = self.thread >> 5
        self.row = self.lane >> 2
        self.quad = self.lane & 3


def expand(s: Program, word: Word) -> tuple[Word, Word]:
    """Four bytes of E2M1 pairs -> E4M3 x 2^-6 of their low and of their high nibbles."""
    low = s.merge(word << 4, 0x80808080, (word << 2) & 0x1C1C1C1C)
    return low, s.merge(word, 0x80808080, (word >> 2) & 0x1C1C1C1C)


def _shifted_table(s: Program, shift: Word) -> tuple[Word, Word]:
    """The magnitudes x 2^(6 - shift) as E4M3 codes."""
    scale = (s.const(133) - shift) << 23
    values = [s.times(s.const(int(np.float32(x).view(np.uint32))), scale) for x in _MAGNITUDES]
    return s.pack_e4m3(values[:4]), s.pack_e4m3(values[4:])


@dataclasses.dataclass(frozen=True)
class RawQuery:
    """What a thread loads of a query: sixteen bytes of values, their scale, the head's weight, what is visible."""

    values: list[Word]
    exponent: Word
    weight: Word
    visible: Word


def load_query(s: Program, queries: Queries, query: Word) -> RawQuery:
    """A warpgroup loads a query; a thread has one group of one head."""
    lane = Lane(s)
    head, group = lane.thread >> 2, lane.thread & 3
    num_groups = queries.width // GROUP
    used = (head < queries.heads) & (group < num_groups)
    row = s.select(used, query * queries.heads + head, 0)
    column = s.select(used, group, 0)
    values = s.load_words(s.offset(s.row(queries.values, row, queries.width // 2), column << 4), 4)
    exponent = s.load_byte(s.offset(s.row(queries.scales, row, num_groups), column))
    weight = s.load_half(s.row(queries.weights, row, 2))
    visible = s.load(s.row(queries.visible, query, 4), s.const(0))
    return RawQuery(
        [s.select(used, x, 0) for x in values], s.select(used, exponent, 0), s.select(used, weight, 0), visible
    )


def write_query(s: Program, raw: RawQuery, codes: Word, parameters: Word) -> None:
    """The warpgroup that loaded a query writes its operand and parameters to shared memory."""
    lane = Lane(s)
    head, group = lane.thread >> 2, lane.thread & 3
    words, exponent, weight = raw.values, raw.exponent, raw.weight

    counts = (((words[0] | words[1] | words[2] | words[3]) & 0x77777777) != 0) | (exponent == 255)
    largest = s.select(counts, exponent, 0)
    shift = largest
    for mask in (1, 2):
        largest = s.max(largest, s.exchange(largest, mask))
    shift = s.select(counts, largest - shift, 0)
    any_wide = s.select((shift > _MOST_SHIFT) & (largest != 255), 1, 0)
    for mask in (1, 2):
        any_wide = any_wide | s.exchange(any_wide, mask)
    wide = any_wide != 0
    table = _shifted_table(s, s.select(wide, 0, s.min(shift, 63)))

    low, high = [], []
    for quad in range(4):
        word = s.permute(words[quad // 2], words[2 + quad // 2], 0x7632 if quad % 2 else 0x5410)
        pairs = s.lookup(table, word), s.lookup(table, word >> 16)
        low.append(s.permute(*pairs, 0x6420) | ((word << 4) & 0x80808080))
        high.append(s.permute(*pairs, 0x7531) | (word & 0x80808080))
    line = codes + (head << 7)
    for part, values in enumerate((low, high)):
        chunk = ((group << 1) + part) ^ (head & 7)
        s.store_shared_4(line + (chunk << 4), values)

    # Columns of a quad: 8 i + 2 quad + {0, 1}, i = 0..3.
    quad, i, odd = (head & 7) >> 1, head >> 3, head & 1
    factor = s.select(wide, _power_of_two(s, exponent), _ONE)
    address = parameters + (group << 7) + ((i >> 1) << 6) + (quad << 4) + ((i & 1) << 3) + (odd << 2)
    s.store_shared(address, factor, COLUMN_SCALES)
    scaled = s.times(weight << 16, _power_of_two(s, largest))
    rounded = s.select(wide, weight, s.pack_bf16(scaled, scaled) & 0xFFFF)
    rounded = rounded | (s.exchange(rounded, 4) << 16)  # of the next head
    with s.when((group == 0) & (odd == 0)):
        s.store_shared(parameters + (quad << 4) + (i << 2), rounded, WEIGHTS)
    warp_wide = s.ballot(wide)
    with s.when(lane.lane == 0):
        s.store_shared(parameters + (lane.warp << 2), warp_wide, WIDE)
    with s.when(lane.thread == 0):
        s.store_shared(parameters, raw.visible, VISIBLE)


def _power_of_two(s: Program, exponent: Word) -> Word:
    """float32 of an E8M0 byte."""
    bits = s.max(exponent << 23, 0x00400000)
    return s.select(exponent == 255, 0x7FC00000, bits)


@dataclasses.dataclass(frozen=True)
class KeyScales:
    """Scales of a thread's entries as float32.

    A dot is kept relative to its entry's group 0, which saves a product a head; the sum over the heads is then
    multiplied by that group's scale. Where any scale of the warp's entries is unusual, the slow path takes them as they
    are.

    Attributes:
      scales: for each entry the scale of each group.
      relative: for each entry the factors of the groups after the first one, unless `unusual`.
      last: for each entry the factor of its score.
      unusual: the same in the whole warp.
      nan: for each word of `key_scales`, bit 7 of the bytes that are 255; otherwise 0.
    """

    scales: list[list[Word]]
    relative: list[list[Word]]
    last: list[Word]
    unusual: Flag
    nan: list[Word]

    def slow(self, s: Program, entry: int) -> list[Word]:
        """Factors of all groups' dots of an entry, which may be unusual."""
        ordinary = [s.const(_ONE), *self.relative[entry]]
        return [s.select(self.unusual, a, b) for a, b in zip(self.scales[entry], ordinary, strict=True)]


def key_scales(s: Program, words: list[Word], entries: list[list[tuple[int, int]]]) -> KeyScales:
    """words: E8M0 bytes of the thread's entries; entries: for each one, where its groups' bytes are: (word, byte)."""
    strange = s.const(0)
    for x in words:
        strange = strange | (((x + 0x20202020) ^ 0x80808080) & 0xC0C0C0C0)  # a byte outside 96..159
    unusual = s.ballot(strange != 0) != 0
    zero = s.const(0)
    scales = [[s.permute(words[word], zero, 0x4440 | byte) << 23 for word, byte in places] for places in entries]
    inverses = [s.const(0x7F000000) - x[0] for x in scales]
    relative = [[s.times(x, inverse) for x in row[1:]] for row, inverse in zip(scales, inverses, strict=True)]
    last = [s.select(unusual, _ONE, x[0]) for x in scales]

    def nan() -> list[Word]:
        return [((x & 0x7F7F7F7F) + 0x01010101) & x & 0x80808080 for x in words]

    nans = s.if_else(unusual, len(words), nan, lambda: [zero] * len(words))
    return KeyScales(scales, relative, last, unusual, nans)


def write_ones(s: Program, thread: Word, ones: Word) -> None:
    """The threads of a block fill `ONES_BYTES` for `row_sums`; `shared_to_async` and a barrier must follow."""
    with s.when(thread < ONES_BYTES // 4):
        s.store_shared(ones + (thread << 2), 0x3F803F80)


def load_visible(s: Program, parameters: Word) -> Word:
    return s.load_shared(parameters, VISIBLE)


def is_slow(s: Program, parameters: Word, scales: KeyScales) -> Flag:
    """Whether a prepared query and the warp's entries need the slow path."""
    flags = s.load_shared_4(parameters, WIDE)
    return ((flags[0] | flags[1] | flags[2] | flags[3]) != 0) | scales.unusual


def add_groups(
    s: Program,
    lane: Lane,
    total: list[Word] | None,
    dots: list[list[Word]],
    first: int,
    scales: KeyScales,
    entries: tuple[int, int],
    parameters: Word,
    slow: Flag,
) -> list[Word]:
    """Adds a query's dots over some groups to the dots over the groups before, for a thread's two entries of a tile.

    total: None before group 0; dots: of `wait_dots`, for each group from number `first` on those of the query's 32
    heads; entries: their places in `scales`; parameters: address of the query's; slow: of `is_slow`.
    """

    def fast():
        return _accumulate(s, total, dots, [scales.relative[i][max(first - 1, 0) :] for i in entries], None)

    def slowly():
        quad = parameters + (lane.quad << 4)
        columns = [
            [x for half in range(2) for x in s.load_shared_4(quad, COLUMN_SCALES + 128 * g + 64 * half)]
            for g in range(first, first + len(dots))
        ]
        return _accumulate(s, total, dots, [scales.slow(s, i)[first:] for i in entries], columns)

    return s.if_else(slow, 16, slowly, fast)


def _accumulate(s: Program, total, dots, rows, columns) -> list[Word]:
    """rows: for both entries the factors of the groups, but for group 0 without columns; columns: of the slow path, for
    each group the scales of the thread's eight heads, or None."""
    sums = []
    for i in range(16):
        factors = rows[i // 2 % 2]
        values = [dot[i] for dot in dots]
        if columns is not None:
            values = [s.times(x, column[i // 4 * 2 + i % 2]) for x, column in zip(values, columns, strict=True)]
        if total is not None:
            running = total[i]
        else:
            running, values = values[0], values[1:]
            if columns is not None:
                running, factors = s.times(running, factors[0]), factors[1:]
        for x, factor in zip(values, factors, strict=False):
            running = s.times_plus(x, factor, running)
        sums.append(running)
    return sums


def head_terms(s: Program, lane: Lane, total: list[Word], parameters: Word) -> list[Word]:
    """The heads' terms of a thread's two entries of a tile, from their dots with a query, for `row_sums`."""
    weights = s.load_shared_4(parameters + (lane.quad << 4), WEIGHTS)
    return [s.weighted_relu(total[i], total[i + 1], weights[i // 4]) for i in range(0, 16, 2)]


def tile_terms(
    s: Program,
    lane: Lane,
    a: list[list[Word]],
    scales: KeyScales,
    entries: tuple[int, int],
    codes: Word,
    parameters: Word,
) -> list[Word]:
    """`head_terms` of one query for a tile's operand; entries: as in `add_groups`."""
    slow = is_slow(s, parameters, scales)
    dots = s.wait_dots(s.start_dots(a, codes), 0)
    return head_terms(s, lane, add_groups(s, lane, None, dots, 0, scales, entries, parameters, slow), parameters)


def masked_max(s: Program, values: list[Word], positions: list[Word], visible: Word) -> Word:
    """The largest float32 score whose position is below `visible`; -inf if there is none, and for NaN."""
    best = s.const(_NEGATIVE_INFINITY)
    for value, position in zip(values, positions, strict=True):
        best = s.float_max(best, s.select(position < visible, value, _NEGATIVE_INFINITY))
    return best
