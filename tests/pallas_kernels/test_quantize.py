"""Block formats against the golden primitives: every bit."""

import fractions
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import formats
from pallas_kernels.compat import gpu_problem, lowering_for
from pallas_kernels.norms import rms_norm
from pallas_kernels.quantize import ops
from pallas_kernels.registry import arg_specs
from pallas_kernels.rope import apply_rope
from tests.golden import primitives
from tests.pallas_kernels.quantize_cases import VALUES, stored, values, write_arguments


@functools.cache
def _compiled(fn, **static):
    return jax.jit(functools.partial(fn, **static))


def _same(actual, expected):
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(expected, np.float32))


# Operation by operation each one is a program to compile; the cases N6 to N8 and C12 run so always.
@pytest.fixture(params=[pytest.param("eager", marks=pytest.mark.slow), "jit"])
def run(request):
    return jax.jit if request.param == "jit" else lambda f: f


def test_fp8_golden(run):
    g = primitives()
    codes, scales = run(ops.quantize_fp8)(g["act_quant.x"])
    _same(formats.e4m3_to_byte(codes), g["act_quant.codes"])
    _same(scales, g["act_quant.scale_e8m0"])
    _same(run(ops.dequantize_fp8)(codes, scales), g["act_quant.inplace"])


def test_mxfp4_golden(run):
    g = primitives()
    packed, scales = run(ops.quantize_mxfp4)(g["fp4_e8m0_b32.x"])
    _same(packed, g["fp4_e8m0_b32.packed"])
    _same(scales, g["fp4_e8m0_b32.scale_e8m0"])
    _same(run(ops.dequantize_mxfp4)(packed, scales), g["fp4_e8m0_b32.inplace"])


def test_kv_fp4_golden(run):
    g = primitives()
    packed, scales = run(ops.quantize_kv_fp4)(g["fp4_e4m3_b16.x"])
    _same(formats.pack_adjacent(formats.unpack_halves(packed)), g["fp4_e4m3_b16.packed"])
    _same(scales, g["fp4_e4m3_b16.scale_e4m3"])
    _same(run(ops.dequantize_kv_fp4)(packed, scales), g["fp4_e4m3_b16.inplace"])


def test_released_bytes():
    g = primitives()

    @jax.jit
    def decode(fp8, fp8_scale, fp4, fp4_scale):
        value = formats.e4m3_to_f32(formats.byte_to_e4m3(fp8)) * formats.e8m0_to_f32(fp8_scale)
        return value, ops.dequantize_weight_fp4(fp4[None], fp4_scale[None])[0]

    names = ("real.fp8.bytes", "real.fp8.scale_byte", "real.fp4.bytes", "real.fp4.scale_byte")
    fp8, fp4 = decode(*(jnp.asarray(g[name]) for name in names))
    _same(fp8, g["real.fp8.value"])
    _same(fp4, g["real.fp4.value"])


def _with_amax(amax, group):
    x = np.zeros(group, np.float32)
    x[3] = amax
    return x


@pytest.mark.parametrize(("amax", "byte"), [(0, 105), (1e-5, 105), (1.0, 119), (448, 127), (449, 128)])
def test_case_n6_window_scales(amax, byte):
    codes, scales = ops.quantize_fp8(jnp.asarray(_with_amax(amax, 32)))
    assert int(np.asarray(scales)[0]) == byte
    if amax == 449:
        assert float(np.asarray(codes, np.float32)[3]) == 224
        assert float(np.asarray(ops.dequantize_fp8(codes, scales), np.float32)[3]) == 448


@pytest.mark.parametrize(("amax", "byte"), [(0, 1), (0.75, 124), (3, 126), (6, 127), (6.0001, 128)])
def test_case_n7_index_key_scales(amax, byte):
    assert int(np.asarray(ops.quantize_mxfp4(jnp.asarray(_with_amax(amax, 32)))[1])[0]) == byte


