"""The Engram gate against its closed form and the golden layer 1 of the tiny model."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41.config import load_config
from dsv41.ops.engram import engram_gate, gate_from_dot
from tests.golden import DATA, checkpoint, primitives

EPS = load_config(DATA / "tiny_text").text_config.rms_norm_eps
jit_gate = jax.jit(functools.partial(engram_gate, eps=EPS))


def bf16_steps(a, b):
    """Distance in bfloat16 steps, for values of one sign or near zero."""
    a, b = (np.asarray(x).view(np.int16).astype(np.int32) for x in (a, b))
    a, b = (np.where(x < 0, -(x & 0x7FFF), x) for x in (a, b))
    return np.abs(a - b)


# Case G5: the gate's shape.
def test_gate_values():
    dots = np.array([4, -4, 0, 1e-8, -1e-8, 0.25, 1e4, -1e4], np.float32)
    gates = [0.880797, 0.119203, 0.500250, 0.500250, 0.499750, 0.622459, 1, 0]
    np.testing.assert_allclose(gate_from_dot(dots), gates, atol=5e-7)
    np.testing.assert_allclose(gate_from_dot(np.float32(-0.0)), 0.499750, atol=5e-7)
    assert gate_from_dot(dots).dtype == jnp.float32


def golden_inputs():
    g, weights = primitives(), checkpoint()
    width = g["engram.L1.x"].shape[-1]
    # wkv's rows are the keys of the streams in order, then the value.
    projected = g["engram.L1.kv"]
    keys = projected[..., : 4 * width].reshape(g["engram.L1.x"].shape)
    value = projected[..., 4 * width :]
    gains = weights["layers.1.engram.q_weight"], weights["layers.1.engram.k_weight"]
    return g["engram.L1.x"], keys, value, *gains


@pytest.mark.parametrize("gate", [jit_gate, functools.partial(engram_gate, eps=EPS)], ids=["jit", "eager"])
@pytest.mark.parametrize("masked", [False, True])
def test_golden_layer(gate, masked):
    g = primitives()
    mask = (g["engram.L1.token_mask"] == 0) & masked
    out = np.asarray(gate(*golden_inputs(), mask))
    expect = g["engram.L1.y_masked" if masked else "engram.L1.y"]
    # The order of the float32 sums is free: at most a rare last bit may differ.
    steps = bf16_steps(out, expect)
    assert steps.max() <= 1 and np.mean(steps != 0) < 1e-3
    assert out.dtype == ml_dtypes.bfloat16


def test_golden_rows_are_table_rows():
    """`engram.L1.rows` are the rows named by `hash_ids`, values times their power-of-two scale."""
    g, weights = primitives(), checkpoint()
    ids = g["engram.L1.hash_ids"]
    values = weights["layers.1.engram.embed.weight"][ids].astype(np.float32)
    scales = weights["layers.1.engram.embed.scale"][ids].astype(np.int32)
    rows = np.ldexp(values, np.repeat(scales - 127, 32, axis=-1))
    np.testing.assert_array_equal(rows, g["engram.L1.rows"].astype(np.float32))


def float64_gate(x, keys, value, q_weight, k_weight):
    x, keys, value, q_weight, k_weight = (
        np.asarray(a).astype(np.float64) for a in (x, keys, value, q_weight, k_weight)
    )
    norm_x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * q_weight
    norm_k = keys / np.sqrt((keys**2).mean(-1, keepdims=True) + EPS) * k_weight
    dot = (norm_x * norm_k).sum(-1) / np.sqrt(x.shape[-1])
    gate = 1 / (1 + np.exp(-np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot)))
    return x + gate[..., None] * value[:, :, None]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_against_float64(scale):
    """At any stream magnitude; the norms cancel it."""
    rng = np.random.default_rng(0)
    shapes = [(2, 3, 4, 96), (2, 3, 4, 96), (2, 3, 96), (4, 96), (4, 96)]
    arrays = [rng.normal(size=s).astype(ml_dtypes.bfloat16) for s in shapes]
    arrays[0] = (arrays[0].astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
    out = np.asarray(jit_gate(*arrays, np.zeros((2, 3), bool))).astype(np.float64)
    exact = float64_gate(*arrays)
    # One bfloat16 rounding, half of 2^-8 relative, and float32 noise where stream and value cancel.
    np.testing.assert_allclose(out, exact, rtol=2**-8, atol=1e-6)


def test_masked_rows_keep_every_bit():
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2**16, (1, 2, 4, 32)).astype(np.uint16).view(ml_dtypes.bfloat16)
    # Infinities and quiet NaNs included; a CPU may quieten a signalling NaN when it merely moves it.
    x = np.where(np.isnan(x.astype(np.float32)), ml_dtypes.bfloat16(np.nan), x)
    keys, value = np.full(x.shape, np.nan, x.dtype), np.full((1, 2, 32), np.nan, x.dtype)
    gain = np.ones((4, 32), x.dtype)
    out = np.asarray(jit_gate(x, keys, value, gain, gain, np.ones((1, 2), bool)))
    np.testing.assert_array_equal(out.view(np.uint16), x.view(np.uint16))


def test_zero_stream_or_key_stays_finite():
    x = np.zeros((1, 1, 4, 32), ml_dtypes.bfloat16)
    value, gain = np.ones((1, 1, 32), x.dtype), np.ones((4, 32), x.dtype)
    out = np.asarray(jit_gate(x, x, value, gain, gain, np.zeros((1, 1), bool))).astype(np.float32)
    np.testing.assert_array_equal(out, np.float32(ml_dtypes.bfloat16(0.50025)))


def test_no_tokens():
    x = np.zeros((2, 0, 4, 32), ml_dtypes.bfloat16)
    gain = np.ones((4, 32), x.dtype)
    assert jit_gate(x, x, np.zeros((2, 0, 32), x.dtype), gain, gain, np.zeros((2, 0), bool)).shape == x.shape
