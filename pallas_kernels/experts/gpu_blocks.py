"""What the programs of both regimes share: the list of used blocks, the activation, stores of results."""

import dataclasses
from typing import Any

from pallas_kernels.experts.gpu_program import Program
from pallas_kernels.indexer.gpu_scores import Lane
from pallas_kernels.simt import Word

_ONE = 0x3F800000
_LOG2E = 0x3FB8AA3B
AMAX_FLOOR = 0x38D1B717  # 1e-4
INFINITY = 0x7F800000
NAN = 0x7FC00000
LIST_HEADER = 16


@dataclasses.dataclass(frozen=True)
class Half:
    """Where the rows of a half of every tile come from: values u8 [E, out, width / 2], scales u8 [E, out, width / 32].

    `first`: how far behind the tile's beginning.
    """

    values: Any
    scales: Any
    first: int


def list_blocks(s: Program, block_expert: Any, blocks: int, experts: int, address: Word) -> None:
    """A warp writes the number of used blocks, and each one's number and expert; a barrier must follow."""
    lane = s.thread() & 31
    row = s.row(block_expert, s.const(0), 4)

    def chunk(first, total):
        block = first + lane
        known = block < blocks
        expert = s.load(row, s.select(known, block, 0) << 2)
        used = known & (expert < experts)
        votes = s.ballot(used)
        at = address + ((total + s.popcount(votes & s.lanes_below())) << 3)
        with s.when(used):
            s.store_shared(at, block, LIST_HEADER)
            s.store_shared(at, expert, LIST_HEADER + 4)
        return (total + s.popcount(votes),)

    (total,) = s.for_range(0, blocks, 32, (s.const(0),), chunk)
    with s.when(lane == 0):
        s.store_shared(address, total)


def listed(s: Program, address: Word, position: Word) -> tuple[Word, Word]:
    """Block and expert of a place in the list."""
    at = address + (position << 3)
    return s.load_shared(at, LIST_HEADER), s.load_shared(at, LIST_HEADER + 4)


def activation(s: Program, gate: Word, up: Word, weight: Word, limit: float) -> Word:
    """silu(min(gate, limit)) * clip(up, -limit, limit) * weight of both rounded to bfloat16; float32."""
    rounded = s.pack_bf16(gate, up)
    gate = s.smaller(rounded << 16, s.float_const(limit))
    up = s.larger(s.smaller(rounded & 0xFFFF0000, s.float_const(limit)), s.float_const(-limit))
    power = s.power_of_two(s.times(gate ^ 0x80000000, s.const(_LOG2E)))
    sigmoid = s.reciprocal(s.plus(power, s.const(_ONE)))
    return s.times(s.times(s.times(gate, sigmoid), up), weight)


def pair_of_channels(s: Program, lane: Lane, values: list[Word]) -> Word:
    """Two float32, a channel of two neighbouring rows -> bfloat16 of two neighbouring channels of one of those rows.

    Lanes with an odd `row` hold odd channels; they get the second row.
    """
    is_odd = (lane.row & 1) != 0
    got = s.exchange(s.select(is_odd, values[0], values[1]), 4)
    return s.pack_bf16(s.select(is_odd, got, values[0]), s.select(is_odd, values[1], got))


def largest(s: Program, values: list[Word], lanes: int) -> Word:
    """Bits of the largest magnitude of float32 values of 2 or 4 neighbouring lanes, at least 1e-4; NaN above all."""
    amax = s.const(AMAX_FLOOR)
    for x in values:
        amax = s.max(amax, x & 0x7FFFFFFF)
    for mask in (1, 2)[: lanes // 2]:
        amax = s.max(amax, s.exchange(amax, mask))
    return amax


def fp8_exponent(s: Program, amax: Word) -> Word:
    """E8M0 byte of amax / 448, rounded up to a power of two: 448 is 1.75 * 2^8."""
    return (amax >> 23) - 8 + s.select((amax & 0x7FFFFF) > 0x600000, 1, 0)


def unpacked(words: list[Word]) -> list[Word]:
    """float32 of pairs of bfloat16."""
    return [x for word in words for x in (word << 16, word & 0xFFFF0000)]


def finite_or_nan(s: Program, x: Word) -> Word:
    """float32, NaN for infinity, whose product with 0 that is."""
    return s.times_plus(x, s.const(0), x)
