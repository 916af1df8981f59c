"""How sparse attention is cut up on a GPU: splits of a query's entries, columns of the consumers, copies in flight."""

import dataclasses

MAX_ENTRIES = 2304  # indices of a query that shared memory holds beside everything else
_SHARED_BYTES = 227 * 1024
_PROCESSORS = 132  # of an H100 or H200


@dataclasses.dataclass(frozen=True)
class Tuning:
    """One way to run the kernel.

    Attributes:
      splits: CTAs that share the entries of a query.
      left_columns: value columns of the warpgroup that also computes the softmax; a multiple of 64.
      registers: a thread of the softmax, the value and the gathering warpgroup; they sum up to at most 504.
    """

    splits: int
    left_columns: int
    registers: tuple[int, int, int]


def left_columns(width: int) -> int:
    return {64: 64, 128: 64, 256: 128}.get(width, 256)


def ring_units(width: int, blocks: int) -> int:
    """Units of 2 KB that may be under way at once, by the shared memory that is left."""

    def aligned(size: int) -> int:
        return -(-size // 1024) * 1024

    tiles = 3 * 64 * width * 2 + 64 * 64 * 2
    table = aligned(4 * (64 * (blocks + blocks % 2) + 3 * (blocks + 1)))
    left = _SHARED_BYTES - tiles - table - 1024 - 512
    scales = 32 * max(4, width // 16)
    per_tile = max(1, width // 128)
    units = 16
    while units > 4 and aligned(units * 2048 + (-(-units // per_tile) + 1) * scales) > left:
        units -= 1
    return units


def choose(*, queries: int, blocks: int, width: int) -> Tuning:
    """By heuristic: enough CTAs to fill the chip once, each with at least one block of 64 entries."""
    splits = max(1, min(blocks, _PROCESSORS // queries))
    # Splits of equal size: 10 blocks in 7 splits take as long as in 5.
    splits = -(-blocks // -(-blocks // splits))
    return Tuning(splits=splits, left_columns=left_columns(width), registers=(200, 160, 144))