@pytest.mark.parametrize(
    ("amax", "scale", "value"),
    [
        (0, 2.0**-9, 0), (6, 1, 6), (6.3, 1, 6), (6.375, 1, 6), (7, 1.125, 6.75), (2688, 448, 2688), (3000, 448, 2688),
    ],
)  # fmt: skip
def test_case_n8_main_kv_scales(amax, scale, value):
    packed, scales = ops.quantize_kv_fp4(jnp.asarray(np.tile(_with_amax(amax, 16), 2)))
    assert float(np.asarray(scales).view(ml_dtypes.float8_e4m3fn)[0]) == scale
    assert float(np.asarray(ops.dequantize_kv_fp4(packed, scales), np.float32)[3]) == value


def test_case_n9_e4m3_specials():
    values = formats.e4m3_to_f32(formats.byte_to_e4m3(jnp.array([0x7E, 0x7F, 0xFF, 0x01, 0x3F], jnp.uint8)))
    np.testing.assert_array_equal(values, np.array([448, np.nan, np.nan, 2.0**-9, 1.875], np.float32))


def test_case_l1_packed_fp4_is_not_fp8():
    value = ops.dequantize_mxfp4(jnp.full((16,), 0x3F, jnp.uint8), jnp.array([128], jnp.uint8))
    assert value[0] == -12
    assert value[1] == 3


def test_case_l3_e8m0_edges():
    decoded = formats.e8m0_to_f32(jnp.array([0, 127, 128, 254, 255], jnp.uint8))
    # Compared as bits: a flushed subnormal would pass a comparison of values on a flushing backend.
    expected = np.array([2.0**-127, 1, 2, 2.0**127], np.float32).view(np.uint32)
    np.testing.assert_array_equal(np.asarray(decoded).view(np.uint32)[:4], expected)
    assert np.isnan(decoded[4])


def test_case_c12_requantising_is_not_idempotent():
    """Why the caches keep the original codes and never round twice."""
    x = jnp.asarray(_with_amax(9 * 2.0**-9, 32))
    first = ops.dequantize_kv_fp4(*ops.quantize_kv_fp4(x))
    second = ops.dequantize_kv_fp4(*ops.quantize_kv_fp4(first))
    assert float(first[3]) == 8 * 2.0**-9
    assert float(second[3]) == 6 * 2.0**-9


def test_nan_reaches_the_scale_or_the_code(run):
    """Also where the compiler reduces by a maximum that skips NaN."""
    x = np.random.default_rng(0).normal(size=(40, 512)).astype(np.float32)
    x[7, 100] = x[39, 511] = np.nan
    groups = np.zeros((40, 16), bool)
    groups[7, 3] = groups[39, 15] = True
    np.testing.assert_array_equal(np.asarray(run(ops.quantize_mxfp4)(x)[1]) == 255, groups)
    codes, scales = run(ops.quantize_fp8)(x)
    np.testing.assert_array_equal(np.asarray(scales) == 255, groups)
    assert (np.asarray(formats.e4m3_to_byte(codes))[np.repeat(groups, 32, axis=-1)] == 0x7F).all()
    back = np.asarray(run(ops.dequantize_kv_fp4)(*run(ops.quantize_kv_fp4)(x)), np.float32)
    halves = np.zeros((40, 32), bool)
    halves[7, 6] = halves[39, 31] = True
    np.testing.assert_array_equal(np.isnan(back), np.repeat(halves, 16, axis=-1))


def test_subnormal_inputs_of_mxfp4_are_zeros(run):
    x = np.full((3, 64), 2.0**-127, ml_dtypes.bfloat16)
    x[1] = -x[1]
    x[2, ::2] = 2.0**-126
    packed, scales = run(ops.quantize_mxfp4)(x)
    np.testing.assert_array_equal(packed, np.broadcast_to(np.array([[0], [0x88], [2]], np.uint8), (3, 32)))
    assert (np.asarray(scales) == 1).all()


