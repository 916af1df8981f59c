"""Packed rows to the bfloat16 tiles that wgmma reads, for one thread of a gathering warpgroup.

bfloat16 values leave here as value * 2^-8: E2M1 bits moved into a bfloat16 read as value * 2^-126, E4M3 bits as value *
2^-120, and one packed product with scale * 2^118 (2^112) finishes both without ever leaving bfloat16's range.
"""

from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, scf

from pallas_kernels import ptx
from pallas_kernels.sparse_attention.gpu_plan import Plan

VALUE_SCALE = 2.0**-8
_SIGNS, _E2M1, _E4M3 = 0x80008000, 0x01C001C0, 0x07F007F0
_TWO_119 = (127 + 119) << 7 | (127 + 119) << 23


def load_shared_byte(address, displacement: int = 0):
    text = f"{{.reg .u16 t; ld.shared.u8 t, [$1+{displacement}]; cvt.u32.u16 $0, t;}}"
    return ptx.asm(text, address, side_effects=True)


def _e4m3_factors(low, high):
    """Two E4M3 bytes -> their values * 2^118, each twice in a word; the NaN code gives NaN."""
    text = f"""{{.reg .b32 a, b, m;
    and.b32 a, $2, 0x7f; shl.b32 a, a, 4; and.b32 b, $3, 0x7f; shl.b32 b, b, 20; or.b32 a, a, b;
    add.u32 b, a, 0x00100010; shr.u32 b, b, 11; and.b32 b, b, 0x00010001; mul.lo.u32 b, b, 0x7fc0;
    mov.b32 m, {_TWO_119}; mul.rn.bf16x2 a, a, m; mul.rn.bf16x2 a, a, m; or.b32 a, a, b;
    prmt.b32 $0, a, a, 0x1010; prmt.b32 $1, a, a, 0x3232;}}"""
    return ptx.asm(text, low, high, results=2)


def _e8m0_factors(byte):
    """An E8M0 byte -> two factors whose product is 2^(e - 127) * 2^112, in both halves of a word; NaN for 255."""
    text = """{.reg .b32 a, b; .reg .pred p;
    add.u32 a, $2, 112; min.u32 b, a, 254; sub.u32 a, a, b; add.u32 a, a, 127;
    setp.eq.u32 p, $2, 255; shl.b32 a, a, 7; shl.b32 b, b, 7; @p mov.b32 a, 0x7fc0;
    prmt.b32 $0, a, a, 0x1010; prmt.b32 $1, b, b, 0x1010;}"""
    return ptx.asm(text, byte, results=2)


def _e2m1_word(word, low, high):
    """8 E2M1 codes, low and high nibbles -> [2 words of the low ones * low], [2 words of the high ones * high]."""
    text = f"""{{.reg .b32 w, s, v;
    prmt.b32 w, $4, $4, 0x3120;
    shl.b32 s, w, 12; and.b32 s, s, {_SIGNS}; shl.b32 v, w, 6; and.b32 v, v, {_E2M1}; or.b32 s, s, v;
    mul.rn.bf16x2 $0, s, $5;
    shl.b32 s, w, 4; and.b32 s, s, {_SIGNS}; shr.u32 v, w, 2; and.b32 v, v, {_E2M1}; or.b32 s, s, v;
    mul.rn.bf16x2 $1, s, $5;
    shl.b32 s, w, 8; and.b32 s, s, {_SIGNS}; shl.b32 v, w, 2; and.b32 v, v, {_E2M1}; or.b32 s, s, v;
    mul.rn.bf16x2 $2, s, $6;
    and.b32 s, w, {_SIGNS}; shr.u32 v, w, 6; and.b32 v, v, {_E2M1}; or.b32 s, s, v;
    mul.rn.bf16x2 $3, s, $6;}}"""
    a, b, c, d = ptx.asm(text, word, low, high, results=4)
    return [a, b], [c, d]


def _e4m3_word(word, factors):
    """4 E4M3 codes -> 2 words of values times both factors."""
    text = "{.reg .b32 t, u;\n"
    for i, picks in enumerate((0x1100, 0x3322)):
        text += f"""prmt.b32 t, $2, $2, {picks}; shr.u32 u, t, 4; and.b32 t, t, {_SIGNS};
        and.b32 u, u, {_E4M3}; or.b32 t, t, u; mul.rn.bf16x2 t, t, $3; mul.rn.bf16x2 ${i}, t, $4;\n"""
    return ptx.asm(text + "}", word, *factors, results=2)


