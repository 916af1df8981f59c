"""Entry points of block quantisation and of the fused cache writes.

Quantising or dequantising by itself is elementwise: inside a larger program XLA fuses it with its neighbours, which no
kernel can beat. So `implementation=None` and "auto" mean XLA here, and the kernels run where they are named. The fused
writes choose by backend like every other op.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import function
from pallas_kernels.page_layout import IndexPageLayout, MainPageLayout, WindowLayout
from pallas_kernels.quantize import ref
from pallas_kernels.quantize.ref import (
    FP8_GROUP,
    KV_FP4_GROUP,
    MXFP4_GROUP,
    WEIGHT_BLOCK,
    dequantize_weight_fp4,
    dequantize_weight_fp8,
    quantize_rows_fp8,
    quantize_weight_fp4,
    quantize_weight_fp8,
)

__all__ = [
    "FP8_GROUP",
    "KV_FP4_GROUP",
    "MXFP4_GROUP",
    "WEIGHT_BLOCK",
    "dequantize_fp8",
    "dequantize_kv_fp4",
    "dequantize_mxfp4",
    "dequantize_weight_fp4",
    "dequantize_weight_fp8",
    "quantize_fp8",
    "quantize_kv_fp4",
    "quantize_mxfp4",
    "quantize_rows_fp8",
    "quantize_weight_fp4",
    "quantize_weight_fp8",
    "write_index",
    "write_main",
    "write_window",
]


def _is_xla(implementation: str | None) -> bool:
    return implementation in (None, "auto", "xla")


def quantize_fp8(x: jax.Array, *, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """[..., C] -> E4M3 [..., C] and E8M0 uint8 [..., C/32]; scale = 2^ceil(log2(max(amax, 1e-4) / 448)).

    Raises:
      ValueError: the implementation asked for cannot run.
    """
    if _is_xla(implementation):
        return ref.quantize_fp8(x)
    return _kernel("quantize_fp8", implementation, x)


def dequantize_fp8(values: jax.Array, scales: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """E4M3 [..., C], E8M0 uint8 [..., C/32] -> bfloat16 [..., C]; raises as `quantize_fp8`."""
    if _is_xla(implementation):
        return ref.dequantize_fp8(values, scales)
    return _kernel("dequantize_fp8", implementation, values, scales)


def quantize_mxfp4(x: jax.Array, *, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """[..., C] -> E2M1 codes, adjacent pairs a byte [..., C/2], and E8M0 uint8 [..., C/32].

    scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)); raises as `quantize_fp8`.
    """
    if _is_xla(implementation):
        return ref.quantize_mxfp4(x)
    return _kernel("quantize_mxfp4", implementation, x)


def dequantize_mxfp4(packed: jax.Array, scales: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Bytes [..., C/2] in adjacent order, E8M0 uint8 [..., C/32] -> bfloat16 [..., C]; raises as `quantize_fp8`."""
    if _is_xla(implementation):
        return ref.dequantize_mxfp4(packed, scales)
    return _kernel("dequantize_mxfp4", implementation, packed, scales)


