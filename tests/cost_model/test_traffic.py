"""HBM bytes told from a program's text, an instruction at a time."""

import pytest

from dsv41.cost_model.hlo import parse
from dsv41.cost_model.traffic import hbm_bytes

KIB = 1 << 10

# As libtpu's compiler writes them; S(1) is VMEM.
FUSIONS = """HloModule jit_f

%rows (table: f32[4096,64], ids: s32[8]) -> f32[8,64] {
  %table = f32[4096,64]{1,0} parameter(0)
  %ids = s32[8]{0} parameter(1)
  %view = f32[4096,64]{1,0} bitcast(%table)
  ROOT %gather.1 = f32[8,64]{1,0} gather(%view, %ids), slice_sizes={1,64}
}

%update (pool: u8[64,1024], row: u8[1,1024], at: s32[]) -> u8[64,1024] {
  %pool = u8[64,1024]{1,0} parameter(0)
  %row = u8[1,1024]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = u8[64,1024]{1,0} dynamic-update-slice(%pool, %row, %at, %at)
}

%both (x: f32[1024], y: f32[1024]) -> f32[1024] {
  %y = f32[1024]{0} parameter(1)
  %x = f32[1024]{0} parameter(0)
  ROOT %add.1 = f32[1024]{0} add(%x, %y)
}

%offloaded (x.1: f32[1024]) -> f32[1024] {
  %x.1 = f32[1024]{0} parameter(0)
  ROOT %negate.1 = f32[1024]{0} negate(%x.1)
}

ENTRY %main (a: f32[1024], b: u8[64,1024], c: f32[4096,64], i: s32[8]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %b = u8[64,1024]{1,0} parameter(1)
  %c = f32[4096,64]{1,0} parameter(2)
  %i = s32[8]{0:S(6)} parameter(3)
  %near = f32[1024]{0:S(1)} negate(%i)
  %zero = s32[] constant(0)
  %line = u8[1,1024]{1,0:S(1)} negate(%i)
  ROOT %INSTRUCTION
}
"""

KERNEL = 'custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"1","bytes_accessed":"9216"}}'


@pytest.mark.parametrize(
    ("instruction", "size"),
    [
        # Both in HBM, then one side in VMEM; parameters of a fusion are told by their numbers.
        ("r = f32[1024]{0} fusion(%a, %near), kind=kLoop, calls=%both", 8 * KIB),
        ("r = f32[1024]{0:S(1)} fusion(%near, %a), kind=kLoop, calls=%both", 4 * KIB),
        ("r = f32[1024]{0} copy(%a)", 8 * KIB),
        # Of a table only the rows; of an update only the row, and the scalar that says where.
        ("r = f32[8,64]{1,0} fusion(%c, %i), kind=kCustom, calls=%rows", 4 * KIB),
        ("r = u8[64,1024]{1,0} fusion(%b, %line, %zero), kind=kLoop, calls=%update", 1 * KIB + 4),
        ("r = u8[64,1024]{1,0} dynamic-update-slice(%b, %line, %zero, %zero)", 0),
        ("r = f32[1024]{0} slice(%c), slice={[0:1024]}", 8 * KIB),
        # Prefetches: what arrives in VMEM is read once, however much there is.
        ("r = (f32[1024]{0:S(1)}, f32[1024]{0}, u32[]{:S(2)}) copy-start(%a)", 4 * KIB),
        ("r = (f32[1024]{0}, f32[1024]{0}, u32[]{:S(2)}) copy-start(%a)", 8 * KIB),
        ("r = ((f32[4096,64]{1,0}), f32[256]{0:S(1)}, s32[]{:S(2)}) slice-start(%c), slice={[0:256]}", 1 * KIB),
        ("r = f32[1024]{0:S(1)} copy-done(%a)", 0),
        ("r = f32[1024]{0} bitcast(%a)", 0),
        # A kernel's own estimate, less what lies in VMEM.
        (f"r = f32[1024]{{0}} custom-call(%a, %near), {KERNEL}", 5 * KIB),
        ('r = f32[1024]{0} custom-call(%a, %near), custom_call_target="tpu_custom_call"', 8 * KIB),
        # What runs elsewhere counts by its insides, a collective once.
        ("r = ((f32[1024]{0}), f32[1024]{0}, u32[]{:S(8)}) call-start(%a), to_apply=%offloaded", 8 * KIB),
        ("r = (f32[1024]{0}, f32[2048]{0}) all-gather-start(%a), replica_groups={{0,1}}, dimensions={0}", 12 * KIB),
    ],
)
def test_instruction(instruction, size):
    base = hbm_bytes(parse(FUSIONS.replace("%INSTRUCTION", "%r = f32[1024]{0:S(1)} bitcast(%near)")))
    assert hbm_bytes(parse(FUSIONS.replace("INSTRUCTION", instruction))) - base == size
