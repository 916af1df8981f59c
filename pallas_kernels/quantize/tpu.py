"""Quantisation and the fused cache writes on TPU (Mosaic TPU). Same signatures as `ops`, and `interpret`."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize.tpu_codes import GROUPS, LANES, as_bf16, decode, encode, moved, selection, where_equal
from pallas_kernels.quantize.tpu_write import write_index, write_main, write_problem, write_window

__all__ = [
    "dequantize_fp8",
    "dequantize_kv_fp4",
    "dequantize_mxfp4",
    "problem",
    "quantize_fp8",
    "quantize_kv_fp4",
    "quantize_mxfp4",
    "write_index",
    "write_main",
    "write_problem",
    "write_window",
]

_CHUNK = 256  # channels worked on at a time
_WHOLE = 1024  # rows of up to this many channels that are no multiple of two chunks are worked on whole
_TILE_BYTES = 2 << 20


def problem(channels: int) -> str | None:
    """What keeps quantise and dequantise from rows of `channels`; None if nothing does."""
    if channels % 32:
        return f"the kernel takes multiples of 32 channels, not {channels}"
    if channels > _WHOLE and channels % (2 * _CHUNK):
        return f"above {_WHOLE} channels the kernel takes multiples of {2 * _CHUNK}, not {channels}"
    if channels > 1 << 16:
        return f"the kernel takes rows of up to {1 << 16} channels, not {channels}"
    return None


def _stored(codes: jax.Array, dtype) -> jax.Array:
    """int32 0..255 -> uint8, or the 8-bit float of these bits."""
    return jax.lax.bitcast_convert_type(codes.astype(jnp.uint8), dtype)


def _loaded(values: jax.Array) -> jax.Array:
    """The inverse of `_stored`."""
    return jax.lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.int32)


def _quantize_kernel(x_ref, values_ref, scales_ref, *, name: str, channels: int, chunk: int):
    group, groups = GROUPS[name], channels // GROUPS[name]

    def part(first):
        """Codes of the channels from `first` on, and their scales at the scales' places among all of the row's."""
        at = pl.ds(first if isinstance(first, int) else pl.multiple_of(first, LANES), chunk)
        codes, scale = encode(name, x_ref[:, at].astype(jnp.float32))
        place = selection(chunk, groups, lambda c, g: where_equal(c + first, g * group))
        return codes, moved(scale, place)

    def store(first, values):
        at = pl.ds(first if isinstance(first, int) else pl.multiple_of(first, LANES), values.shape[1])
        values_ref[:, at] = _stored(values, values_ref.dtype)

    def body(q, scales):
        codes, found = part(q * chunk)
        if name == "fp8":
            store(q * chunk, codes)
        elif name == "mxfp4":
            pairs = selection(chunk, chunk // 2, lambda c, b: where_equal(c, 2 * b) + 16 * where_equal(c, 2 * b + 1))
            store(q * (chunk // 2), moved(codes, pairs))
        else:
            high, more = part(channels // 2 + q * chunk)
            store(q * chunk, codes | (high << 4))
            found = found + more
        return scales + found

    nothing = jnp.zeros((x_ref.shape[0], groups), jnp.int32)
    if chunk < channels:
        steps = channels // chunk // (2 if name == "kv_fp4" else 1)
        scales = jax.lax.fori_loop(0, steps, body, nothing)
    else:
        codes, scales = part(0)
        if name != "fp8":
            low, high = _nibbles(name, channels)
            codes = moved(
                codes,
                selection(chunk, channels // 2, lambda c, b: where_equal(c, low(b)) + 16 * where_equal(c, high(b))),
            )
        values_ref[...] = _stored(codes[:, : values_ref.shape[1]], values_ref.dtype)
    scales_ref[...] = scales.astype(jnp.uint8)


def _nibbles(name: str, channels: int):
    """Which channels a byte holds: functions of the byte's number for its low and its high half."""
    if name == "mxfp4":
        return lambda b: 2 * b, lambda b: 2 * b + 1
    return lambda b: b, lambda b: b + channels // 2


