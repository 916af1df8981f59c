"""Quantising and dequantising whole arrays: one thread takes 8 (main KV: 2 x 8) channels, neighbours share a group.

Only imported where a GPU kernel is traced. Every access is coalesced: a warp reads or writes 512 bytes of bfloat16 at
once. Groups lie along the last axis, which is contiguous, so only main KV, packed by halves, needs to know its width.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx
from pallas_kernels.ptx import Value
from pallas_kernels.quantize import gpu_codes as codes

_THREADS = 128


def launch(
    emit: Callable[..., None],
    name: str,
    blocks: int,
    arrays: Sequence[jax.Array],
    out_type: tuple[jax.ShapeDtypeStruct, ...] = (),
    scratch_types: Sequence = (),
):
    """Runs `emit(block number, *refs)` in one warpgroup a block; refs of the inputs, outputs and scratch memory."""
    count = len(arrays) + len(out_type) + len(scratch_types)

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * count, plgpu.Layout.WG_SPLAT(())))
    def inline(ctx, *args):
        del ctx
        emit(args[-1].registers.item(), *args[:-1])

    def body(*refs):
        inline(*refs, lax.axis_index("block"))

    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(*arrays)


def _items(block: Value, unroll: int, count: int, together: int) -> list[Value]:
    """Numbers of this thread's items. Lanes beyond the end repeat the last `together` items, which share a group."""
    thread = ptx.thread_in_warpgroup()
    inside = ptx.and_(thread, together - 1)
    first = arith.subi(ptx.add(ptx.mul(block, _THREADS * unroll), thread), inside)
    last = ptx.const(count - together)
    return [ptx.add(arith.minui(ptx.add(first, _THREADS * u), last), inside) for u in range(unroll)]


