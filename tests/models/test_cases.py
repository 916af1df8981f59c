"""Published faults of such systems, on a whole model or its parts (numbers of the cases in the names)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.cache import AttentionState, LayerCache
from dsv41.config import LayerMode, ModelConfig, layer_schedule
from dsv41.models import ForcedChoices, bind
from dsv41.ops import selection
from dsv41.ops.moe import route, routed_experts, swiglu
from dsv41.ops.rope import layer_frequencies
from pallas_kernels.fixed_order import contract
from pallas_kernels.hyper_connection import ops as mhc
from pallas_kernels.norms import rms_norm
from tests.golden import expected
from tests.models_for_tests import small_model, tiny_model

LENGTH = 53


def test_n3_each_sublayer_is_collapsed_by_the_previous_mix():
    """Two layers of identity sublayers whose mix predicts one-hot(k mod 4): sublayer k + 1 sees stream k mod 4."""
    streams = jnp.asarray(
        np.array([1.0, 10.0, 100.0, 1000.0])[None, None, :, None] * np.ones((1, 1, 4, 32)), jnp.bfloat16
    )
    pre = jnp.zeros((1, 1, 4)).at[..., 0].set(1.0)
    seen = []
    for k in range(4):
        base = jnp.where(jnp.arange(24) == k % 4, 60.0, -60.0)  # sigmoid saturates: 1 for stream k, 0 elsewhere
        next_pre, _, _ = mhc.mix_coefficients(
            streams, jnp.zeros((24, 128)), jnp.ones(3), base, iters=20, norm_eps=1e-20, hc_eps=1e-6
        )
        np.testing.assert_allclose(next_pre[0, 0], np.eye(4)[k % 4] + 1e-6, atol=1e-9)
        seen.append(float(mhc.collapse(streams, pre)[0, 0, 0]))
        pre = next_pre
    assert seen == [1, 1, 10, 100]


def test_n3_the_model_passes_the_mix_on():
    """In the whole model, block n starts from the mix that block n - 1's MoE predicted, the first from stream 0."""
    model, ids = small_model(), expected("tiny_text")["input_ids"][:, :LENGTH]
    _, _, aux = model.forward(
        model.make_batch(ids), model.init_cache(2, 128), logits="all", capture=("streams", "outputs", "choices")
    )
    np.testing.assert_array_equal(aux["pre_in.0"][0, 0], [1, 0, 0, 0])
    for n in range(1, len(model.schedule.layers)):
        np.testing.assert_array_equal(aux[f"pre_in.{n}"], aux[f"pre_out.{n - 1}"])


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_n4_n5_any_magnitude_is_finite(factor):
    """Embeddings times 1e-6, 1 and 1e6 (residuals of 2e6 are real): finite logits, bfloat16 streams hold the range."""
    model, ids = small_model(), expected("tiny_text")["input_ids"][:, :LENGTH]
    table = np.asarray(model.params["embed"]["weight"], np.float32) * factor
    table[int(ids[0, 0])] = 0  # one token without any signal at all
    table[int(ids[0, 1]), 3] = 3e5 * factor
    params = model.params | {"embed": {"weight": jnp.asarray(table, jnp.bfloat16)}}
    scaled = dataclasses.replace(model, params=params)
    capture = ("streams", "outputs", "choices")
    logits, _, aux = scaled.forward(scaled.make_batch(ids), model.init_cache(2, 128), logits="all", capture=capture)
    assert np.isfinite(np.asarray(logits)).all()
    for name, value in aux.items():
        assert np.isfinite(np.asarray(value, np.float32)[:, :LENGTH]).all(), name
    if factor == 1e6:
        assert np.abs(np.asarray(aux[f"block_out.{len(model.schedule.layers) - 1}"], np.float32)).max() > 65_504


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_n5_rms_norm(factor):
    x = np.random.default_rng(0).normal(size=(3, 5120)).astype(np.float32)
    x[1] = 0
    x[2, 7] = 3e5
    y = np.asarray(rms_norm(jnp.asarray(x * factor), jnp.ones(5120), 1e-20), np.float32)
    assert (y[1] == 0).all()
    np.testing.assert_allclose(np.sqrt((y[[0, 2]] ** 2).mean(-1)), 1, rtol=1e-2)


