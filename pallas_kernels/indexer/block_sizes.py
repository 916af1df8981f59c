"""Tiles and grids of the index-score kernels on Hopper."""

from pallas_kernels.indexer.plans import EntriesPlan, MaximaPlan

# Streaming multiprocessors of an H100 or H200, and shared memory of a block.
_PROCESSORS = 132
_SHARED_BYTES = 227 * 1024


def problem(heads: int, width: int, block_size: int) -> str | None:
    """Why no plan exists for these widths; None if one does."""
    if heads > 32:
        return f"a query may have up to 32 index heads, got {heads}"
    if width > 128:
        return f"index keys may have up to 128 channels, got {width}"
    if block_size not in (4, 8, 16):
        return f"block_size must be 4, 8 or 16, got {block_size}"
    return None


def maxima_plan(batch: int, tokens: int, table: int, width: int, block_size: int) -> MaximaPlan:
    """One block a processor; query tiles as large as they may be while the rows still fill shared memory."""
    queries = min(tokens, 16)
    return MaximaPlan(
        batch=batch,
        tokens=tokens,
        table=table,
        width=width,
        block_size=block_size,
        queries=queries,
        warpgroups=3,
        stages=4,
        blocks=_PROCESSORS,
    )


def entries_plan(batch: int, tokens: int, table: int, width: int, block_size: int, count: int) -> EntriesPlan:
    """A block a query, or several where there are few queries."""
    queries, warpgroups = batch * tokens, 3
    steps = -(-count * block_size // 256)
    splits = max(1, min(-(-steps // warpgroups), _PROCESSORS // queries))
    return EntriesPlan(
        queries=queries,
        tokens=tokens,
        table=table,
        count=count,
        width=width,
        block_size=block_size,
        warpgroups=warpgroups,
        splits=splits,
    )
