"""Single operations against the golden primitives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.config import ModelConfig, load_config
from dsv41.ops import compressor, moe, rope, selection
from dsv41.ops.linear import QuantizedArray, WeightFormat, linear
from pallas_kernels.norms import rms_norm
from pallas_kernels.rope import apply_rope
from tests.golden import DATA, checkpoint, primitives


def _same(actual, golden):
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(golden, np.float32))


@pytest.mark.parametrize("size", ["tiny", "real"])
@pytest.mark.parametrize(("name", "compressed"), [("swa", False), ("yarn", True)])
def test_rope_tables(size, name, compressed):
    """Frequencies exact; cosine and sine within a float32 ulp of the reference, up to position 1,048,575."""
    text = ModelConfig().text_config if size == "real" else load_config(DATA / "tiny_text").text_config
    g, frequencies = primitives(), rope.layer_frequencies(text, compressed=compressed)
    np.testing.assert_array_equal(frequencies, g[f"rope.{name}_{size}.freq"])
    table = rope.rope_table(frequencies, g["rope.positions"])
    np.testing.assert_allclose(table[:, 0], g[f"rope.{name}_{size}.cos"], rtol=0, atol=6e-8)
    np.testing.assert_allclose(table[:, 1], g[f"rope.{name}_{size}.sin"], rtol=0, atol=6e-8)


def test_rotation():
    g = primitives()
    table = jnp.asarray(np.stack([g["rope.apply.cos"], g["rope.apply.sin"]], axis=1))
    _same(jax.jit(apply_rope)(g["rope.apply.x3"], table), g["rope.apply.y3"])
    _same(apply_rope(jnp.asarray(g["rope.apply.x4"]), table[:, None]), g["rope.apply.y4"])
    inverse = apply_rope(jnp.asarray(g["rope.apply.x4"]), table[:, None], inverse=True)
    _same(inverse, g["rope.apply.y4_inverse"])


def test_rms_norm():
    g = primitives()
    _same(jax.jit(rms_norm)(g["rmsnorm.x"], g["rmsnorm.w"], 1e-20), g["rmsnorm.y"])


def _fp8(name: str) -> QuantizedArray:
    g = primitives()
    codes = jax.lax.bitcast_convert_type(jnp.asarray(g[f"{name}.w_codes"]), jnp.float8_e4m3fn)
    return QuantizedArray(codes, jnp.asarray(g[f"{name}.w_scale_e8m0"]), WeightFormat.FP8_BLOCK)


@pytest.mark.parametrize("name", ["linear_fp8", "linear_fp8_ragged"])
def test_fp8_linear(name):
    g = primitives()
    _same(jax.jit(linear)(g[f"{name}.x"], _fp8(name)), g[f"{name}.y"])


def test_fp4_linear():
    g = primitives()
    weight = QuantizedArray(
        jnp.asarray(g["linear_fp4.w_packed"]), jnp.asarray(g["linear_fp4.w_scale_e8m0"]), WeightFormat.FP4_ROW
    )
    _same(jax.jit(linear)(g["linear_fp4.x"], weight), g["linear_fp4.y"])


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_n5_linear_of_any_magnitude(factor):
    """Activations of any size: finite, a zero row stays zero, the FP8 floor alone limits the relative error."""
    g = primitives()
    x = g["linear_fp8.x"].astype(np.float32) * factor
    x[0] = 0
    x[1, 3] = 3e5 * factor
    y = np.asarray(linear(jnp.asarray(x, jnp.bfloat16), _fp8("linear_fp8")), np.float32)
    assert np.isfinite(y).all()
    assert (y[0] == 0).all()
    if factor >= 1:  # below 1e-4 the scale is floored by definition
        exact = (
            np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
            @ np.asarray(_fp8("linear_fp8").dequantize(), np.float32).T
        )
        assert np.sqrt(((y - exact)[2:] ** 2).mean() / (exact[2:] ** 2).mean()) < 0.05


@pytest.mark.parametrize("kind", ["text", "vl"])
def test_gate(kind):
    """Experts exact with both biases; weights within a few float32 ulp."""
    g = primitives()
    image = g["gate.image_mask"].astype(bool) if kind == "vl" else np.zeros(24, bool)
    golden, golden_weights = g[f"gate.{kind}.indices"], g[f"gate.{kind}.weights"]
    experts, weights = moe.route(
        *(jnp.asarray(g[f"gate.{k}"]) for k in ("x", "weight", "bias", "bias_vl")),
        jnp.asarray(image), top_k=4, scale=float(golden_weights[0].sum()),
    )  # fmt: skip
    order = np.argsort(golden, axis=1)
    np.testing.assert_array_equal(experts, np.take_along_axis(golden, order, 1))
    np.testing.assert_allclose(weights, np.take_along_axis(golden_weights, order, 1), rtol=1e-6)


def _stored(stem: str, format: WeightFormat) -> QuantizedArray:
    values = checkpoint()[f"{stem}.weight"]
    values = values.view(np.uint8) if values.dtype == np.int8 else values
    return QuantizedArray(jnp.asarray(values), jnp.asarray(checkpoint()[f"{stem}.scale"]), format)


def test_experts():
    """A routed FP4 expert with its weight, the shared FP8 one, and BF16 ones; inputs large enough for the clamp."""
    g = primitives()
    x, weight = jnp.asarray(g["expert.x"]), jnp.asarray(g["expert.route_weight"])
    routed = [_stored(f"layers.3.ffn.experts.2.{w}", WeightFormat.FP4_ROW) for w in ("w1", "w3", "w2")]
    _same(moe.expert(x, *routed, weight, 10.0), g["expert.routed_L3_e2.y"])
    shared = [_stored(f"layers.3.ffn.shared_experts.{w}", WeightFormat.FP8_BLOCK) for w in ("w1", "w3", "w2")]
    _same(moe.expert(x, *shared, None, 10.0), g["expert.shared_L3.y"])
    plain = [QuantizedArray(jnp.asarray(g[f"expert_bf16.{w}"]), None, WeightFormat.BF16) for w in ("w1", "w3", "w2")]
    _same(moe.expert(x, *plain, weight, 10.0), g["expert_bf16.y"])
    _same(moe.expert(x, *plain, None, 10.0), g["expert_bf16.y_unweighted"])


def _pool_mask(scores: np.ndarray, visible: np.ndarray, blocks: int, size: int) -> np.ndarray:
    """bool [B, T, S]: entries of the candidate blocks for given index scores float32 [B, T, S]."""
    b, t, s = scores.shape
    padded = -(-s // 8) * 8
    full = np.zeros((b * t, padded), np.float32)
    full[:, :s] = np.where(np.isfinite(scores), scores, 0).reshape(b * t, s)
    # Scores pass through relu(q k) w: split by sign over two heads, q = 1 and weights 1, -1. bfloat16 is exact enough
    # only for bfloat16 scores, so ranks stand for the scores.
    ranks = np.argsort(np.argsort(full, axis=1), axis=1).astype(np.float32)
    keys = jnp.asarray(ranks)[:, :, None]
    seen = jnp.asarray(visible.reshape(b * t, 1))
    _, found = selection.rank(
        jnp.ones((b * t, 1, 1, 1)), jnp.ones((b * t, 1, 1)), seen, selection.newest_block(seen, size), lambda i: keys,
        tile=padded, sizes=selection.SelectionSizes(1, blocks, size),
    )  # fmt: skip
    candidates = selection.ascending(found.ids)
    mask = np.zeros((b * t, padded // size + 1), bool)
    np.put_along_axis(mask, np.where(candidates[:, 0] < 0, padded // size, candidates[:, 0]), True, axis=1)
    return np.repeat(mask[:, :-1], size, axis=1)[:, :s].reshape(b, t, s)


@pytest.mark.parametrize(
    ("phase", "suffix", "size", "blocks"),
    [
        ("prefill", "b4k3", 4, 3),
        ("prefill", "b8k2", 8, 2),
        ("decode", "b8k20_len45", 8, 20),
        ("decode", "b8k3_len45", 8, 3),
    ],
)
def test_candidate_pools(phase, suffix, size, blocks):
    g = primitives()
    scores = g[f"candidates.{phase}.logits"]
    b, t, s = scores.shape
    visible = np.broadcast_to(np.arange(1, t + 1) if phase == "prefill" else np.array([s]), (b, t)).astype(np.int32)
    mask = _pool_mask(scores, visible, blocks, size)
    np.testing.assert_array_equal(mask, g[f"candidates.{phase}.mask_{suffix}"].astype(bool))


@pytest.mark.parametrize(("layer", "ratio"), [(2, 2), (6, 1)])
def test_compressor_decodes_one_token_at_a_time(layer, ratio):
    """Latents of positions 9, 10, 11 after a prefill of 9: at ratio 2 a group completes at 9 and at 11."""
    g, c = primitives(), checkpoint()
    stem = f"layers.{layer}.attn.compressor"
    norm = jnp.asarray(c[f"{stem}.norm.weight"])
    weights = [QuantizedArray(jnp.asarray(c[f"{stem}.wkv.weight"]), None, WeightFormat.BF16)]
    prefix = f"compressor.L{layer}"
    if ratio == 1:
        for position in (9, 10, 11):
            latent = rms_norm(linear(jnp.asarray(g[f"{prefix}.x_decode{position}"]), weights[0]), norm, 1e-20)
            _same(latent, g[f"{prefix}.latent_decode{position}"])
        return
    x = jnp.concatenate(
        [jnp.asarray(g[f"{prefix}.x_prefill9"])] + [jnp.asarray(g[f"{prefix}.x_decode{p}"]) for p in (9, 10, 11)], 1
    )
    from pallas_kernels.fixed_order import contract

    kv, gate = (contract(x, jnp.asarray(c[f"{stem}.{w}.weight"])) for w in ("wkv", "wgate"))
    np.testing.assert_allclose(kv[:, 8], g[f"{prefix}.kv_state"][:, 0], rtol=1e-5, atol=1e-5)
    for position in (9, 11):
        start, new = jnp.full(2, position), jnp.ones(2, jnp.int32)
        group, complete, row = compressor.group_window(start, new, 1, 2)
        latent = compressor.pool_groups(
            kv[:, position - 1 : position + 1], gate[:, position - 1 : position + 1], row, norm, 1e-20
        )
        assert (np.asarray(group)[:, 0] == position // 2).all()
        np.testing.assert_array_equal(complete, [[True], [True]])
        _same(latent, g[f"{prefix}.latent_decode{position}"])