def quantize_kv_fp4(x: jax.Array, *, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """[..., C] -> E2M1 codes, half-split [..., C/2], and E4M3 scale bytes uint8 [..., C/16].

    scale = E4M3(max(amax, 6 * 2^-9) / 6), saturating; exact for inputs that hold bfloat16 values. Raises as
    `quantize_fp8`.
    """
    if _is_xla(implementation):
        return ref.quantize_kv_fp4(x)
    return _kernel("quantize_kv_fp4", implementation, x)


def dequantize_kv_fp4(packed: jax.Array, scales: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Bytes [..., C/2] in half-split order, E4M3 scale bytes [..., C/16] -> bfloat16 [..., C]; raises as
    `quantize_fp8`."""
    if _is_xla(implementation):
        return ref.dequantize_kv_fp4(packed, scales)
    return _kernel("dequantize_kv_fp4", implementation, packed, scales)


def write_window(
    x: jax.Array,
    gain: jax.Array,
    rope: jax.Array,
    rings: jax.Array,
    slot: jax.Array,
    index: jax.Array,
    *,
    eps: float,
    layout: WindowLayout,
    implementation: str | None = None,
) -> jax.Array:
    """RMSNorm, RoPE, FP8 quantisation and the write into window rings, in place if `rings` is donated.

    Args:
      x: bfloat16 [B, T, H], before the norm.
      gain: bfloat16 [H].
      rope: float32 [B, T, 2, r], cosine then sine for the last 2r channels (architecture.md section 3).
      rings: uint8 [slots, rows, 4, 128] (`WindowLayout`).
      slot, index: int32 [B, T], where each row goes; a slot or index that does not exist drops the row. No two rows may
        go to one place.
      eps: of the norm.
      layout: of `rings`.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      The rings; only the bytes of the rows written change.

    Raises:
      TypeError, ValueError: a dtype or shape does not fit; the implementation asked for cannot run.
    """
    _check_rows("write_window", x, rope, layout.head_dim, rings, layout.shape(rings.shape[0]), slot, index)
    _check_gain("write_window", gain, layout.head_dim)
    return _write(
        "write_window", implementation, rings, rope, x, gain, rope, rings, slot, index, eps=eps, layout=layout
    )


def write_main(
    latent: jax.Array,
    rope: jax.Array,
    pool: jax.Array,
    page: jax.Array,
    entry: jax.Array,
    *,
    layout: MainPageLayout,
    implementation: str | None = None,
) -> jax.Array:
    """RoPE, FP4 quantisation and the write into pages of main KV, in place if `pool` is donated.

    Args:
      latent: bfloat16 [B, G, H], already normed.
      rope: float32 [B, G, 2, r], cosine then sine for the last 2r channels (architecture.md section 3).
      pool: uint8 [pages, rows, 4, 128] (`MainPageLayout`).
      page, entry: int32 [B, G], where each row goes; a page or entry that does not exist drops the row. No two rows may
        go to one place.
      layout: of `pool`.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      The pool; only the bytes of the entries written change.

    Raises:
      TypeError, ValueError: a dtype or shape does not fit; the implementation asked for cannot run.
    """
    _check_rows("write_main", latent, rope, layout.head_dim, pool, layout.shape(pool.shape[0]), page, entry)
    return _write("write_main", implementation, pool, rope, latent, rope, pool, page, entry, layout=layout)


def write_index(
    key: jax.Array,
    gain: jax.Array,
    rope: jax.Array,
    pool: jax.Array,
    page: jax.Array,
    entry: jax.Array,
    *,
    eps: float,
    layout: IndexPageLayout,
    implementation: str | None = None,
) -> jax.Array:
    """RMSNorm, RoPE, MXFP4 quantisation and the write into pages of index keys, in place if `pool` is donated.

    Args:
      key: bfloat16 [B, G, C], before the norm.
      gain: bfloat16 [C].
      rope: float32 [B, G, 2, r], cosine then sine for the last 2r channels (architecture.md section 3).
      pool: uint8 [pages, rows, 4, 128] (`IndexPageLayout`).
      page, entry: int32 [B, G], where each row goes; a page or entry that does not exist drops the row. No two rows may
        go to one place.
      eps: of the norm.
      layout: of `pool`.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      The pool; only the bytes of the entries written change.

    Raises:
      TypeError, ValueError: a dtype or shape does not fit; the implementation asked for cannot run.
    """
    _check_rows("write_index", key, rope, layout.dim, pool, layout.shape(pool.shape[0]), page, entry)
    _check_gain("write_index", gain, layout.dim)
    return _write("write_index", implementation, pool, rope, key, gain, rope, pool, page, entry, eps=eps, layout=layout)


def _check_rows(op: str, x, rope, width: int, pool, pool_shape: tuple[int, ...], outer, inner) -> None:
    """Shapes and dtypes that the three writes have in common."""
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(f"{op}: rows must be [B, T, {width}], got {x.shape}")
    if rope.ndim != 4 or rope.shape[:3] != (*x.shape[:2], 2) or 2 * rope.shape[3] > width:
        raise ValueError(f"{op}: rope must be [B, T, 2, r] for rows {x.shape}, got {rope.shape}")
    if pool.shape != pool_shape:
        raise ValueError(f"{op}: the pages or rings must be {pool_shape}, got {pool.shape}")
    if outer.shape != x.shape[:2] or inner.shape != x.shape[:2]:
        raise ValueError(f"{op}: addresses must be {x.shape[:2]}, got {outer.shape} and {inner.shape}")
    expected = (jnp.bfloat16, jnp.float32, jnp.uint8, jnp.int32, jnp.int32)
    for array, dtype in zip((x, rope, pool, outer, inner), expected, strict=True):
        if array.dtype != dtype:
            raise TypeError(f"{op}: expected {jnp.dtype(dtype).name} {array.shape}, got {array.dtype}")


def _check_gain(op: str, gain, width: int) -> None:
    if gain.shape != (width,) or gain.dtype != jnp.bfloat16:
        raise ValueError(f"{op}: gain must be bfloat16 [{width}], got {gain.dtype} {gain.shape}")


def _kernel(op: str, implementation: str | None, *arrays: jax.Array):
    """A quantise or dequantise kernel that was asked for by name, or by "pallas"."""
    from pallas_kernels.quantize import gpu, tpu

    first = arrays[0]
    pack = 2 if op in ("dequantize_mxfp4", "dequantize_kv_fp4") else 1
    dtype = jnp.bfloat16 if op.startswith("de") else first.dtype
    problems = {
        "gpu": lambda: gpu.problem(first.shape[-1] * pack, first.size * pack, dtype),
        "tpu": lambda: tpu.problem(first.shape[-1] * pack),
    }
    return function(__package__, op, implementation, problems)(*arrays)


def _write(op: str, implementation: str | None, pool: jax.Array, rope: jax.Array, *arrays: jax.Array, **static):
    from pallas_kernels.quantize import gpu, tpu

    if arrays[0].size == 0:
        return pool
    sizes = arrays[0].shape[-1], 2 * rope.shape[-1]
    problems = {"gpu": lambda: gpu.write_problem(*sizes), "tpu": lambda: tpu.write_problem(*sizes)}
    return function(__package__, op, implementation, problems)(*arrays, **static)
