"""Sizes of a launch of the index-score kernels on Hopper."""

import dataclasses

from pallas_kernels.page_layout import PAGE_ENTRIES, IndexPageLayout

# A prepared query in shared memory: 32 rows of 128 bytes of codes, and its parameters.
CODE_BYTES = 4096
PARAMETER_BYTES = 608
# Ones in bfloat16, an operand that sums over the heads.
ONES_BYTES = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaximaPlan:
    """One launch.

    Attributes:
      batch, tokens, table: B, T and M of the arguments.
      width: C.
      block_size: entries a maximum.
      queries: of a tile, all of one sequence.
      together: queries whose scores are masked and stored together: 1, 2 or 4.
      warpgroups: of a block.
      stages: pages in the ring of a warpgroup.
      blocks: of the grid.
    """

    batch: int
    tokens: int
    table: int
    width: int
    block_size: int
    queries: int
    together: int
    warpgroups: int
    stages: int
    blocks: int

    @property
    def tiles(self) -> int:
        """Query tiles of a sequence."""
        return -(-self.tokens // self.queries)

    @property
    def rows(self) -> int:
        return self.batch * self.tiles

    @property
    def layout(self) -> IndexPageLayout:
        return IndexPageLayout(self.width)

    @property
    def page_bytes(self) -> int:
        return self.layout.page_rows * 4 * PAGE_ENTRIES

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.page_bytes

    @property
    def ring_offset(self) -> int:
        return self.queries * CODE_BYTES

    @property
    def parameter_offset(self) -> int:
        return self.ring_offset + self.warpgroups * self.ring_bytes

    @property
    def ones_offset(self) -> int:
        return self.parameter_offset + self.queries * PARAMETER_BYTES

    @property
    def starts_offset(self) -> int:
        return self.ones_offset + ONES_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.starts_offset + 4 * (self.rows + 1)

    @property
    def page_maxima(self) -> int:
        return PAGE_ENTRIES // self.block_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntriesPlan:
    """One launch of the entry-scores kernel.

    Attributes:
      queries, tokens, table, count: B * T, T, M and n of the arguments.
      width: C.
      block_size: entries of a chosen block.
      warpgroups: of a block.
      splits: blocks of the grid for a query.
    """

    queries: int
    tokens: int
    table: int
    count: int
    width: int
    block_size: int
    warpgroups: int
    splits: int

    @property
    def blocks(self) -> int:
        return self.queries * self.splits

    @property
    def entries(self) -> int:
        """Scores of a query."""
        return self.count * self.block_size

    @property
    def layout(self) -> IndexPageLayout:
        return IndexPageLayout(self.width)

    @property
    def page_bytes(self) -> int:
        return self.layout.page_rows * 4 * PAGE_ENTRIES

    @property
    def shared_bytes(self) -> int:
        return CODE_BYTES + PARAMETER_BYTES + ONES_BYTES
