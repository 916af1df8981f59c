"""Entry points of index scoring on the packed pages of index keys."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.array_checks import expect
from pallas_kernels.dispatch import choose, function
from pallas_kernels.indexer.ref import index_scores, run_maxima
from pallas_kernels.page_layout import PAGE_ENTRIES, IndexPageLayout

__all__ = ["PAGE_ENTRIES", "block_maxima", "entry_scores", "index_scores", "run_maxima", "runs_kernel"]


def block_maxima(
    q_values: jax.Array,
    q_scales: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    visible: jax.Array,
    *,
    block_size: int,
    implementation: str | None = None,
) -> jax.Array:
    """The largest index score of each block of consecutive entries (architecture.md section 3).

    The score of a query and an entry is the sum over heads of bf16(bf16(relu(bf16(q_h . k))) * w_h), summed in float32
    and rounded to bfloat16, never -0. A score of NaN counts as -inf. Entries at and after `visible` are not scored,
    nor are those of unassigned pages; their memory may hold any bytes.

    Args:
      q_values: uint8 [B, T, N, C/2], MXFP4 queries, adjacent channels a byte.
      q_scales: uint8 [B, T, N, C/32], their E8M0 scales.
      weights: bfloat16 [B, T, N], head weights with their scale.
      pool: uint8 [P, rows, 4, 128], pages of index keys in `IndexPageLayout(C)`.
      pages: int32 [B, M], the physical page of entries 128 * i to 128 * i + 127 of a sequence, -1 for none.
      visible: int32 [B, T], how many entries each query sees.
      block_size: entries a block, a divisor of 128.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      float32 [B, T, M * 128 / block_size] holding bfloat16 values; -inf where a block has no visible entry.

    Raises:
      ValueError: shapes or dtypes do not fit, or the implementation asked for cannot run.
    """
    _check("block_maxima", q_values, q_scales, weights, pool, pages, visible, block_size)
    arrays = (q_values, q_scales, weights, pool, pages, visible)
    batch, tokens = visible.shape
    if min(batch, tokens, pages.shape[1]) == 0:
        return jnp.zeros((batch, tokens, pages.shape[1] * PAGE_ENTRIES // block_size), jnp.float32)

    problems = _problems(q_values, weights, pool, block_size, num_pages=pages.shape[1])
    return function(__package__, "block_maxima", implementation, problems)(*arrays, block_size=block_size)


def entry_scores(
    q_values: jax.Array,
    q_scales: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    visible: jax.Array,
    blocks: jax.Array,
    *,
    block_size: int,
    implementation: str | None = None,
) -> jax.Array:
    """The index score of each entry of some blocks of every query.

    A (query, entry) pair has the same bits here as inside `block_maxima` with the same implementation, so that choosing
    blocks by their maxima and then entries by their scores is exact.

    Args:
      q_values, q_scales, weights, pool, pages, visible, block_size, implementation: as in `block_maxima`.
      blocks: int32 [B, T, n], block numbers of the query's sequence, -1 for none, in any order.

    Returns:
      float32 [B, T, n * block_size] holding bfloat16 values; -inf for unused blocks and entries that are not visible.

    Raises:
      ValueError: shapes or dtypes do not fit, or the implementation asked for cannot run.
    """
    _check("entry_scores", q_values, q_scales, weights, pool, pages, visible, block_size)
    if blocks.ndim != 3 or blocks.shape[:2] != visible.shape or blocks.dtype != jnp.int32:
        raise ValueError(
            f"entry_scores: blocks must be int32 [{visible.shape[0]}, {visible.shape[1]}, n], "
            f"got {blocks.dtype} {blocks.shape}"
        )
    arrays = (q_values, q_scales, weights, pool, pages, visible, blocks)
    if min(*blocks.shape, pages.shape[1]) == 0:
        return jnp.full((*visible.shape, blocks.shape[2] * block_size), -jnp.inf, jnp.float32)

    problems = _problems(q_values, weights, pool, block_size, num_blocks=blocks.shape[2])
    return function(__package__, "entry_scores", implementation, problems)(*arrays, block_size=block_size)


def runs_kernel(
    q_values: jax.Array, weights: jax.Array, pool: jax.Array, block_size: int, *, num_pages: int, num_blocks: int
) -> bool:
    """Whether both entries run as kernels under the current choice of kernels, and not as plain XLA.

    num_pages: of a sequence's table; num_blocks: listed for a query.

    Raises:
      ValueError: kernels were asked for and cannot run these shapes.
    """
    problems = _problems(q_values, weights, pool, block_size, num_pages=num_pages, num_blocks=num_blocks)
    return choose("index scores", None, problems) != "xla"


def _problems(q_values, weights, pool, block_size: int, **counts: int) -> dict[str, Callable[[], str | None]]:
    def gpu() -> str | None:
        from pallas_kernels.indexer import gpu

        return gpu.problem(q_values, weights, pool, block_size=block_size)

    def tpu() -> str | None:
        from pallas_kernels.indexer import tpu

        return tpu.problem(q_values, block_size, **counts)

    return {"gpu": gpu, "tpu": tpu}


def _check(op, q_values, q_scales, weights, pool, pages, visible, block_size: int) -> None:
    if q_values.ndim != 4:
        raise ValueError(f"{op}: q_values must be [B, T, N, C/2], got {q_values.shape}")
    b, t, n, half = q_values.shape
    layout = IndexPageLayout(2 * half)
    if block_size < 1 or PAGE_ENTRIES % block_size:
        raise ValueError(f"{op}: block_size must divide {PAGE_ENTRIES}, got {block_size}")

    expect(op, "q_values", q_values, jnp.uint8, b, t, n, half)
    expect(op, "q_scales", q_scales, jnp.uint8, b, t, n, layout.scale_bytes)
    expect(op, "weights", weights, jnp.bfloat16, b, t, n)
    expect(op, "pool", pool, jnp.uint8, None, *layout.shape(1)[1:])
    expect(op, "pages", pages, jnp.int32, b, None)
    expect(op, "visible", visible, jnp.int32, b, t)