def test_e2m1_all_codes_agree_with_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    decoded = np.asarray(formats.e2m1_to_f32(jnp.asarray(codes)))
    np.testing.assert_array_equal(decoded.view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(formats.f32_to_e2m1(jnp.asarray(expected)), codes)


_f32_to_e2m1 = jax.jit(formats.f32_to_e2m1)


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=50))
def test_e2m1_rounding_agrees_with_ml_dtypes(values):
    x = np.zeros(50, np.float32)
    x[: len(values)] = values
    expected = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(_f32_to_e2m1(x), expected)


_f32_to_e4m3_byte = jax.jit(lambda x: formats.e4m3_to_byte(formats.f32_to_e4m3(x)))


@given(st.lists(st.floats(-500, 500, width=32) | st.floats(-0.03125, 0.03125, width=32), min_size=8, max_size=8))
def test_e4m3_rounding_agrees_with_ml_dtypes(values):
    x = np.array(values, np.float32)
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(_f32_to_e4m3_byte(x), expected)


def test_e4m3_rounding_at_every_code_and_midpoint():
    codes = np.arange(127, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middle = (values[:-1] + values[1:]) / 2
    x = np.concatenate([values, middle, np.nextafter(middle, 0), np.nextafter(middle, 999), [448.5, 1e30, np.inf]])
    x = np.concatenate([x, -x, [np.nan]]).astype(np.float32)
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(_f32_to_e4m3_byte(x), expected)


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "kv_fp4"])
def test_round_trip_inside_one_program_rounds(name):
    """Compilers may drop a cast and its inverse as excess precision: on GPU they do."""
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    quantize, dequantize = getattr(ops, f"quantize_{name}"), getattr(ops, f"dequantize_{name}")
    apart = jax.jit(dequantize)(*jax.jit(quantize)(x))
    together = jax.jit(lambda x: dequantize(*quantize(x)))(x)
    _same(together, apart)
    assert (np.asarray(together, np.float32) != x).any()


_packings = jax.jit(lambda codes: (formats.pack_adjacent(codes), formats.pack_halves(codes)))
_unpackings = jax.jit(lambda adjacent, halves: (formats.unpack_adjacent(adjacent), formats.unpack_halves(halves)))


@pytest.mark.parametrize("length", [2, 14, 64])
@given(data=st.data())
def test_packing_round_trips(length, data):
    codes = np.array(data.draw(st.lists(st.integers(0, 15), min_size=length, max_size=length)), np.uint8)
    for unpacked in _unpackings(*_packings(codes)):
        np.testing.assert_array_equal(unpacked, codes)


@given(st.floats(2.0**-110, 2.0**127, width=32), st.sampled_from([1.0, 6.0, 448.0]))
def test_scale_exponent_is_exact(value, divisor):
    exponent = int(formats.ceil_log2_ratio_exponent(jnp.float32(value), divisor))
    exact = fractions.Fraction(value) / fractions.Fraction(divisor)
    assert fractions.Fraction(2) ** (exponent - 127) >= exact
    assert fractions.Fraction(2) ** (exponent - 128) < exact


def test_main_kv_ties_are_exact_for_every_scale():
    """Each E4M3 scale times each midpoint: dividing through a rounded reciprocal would round some of these up."""
    scales = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    x = np.zeros((len(scales), 32), np.float32)
    x[:, 0] = x[:, 16] = 6 * scales
    x[:, 1:8] = midpoints * scales[:, None]
    decoded = np.asarray(jax.jit(lambda x: ops.dequantize_kv_fp4(*ops.quantize_kv_fp4(x)))(x), np.float32)
    np.testing.assert_array_equal(decoded[:, 1:8], np.array([0, 1, 1, 2, 2, 4, 4], np.float32) * scales[:, None])


