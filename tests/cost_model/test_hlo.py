"""The reader of compiled programs: the TPU compiler's text as written, and a program compiled here."""

import jax
import jax.numpy as jnp
import pytest

from dsv41.cost_model.hlo import Shape, parse
from dsv41.cost_model.temporaries import largest_temporaries

# Cut from what libtpu's compiler writes; long attributes left out.
TPU_TEXT = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(bf16[64,1024]{1,0:T(8,128)(2,1)})->f32[8]}

FileNames
1 "f.py"

%fused_computation.1 (param_0.2: bf16[128,1024], param_1.1: bf16[1024,1024]) -> bf16[128,1024] {
  %param_0.2 = bf16[128,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1.1 = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.3 = bf16[128,1024]{1,0:T(8,128)(2,1)} convolution(%param_0.2, %param_1.1), dim_labels=bf_io->bf
}

%update.1 (param_0.3: u8[64,512], param_1.2: u8[1,512], param_2.2: s32[]) -> u8[64,512] {
  %param_0.3 = u8[64,512]{1,0} parameter(0)
  %param_1.2 = u8[1,512]{1,0} parameter(1)
  %param_2.2 = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = u8[64,512]{1,0} dynamic-update-slice(%param_0.3, %param_1.2, %param_2.2, %param_2.2)
}

%body (state.1: (s32[], bf16[128,1024], bf16[1024,1024])) -> (s32[], bf16[128,1024], bf16[1024,1024]) {
  %state.1 = (s32[]{:T(128)}, bf16[128,1024]{1,0:T(8,128)(2,1)}, bf16[1024,1024]{1,0}) parameter(0)
  %get-tuple-element.5 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %get-tuple-element.6 = bf16[128,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%state.1), index=1
  %get-tuple-element.7 = bf16[1024,1024]{1,0} get-tuple-element(%state.1), index=2
  %fusion.3 = bf16[128,1024]{1,0:T(8,128)(2,1)} fusion(%get-tuple-element.6, %get-tuple-element.7), kind=kOutput, \
calls=%fused_computation.1, metadata={op_name="jit(f)/layer_3/while/body/dot_general" stack_frame_id=15}
  ROOT %tuple.2 = (s32[], bf16[128,1024], bf16[1024,1024]) tuple(%get-tuple-element.5, %fusion.3, %get-tuple-element.7)
}

%condition (state.2: (s32[], bf16[128,1024], bf16[1024,1024])) -> pred[] {
  %constant.4 = s32[]{:T(128)} constant(7)
  %state.2 = (s32[]{:T(128)}, bf16[128,1024]{1,0:T(8,128)(2,1)}, bf16[1024,1024]{1,0}) parameter(0)
  %get-tuple-element.8 = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  ROOT %lt.3 = pred[]{:T(512)} compare(%get-tuple-element.8, %constant.4), direction=LT
}

%unknown (state.3: (s32[], bf16[128,1024], bf16[1024,1024])) -> pred[] {
  %state.3 = (s32[]{:T(128)}, bf16[128,1024]{1,0:T(8,128)(2,1)}, bf16[1024,1024]{1,0}) parameter(0)
  %get-tuple-element.9 = s32[]{:T(128)} get-tuple-element(%state.3), index=0
  ROOT %lt.4 = pred[]{:T(512)} compare(%get-tuple-element.9, %get-tuple-element.9), direction=LT
}

ENTRY %main.0_spmd (param.4: bf16[128,1024], param.5: bf16[1024,1024], param.6: u8[64,512]) -> bf16[128,1024] {
  %constant.1 = s32[]{:T(128)} constant(2)
  %copy.18 = s32[]{:T(128)} copy(%constant.1)
  %param.4 = bf16[128,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %param.5 = bf16[1024,1024]{1,0} parameter(1)
  %param.6 = u8[64,512]{1,0} parameter(2)
  %copy-start = (bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[1024,1024]{1,0}, u32[]{:S(2)}) copy-start(%param.5)
  %copy-done = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %copy.1 = u8[64,512]{0,1} copy(%param.6), metadata={op_name="jit(f)/layer_0/attend/copy"}
  %fusion.9 = u8[64,512]{1,0} fusion(%param.6, %copy.1, %constant.1), kind=kLoop, calls=%update.1
  %write.1 = u8[64,512]{1,0} custom-call(%copy.18, %fusion.9), custom_call_target="tpu_custom_call", \
output_to_operand_aliasing={{}: (1, {})}, frontend_attributes={kernel_metadata={}}
  %topk.1 = (f32[32,128]{1,0}, s32[32,128]{1,0}) custom-call(%copy.18), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(f)/layer_12/select/topk"}
  %tuple.25 = (s32[], bf16[128,1024], bf16[1024,1024]) tuple(%copy.18, %param.4, %copy-done)
  %while.10 = (s32[], bf16[128,1024], bf16[1024,1024]) while(%tuple.25), condition=%condition, body=%body
  %while.11 = (s32[], bf16[128,1024], bf16[1024,1024]) while(%while.10), condition=%unknown, body=%body, \
metadata={op_name="jit(f)/search"}
  ROOT %get-tuple-element.9 = bf16[128,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%while.11), index=1
}
"""


@pytest.fixture(scope="module")
def program():
    return parse(TPU_TEXT)


def by_name(program):
    return {i.name: i for body in program.computations.values() for i in body}


def test_instructions(program):
    found = by_name(program)
    assert program.entry == "main.0_spmd" and len(program.computations) == 6
    assert found["fusion.3"].operands == ("get-tuple-element.6", "get-tuple-element.7")
    assert found["fusion.3"].scope == "jit(f)/layer_3/while/body/dot_general"
    assert found["fusion.3"].called == ("fused_computation.1",)
    assert found["while.10"].called == ("body",)
    assert found["constant.4"].operands == () and found["constant.4"].text.startswith("(7)")
    start = found["copy-start"]
    assert [str(s) for s in start.shapes] == ["bf16[1024,1024]", "bf16[1024,1024]", "u32[]"]
    assert [s.in_main_memory for s in start.shapes] == [False, True, False]
    assert start.bytes == 2 * (2 << 20) + 4
    assert program.operand_shapes("main.0_spmd", found["while.10"])[1] == Shape("bf16", (128, 1024))


@pytest.mark.parametrize(
    ("dtype", "dims", "size"),
    [("pred", (3,), 3), ("f8e4m3fn", (2, 5), 10), ("f8e8m0fnu", (4,), 4), ("s4", (3,), 2), ("f32", (), 4)],
)
def test_shape_bytes(dtype, dims, size):
    assert Shape(dtype, dims).bytes == size


def test_loops_count_by_their_trips(program):
    """From 2 to 7, and once where the text does not say."""
    assert program.times["body"] == 5 + 1
    assert program.times["fused_computation.1"] == 6
    assert program.unknown_loops == ("jit(f)/search",)


def test_written_trips_win():
    text = TPU_TEXT.replace(
        "condition=%unknown, body=%body",
        'condition=%unknown, body=%body, backend_config={"known_trip_count":{"n":"3"}}',
    )
    program = parse(text)
    assert program.times["body"] == 8 and program.unknown_loops == ()


def test_temporaries_leave_out_what_is_in_place(program):
    """Views, arguments, VMEM, updates and aliased results take no HBM; a copy of a pool does."""
    made = {(t.shape, t.opcode, t.scope): (t.bytes, t.count) for t in largest_temporaries(program, limit=100)}
    assert made == {
        ("bf16[128,1024]", "fusion", "jit(f)/layer_*/while/body/dot_general"): (256 << 10, 1),
        ("u8[64,512]", "copy", "jit(f)/layer_*/attend/copy"): (32 << 10, 1),
        ("f32[32,128]", "custom-call", "jit(f)/layer_*/select/topk"): (16 << 10, 1),
        ("s32[32,128]", "custom-call", "jit(f)/layer_*/select/topk"): (16 << 10, 1),
        ("s32[]", "copy", ""): (4, 1),
    }


def test_no_program():
    with pytest.raises(ValueError, match="no entry computation"):
        parse("HloModule nothing")


def test_a_program_compiled_here():
    def f(x):
        return jax.lax.fori_loop(0, 5, lambda i, y: jax.lax.fori_loop(0, 3, lambda j, z: jnp.sin(z) * 2, y), x)

    program = parse(jax.jit(f).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile().as_text())
    assert program.unknown_loops == ()
    sines = [program.times[name] for name, body in program.computations.items() for i in body if i.opcode == "sine"]
    assert sum(sines) == 15
