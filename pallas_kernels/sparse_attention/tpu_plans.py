"""Sizes of the TPU kernel of sparse attention."""

import dataclasses

from jax.experimental import pallas as pl

from pallas_kernels.page_layout import ROW_BYTES, MainPageLayout, WindowLayout

LANES = 128
# Entries that are dequantised together.
TILE = 128
# Leaves the compiler room in the 64 MiB of the smallest VMEM.
VMEM_LIMIT = 48 << 20
_PAD = 8  # selected entries are padded to a multiple


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of one call.

    Attributes:
      chunk, chunks: selected entries that are copied, waited for and skipped together, and how many times.
      unroll: how many of them are started in straight code; fewer than all spare the interpreter.
      window: W padded to whole registers.
      block, blocks: ring entries of one softmax update, and how many such blocks there are.
      tail: last channels, whole registers, that contain the `rotated` ones.
    """

    heads: int
    width: int
    tokens: int
    chunk: int
    chunks: int
    unroll: int
    window: int
    ring: WindowLayout
    block: int
    blocks: int
    tail: int
    rotated: int
    scale: float

    @property
    def main(self) -> MainPageLayout:
        return MainPageLayout(self.width)

    @property
    def entries(self) -> int:
        return self.chunks * TILE

    @property
    def ring_rows(self) -> int:
        return self.block * self.blocks

    @property
    def ring_scale_rows(self) -> int:
        return pl.cdiv(self.ring_rows * self.ring.scale_bytes, ROW_BYTES)

    def vmem_bytes(self) -> int:
        """Upper estimate: scratch, double-buffered blocks and constants, and the arrays of one softmax update."""
        lanes, heads = max(self.width, LANES), pl.cdiv(self.heads, 8) * 8
        packed = 2 * ROW_BYTES * (2 * self.entries + self.ring_rows + self.ring_scale_rows + 8)
        tiles = 2 * lanes * (self.entries + self.ring_rows)
        blocks = 2 * 2 * 2 * heads * lanes + 2 * 4 * 8 * (self.entries + self.window + 2 * self.tail)
        constants = 2 * 2 * (5 * LANES * lanes + self.tail**2)
        working = 4 * heads * (4 * max(self.entries, self.block) + 3 * lanes) + 8 * 4 * TILE * lanes
        return packed + tiles + blocks + constants + working


def make_plan(q, window_index, selected, rope, scale: float, ring: WindowLayout, interpret: bool = False) -> Plan:
    entries = 0 if selected is None else selected.shape[-1]
    chunk = min(TILE, pl.cdiv(entries, _PAD) * _PAD)
    block = pl.cdiv(ring.length, LANES) * LANES if ring.length <= 2 * LANES else LANES
    rotated = 0 if rope is None else 2 * rope.shape[-1]
    return Plan(
        heads=q.shape[2],
        width=q.shape[3],
        tokens=q.shape[1],
        chunk=chunk,
        chunks=pl.cdiv(entries, TILE),
        unroll=min(chunk, _PAD) if interpret else chunk,
        window=pl.cdiv(window_index.shape[-1], LANES) * LANES,
        ring=ring,
        block=block,
        blocks=pl.cdiv(ring.length, block) if window_index.shape[-1] else 0,
        tail=min(q.shape[3], pl.cdiv(rotated, LANES) * LANES),
        rotated=rotated,
        scale=scale,
    )
