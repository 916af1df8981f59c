"""Quantising and dequantising whole arrays: one thread takes 8 (main KV: 2 x 8) channels, neighbours share a group.

Only imported where a GPU kernel is traced. Every access is coalesced: a warp reads or writes 512 bytes of bfloat16 at
once. Groups lie along the last axis, which is contiguous, so only main KV, packed by halves, needs to know its width.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class _Items:
    """Which items, of `count`, each thread takes: `unroll` of them, a block's width apart.

    Every `together` neighbours share a group. The last block begins early enough to be full, so it repeats items of the
    one before it and writes the same bytes; if there is less than one block, the lanes beyond the end repeat the last
    group.
    """

    count: int
    together: int
    unroll: int

    @classmethod
    def plan(cls, count: int, together: int, unroll: int) -> "_Items":
        return cls(count, together, unroll if count >= _THREADS * unroll else 1)

    @property
    def blocks(self) -> int:
        return -(-self.count // (_THREADS * self.unroll))

    def first(self, block: Value) -> Value:
        """The thread's first item."""
        thread = ptx.thread_in_warpgroup()
        if self.count < _THREADS:
            inside = ptx.and_(thread, self.together - 1)
            last = ptx.const(self.count - self.together)
            return ptx.add(arith.minui(arith.subi(thread, inside), last), inside)
        full = _THREADS * self.unroll
        return ptx.add(arith.minui(ptx.mul(block, full), ptx.const(self.count - full)), thread)

    def leads(self, item: Value) -> Value:
        """Whether the thread is the first of its group."""
        return arith.cmpi(arith.CmpIPredicate.eq, ptx.and_(item, self.together - 1), ptx.const(0))