def test_main_kv_scale_ties_are_exact():
    """amax / 6 halfway between two E4M3 codes goes to the even one, for every code."""
    codes = np.arange(9, 125, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middle = (values[:-1] + values[1:]) / 2
    x = np.zeros((len(middle), 32), np.float32)
    x[:, 0] = 6 * middle
    scales = np.asarray(jax.jit(ops.quantize_kv_fp4)(x)[1])[:, 0]
    np.testing.assert_array_equal(scales, np.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:]))


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("quantise", ["fp8", "mxfp4", "kv_fp4"])
def test_case_n5_any_magnitude_is_finite(factor, quantise):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 64)).astype(np.float32) * factor
    x[0] = 0
    x[1, 5] = 3e5 * factor
    quantize, dequantize = getattr(ops, f"quantize_{quantise}"), getattr(ops, f"dequantize_{quantise}")
    y = np.asarray(_compiled(dequantize)(*_compiled(quantize)(x)), np.float32)
    assert np.isfinite(y).all()
    assert (y[0] == 0).all()


WRITES = ["write_window", "write_main", "write_index"]


@pytest.mark.parametrize(
    ("op", "width", "rope_dim"),
    [
        # The released width of each, and one narrower than the rows of its layout.
        pytest.param(op, *size, marks=() if size in ((64, 16), released) else pytest.mark.slow)
        for op, released in zip(WRITES, [(512, 64), (512, 64), (128, 32)], strict=True)
        for size in ((64, 16), (128, 32), (512, 64))
    ],
)
def test_write_is_norm_rope_quantise_and_store(op, width, rope_dim):
    arrays, static = write_arguments(op, width, rope_dim, 3, 7, outer=5, seed=width)
    x, rope, pool, first, second = (np.asarray(a) for name, a in arrays.items() if name != "gain")
    layout = static["layout"]
    written = np.asarray(jax.jit(functools.partial(getattr(ops, op), **static))(**arrays))
    quantize = {"write_window": ops.quantize_fp8, "write_main": ops.quantize_kv_fp4, "write_index": ops.quantize_mxfp4}
    rotated = x if op == "write_main" else jax.jit(rms_norm, static_argnums=2)(x, arrays["gain"], static["eps"])
    rotated = jax.jit(apply_rope)(rotated, rope)
    codes, scales = (np.asarray(a).view(np.uint8) for a in jax.jit(quantize[op])(rotated))
    keep = (first >= 0) & (first < len(pool)) & (second >= 0)
    keep &= second < (layout.length if op == "write_window" else 128)
    assert 0 < keep.sum() < keep.size
    expected = jax.jit(layout.write)(pool, first[keep], second[keep], codes[keep], scales[keep])
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("op", WRITES)
def test_write_of_no_rows_returns_the_pool(op):
    arrays, static = write_arguments(op, 64, 16, 2, 0, outer=3)
    written = getattr(ops, op)(**{k: jnp.asarray(v) for k, v in arrays.items()}, **static)
    np.testing.assert_array_equal(written, arrays["rings" if op == "write_window" else "pool"])


@pytest.mark.parametrize("name", ["x", "gain", "rope", "rings", "slot", "index"])
def test_write_says_what_does_not_fit(name):
    arrays, static = write_arguments("write_window", 64, 16, 2, 3, outer=3)
    arrays = {k: jnp.asarray(v) for k, v in arrays.items()}
    part = arrays[name][1:] if name == "rope" else arrays[name][..., 1:]
    with pytest.raises(ValueError, match="write_window"):
        ops.write_window(**{**arrays, name: part}, **static)
    with pytest.raises((TypeError, ValueError), match="write_window"):
        ops.write_window(**{**arrays, name: arrays[name].astype(jnp.float16)}, **static)


@pytest.mark.parametrize(
    "spec",
    # Tiny rows differ from odd ones in their number only.
    [
        pytest.param(s, marks=pytest.mark.slow if "quantize" in s.name and s.name.endswith("tiny") else ())
        for s in arg_specs("quantize", "ci")
    ],
    ids=lambda spec: spec.name,
)
def test_shapes_of_the_benchmark_run(spec):
    # This generator takes a third of the default one's time to compile.
    key = jax.random.key(0, impl="unsafe_rbg")
    made, out = jax.jit(lambda key: (made := spec.make(key), spec.bind("xla")(made)))(key)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, spec.abstract())
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(out))


