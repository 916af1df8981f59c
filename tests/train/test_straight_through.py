"""Rounding in training: forward as served, backward the identity (training.md sections 2.2 and 2.3)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.ops import straight_through as st
from pallas_kernels.quantize import ops as quantize

SERVED = {
    "activation_fp8": lambda x: quantize.dequantize_fp8(*quantize.quantize_fp8(x)),
    "index_mxfp4": lambda x: quantize.dequantize_mxfp4(*quantize.quantize_mxfp4(x)),
    "main_kv_fp4": lambda x: quantize.dequantize_kv_fp4(*quantize.quantize_kv_fp4(x)),
    "weight_fp8": lambda x: quantize.dequantize_weight_fp8(*quantize.quantize_weight_fp8(x)),
    "weight_fp4": lambda x: quantize.dequantize_weight_fp4(*quantize.quantize_weight_fp4(x)),
    "rows_fp8": lambda x: quantize.dequantize_fp8(*quantize.quantize_rows_fp8(x)),
}


# One program each: the tests of stored values ask for numbers, not for how they are reached.
FP8_WEIGHT, FP4_WEIGHT, TO_FP8 = map(
    jax.jit, (quantize.dequantize_weight_fp8, quantize.dequantize_weight_fp4, quantize.quantize_weight_fp8)
)


def _random(shape, dtype, seed=0):
    # By numpy, which compiles nothing.
    return jnp.asarray((4 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype))


@pytest.mark.parametrize("name", SERVED)
def test_forward_is_what_is_served_and_the_gradient_is_the_identity(name):
    dtype = jnp.float32 if name in ("weight_fp8", "weight_fp4", "rows_fp8") else jnp.bfloat16
    x, g = _random((3, 40, 64), dtype), _random((3, 40, 64), jnp.bfloat16, 1)
    y, pull = jax.vjp(getattr(st, name), x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y), np.asarray(SERVED[name](x)))
    assert (np.asarray(y) != np.asarray(x)).any()  # it does round
    (back,) = pull(g)
    assert back.dtype == dtype
    np.testing.assert_array_equal(np.asarray(back), np.asarray(g).astype(dtype))


@pytest.mark.parametrize("shape", [(64, 96), (2, 40, 70)])
def test_weights_of_stored_tiles_come_back(shape):
    rng = np.random.default_rng(0)
    values = (rng.normal(size=shape) * 40).astype(jnp.float8_e4m3fn)
    tiles = (*shape[:-2], -(-shape[-2] // 32), -(-shape[-1] // 32))
    # Also scales that are larger than the values need: the largest value of a tile may be anything.
    scales = rng.integers(90, 140, tiles).astype(np.uint8)
    x = np.asarray(FP8_WEIGHT(values, scales))
    np.testing.assert_array_equal(np.asarray(st.weight_fp8(jnp.asarray(x.astype(np.float32)))), x)


def test_weights_of_stored_fp4_rows_come_back():
    rng = np.random.default_rng(0)
    packed, scales = rng.integers(0, 256, (3, 8, 32), np.uint8), rng.integers(90, 140, (3, 8, 2)).astype(np.uint8)
    packed[0] &= 0x11  # codes of 0 and 0.5 only, for which the smallest scale is another one
    x = np.asarray(FP4_WEIGHT(packed, scales))
    np.testing.assert_array_equal(np.asarray(st.weight_fp4(jnp.asarray(x.astype(np.float32)))), x)


def test_a_tile_has_the_smallest_scale_without_saturation():
    x = np.zeros((64, 64), np.float32)
    x[3, 5], x[40, 1] = 448.0, 449.0
    values, scales = map(np.asarray, TO_FP8(x))
    assert scales[0, 0] == 127
    assert scales[1, 0] == 128
    assert values.astype(np.float32)[3, 5] == 448
    assert np.isfinite(values.astype(np.float32)).all()
    x[7, 7] = np.nan
    assert np.asarray(TO_FP8(x)[1])[0, 0] == 255


# Gradients are products of bfloat16 values: each factor is off by up to 2^-9 of itself.
BF16 = {"rtol": 2e-2, "atol": 2e-2}


@pytest.mark.parametrize("name", ["product_bf16", "product_of_master", "group_product_bf16"])
def test_gradients_of_products(name):
    grouped = name == "group_product_bf16"
    x = _random((6, 3, 16) if grouped else (6, 16), jnp.bfloat16)
    weight = _random(
        (3, 8, 16) if grouped else (8, 16), jnp.float32 if name == "product_of_master" else jnp.bfloat16, 1
    )
    y, pull = jax.vjp(getattr(st, name), x, weight)
    g = _random(y.shape, jnp.float32, 2)
    x64, w64, g64 = (np.asarray(a).astype(jnp.bfloat16).astype(np.float64) for a in (x, weight, g))
    out = "tgi,goi->tgo" if grouped else "ti,oi->to"
    first, second = out.split("->")[0].split(",")
    product = out.split("->")[1]
    np.testing.assert_allclose(y, np.einsum(out, x64, w64), rtol=1e-5, atol=1e-4)
    dx, dw = pull(g)
    assert (dx.dtype, dw.dtype) == (x.dtype, weight.dtype)
    np.testing.assert_allclose(np.asarray(dx, np.float32), np.einsum(f"{product},{second}->{first}", g64, w64), **BF16)
    np.testing.assert_allclose(np.asarray(dw, np.float32), np.einsum(f"{product},{first}->{second}", g64, x64), **BF16)