def quantize(name: str, x: jax.Array, *, unroll: int) -> tuple[jax.Array, jax.Array]:
    """bfloat16 x in groups of 32 to "fp8" or "mxfp4": value bytes and scale bytes, flat."""
    items = _Items.plan(x.size // codes.CHANNELS, 4, unroll)
    value_bytes = codes.CHANNELS if name == "fp8" else codes.CHANNELS // 2
    encode = codes.encode_fp8 if name == "fp8" else codes.encode_mxfp4

    def emit(block, x, values, scales):
        item = items.first(block)
        x = ptx.row_address(ptx.global_address(x), item, 16)
        values = ptx.row_address(ptx.global_address(values), item, value_bytes)
        scales = ptx.row_address(ptx.global_address(scales), ptx.shr(item, 2), 1)
        loaded = [ptx.load_16_bytes(x, 16 * _THREADS * u) for u in range(items.unroll)]
        for u, words in enumerate(loaded):
            out, scale = encode(words, codes.group_amax(words, 4))
            ptx.store_words(values, out if name == "fp8" else [out], value_bytes * _THREADS * u)
            ptx.store_byte(scales, scale, _THREADS // 4 * u, predicate=items.leads(item))

    out_type = (
        jax.ShapeDtypeStruct((items.count * value_bytes,), jnp.uint8),
        jax.ShapeDtypeStruct((items.count // 4,), jnp.uint8),
    )
    return launch(emit, f"quantize_{name}", items.blocks, (x,), out_type)


def dequantize(name: str, values: jax.Array, scales: jax.Array, *, unroll: int) -> jax.Array:
    """Bytes of "fp8" or "mxfp4" -> bfloat16, flat."""
    value_bytes = codes.CHANNELS if name == "fp8" else codes.CHANNELS // 2
    items = _Items.plan(values.size // value_bytes, 4, unroll)
    decode = codes.decode_fp8 if name == "fp8" else lambda words, scale: codes.decode_mxfp4(words[0], scale)

    def emit(block, values, scales, out):
        item = items.first(block)
        values = ptx.row_address(ptx.global_address(values), item, value_bytes)
        scales = ptx.row_address(ptx.global_address(scales), ptx.shr(item, 2), 1)
        out = ptx.row_address(ptx.global_address(out), item, 16)
        steps = range(items.unroll)
        loaded = [ptx.load_words(values, value_bytes // 4, value_bytes * _THREADS * u) for u in steps]
        scale = [ptx.load_u8(scales, _THREADS // 4 * u) for u in steps]
        for u in steps:
            ptx.store_words(out, decode(loaded[u], scale[u]), 16 * _THREADS * u)

    out_type = (jax.ShapeDtypeStruct((items.count * codes.CHANNELS,), jnp.bfloat16),)
    return launch(emit, f"dequantize_{name}", items.blocks, (values, scales), out_type)[0]


def _pieces(items: _Items, item: Value, width: int) -> list[tuple[Value, Value]]:
    """Row, and number of the 8 channels in its lower half, of each item of main KV."""
    per_row = width // (2 * codes.CHANNELS)
    places = []
    for u in range(items.unroll):
        if places and _THREADS % per_row == 0:
            row, piece = places[0]
            places.append((ptx.add(row, _THREADS // per_row * u), piece))
        else:
            number = ptx.add(item, _THREADS * u)
            row = arith.divui(number, ptx.const(per_row))
            places.append((row, arith.subi(number, ptx.mul(row, per_row))))
    return places


def quantize_kv_fp4(x: jax.Array, *, unroll: int) -> tuple[jax.Array, jax.Array]:
    """bfloat16 x [..., C] in groups of 16 -> E2M1 bytes in half-split order and E4M3 scale bytes, flat."""
    width = x.shape[-1]
    items = _Items.plan(x.size // (2 * codes.CHANNELS), 2, unroll)

    def emit(block, x, values, scales):
        item = items.first(block)
        x, scales = ptx.global_address(x), ptx.global_address(scales)
        values = ptx.row_address(ptx.global_address(values), item, 8)
        places = _pieces(items, item, width)
        sources = [ptx.offset(ptx.row_address(x, row, 2 * width), ptx.mul(piece, 16)) for row, piece in places]
        loaded = [(ptx.load_16_bytes(s), ptx.load_16_bytes(s, width)) for s in sources]
        for u, ((row, piece), (low, high)) in enumerate(zip(places, loaded, strict=True)):
            out, scale = codes.encode_kv_fp4(low, high, (codes.group_amax(low, 2), codes.group_amax(high, 2)))
            ptx.store_words(values, out, 8 * _THREADS * u)
            target = ptx.offset(ptx.row_address(scales, row, width // 16), ptx.shr(piece, 1))
            ptx.store_byte(target, scale[0], predicate=items.leads(item))
            ptx.store_byte(target, scale[1], width // 32, predicate=items.leads(item))

    out_type = (jax.ShapeDtypeStruct((items.count * 8,), jnp.uint8), jax.ShapeDtypeStruct((items.count,), jnp.uint8))
    return launch(emit, "quantize_kv_fp4", items.blocks, (x,), out_type)


def dequantize_kv_fp4(packed: jax.Array, scales: jax.Array, *, unroll: int) -> jax.Array:
    """E2M1 bytes [..., C/2] in half-split order and E4M3 scale bytes [..., C/16] -> bfloat16, flat."""
    width = 2 * packed.shape[-1]
    items = _Items.plan(packed.size // 8, 2, unroll)

    def emit(block, packed, scales, out):
        item = items.first(block)
        packed = ptx.row_address(ptx.global_address(packed), item, 8)
        scales, out = ptx.global_address(scales), ptx.global_address(out)
        places = _pieces(items, item, width)
        loaded = [ptx.load_words(packed, 2, 8 * _THREADS * u) for u in range(items.unroll)]
        sources = [ptx.offset(ptx.row_address(scales, row, width // 16), ptx.shr(piece, 1)) for row, piece in places]
        scale = [(ptx.load_u8(s), ptx.load_u8(s, width // 32)) for s in sources]
        for (row, piece), words, s in zip(places, loaded, scale, strict=True):
            low, high = codes.decode_kv_fp4(words, s)
            target = ptx.offset(ptx.row_address(out, row, 2 * width), ptx.mul(piece, 16))
            ptx.store_words(target, low)
            ptx.store_words(target, high, width)

    out_type = (jax.ShapeDtypeStruct((items.count * 16,), jnp.bfloat16),)
    return launch(emit, "dequantize_kv_fp4", items.blocks, (packed, scales), out_type)[0]