def test_n10_query_heads_are_not_normalised():
    model, g = tiny_model(), expected("tiny_text")
    attn = bind(model.config, model.params).layers[3].attn
    x = rms_norm(jnp.asarray(g["prefill.block_in.3"])[:, :, 0], jnp.ones(128), 1e-20)
    q = np.asarray(attn.wq_b(attn.q_norm(attn.wq_a(x))), np.float32)
    norms = np.linalg.norm(q, axis=-1)
    assert norms.std() / norms.mean() > 0.01
    assert not np.allclose(norms, np.sqrt(q.shape[-1]))


def test_n11_rope_bases_by_layer_kind():
    """Sliding layers: base 1e4, unscaled. Compressed: base 1.6e5, the YaRN ramp from pair 15 to 25 of 32."""
    text = ModelConfig().text_config
    pair = np.arange(32)
    np.testing.assert_allclose(layer_frequencies(text, compressed=False), 1e4 ** (-pair / 32), rtol=1e-6)
    ratio = layer_frequencies(text, compressed=True) / 1.6e5 ** (-pair / 32)
    np.testing.assert_allclose(ratio[:16], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[25:], 1 / 16, rtol=1e-6)
    assert (np.diff(ratio[15:26]) < 0).all()


def test_n13_router():
    logits = np.array([3, 2, 1, 0, -1, -2, -3, 4], np.float32)
    bias = jnp.asarray([0, 0, 0, 0, 0, 0, 10, -10], jnp.float32)
    gate = jnp.asarray(np.concatenate([logits[:, None], np.zeros((8, 31), np.float32)], axis=1), jnp.bfloat16)
    x = jnp.zeros((2, 32), jnp.bfloat16).at[:, 0].set(1)
    experts, weights = route(x, gate, bias, jnp.zeros(8), jnp.array([False, True]), top_k=6, scale=1.5)
    np.testing.assert_array_equal(experts[0], [0, 1, 2, 3, 4, 6])
    golden = [0.439208, 0.366858, 0.288268, 0.209428, 0.140791, 0.055448]
    np.testing.assert_allclose(weights[0], golden, atol=2e-6)
    np.testing.assert_allclose(weights.sum(-1), 1.5, rtol=1e-6)
    np.testing.assert_array_equal(experts[1], [0, 1, 2, 3, 4, 7])  # the image row's own bias: none


def test_n14_swiglu_clamp():
    gate, up = jnp.array([20.0, -20.0, 1.0]), jnp.array([20.0, 20.0, -30.0])
    np.testing.assert_allclose(swiglu(gate, up, 10.0), [99.99546, -4.1223e-7, -7.310586], rtol=1e-4)


def test_m2_skewed_routing_drops_no_token():
    """512 tokens all given to the same experts equal the sum of those experts computed one by one."""
    model = tiny_model()
    ffn = bind(model.config, model.params).layers[3].ffn
    w1, w3, w2 = (getattr(ffn.experts, w).stored for w in ("w1", "w3", "w2"))
    from dsv41.ops.moe import expert

    x = jnp.asarray(np.random.default_rng(0).normal(size=(512, 128)), jnp.bfloat16)
    chosen, weights = jnp.tile(jnp.array([[1, 5, 7]]), (512, 1)), jnp.full((512, 3), 0.5)
    y = routed_experts(x, chosen, weights, jnp.ones(512, bool), w1, w3, w2, 10.0)
    dense = sum(
        expert(x, w1.at_row(e), w3.at_row(e), w2.at_row(e), weights[:, :1], 10.0).astype(jnp.float32) for e in (1, 5, 7)
    )
    np.testing.assert_array_equal(y, dense)


