"""How a call of sparse attention is cut into items on the GPU, and how a CTA's shared memory is laid out."""

import dataclasses

from pallas_kernels.page_layout import WindowLayout
from pallas_kernels.sparse_attention.block_sizes import Tuning

BLOCK = 64  # entries of a tile
HEADS = 64  # rows of a wgmma tile
WARPGROUP = 128
ROWS = 3  # of 64 float32: the masks of the two tiles, and factors of the heads
SHARED_BYTES = 227 * 1024
_ALIGNMENT = 1024  # of every array in shared memory


class Table:
    """Words about an item: a header, its blocks that have entries (numbered from its first one), indices, flags."""

    COUNT = 0  # blocks listed; 0: there is no such item
    FIRST = 1  # the item's first block among all of its query
    SLOT = 2  # ring of its sequence
    ACTIVE = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one kernel's gathering.

    Attributes:
      width: channels of an entry, H.
      window, selected: entries of a query by source, W and K.
      blocks: blocks of 64 entries of an item, at most.
      gatherers: warpgroups that gather, 1 or 2.
      group: units that are copied, awaited and dequantised together; divides the units of a tile.
      ring_groups: groups in flight.
      single: a CTA has one item only, so that there is no second table.
      window_layout: of the rings.
    """

    width: int
    window: int
    selected: int
    blocks: int
    gatherers: int
    group: int
    ring_groups: int
    single: bool
    window_layout: WindowLayout

    @property
    def window_blocks(self) -> int:
        return -(-self.window // BLOCK)

    @property
    def threads(self) -> int:
        return self.gatherers * WARPGROUP

    @property
    def tiles(self) -> int:
        """8-row tiles of a block that one warp takes."""
        return 2 // self.gatherers

    @property
    def unit_bytes(self) -> int:
        return 16 * self.threads

    @property
    def window_units(self) -> int:
        """Units of an 8-row tile of window entries."""
        return self.width // 64

    @property
    def main_units(self) -> int:
        """Units of an 8-row tile of main entries."""
        return max(1, self.width // 128)

    @property
    def scale_slots(self) -> int:
        """8-row tiles whose scales may be held at once: those the ring spans, and the one being read."""
        return -(-self.ring_groups * self.group // self.main_units) + 1

    @property
    def scale_slot_bytes(self) -> int:
        """Scales of a tile a warp, the larger of both formats (at least the 4 bytes that can be copied)."""
        return self.threads // 4 * max(4, self.width // 16)

    @property
    def group_bytes(self) -> int:
        return self.group * self.unit_bytes

    @property
    def ring_bytes(self) -> int:
        return self.ring_groups * self.group_bytes + self.scale_slots * self.scale_slot_bytes

    @property
    def load_rounds(self) -> int:
        return -(-self.blocks * BLOCK // self.threads)

    @property
    def indices_at(self) -> int:
        """First word of a table's indices, behind its header and the list of the blocks that have entries."""
        return -(-(Table.ACTIVE + self.blocks) // 4) * 4

    @property
    def table_words(self) -> int:
        return self.indices_at + self.blocks * BLOCK

    @property
    def tables_at(self) -> int:
        """First word of the tables in the words of a CTA, behind its rows."""
        return ROWS * HEADS

    @property
    def flags_at(self) -> int:
        """Behind the tables: whether there is an entry, one word for 32 of them, while a table is written."""
        return self.tables_at + self.table_words + (Table.ACTIVE if self.single else self.table_words)

    @property
    def counts_at(self) -> int:
        """Behind the flags: for each slot of tiles, how many blocks its item has."""
        return self.flags_at + self.load_rounds * self.threads // 32

    @property
    def words(self) -> int:
        return self.counts_at + 2

    @property
    def shared_bytes(self) -> int:
        """All shared memory of a CTA: queries, two tiles, probabilities, rows and tables, ring, barriers."""
        arrays = [
            HEADS * self.width * 2,
            2 * BLOCK * self.width * 2,
            HEADS * BLOCK * 2,
            4 * self.words,
            self.ring_bytes,
        ]
        barriers = 16 * 8
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in arrays) + barriers

    def with_ring(self) -> "Plan | None":
        """The same with as many groups in flight as there is shared memory for; None where there is not even one.

        Copies may run into the next item, but not through it, and an item may have no more than one block: hence at
        most a block of them.
        """
        for groups in range(self.tiles * self.main_units // self.group, 0, -1):
            plan = dataclasses.replace(self, ring_groups=groups)
            if plan.shared_bytes <= SHARED_BYTES:
                return plan
        return None


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    Attributes:
      queries: B * T.
      tokens: T.
      groups: of 64 heads.
      width: H.
      window, selected: entries of a query by source, W and K.
      layout: of the rings.
    """

    queries: int
    tokens: int
    groups: int
    width: int
    window: int
    selected: int
    layout: WindowLayout

    @property
    def blocks(self) -> int:
        """Blocks of 64 entries of a query; the window's last one and the selection's are filled up."""
        return -(-self.window // BLOCK) + -(-self.selected // BLOCK)

    def items(self, tuning: Tuning) -> int:
        """Groups of heads of a query, or shares of their entries: what a CTA computes at a time."""
        return self.queries * self.groups * tuning.splits

    def ctas(self, tuning: Tuning) -> int:
        return min(self.items(tuning), tuning.ctas)

    def plan(self, tuning: Tuning) -> Plan | None:
        """None where an item's indices are too many for the shared memory."""
        return Plan(
            width=self.width,
            window=self.window,
            selected=self.selected,
            blocks=-(-self.blocks // tuning.splits),
            gatherers=tuning.gatherers,
            group=tuning.group,
            ring_groups=1,
            single=self.items(tuning) == self.ctas(tuning),
            window_layout=self.layout,
        ).with_ring()
