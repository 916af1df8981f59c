"""Entry point of sparse attention: one softmax over a query's window and selected entries, on the packed caches."""

import jax
import jax.numpy as jnp

from pallas_kernels.array_checks import expect
from pallas_kernels.dispatch import function
from pallas_kernels.page_layout import MainPageLayout, WindowLayout


def sparse_attention(
    q: jax.Array,
    window: jax.Array,
    slot: jax.Array,
    window_index: jax.Array,
    pool: jax.Array | None,
    selected: jax.Array | None,
    sink: jax.Array,
    rope: jax.Array | None,
    *,
    scale: float,
    window_layout: WindowLayout,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of each query over its own window rows and selected entries (architecture.md section 3).

    One softmax over both; an entry is key and value at once. The sink enters the denominator only. Probabilities enter
    the value product unnormalised and rounded to bfloat16, the denominator unrounded. The quotient is rounded to
    bfloat16, then rotated backwards in float32 and rounded again. A query that sees nothing gives 0. Rows that no index
    names may hold any bytes.

    Args:
      q: bfloat16 [B, T, N, H], rotated.
      window: uint8 [slots, rows, 4, 128], rings of window KV in `window_layout`.
      slot: int32 [B], ring of each sequence; in range where any of its window indices is used.
      window_index: int32 [B, T, W], rows inside the ring, -1 for none, in any order.
      pool: uint8 [P, rows, 4, 128], pages of main KV in `MainPageLayout(H)`, or None.
      selected: int32 [B, T, K], physical entry numbers (page * 128 + entry in it), -1 for none, in any order; None
        with pool.
      sink: float32 [N], not scaled.
      rope: float32 [B, T, 2, r], cosine and sine at the queries' positions for the last 2r channels; None: the output
        stays rotated.
      scale: factor of the logits.
      window_layout: layout of `window`, of width H.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      bfloat16 [B, T, N, H].

    Raises:
      ValueError: shapes or dtypes do not fit, or the implementation asked for cannot run.
    """
    arrays = (q, window, slot, window_index, pool, selected, sink, rope)
    _check(*arrays, window_layout)

    def gpu_problem() -> str | None:
        from pallas_kernels.sparse_attention import gpu

        return gpu.problem(*arrays, scale=scale, window_layout=window_layout)

    def tpu_problem() -> str | None:
        from pallas_kernels.sparse_attention import tpu

        return tpu.problem(q, window_index, selected, rope, window_layout=window_layout)

    problems = {"gpu": gpu_problem, "tpu": tpu_problem}
    attend = function(__package__, "sparse_attention", implementation, problems)
    return attend(*arrays, scale=scale, window_layout=window_layout)


def _check(q, window, slot, window_index, pool, selected, sink, rope, window_layout: WindowLayout) -> None:
    if q.ndim != 4:
        raise ValueError(f"sparse_attention: q must be [B, T, N, H], got {q.shape}")
    b, t, n, h = q.shape
    if window_layout.head_dim != h:
        raise ValueError(f"sparse_attention: the window's width {window_layout.head_dim} is not q's, {h}")
    if (pool is None) != (selected is None):
        raise ValueError("sparse_attention: pool and selected come together")

    op = "sparse_attention"
    expect(op, "q", q, jnp.bfloat16, b, t, n, h)
    expect(op, "window", window, jnp.uint8, None, *window_layout.shape(1)[1:])
    expect(op, "slot", slot, jnp.int32, b)
    expect(op, "window_index", window_index, jnp.int32, b, t, None)
    expect(op, "sink", sink, jnp.float32, n)
    if pool is not None:
        expect(op, "pool", pool, jnp.uint8, None, *MainPageLayout(h).shape(1)[1:])
        expect(op, "selected", selected, jnp.int32, b, t, None)
    if rope is not None:
        expect(op, "rope", rope, jnp.float32, b, t, 2, None)
        if 2 * rope.shape[-1] > h:
            raise ValueError(f"sparse_attention: rope rotates {2 * rope.shape[-1]} channels of {h}")