def test_a1_reuse_without_a_selection_is_an_error():
    model = tiny_model()
    backbone, cache = bind(model.config, model.params), model.init_cache(1, 128)
    batch = jax.tree.map(jnp.asarray, model.make_batch([[5, 6, 7]]))
    residual = backbone.start(batch)

    def run(layer, state):
        backbone.run(residual, batch, cache, state, range(layer, layer + 1), ForcedChoices(), ())

    with pytest.raises(ValueError, match="layer 3 reuses the selection of layer 2"):
        run(3, None)
    none = jnp.full((1, 8, 8), -1, jnp.int32)
    stale = AttentionState(selected=none, physical_entries=none, candidates=None, index_source=4)
    with pytest.raises(ValueError, match="layer 3 reuses the selection of layer 2"):
        run(3, stale)
    with pytest.raises(ValueError, match="candidate pool that no layer"):
        run(8, stale)


def _pool(length: int, scores: np.ndarray, blocks: int, size: int = 8, tile: int = 2048) -> np.ndarray:
    """Candidate blocks of one query that sees `length` entries with the given scores."""
    padded = np.full(-(-length // tile) * tile, 0, np.float32)
    padded[:length] = scores
    keys = jnp.asarray(padded, jnp.bfloat16)[None, :, None]
    q, w = jnp.ones((1, 1, 1, 1), jnp.bfloat16), jnp.ones((1, 1, 1), jnp.bfloat16)
    visible = jnp.array([[length]])
    _, found = selection.rank(
        q, w, visible, selection.newest_block(visible, size),
        lambda i: jax.lax.dynamic_slice_in_dim(keys, i * tile, tile, axis=1),
        tile=tile, sizes=selection.SelectionSizes(4, blocks, size),
    )  # fmt: skip
    return np.asarray(selection.ascending(found.ids))[0, 0]


@pytest.mark.parametrize(
    ("length", "blocks", "kept", "usable"),
    [
        (1, 1, 1, 1), (9, 2, 2, 9), (17, 3, 3, 17), (16384, 2048, 2048, 16384), (16385, 2049, 2048, 16377),
        (16392, 2049, 2048, 16384), (16393, 2050, 2048, 16377),
    ],
)  # fmt: skip
def test_a2_candidate_arithmetic(length, blocks, kept, usable):
    pool = _pool(length, np.ones(length), 2048)
    pool = pool[pool >= 0]
    assert -(-length // 8) == blocks
    assert len(pool) == len(set(pool)) == kept
    entries = (pool[:, None] * 8 + np.arange(8)).ravel()
    assert (entries < length).sum() == usable


def test_a2_candidate_arithmetic_at_a_million():
    length = 1 << 20
    pool = _pool(length, np.ones(length), 2048, tile=1 << 16)
    assert len(set(pool)) == 2048
    assert 131_071 in pool


def test_a3_newest_block_stays():
    """relu makes a negative weight the way to a negative score: the last block scores -100, the others 1."""
    length = 20_000
    keys = np.ones(-(-length // 2048) * 2048, np.float32)
    keys[length - 8 :] = 0  # scores 0 against 1 elsewhere: worse than every other block
    pool = _pool(length, keys[:length], 2048)
    assert 2499 in pool
    assert 19_999 in (pool[:, None] * 8 + np.arange(8)).ravel()


def test_a7_window_edges():
    """Only the last `sliding_window` positions of a layer without compressed entries matter, and all of them do."""
    model = tiny_model()
    spec = layer_schedule(model.config.text_config).layers[0]
    assert spec.mode is LayerMode.SLIDING
    attn = bind(model.config, model.params).layers[0].attn
    batch = jax.tree.map(jnp.asarray, model.make_batch([[5] * 40], padded=False))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 40, 128)), jnp.bfloat16)
    run = jax.jit(lambda x: attn(x, batch, LayerCache.of(model.init_cache(1, 128), spec), None, None)[0])
    base = np.asarray(run(x), np.float32)[0, 39]
    for position, matters in ((23, False), (24, True), (39, True)):
        moved = np.asarray(run(x.at[0, position].add(1.0)), np.float32)[0, 39]
        assert (moved != base).any() == matters, position


def test_contract_of_one_row_has_the_bits_of_many():
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(64, 384)), jnp.float32), jnp.asarray(rng.normal(size=(24, 384)), jnp.float32)
    product = jax.jit(contract)
    np.testing.assert_array_equal(product(x[:1], w), np.asarray(product(x, w))[:1])
