"""Gradients of the parts against finite differences of float64 references (training.md section 9)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.layers import MoE, parameters_of, with_parameters
from dsv41.ops.compressor import pool_groups
from dsv41.ops.engram import engram_gate
from dsv41.ops.linear import WeightFormat
from dsv41.ops.moe import swiglu
from dsv41.train.attention import core_attention
from dsv41.train.experts import grouped_product, moe_sublayer, sqrt_softplus
from pallas_kernels.hyper_connection import ops as mhc
from tests.models_for_tests import small_model

# Values between the parts are bfloat16, and so are the factors of backward products: 2^-9 each, a few of them in a row.
BF16 = 1.5e-2
COORDINATES = 40


def check(fn, reference, arguments: dict[str, np.ndarray], seed: int = 0, tolerance: float = BF16) -> None:
    """Compares gradients of sum(c * fn(**arguments)), c random, at some coordinates of every float argument.

    arguments are arrays on the grid of bfloat16 or float32; `reference` takes and returns float64.
    """
    rng = np.random.default_rng(seed)
    exact = {name: np.asarray(x, np.float64) for name, x in arguments.items()}
    y = reference(**exact)
    c = np.asarray(jnp.asarray(rng.normal(size=y.shape), jnp.bfloat16), np.float64)
    got = fn(**arguments)
    error = np.sqrt(((np.asarray(got, np.float64) - y) ** 2).mean() / (y**2).mean())
    assert error < tolerance, f"forward: {error}"
    grads = jax.jit(jax.grad(lambda a: (fn(**a).astype(jnp.float32) * c.astype(np.float32)).sum()))(arguments)
    for name, x in exact.items():
        at = rng.choice(x.size, min(COORDINATES, x.size), replace=False)
        step = 1e-5
        expected = []
        for i in at:
            sides = []
            for sign in (1, -1):
                moved = x.copy()
                moved.flat[i] += sign * step
                sides.append((c * reference(**(exact | {name: moved}))).sum())
            expected.append((sides[0] - sides[1]) / (2 * step))
        actual = np.asarray(grads[name], np.float64).reshape(-1)[at]
        scale = np.sqrt(np.mean(np.square(expected)))
        assert scale > 0, name
        error = np.sqrt(np.mean((actual - expected) ** 2)) / scale
        assert error < tolerance, f"{name}: {error}"


def _bf16(rng, *shape, scale=1.0):
    return jnp.asarray(scale * rng.normal(size=shape), jnp.bfloat16)


def test_attention():
    rng = np.random.default_rng(0)
    t, width, entries, k, heads, dim = 9, 4, 6, 3, 2, 16
    first = np.maximum(np.arange(t) - width + 1, [0, 0, 0, 0, 0, 5, 5, 5, 5])[None].astype(np.int32)
    selected = rng.integers(0, entries, (1, t, k)).astype(np.int32)
    selected[0, :3] = -1
    selected[0, 5, 1:] = -1

    def fn(q, window, main, sink):
        return core_attention(q, window, jnp.asarray(first), main, jnp.asarray(selected), sink, width=width)[0]

    def reference(q, window, main, sink):
        out = np.zeros(q.shape)
        for i in range(t):
            kv = np.concatenate([window[0, first[0, i] : i + 1], main[0, selected[0, i][selected[0, i] >= 0]]])
            logits = q[0, i] @ kv.T * dim**-0.5
            weight = np.exp(logits)
            out[0, i] = weight @ kv / (weight.sum(-1) + np.exp(sink))[:, None]
        return out

    arguments = {
        "q": _bf16(rng, 1, t, heads, dim, scale=2),
        "window": _bf16(rng, 1, t, dim),
        "main": _bf16(rng, 1, entries, dim).astype(jnp.float32),
        "sink": jnp.asarray(rng.normal(size=heads), jnp.float32),
    }
    check(fn, reference, arguments)


def test_attention_in_tiles_is_attention():
    rng = np.random.default_rng(0)
    q, window = _bf16(rng, 1, 40, 2, 16), _bf16(rng, 1, 40, 16)
    first = jnp.maximum(jnp.arange(40) - 7, 0)[None]
    selected = jnp.asarray(rng.integers(-1, 10, (1, 40, 3)), jnp.int32)
    main, sink = _bf16(rng, 1, 10, 16).astype(jnp.float32), jnp.zeros(2)

    def run(tile):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dsv41.train.attention.query_tile", lambda *_: tile)
            return core_attention(q, window, first, main, selected, sink, width=8)

    for a, b in zip(run(40), run(16), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2**-7, atol=1e-6)


def test_compressor():
    rng = np.random.default_rng(1)
    row = jnp.arange(6, dtype=jnp.int32).reshape(1, 3, 2)

    def reference(value, gate, weight):
        weights = np.exp(gate.reshape(3, 2, 8))
        pooled = (value.reshape(3, 2, 8) * weights / weights.sum(1, keepdims=True)).sum(1)
        return (pooled / np.sqrt((pooled**2).mean(-1, keepdims=True)) * weight)[None]

    arguments = {
        "value": jnp.asarray(rng.normal(size=(1, 6, 8)), jnp.float32),
        "gate": jnp.asarray(rng.normal(size=(1, 6, 8)), jnp.float32),
        "weight": 1 + _bf16(rng, 8, scale=0.1),
    }
    check(lambda value, gate, weight: pool_groups(value, gate, row, weight, 1e-20), reference, arguments)


def test_engram_gate():
    rng = np.random.default_rng(2)
    mask = jnp.asarray([[False, False, True]])

    def reference(streams, keys, value, q_weight, k_weight):
        def norm(x):
            return x / np.sqrt((x**2).mean(-1, keepdims=True))

        dot = (norm(streams) * norm(keys) * q_weight * k_weight).sum(-1) * 16**-0.5
        gate = 1 / (1 + np.exp(-np.sign(dot) * np.sqrt(np.abs(dot))))
        mixed = streams + gate[..., None] * value[:, :, None]
        return np.where(np.asarray(mask)[..., None, None], streams, mixed)

    arguments = {
        "streams": _bf16(rng, 1, 3, 2, 16),
        "keys": _bf16(rng, 1, 3, 2, 16),
        "value": _bf16(rng, 1, 3, 16),
        "q_weight": 1 + _bf16(rng, 2, 16, scale=0.1),
        "k_weight": 1 + _bf16(rng, 2, 16, scale=0.1),
    }

    def fn(streams, keys, value, q_weight, k_weight):
        return engram_gate(streams, keys, value, q_weight, k_weight, mask, 1e-20)

    check(fn, reference, arguments)


def test_mix_coefficients():
    rng = np.random.default_rng(3)
    r, d = 4, 8

    def reference(streams, fn, scale, base):
        flat = streams.reshape(3, r * d)
        mix = flat @ fn.T / np.sqrt((flat**2).mean(-1, keepdims=True))
        pre = 1 / (1 + np.exp(-(mix[:, :r] * scale[0] + base[:r])))
        post = 2 / (1 + np.exp(-(mix[:, r : 2 * r] * scale[1] + base[r : 2 * r])))
        comb = np.exp((mix[:, 2 * r :] * scale[2] + base[2 * r :]).reshape(3, r, r))
        comb = comb / comb.sum(2, keepdims=True)
        comb = comb / comb.sum(1, keepdims=True)
        for _ in range(19):
            comb = comb / comb.sum(2, keepdims=True)
            comb = comb / comb.sum(1, keepdims=True)
        return np.concatenate([pre, post, comb.reshape(3, -1)], axis=1)

    def fn(streams, fn, scale, base):
        parts = mhc.mix_coefficients(streams, fn, scale, base, iters=20, norm_eps=1e-20, hc_eps=1e-9)
        return jnp.concatenate([x.reshape(3, -1) for x in parts], axis=1)

    arguments = {
        "streams": jnp.asarray(rng.normal(size=(3, r, d)), jnp.float32),
        "fn": jnp.asarray(rng.normal(size=(24, r * d)) / 6, jnp.float32),
        "scale": jnp.asarray([0.9, 1.1, 0.8], jnp.float32),
        "base": jnp.asarray(rng.normal(size=24), jnp.float32),
    }
    check(fn, reference, arguments, tolerance=1e-4)  # float32 throughout


def test_experts():
    rng = np.random.default_rng(4)
    config = small_model().config.text_config
    layer = MoE(config, dense=WeightFormat.BF16, routed=WeightFormat.BF16, experts=12, top_k=3)
    d = config.hidden_size
    shapes = parameters_of(layer)
    params = jax.tree.map(lambda s: _bf16(rng, *s.shape, scale=s.shape[-1] ** -0.5).astype(s.dtype), shapes)
    chosen = np.sort(np.stack([rng.permutation(12)[:3] for _ in range(4)]), axis=1).astype(np.int32)
    valid, image = np.array([[True, True, True, False]]), np.zeros((1, 4), bool)

    def fn(x, gate, w1, w3, w2):
        tree = params | {
            "gate": params["gate"] | {"weight": gate},
            "experts": {"w1": {"weight": w1}, "w2": {"weight": w2}, "w3": {"weight": w3}},
        }
        return moe_sublayer(with_parameters(layer, tree), x, valid, image, jnp.asarray(chosen)[None])[0][:, :3]

    shared = {name: np.asarray(params["shared_experts"][name]["weight"], np.float64) for name in ("w1", "w2", "w3")}

    def expert(x, w1, w3, w2, weight):
        gate = np.minimum(x @ w1.T, 10)
        return (gate / (1 + np.exp(-gate)) * np.clip(x @ w3.T, -10, 10) * weight) @ w2.T

    def reference(x, gate, w1, w3, w2):
        out = np.zeros((1, 3, d))
        for i in range(3):
            score = np.sqrt(np.log1p(np.exp(gate[chosen[i]] @ x[0, i])))
            for e, weight in zip(chosen[i], score / score.sum() * 1.5, strict=True):
                out[0, i] += expert(x[0, i], w1[e], w3[e], w2[e], weight)
            out[0, i] += expert(x[0, i], shared["w1"], shared["w3"], shared["w2"], 1.0)
        return out

    arguments = {"x": _bf16(rng, 1, 4, d), "gate": params["gate"]["weight"]}
    arguments |= {name: params["experts"][name]["weight"] for name in ("w1", "w3", "w2")}
    check(fn, reference, arguments)


def test_products_by_expert_in_parts():
    """Weights gathered one block at a time give the gradients of all at once."""
    rng = np.random.default_rng(5)
    x, w = _bf16(rng, 5, 8, 32), _bf16(rng, 3, 16, 32)
    blocks, g = jnp.asarray([0, 0, 2, 2, 3], jnp.int32), jnp.asarray(rng.normal(size=(5, 8, 16)), jnp.float32)

    def run(budget):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dsv41.train.experts._GATHERED_BYTES", budget)
            y, pull = jax.vjp(lambda x, w: grouped_product(x, w, blocks), x, w)
            return y, *pull(g)

    for a, b in zip(run(1), run(1 << 30), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    y, dx, dw = run(1 << 30)
    assert not np.asarray(y[4]).any() and not np.asarray(dx[4]).any()  # no expert
    assert not np.asarray(dw[1]).any()  # no rows
    assert swiglu(y, y, 10.0).shape == y.shape


def test_router_scores_of_far_logits():
    logits = jnp.asarray([-300.0, -150.0, -88.0, -21.0, -19.0, 0.0, 5.0, 300.0])
    value, slope = jax.vmap(jax.value_and_grad(sqrt_softplus))(logits)
    x = np.asarray(logits, np.float64)
    softplus = np.logaddexp(0, x)
    # Subnormal numbers are zeros to some devices.
    np.testing.assert_allclose(value, np.sqrt(softplus), rtol=1e-6, atol=1e-18)
    np.testing.assert_allclose(slope, 1 / (1 + np.exp(-x)) / (2 * np.sqrt(softplus)), rtol=1e-6, atol=1e-18)
