"""How the GPU kernels of the mHC step divide their work."""

import dataclasses
from collections.abc import Sequence

import jax

from pallas_kernels.tuning import knob

TOKENS = 16  # of a tile: the rows of a matrix instruction
STREAMS = 4
MIX = (2 + STREAMS) * STREAMS
SUMS = TOKENS * (MIX + 2)  # words a tile and chunk: 16 x 24 mixes, then 16 x (squares of the streams, of u)
COEF_PITCH = 112  # bytes of a token's comb, post and pre in shared memory: 28 words keep rows in different banks
STAGES = 4  # tiles of a unit in shared memory: one in use, the others on their way
WARPS = 8  # of a unit; each has 16 columns, whose weights take 48 registers of every thread
UNITS = 2  # of a thread block: while one copies, the other calculates
COLUMNS = 16 * WARPS  # of a tile, in every stream

MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024

STREAM_BYTES = TOKENS * COLUMNS * 2  # one stream of a tile
Y_OFFSET = STREAMS * STREAM_BYTES  # of y, later u, in a stage
COEF_OFFSET = Y_OFFSET + STREAM_BYTES  # of the tokens' comb, post and pre
STAGE_BYTES = COEF_OFFSET + TOKENS * COEF_PITCH
LOW_BYTES = WARPS * STREAMS * (MIX // 8) * 32 * 8  # the low parts of a block's weights
UNIT_BYTES = STAGES * STAGE_BYTES + WARPS * SUMS * 4  # and the sums of a tile by warp
BLOCK_BYTES = LOW_BYTES + UNITS * UNIT_BYTES


@dataclasses.dataclass(frozen=True)
class Plan:
    """The launches for T tokens of width D.

    A thread block of the pass over the streams works on one chunk of columns. It consists of units, each of which has
    tiles of its own: 16 tokens by the columns of the chunk, in all streams.

    Attributes:
      num_tokens, dim: T, D.
      finish_tokens: tokens a thread block of the second kernel, 1 or a multiple of 4.
    """

    num_tokens: int
    dim: int
    finish_tokens: int

    def __post_init__(self):
        if self.finish_tokens != 1 and (self.finish_tokens % 4 or not 0 < self.finish_tokens <= 128):
            raise ValueError(f"finish_tokens must be 1 or a multiple of 4 up to 128, got {self.finish_tokens}")

    @property
    def chunks(self) -> int:
        return self.dim // COLUMNS

    @property
    def tiles(self) -> int:
        """Of a chunk."""
        return -(-self.num_tokens // TOKENS)

    @property
    def groups(self) -> int:
        """Thread blocks that share a chunk; first their first units, then their second ones take its tiles."""
        return min(max(1, MULTIPROCESSORS // self.chunks), self.tiles)

    @property
    def finish_blocks(self) -> int:
        return -(-self.num_tokens // self.finish_tokens)


def problem(num_tokens: int, num_streams: int, dim: int) -> str | None:
    """Why there is no plan; None if there is."""
    if num_streams != STREAMS:
        return f"{STREAMS} streams are supported, got {num_streams}"
    if dim % COLUMNS:
        return f"the width of a stream must be a multiple of {COLUMNS}, got {dim}"
    if num_tokens == 0:
        return "there are no tokens"
    return None


def knobs(streams: jax.ShapeDtypeStruct, **_) -> tuple[str, dict[str, Sequence[int]]]:
    """What the tuner may vary for these arguments of `ops.residual_step`, see `pallas_kernels.tuning`."""
    num_tokens, _, dim = streams.shape
    return _key(num_tokens, dim), {"finish_tokens": (1, 4, 16)}


def _key(num_tokens: int, dim: int) -> str:
    return f"{num_tokens}x{dim}"


def plan(num_tokens: int, dim: int) -> Plan:
    """One token a block of the second kernel while that fills the device, then more to amortise a block's start."""
    default = 1 if num_tokens <= 4 * MULTIPROCESSORS else 4
    finish_tokens = knob("hyper_connection", _key(num_tokens, dim), "finish_tokens", default)
    return Plan(num_tokens=num_tokens, dim=dim, finish_tokens=finish_tokens)