def _dequantize_kernel(values_ref, scales_ref, x_ref, *, name: str, channels: int, chunk: int):
    group, groups = GROUPS[name], channels // GROUPS[name]
    scales = as_bf16(scales_ref[...].astype(jnp.int32))

    def spread(first):
        """Every channel's scale byte."""
        places = selection(groups, chunk, lambda g, c: where_equal((c + first) // group, g))
        return jnp.dot(scales, places, preferred_element_type=jnp.float32).astype(jnp.int32)

    def at(first, width):
        return pl.ds(first if isinstance(first, int) else pl.multiple_of(first, LANES), width)

    def store(first, codes):
        x_ref[:, at(first, chunk)] = decode(name, codes, spread(first)).astype(jnp.bfloat16)

    def body(q, _):
        if name == "fp8":
            store(q * chunk, _loaded(values_ref[:, at(q * chunk, chunk)]))
            return 0
        if name == "mxfp4":
            packed = values_ref[:, at(q * (chunk // 2), chunk // 2)].astype(jnp.int32)
            low = selection(chunk // 2, chunk, lambda b, c: where_equal(c, 2 * b))
            high = selection(chunk // 2, chunk, lambda b, c: where_equal(c, 2 * b + 1))
            store(q * chunk, moved(packed & 0xF, low) + moved(packed >> 4, high))
            return 0
        packed = values_ref[:, at(q * chunk, chunk)].astype(jnp.int32)
        store(q * chunk, packed & 0xF)
        store(channels // 2 + q * chunk, packed >> 4)
        return 0

    if chunk < channels:
        jax.lax.fori_loop(0, channels // chunk // (2 if name == "kv_fp4" else 1), body, 0)
        return
    codes = _loaded(values_ref[...])
    if name != "fp8":
        low, high = _nibbles(name, channels)
        half = channels // 2
        low = selection(half, channels, lambda b, c: where_equal(c, low(b)))
        high = selection(half, channels, lambda b, c: where_equal(c, high(b)))
        codes = moved(codes & 0xF, low) + moved(codes >> 4, high)
    x_ref[...] = decode(name, codes, spread(0)).astype(jnp.bfloat16)


def _tiling(rows: int, channels: int, whole_chunk: int) -> tuple[int, int]:
    """Rows of a grid step (8-bit registers have 32), channels of a chunk."""
    tile = max(32, min(_TILE_BYTES // (4 * channels) // 32 * 32, 256, pl.cdiv(rows, 32) * 32))
    return tile, _CHUNK if channels % (2 * _CHUNK) == 0 else whole_chunk


def _call(kernel, name: str, tile: int, arrays: list[jax.Array], out: list[tuple[int, jnp.dtype]], interpret: bool):
    """Runs a kernel over tiles of rows of 2-D arrays; out: width and dtype of each result."""
    rows = arrays[0].shape[0]
    out_shape = [jax.ShapeDtypeStruct((rows, width), dtype) for width, dtype in out]

    def tiles(shape):
        return pl.BlockSpec((tile, shape[1]), lambda i: (i, 0))

    moved_bytes = sum(math.prod(a.shape) * a.dtype.itemsize for a in (*arrays, *out_shape))
    return pl.pallas_call(
        kernel,
        name=name,
        grid=(pl.cdiv(rows, tile),),
        in_specs=[tiles(a.shape) for a in arrays],
        out_specs=[tiles(o.shape) for o in out_shape],
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved_bytes),
        interpret=interpret,
    )(*arrays)


def _quantize(name: str, x: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    channels = x.shape[-1]
    if (why := problem(channels)) is not None:
        raise ValueError(f"quantize_{name}: {why}")
    widths = channels if name == "fp8" else channels // 2, channels // GROUPS[name]
    dtypes = jnp.float8_e4m3fn if name == "fp8" else jnp.uint8, jnp.uint8
    shapes = [(*x.shape[:-1], width) for width in widths]
    if not x.size:
        return tuple(jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    rows = x.reshape(-1, channels)
    # A row that is worked on whole must end with a register.
    padded = pl.cdiv(channels, LANES) * LANES
    tile, chunk = _tiling(len(rows), channels, padded)
    if chunk >= channels and padded != channels:
        rows = jnp.pad(rows, ((0, 0), (0, padded - channels)))
    kernel = functools.partial(_quantize_kernel, name=name, channels=channels, chunk=chunk)
    made = _call(kernel, f"quantize_{name}", tile, [rows], list(zip(widths, dtypes, strict=True)), interpret)
    return tuple(a.reshape(shape) for a, shape in zip(made, shapes, strict=True))


def _dequantize(name: str, values: jax.Array, scales: jax.Array, interpret: bool) -> jax.Array:
    channels = scales.shape[-1] * GROUPS[name]
    if (why := problem(channels)) is not None:
        raise ValueError(f"dequantize_{name}: {why}")
    shape = (*values.shape[:-1], channels)
    if not values.size:
        return jnp.zeros(shape, jnp.bfloat16)
    arrays = [a.reshape(-1, a.shape[-1]) for a in (values, scales)]
    tile, chunk = _tiling(len(arrays[0]), channels, channels)
    kernel = functools.partial(_dequantize_kernel, name=name, channels=channels, chunk=chunk)
    return _call(kernel, f"dequantize_{name}", tile, arrays, [(channels, jnp.bfloat16)], interpret)[0].reshape(shape)


def quantize_fp8(x: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """[..., C] -> E4M3 [..., C], E8M0 uint8 [..., C/32]."""
    return _quantize("fp8", x, interpret)


def quantize_mxfp4(x: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """[..., C] -> E2M1 codes in adjacent order [..., C/2], E8M0 uint8 [..., C/32]."""
    return _quantize("mxfp4", x, interpret)


def quantize_kv_fp4(x: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """[..., C] -> E2M1 codes in half-split order [..., C/2], E4M3 bytes uint8 [..., C/16]."""
    return _quantize("kv_fp4", x, interpret)


def dequantize_fp8(values: jax.Array, scales: jax.Array, *, interpret: bool = False) -> jax.Array:
    """E4M3 [..., C], E8M0 uint8 [..., C/32] -> bfloat16 [..., C]."""
    return _dequantize("fp8", values, scales, interpret)


def dequantize_mxfp4(packed: jax.Array, scales: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Bytes [..., C/2] in adjacent order, E8M0 uint8 [..., C/32] -> bfloat16 [..., C]."""
    return _dequantize("mxfp4", packed, scales, interpret)


def dequantize_kv_fp4(packed: jax.Array, scales: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Bytes [..., C/2] in half-split order, E4M3 bytes uint8 [..., C/16] -> bfloat16 [..., C]."""
    return _dequantize("kv_fp4", packed, scales, interpret)