needs_gpu = pytest.mark.skipif(
    jax.default_backend() != "gpu" or gpu_problem() is not None, reason="the GPU kernels need a GPU and jax 0.11"
)


def _bytes(x):
    return np.asarray(x).view(np.uint8)


@needs_gpu
@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (129, 512), (1000, 1024)])
@pytest.mark.parametrize("name", ["fp8", "mxfp4", "kv_fp4"])
def test_gpu_kernels_give_the_bits_of_ref(name, shape):
    quantize, dequantize = (getattr(ops, f"{way}_{name}") for way in ("quantize", "dequantize"))
    kernel, plain = jax.jit(functools.partial(quantize, implementation="gpu")), jax.jit(quantize)
    for seed, kind in enumerate(VALUES):
        x = jnp.asarray(values(kind, *shape, ml_dtypes.bfloat16, seed))
        for actual, expected in zip(kernel(x), plain(x), strict=True):
            np.testing.assert_array_equal(_bytes(actual), _bytes(expected), err_msg=kind)
    codes = stored(name, *shape, seed=1)
    actual = np.asarray(dequantize(*map(jnp.asarray, codes), implementation="gpu"), np.float32)
    expected = np.asarray(jax.jit(dequantize)(*codes), np.float32)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(actual[finite].view(np.uint32), expected[finite].view(np.uint32))


@needs_gpu
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (3, 7), (2, 700)])
@pytest.mark.parametrize(("width", "rope_dim"), [(64, 16), (128, 64), (512, 64), (1024, 64)])
@pytest.mark.parametrize("op", WRITES)
def test_gpu_writes(op, width, rope_dim, batch, rows):
    pool = "rings" if op == "write_window" else "pool"
    for kind in ("exact", "normal", "special", "ties", "consecutive"):
        arrays, static = write_arguments(op, width, rope_dim, batch, rows, outer=100, kind=kind, seed=rows)
        if kind == "exact":
            runs = [
                jax.jit(functools.partial(getattr(ops, op), **static, implementation=i), donate_argnames=pool)
                for i in ("gpu", "xla")
            ]
        actual, expected = (np.asarray(run(**{k: jnp.asarray(a) for k, a in arrays.items()})) for run in runs)
        if op == "write_main" or kind == "exact":
            np.testing.assert_array_equal(actual, expected, err_msg=kind)
        else:
            # The norm is summed in another order: its last float32 bit moves a value across a rounding boundary now and
            # then, and with the largest of a group its scale and all its codes.
            assert (actual != expected).sum() <= 40 + 1e-4 * (expected != arrays[pool]).sum(), kind


@needs_gpu
@pytest.mark.parametrize("op", WRITES)
def test_gpu_writes_happen_in_place(op):
    arrays, static = write_arguments(op, 128, 64, 8, 1, outer=9)
    arrays = {name: jnp.asarray(a) for name, a in arrays.items()}
    pool = "rings" if op == "write_window" else "pool"
    write = jax.jit(functools.partial(getattr(ops, op), **static, implementation="gpu"), donate_argnames=pool)
    compiled = write.lower(**arrays).compile()
    assert " copy(" not in compiled.as_text()
    pointer = arrays[pool].unsafe_buffer_pointer()
    assert compiled(**arrays).unsafe_buffer_pointer() == pointer


def test_kernels_say_what_they_do_not_take():
    with pytest.raises(ValueError, match=r"quantize_fp8.*bfloat16"):
        ops.quantize_fp8(jnp.zeros((2, 64)), implementation="gpu")
    with pytest.raises(ValueError, match=r"quantize_kv_fp4.*32 channels"):
        ops.quantize_kv_fp4(jnp.zeros((2, 48), jnp.bfloat16), implementation="gpu")
    arrays, static = write_arguments("write_window", 32, 16, 2, 3, outer=3)
    with pytest.raises(ValueError, match=r"write_window.*64 channels"):
        ops.write_window(**{k: jnp.asarray(v) for k, v in arrays.items()}, **static, implementation="gpu")


