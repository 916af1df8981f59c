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


def f32() -> ir.Type:
    return ir.F32Type.get()


def const_f32(value: float) -> Value:
    return utils.c(value, f32())


def as_f32(word: Value) -> Value:
    """The 32 bits read as float32."""
    return arith.bitcast(f32(), word)


def fma(a: Value, b: Value, c: Value) -> Value:
    """float32 a * b + c, rounded once."""
    return asm("fma.rn.f32 $0, $1, $2, $3;", a, b, c, type=f32())


def mul_f32(a: Value, b: Value) -> Value:
    """float32 a * b that is never fused with an addition."""
    return asm("mul.rn.f32 $0, $1, $2;", a, b, type=f32())


def add_f32(a: Value, b: Value) -> Value:
    """float32 a + b that is never fused with a product."""
    return asm("add.rn.f32 $0, $1, $2;", a, b, type=f32())


def sub_f32(a: Value, b: Value) -> Value:
    return asm("sub.rn.f32 $0, $1, $2;", a, b, type=f32())


def pack_bf16(low: Value, high: Value) -> Value:
    """Two float32 rounded to bfloat16, to nearest even, in one word."""
    return asm("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high)


def unpack_bf16(word: Value) -> tuple[Value, Value]:
    """float32 values of the low and the high half of a word."""
    return as_f32(shl(word, 16)), as_f32(and_(word, -65536))


def sub(a: Value, b: Value | int) -> Value:
    return arith.subi(a, _value(b))


def div(a: Value, b: int) -> Value:
    """Unsigned."""
    return arith.divui(a, const(b))


def rem(a: Value, b: int) -> Value:
    """Unsigned."""
    return arith.remui(a, const(b))


when = utils.when  # with when(i1): what is emitted runs where it holds


def less(a: Value | int, b: Value | int) -> Value:
    """i1: a < b, signed."""
    return arith.cmpi(arith.CmpIPredicate.slt, _value(a), _value(b))


def load_shared(address: Value, displacement: int = 0, words: int = 1, type: ir.Type | None = None):
    """1, 2 or 4 words; one value, or a list of several."""
    kind = {1: "", 2: ".v2", 4: ".v4"}[words]
    out = ",".join(f"${i}" for i in range(words))
    out = out if words == 1 else f"{{{out}}}"
    text = f"ld.shared{kind}.b32 {out}, [${words}+{displacement}];"
    return asm(text, address, results=words, type=type, side_effects=True)


def store_shared(address: Value, *words: Value, displacement: int = 0) -> None:
    """1, 2 or 4 words."""
    kind = {1: "", 2: ".v2", 4: ".v4"}[len(words)]
    values = ",".join(f"${i + 1}" for i in range(len(words)))
    values = values if len(words) == 1 else f"{{{values}}}"
    utils.inline_ptx(f"st.shared{kind}.b32 [$0+{displacement}], {values};", address, *words)


def store_global(address: Value, *words: Value, displacement: int = 0) -> None:
    """1, 2 or 4 words."""
    kind = {1: "", 2: ".v2", 4: ".v4"}[len(words)]
    values = ",".join(f"${i + 1}" for i in range(len(words)))
    values = values if len(words) == 1 else f"{{{values}}}"
    utils.inline_ptx(f"st.global{kind}.b32 [$0+{displacement}], {values};", address, *words)


def copy_16_bytes_async(shared: Value, address: Value, size: Value, displacement: int = 0) -> None:
    """cp.async of `size` (0 or 16) bytes from global to shared memory; what is not copied becomes zero."""
    utils.inline_ptx(f"cp.async.cg.shared.global.L2::128B [$0+{displacement}], [$1], 16, $2;", shared, address, size)


def commit_copies() -> None:
    """Closes a group of cp.async."""
    utils.inline_ptx("cp.async.commit_group;")


def wait_copies(pending: int) -> None:
    """Until at most this many of the thread's groups of cp.async are under way."""
    utils.inline_ptx(f"cp.async.wait_group {pending};")


def barrier(name: Value, threads: int) -> None:
    """Named barrier 8..15 (lower ones are Mosaic's) for this many threads of the block."""
    utils.inline_ptx(f"bar.sync $0, {threads};", name, convergent=True)


def shuffle_xor(x: Value, mask: int) -> Value:
    """float32 of the lane whose number differs in these bits; all lanes of the warp take part."""
    text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"
    return utils.inline_ptx(text, x, result_types=f32(), has_side_effects=True, convergent=True)


def mma_bf16(acc: list[Value], a: list[Value], b: list[Value]) -> list[Value]:
    """acc + a b of m16n8k16 for the warp: a 4 words, b 2 words of bfloat16 pairs, acc 4 float32."""
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    out = utils.inline_ptx(text, *a, *b, *acc, result_types=(f32(),) * 4, has_side_effects=True, convergent=True)
    return list(out)


def load_words(address: Value, count: int, displacement: int = 0) -> list[Value]:
    """1, 2 or 4 words from global memory that this kernel does not write, not kept in L1; aligned to their size."""
    if count == 4:
        return load_16_bytes(address, displacement)
    names = "$0" if count == 1 else "{$0,$1}"
    suffix = "u32" if count == 1 else "v2.u32"
    text = f"ld.global.nc.L1::no_allocate.{suffix} {names}, [${count}+{displacement}];"
    loaded = asm(text, address, results=count, side_effects=True)
    return [loaded] if count == 1 else loaded


def store_words(address: Value, words: list[Value], displacement: int = 0, *, predicate: Value | None = None) -> None:
    """1, 2 or 4 words to global memory, aligned to their size."""
    suffix = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[len(words)]
    names = ",".join(f"${i + 1}" for i in range(len(words)))
    names = names if len(words) == 1 else f"{{{names}}}"
    utils.inline_ptx(f"st.global.{suffix} [$0+{displacement}], {names};", address, *words, predicate=predicate)


def store_byte(address: Value, value: Value, displacement: int = 0, *, predicate: Value | None = None) -> None:
    """The low byte of a word to global memory."""
    utils.inline_ptx(f"st.global.u8 [$0+{displacement}], $1;", address, value, predicate=predicate)


def load_global(address: Value, words: int = 1, type: ir.Type | None = None):
    """1, 2 or 4 words that this kernel may have written; one value, or a list of several."""
    kind = {1: "", 2: ".v2", 4: ".v4"}[words]
    out = ",".join(f"${i}" for i in range(words))
    out = out if words == 1 else f"{{{out}}}"
    return asm(f"ld.global{kind}.b32 {out}, [${words}];", address, results=words, type=type, side_effects=True)