def _blocks(count: int, unroll: int) -> int:
    return -(-count // (_THREADS * unroll))


def _leads(item: Value, together: int) -> Value:
    """Whether the thread is the first of its group."""
    return arith.cmpi(arith.CmpIPredicate.eq, ptx.and_(item, together - 1), ptx.const(0))


def quantize(name: str, x: jax.Array, *, unroll: int) -> tuple[jax.Array, jax.Array]:
    """bfloat16 x in groups of 32 to "fp8" or "mxfp4": value bytes and scale bytes, flat."""
    count = x.size // codes.CHANNELS
    value_bytes = codes.CHANNELS if name == "fp8" else codes.CHANNELS // 2
    encode = codes.encode_fp8 if name == "fp8" else codes.encode_mxfp4

    def emit(block, x, values, scales):
        x, values, scales = (ptx.global_address(r) for r in (x, values, scales))
        items = _items(block, unroll, count, 4)
        loaded = [ptx.load_16_bytes(ptx.row_address(x, i, 16)) for i in items]
        for item, words in zip(items, loaded, strict=True):
            out, scale = encode(words, codes.group_amax(words, 4))
            ptx.store_words(ptx.row_address(values, item, value_bytes), out if name == "fp8" else [out])
            ptx.store_byte(ptx.row_address(scales, ptx.shr(item, 2), 1), scale, predicate=_leads(item, 4))

    out_type = (
        jax.ShapeDtypeStruct((count * value_bytes,), jnp.uint8),
        jax.ShapeDtypeStruct((count // 4,), jnp.uint8),
    )
    return launch(emit, f"quantize_{name}", _blocks(count, unroll), (x,), out_type)


def dequantize(name: str, values: jax.Array, scales: jax.Array, *, unroll: int) -> jax.Array:
    """Bytes of "fp8" or "mxfp4" -> bfloat16, flat."""
    value_bytes = codes.CHANNELS if name == "fp8" else codes.CHANNELS // 2
    count = values.size // value_bytes
    decode = codes.decode_fp8 if name == "fp8" else lambda words, scale: codes.decode_mxfp4(words[0], scale)

    def emit(block, values, scales, out):
        values, scales, out = (ptx.global_address(r) for r in (values, scales, out))
        items = _items(block, unroll, count, 4)
        loaded = [ptx.load_words(ptx.row_address(values, i, value_bytes), value_bytes // 4) for i in items]
        scale = [ptx.load_u8(ptx.row_address(scales, ptx.shr(i, 2), 1)) for i in items]
        for item, words, s in zip(items, loaded, scale, strict=True):
            ptx.store_words(ptx.row_address(out, item, 16), decode(words, s))

    out_type = (jax.ShapeDtypeStruct((count * codes.CHANNELS,), jnp.bfloat16),)
    return launch(emit, f"dequantize_{name}", _blocks(count, unroll), (values, scales), out_type)[0]


def _split(item: Value, width: int) -> tuple[Value, Value]:
    """Row and number of the 8 channels in its lower half."""
    per_row = width // (2 * codes.CHANNELS)
    row = arith.divui(item, ptx.const(per_row))
    return row, arith.subi(item, ptx.mul(row, per_row))


def quantize_kv_fp4(x: jax.Array, *, unroll: int) -> tuple[jax.Array, jax.Array]:
    """bfloat16 x [..., C] in groups of 16 -> E2M1 bytes in half-split order and E4M3 scale bytes, flat."""
    width = x.shape[-1]
    count = x.size // (2 * codes.CHANNELS)

    def emit(block, x, values, scales):
        x, values, scales = (ptx.global_address(r) for r in (x, values, scales))
        items = _items(block, unroll, count, 2)
        places = [_split(i, width) for i in items]
        sources = [ptx.offset(ptx.row_address(x, row, 2 * width), ptx.mul(pair, 16)) for row, pair in places]
        loaded = [[ptx.load_16_bytes(s), ptx.load_16_bytes(s, width)] for s in sources]
        for item, (row, pair), (low, high) in zip(items, places, loaded, strict=True):
            amax = (codes.group_amax(low, 2), codes.group_amax(high, 2))
            out, bytes_ = codes.encode_kv_fp4(low, high, amax)
            ptx.store_words(ptx.row_address(values, item, 8), out)
            target = ptx.offset(ptx.row_address(scales, row, width // 16), ptx.shr(pair, 1))
            leads = _leads(item, 2)
            ptx.store_byte(target, bytes_[0], predicate=leads)
            ptx.store_byte(target, bytes_[1], width // 32, predicate=leads)

    out_type = (jax.ShapeDtypeStruct((count * 8,), jnp.uint8), jax.ShapeDtypeStruct((count,), jnp.uint8))
    return launch(emit, "quantize_kv_fp4", _blocks(count, unroll), (x,), out_type)


def dequantize_kv_fp4(packed: jax.Array, scales: jax.Array, *, unroll: int) -> jax.Array:
    """E2M1 bytes [..., C/2] in half-split order and E4M3 scale bytes [..., C/16] -> bfloat16, flat."""
    width = 2 * packed.shape[-1]
    count = packed.size // 8

    def emit(block, packed, scales, out):
        packed, scales, out = (ptx.global_address(r) for r in (packed, scales, out))
        items = _items(block, unroll, count, 2)
        places = [_split(i, width) for i in items]
        loaded = [ptx.load_words(ptx.row_address(packed, i, 8), 2) for i in items]
        sources = [ptx.offset(ptx.row_address(scales, row, width // 16), ptx.shr(pair, 1)) for row, pair in places]
        scale = [(ptx.load_u8(s), ptx.load_u8(s, width // 32)) for s in sources]
        for (row, pair), words, s in zip(places, loaded, scale, strict=True):
            low, high = codes.decode_kv_fp4(words, s)
            target = ptx.offset(ptx.row_address(out, row, 2 * width), ptx.mul(pair, 16))
            ptx.store_words(target, low)
            ptx.store_words(target, high, width)

    out_type = (jax.ShapeDtypeStruct((count * 16,), jnp.bfloat16),)
    return launch(emit, "dequantize_kv_fp4", _blocks(count, unroll), (packed, scales), out_type)[0]