@pytest.mark.skipif(gpu_problem() is not None, reason="needs Pallas of jax 0.11")
@pytest.mark.parametrize("spec", arg_specs("quantize", "ci"), ids=lambda spec: spec.name)
def test_gpu_kernels_lower(spec):
    shapes = spec.abstract()
    with lowering_for("gpu", "NVIDIA H200", 132):
        lowered = jax.jit(spec.bind("gpu")).trace(shapes).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert "write" not in spec.name or "output_operand_alias<" in text


# The TPU kernels, interpreted.


@pytest.mark.parametrize("shape", [pytest.param((1, 32), marks=pytest.mark.slow), (5, 96), (9, 1024)])
@pytest.mark.parametrize("name", ["fp8", "mxfp4", "kv_fp4"])
def test_tpu_kernels_give_the_bits_of_ref(name, shape):
    quantize, dequantize = (
        jax.jit(getattr(ops, f"{way}_{name}"), static_argnames="implementation") for way in ("quantize", "dequantize")
    )
    x = np.concatenate([values(kind, *shape, ml_dtypes.bfloat16, seed) for seed, kind in enumerate(VALUES)])
    for actual, expected in zip(quantize(x, implementation="tpu_interpret"), quantize(x), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(_bytes(actual), _bytes(expected))
    codes, scales = stored(name, *shape, seed=1)
    if name != "kv_fp4":
        # 2^-127 is a subnormal: the CPU takes it for 0.
        scales = np.maximum(scales, 1)
    actual = np.asarray(dequantize(codes, scales, implementation="tpu_interpret"), np.float32)
    expected = np.asarray(dequantize(codes, scales), np.float32)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(actual[finite].view(np.uint32), expected[finite].view(np.uint32))


def test_tpu_kernels_of_no_rows():
    codes, scales = ops.quantize_fp8(jnp.zeros((0, 64), jnp.bfloat16), implementation="tpu_interpret")
    assert codes.shape == (0, 64) and codes.dtype == jnp.float8_e4m3fn and scales.shape == (0, 2)
    assert ops.dequantize_fp8(codes, scales, implementation="tpu_interpret").shape == (0, 64)


@pytest.mark.parametrize(
    ("op", "width", "rope_dim", "batch", "rows"),
    [
        ("write_window", 64, 16, 2, 100), ("write_window", 512, 64, 3, 7),
        pytest.param("write_window", 1024, 64, 1, 1, marks=pytest.mark.slow),
        ("write_main", 32, 32, 2, 100), ("write_main", 512, 64, 3, 7),
        ("write_index", 64, 16, 2, 100), ("write_index", 128, 64, 3, 7),
    ],
)  # fmt: skip
def test_tpu_writes(op, width, rope_dim, batch, rows):
    kinds = {
        kind: write_arguments(op, width, rope_dim, batch, rows, outer=13, kind=kind, seed=rows)
        for kind in ("exact", "normal", "special", "ties", "consecutive")
    }
    static = kinds["exact"][1]
    pool = "rings" if op == "write_window" else "pool"
    written_by = {
        i: jax.jit(functools.partial(getattr(ops, op), implementation=i, **static)) for i in ("tpu_interpret", "xla")
    }
    for kind, (arrays, _) in kinds.items():
        actual, expected = (np.asarray(write(**arrays)) for write in written_by.values())
        if op == "write_main" or kind == "exact":
            np.testing.assert_array_equal(actual, expected, err_msg=kind)
        else:
            # The norm's sum has another order: its last float32 bit moves a few values across a rounding boundary.
            written = max((expected != arrays[pool]).sum(), 1)
            assert (actual != expected).sum() <= max(0.01 * written, 2)
            np.testing.assert_array_equal((actual == arrays[pool])[expected == arrays[pool]].mean() > 0.999, True)
