"""Sizes of the TPU kernels of the indexer."""

import dataclasses

from jax.experimental import pallas as pl

from pallas_kernels.page_layout import PAGE_ENTRIES, ROW_BYTES, IndexPageLayout

LANES = 128
SUBLANES = 8
# Leaves the compiler room in the 64 MiB of the smallest VMEM.
VMEM_LIMIT = 48 << 20
# Of 1 MiB; a page or a block takes an int32 in two operands, each of them buffered twice.
SMEM_LIMIT = 768 << 10
SMEM_BYTES_EACH = 16
_MAX_TOKENS = 8  # queries that share a dequantised page
_OUT_BYTES = 8 << 20  # of a grid step's maxima


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of one call.

    Attributes:
      heads: N padded to whole registers.
      tokens: queries of a grid step.
      pages: of a step of copies; for `entry_scores` one a block.
      steps: that cover the page table's line, or the list of blocks.
    """

    heads: int
    tokens: int
    width: int
    block_size: int
    pages: int
    steps: int
    form: str
    interpret: bool

    @property
    def layout(self) -> IndexPageLayout:
        return IndexPageLayout(self.width)

    @property
    def blocks_a_page(self) -> int:
        return PAGE_ENTRIES // self.block_size

    @property
    def page_scratch_bytes(self) -> int:
        return 2 * self.pages * pl.cdiv(self.layout.page_rows, SUBLANES) * SUBLANES * ROW_BYTES

    def vmem_bytes(self, out_rows: int) -> int:
        """Upper estimate: page buffers, double-buffered blocks, weights and scores on lanes, working arrays."""
        rows = self.tokens * self.heads
        blocks = 2 * (rows * self.width * 2 + SUBLANES * pl.cdiv(rows, LANES) * ROW_BYTES)
        blocks += 2 * self.tokens * pl.cdiv(out_rows, SUBLANES) * SUBLANES * ROW_BYTES
        scores = (SUBLANES * self.pages + rows) * ROW_BYTES
        return self.page_scratch_bytes + blocks + scores + (64 << 10) + 4 * rows * ROW_BYTES


def maxima_plan(q_values, num_pages: int, block_size: int, form: str = "float32", interpret: bool = False):
    """The plan, and the rows of 128 maxima that a query has."""
    _, t, n, half = q_values.shape
    rows = pl.cdiv(num_pages, SUBLANES * block_size) * SUBLANES
    tokens = max(1, min(_MAX_TOKENS, _OUT_BYTES // (rows * ROW_BYTES)))
    tokens = pl.cdiv(t, max(1, pl.cdiv(t, tokens)))
    plan = Plan(
        heads=pl.cdiv(n, SUBLANES) * SUBLANES,
        tokens=tokens,
        width=2 * half,
        block_size=block_size,
        pages=SUBLANES * block_size,
        steps=rows // SUBLANES,
        form=form,
        interpret=interpret,
    )
    return plan, rows


def entries_plan(q_values, num_blocks: int, block_size: int, form: str = "float32", interpret: bool = False):
    """The plan, and the rows of 128 scores that a query has."""
    n, half = q_values.shape[2:]
    blocks_a_row = PAGE_ENTRIES // block_size
    rows = pl.cdiv(num_blocks, blocks_a_row)
    # Half a register of rows where it would take too many pages.
    step_rows = min(rows, max(1, min(SUBLANES, 128 // blocks_a_row)))
    rows = pl.cdiv(rows, step_rows) * step_rows
    plan = Plan(
        heads=pl.cdiv(n, SUBLANES) * SUBLANES,
        tokens=1,
        width=2 * half,
        block_size=block_size,
        pages=step_rows * blocks_a_row,
        steps=rows // step_rows,
        form=form,
        interpret=interpret,
    )
    return plan, rows
