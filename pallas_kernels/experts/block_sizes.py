"""How the experts' kernels divide their work on Hopper."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.tuning import knob

MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024
CHUNK = 256  # channels of a copied piece of a weight row: 128 bytes
GROUP = 32  # channels with one scale
TILE_ROWS = 64  # weight rows of one product
FEW_ROWS = (8,)  # of a block, for `FewPlan`
MANY_ROWS = (16, 32, 64, 128)  # for `ManyPlan`
MANY_CHUNK = 128
_SLOT_BYTES = TILE_ROWS * (CHUNK // 2 + CHUNK // GROUP)


@dataclasses.dataclass(frozen=True)
class FewPlan:
    """Of a kernel for blocks of few rows, whose products are bound by reading the weights.

    A thread block takes a run of (block, tile of 64 weight rows) pairs; its warpgroups share the channels of a tile.

    Attributes:
      gated: gate and up of 32 channels each make a tile; otherwise 64 rows of one matrix do.
      blocks, rows: of x.
      experts: in the stack.
      out: rows of a matrix; `width`: its channels.
      warpgroups: of a thread block.
      stages: chunks of a warpgroup's ring.
      grid: thread blocks.
    """

    gated: bool
    blocks: int
    rows: int
    experts: int
    out: int
    width: int
    warpgroups: int
    stages: int
    grid: int

    @property
    def tiles(self) -> int:
        """Of an expert."""
        return self.out // self.tile_out

    @property
    def tile_out(self) -> int:
        """Channels that a tile yields."""
        return TILE_ROWS // 2 if self.gated else TILE_ROWS

    @property
    def chunks(self) -> int:
        return self.width // CHUNK

    @property
    def columns(self) -> int:
        """Of a product: large and small magnitudes of each row."""
        return 2 * self.rows

    @property
    def code_bytes(self) -> int:
        """Of a block of x in E4M3."""
        return self.columns * self.width

    # Offsets in shared memory, behind the codes

    @property
    def scales_offset(self) -> int:
        return self.code_bytes

    @property
    def ring_offset(self) -> int:
        return self.scales_offset + self.rows * self.width // GROUP * 4

    @property
    def ring_bytes(self) -> int:
        """Of a warpgroup."""
        return self.stages * _SLOT_BYTES

    @property
    def slot_bytes(self) -> int:
        return _SLOT_BYTES

    @property
    def sums_offset(self) -> int:
        return self.ring_offset + self.warpgroups * self.ring_bytes

    @property
    def part_bytes(self) -> int:
        """A warpgroup's sums over its channels of a tile."""
        return TILE_ROWS * self.rows * 4

    @property
    def sums_bytes(self) -> int:
        """Of all warpgroups but the one that adds them up."""
        return (self.warpgroups - 1) * self.part_bytes

    @property
    def list_offset(self) -> int:
        """Of the used blocks' number, then (block, expert) of each."""
        return self.sums_offset + self.sums_bytes

    @property
    def shared_bytes(self) -> int:
        return self.list_offset + 16 + 8 * self.blocks


@dataclasses.dataclass(frozen=True)
class ManyPlan:
    """Of a kernel for blocks of many rows, whose products are bound by dequantising and by the matrix units.

    Four warpgroups take a tile of 256 weight rows and a block at a time; thread blocks take every `grid`-th pair.

    Attributes:
      gated, blocks, rows, experts, out, width, grid: as in `FewPlan`.
      stages: chunks of the ring.
    """

    gated: bool
    blocks: int
    rows: int
    experts: int
    out: int
    width: int
    stages: int
    grid: int

    warpgroups = 4

    @property
    def warpgroup_out(self) -> int:
        """Channels that a warpgroup's rows of a tile yield."""
        return TILE_ROWS // 2 if self.gated else TILE_ROWS

    @property
    def tile_out(self) -> int:
        return self.warpgroups * self.warpgroup_out

    @property
    def tiles(self) -> int:
        """Of an expert."""
        return self.out // self.tile_out

    @property
    def chunks(self) -> int:
        return self.width // MANY_CHUNK

    @property
    def together(self) -> int:
        """Chunks between barriers of a thread block: two where the ring is long."""
        return 2 if self.stages > 4 else 1

    @property
    def ahead(self) -> int:
        """Chunks that are copied before the first product: a chunk's products may last into the next step."""
        return self.stages - 1 - self.together

    # Offsets in a slot, behind the rows of the block

    @property
    def weights_offset(self) -> int:
        return self.rows * MANY_CHUNK * 2

    @property
    def scales_offset(self) -> int:
        return self.weights_offset + self.warpgroups * TILE_ROWS * MANY_CHUNK // 2

    @property
    def slot_bytes(self) -> int:
        return self.scales_offset + self.warpgroups * TILE_ROWS * MANY_CHUNK // GROUP

    # Offsets in shared memory, behind the ring

    @property
    def staged_offset(self) -> int:
        return self.stages * self.slot_bytes

    @property
    def staged_rows(self) -> int:
        """Rows whose results lie in shared memory at a time."""
        return min(self.rows, 64 if self.gated else 32)

    @property
    def staged_pitch(self) -> int:
        """Bytes of a row of a warpgroup's results, and room against bank conflicts."""
        return 2 * self.warpgroup_out + 16

    @property
    def staged_bytes(self) -> int:
        """Of a warpgroup: its results, the rows' weights."""
        return self.staged_rows * self.staged_pitch + (4 * self.rows if self.gated else 0)

    @property
    def list_offset(self) -> int:
        """As of `FewPlan`."""
        return self.staged_offset + self.warpgroups * self.staged_bytes

    @property
    def shared_bytes(self) -> int:
        return self.list_offset + 16 + 8 * self.blocks