class TileRows:
    """Reads a group's packed pieces and scales, and writes them dequantised to this thread's rows of the tile."""

    def __init__(self, plan: Plan, tiles, sources: Any):
        self.plan, self.sources = plan, sources
        self.column_tiles = plan.width // 64
        row = sources.row
        self.base = ptx.add(
            ptx.shared_address(tiles), ptx.mul(sources.warp, plan.tiles * self.column_tiles * 1024), ptx.mul(row, 128)
        )
        chunk = ptx.mul(sources.piece, 2)
        self.places = [ptx.mul(ptx.xor(ptx.add(chunk, j), row), 16) for j in range(2)]
        # Channels from H/2 on lie in column tiles of their own, or in the same one where there is only one.
        self.upper_step = 0 if plan.width == 64 else plan.width // 128 * 1024
        self.upper = self.places
        if plan.width == 64:
            self.upper = [ptx.mul(ptx.xor(ptx.add(chunk, 4 + j), row), 16) for j in range(2)]

    def _pieces(self, slot):
        address = ptx.add(self.sources.units, ptx.mul(slot, self.plan.group_bytes))
        text = "ld.shared.v4.b32 {{$0,$1,$2,$3}}, [$4+{}];"
        return [
            ptx.asm(text.format(i * self.plan.unit_bytes), address, results=4, side_effects=True)
            for i in range(self.plan.group)
        ]

    def _at(self, tile, unit):
        step = ptx.add(ptx.mul(tile, self.column_tiles * 1024), ptx.mul(unit, 1024))
        return [ptx.add(self.base, step, place) for place in self.places], [
            ptx.add(self.base, step, place) for place in self.upper
        ]

    def read_window(self, unit, tile, slot, scale_slot, table, number):
        pieces, scale_bytes = self._pieces(slot), self.plan.width // 32
        row = self.sources.scale_row(scale_slot, max(4, scale_bytes))
        scale = ptx.add(row, ptx.mul(unit, 2), ptx.shr(self.sources.piece, 1))
        if scale_bytes == 2:
            scale = ptx.add(scale, ptx.mul(ptx.and_(self.sources.index(table, number, tile), 1), 2))
        return pieces, [load_shared_byte(scale, 2 * i) for i in range(self.plan.group)]

    def write_window(self, loaded, unit, tile) -> None:
        at, _ = self._at(tile, unit)
        for i, (words, scale) in enumerate(zip(*loaded, strict=True)):
            factors = _e8m0_factors(scale)
            out = [_e4m3_word(word, factors) for word in words]
            for j in range(2):
                ptx.store_shared_16_bytes(at[j], out[2 * j] + out[2 * j + 1], i * 1024)

    def read_main(self, unit, tile, slot, scale_slot, table, number):
        row = self.sources.scale_row(scale_slot, self.plan.width // 16)
        scale = ptx.add(row, ptx.mul(unit, 4), self.sources.piece)
        pieces = self._pieces(slot)
        half = self.plan.width // 32
        return pieces, [
            (load_shared_byte(scale, 4 * i), load_shared_byte(scale, 4 * i + half)) for i in range(self.plan.group)
        ]

    def write_main(self, loaded, unit, tile) -> None:
        at, upper = self._at(tile, unit)
        stores = []
        for i, (words, scales) in enumerate(zip(*loaded, strict=True)):
            factors = _e4m3_factors(*scales)
            out = [_e2m1_word(word, *factors) for word in words]
            for j in range(2):
                stores.append((at[j], out[2 * j][0] + out[2 * j + 1][0], i * 1024))
                stores.append((upper[j], out[2 * j][1] + out[2 * j + 1][1], i * 1024 + self.upper_step))
        if self.plan.width > 64:
            for store in stores:
                ptx.store_shared_16_bytes(*store)
            return
        branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, self.sources.piece, ptx.const(2)))
        with ir.InsertionPoint(branch.then_block):
            for store in stores:
                ptx.store_shared_16_bytes(*store)
            scf.yield_([])
