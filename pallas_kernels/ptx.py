"""Small pieces of PTX and address arithmetic for `plgpu.inline_mgpu` bodies of Mosaic GPU kernels.

Values are MLIR values of type i32 (or i64 for global addresses). Only imported where a GPU kernel is traced.
"""

from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils

Value = Any


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def const(value: int) -> Value:
    return utils.c(value, i32())


def _value(x: Value | int) -> Value:
    return const(x) if isinstance(x, int) else x


def add(first: Value, *rest: Value | int) -> Value:
    for x in rest:
        first = arith.addi(first, _value(x))
    return first


def mul(a: Value, b: Value | int) -> Value:
    return arith.muli(a, _value(b))


def shr(a: Value, b: Value | int) -> Value:
    """Logical shift right."""
    return arith.shrui(a, _value(b))


def shl(a: Value, b: Value | int) -> Value:
    return arith.shli(a, _value(b))


def and_(a: Value, b: Value | int) -> Value:
    return arith.andi(a, _value(b))


def or_(a: Value, b: Value | int) -> Value:
    return arith.ori(a, _value(b))


def xor(a: Value, b: Value | int) -> Value:
    return arith.xori(a, _value(b))


def thread_in_warpgroup() -> Value:
    """0..127."""
    return and_(utils.thread_idx(), 127)


def asm(text: str, *operands: Value, results: int = 1, type: ir.Type | None = None, side_effects: bool = False):
    """Inline PTX with operands $results, $results + 1, ...; returns one value, or a list of several."""
    kind = type or i32()
    out = utils.inline_ptx(text, *operands, result_types=(kind,) * results, has_side_effects=side_effects)
    return out[0] if results == 1 else list(out)


def global_address(ref: Value) -> Value:
    """i64 address of a GMEM ref's first element."""
    return llvm.ptrtoint(i64(), utils.memref_ptr(ref))


def shared_address(ref: Value) -> Value:
    """i32 shared-window address of an SMEM ref's first element."""
    return llvm.ptrtoint(i32(), utils.memref_ptr(ref))


def offset(base: Value, bytes_: Value) -> Value:
    """i64 address + u32 offset."""
    return arith.addi(base, arith.extui(i64(), bytes_))


def row_address(base: Value, row: Value, pitch: int) -> Value:
    """i64 base + row * pitch, with row u32 and a product that may exceed 32 bits."""
    return arith.addi(base, arith.muli(arith.extui(i64(), row), utils.c(pitch, i64())))


def load_16_bytes(address: Value, displacement: int = 0) -> list[Value]:
    """Four words from global memory that this kernel does not write, not kept in L1."""
    text = f"ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {{$0,$1,$2,$3}}, [$4+{displacement}];"
    return asm(text, address, results=4, side_effects=True)


def load_word(address: Value, displacement: int = 0) -> Value:
    return asm(f"ld.global.nc.u32 $0, [$1+{displacement}];", address, side_effects=True)


def load_u16(address: Value, displacement: int = 0) -> Value:
    text = f"{{.reg .u16 t; ld.global.nc.u16 t, [$1+{displacement}]; cvt.u32.u16 $0, t;}}"
    return asm(text, address, side_effects=True)


def load_u8(address: Value, displacement: int = 0) -> Value:
    text = f"{{.reg .u16 t; ld.global.nc.u8 t, [$1+{displacement}]; cvt.u32.u16 $0, t;}}"
    return asm(text, address, side_effects=True)


def store_shared_16_bytes(address: Value, words: list[Value], displacement: int = 0) -> None:
    utils.inline_ptx(f"st.shared.v4.b32 [$0+{displacement}], {{$1,$2,$3,$4}};", address, *words)