def many_plan(gated: bool, blocks: int, rows: int, experts: int, out: int, width: int) -> ManyPlan:
    """A thread block a processor, the longest ring that fits up to six chunks."""
    key = _key(blocks, rows, *((width, out) if gated else (out, width)))
    grid = min(MULTIPROCESSORS, blocks * out // (2 * TILE_ROWS if gated else 4 * TILE_ROWS))

    def plan(stages: int) -> ManyPlan:
        return ManyPlan(gated, blocks, rows, experts, out, width, stages, grid)

    stages = max((n for n in range(3, 7) if plan(n).shared_bytes <= SHARED_BYTES), default=3)
    return plan(knob("experts", key, "stages", stages))


def few_plan(gated: bool, blocks: int, rows: int, experts: int, out: int, width: int) -> FewPlan:
    """Five warpgroups with two chunks each: six, or more chunks, made nothing faster on an H200."""
    key = _key(blocks, rows, *((width, out) if gated else (out, width)))
    chunks = width // CHUNK
    warpgroups = min(knob("experts", key, "warpgroups", 5), chunks)
    stages = knob("experts", key, "stages", 2)
    grid = min(MULTIPROCESSORS, blocks * out // (TILE_ROWS // 2 if gated else TILE_ROWS))
    return FewPlan(gated, blocks, rows, experts, out, width, warpgroups, stages, grid)


def _key(blocks: int, rows: int, d: int, f: int) -> str:
    return f"{blocks}x{rows} d{d} f{f}"


def knobs(x: jax.ShapeDtypeStruct, w1: tuple, **_) -> tuple[str, dict[str, Sequence[int]]]:
    """What the tuner may vary for these arguments of `ops.expert_blocks`."""
    blocks, rows, d = x.shape
    few = {"warpgroups": (3, 4, 5, 6), "stages": (2, 3, 4)}
    return _key(blocks, rows, d, w1[0].shape[1]), few if rows in FEW_ROWS else {"stages": (3, 4, 5, 6)}


def plans(blocks: int, rows: int, experts: int, d: int, f: int) -> tuple[FewPlan | ManyPlan, FewPlan | ManyPlan]:
    """Of gate and up, and of down."""
    make = few_plan if rows in FEW_ROWS else many_plan
    return make(True, blocks, rows, experts, f, d), make(False, blocks, rows, experts, d, f)


def problem(x: jax.Array, w1: tuple, w2: tuple) -> str | None:
    """What keeps the kernels from taking these arrays of `ops.expert_blocks`; None if nothing does."""
    blocks, rows, d = x.shape
    experts, f = w1[0].shape[:2]
    if w1[0].dtype != jnp.uint8:
        return f"the kernel takes packed FP4 weights, not {w1[0].dtype}"
    if d % CHUNK or f % CHUNK:
        return f"D and F must be multiples of {CHUNK}, got {d} and {f}"
    if rows not in FEW_ROWS + MANY_ROWS:
        return f"blocks must have {' or '.join(map(str, FEW_ROWS + MANY_ROWS))} rows, got {rows}"
    for plan in plans(blocks, rows, experts, d, f):
        if plan.shared_bytes > SHARED_BYTES:
            return f"{blocks} blocks of {rows} x {plan.width} need {plan.shared_bytes} bytes of shared memory"
    return None
