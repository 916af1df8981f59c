"""How the index-score kernels divide their work on Hopper."""

from collections.abc import Sequence

import jax

from pallas_kernels.indexer.plans import EntriesPlan, MaximaPlan
from pallas_kernels.tuning import knob

MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024
MAX_HEADS = 32
MAX_WIDTH = 128
BLOCK_SIZES = (4, 8, 16)
MAX_QUERIES = (1 << 31) // 128
_STEP_ENTRIES = 256  # of a warpgroup, in entry scores


def problem(batch: int, tokens: int, heads: int, width: int, block_size: int) -> str | None:
    """Why there is no plan; None if there is."""
    if heads > MAX_HEADS:
        return f"a query has {heads} index heads, more than {MAX_HEADS}"
    if width > MAX_WIDTH:
        return f"index keys have {width} channels, more than {MAX_WIDTH}"
    if block_size not in BLOCK_SIZES:
        return f"block_size must be one of {BLOCK_SIZES}, got {block_size}"
    if batch * tokens > MAX_QUERIES or maxima_plan(batch, tokens, 1, width, block_size).shared_bytes > SHARED_BYTES:
        return f"{batch} x {tokens} queries are too many"
    return None


def knobs(
    q_values: jax.ShapeDtypeStruct,
    pages: jax.ShapeDtypeStruct,
    block_size: int,
    blocks: jax.ShapeDtypeStruct | None = None,
    **_,
) -> tuple[str, dict[str, Sequence[int]]]:
    """What the tuner may vary for these arguments of `ops.block_maxima` or `ops.entry_scores`."""
    batch, tokens, _, half = q_values.shape
    if blocks is None:
        choices: dict[str, Sequence[int]] = {"warpgroups": (2, 3, 4), "stages": (2, 3, 4, 6)}
        if tokens > 8:
            choices["queries"] = (8, 16, 32)
        return _maxima_key(batch, tokens, pages.shape[1], 2 * half, block_size), choices
    splits = [1 << i for i in range(6) if 1 << i <= blocks.shape[2] * block_size // _STEP_ENTRIES]
    key = _entries_key(batch * tokens, blocks.shape[2], 2 * half, block_size)
    return key, {"warpgroups": (2, 3, 4), "splits": splits or [1]}


def _maxima_key(batch: int, tokens: int, table: int, width: int, block_size: int) -> str:
    return f"maxima {batch}x{tokens} of {table} pages c{width} {block_size}"


def _entries_key(queries: int, count: int, width: int, block_size: int) -> str:
    return f"entries {queries}x{count} c{width} {block_size}"


def maxima_plan(batch: int, tokens: int, table: int, width: int, block_size: int) -> MaximaPlan:
    """One block a processor, tiles of up to 32 queries of a sequence."""
    key = _maxima_key(batch, tokens, table, width, block_size)
    tiles = -(-tokens // 32)
    even = -(-tokens // tiles)
    queries = min(tokens, knob("indexer", key, "queries", even if tiles == 1 else even + -even % 4))
    return MaximaPlan(
        batch=batch,
        tokens=tokens,
        table=table,
        width=width,
        block_size=block_size,
        queries=queries,
        together=min(4, 1 << (queries - 1).bit_length()),
        warpgroups=knob("indexer", key, "warpgroups", 3 if queries == 1 else 2),
        stages=knob("indexer", key, "stages", 4 if queries == 1 else 6 if queries <= 16 else 3),
        blocks=MULTIPROCESSORS,
    )


def entries_plan(batch: int, tokens: int, table: int, width: int, block_size: int, count: int) -> EntriesPlan:
    """A block a query, or several where there are few queries."""
    queries = batch * tokens
    key = _entries_key(queries, count, width, block_size)
    warpgroups = knob("indexer", key, "warpgroups", 3)
    steps = -(-count * block_size // _STEP_ENTRIES)
    splits = max(1, min(-(-steps // warpgroups), MULTIPROCESSORS // queries))
    return EntriesPlan(
        queries=queries,
        tokens=tokens,
        table=table,
        count=count,
        width=width,
        block_size=block_size,
        warpgroups=warpgroups,
        splits=knob("indexer", key, "splits", splits),
    )
