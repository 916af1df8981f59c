"""Balance of experts (training.md section 5)."""

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.train.pack import Document
from dsv41.train.router_balance import Loads, count_loads, sequence_balance, update_biases
from tests.models_for_tests import small_model
from tests.train import packs


def _pack():
    tokens = packs.random_tokens(20, 3)
    tokens[4:8] = small_model().config.image_token_id
    return packs.pack([[Document(tokens), Document(packs.random_tokens(9, 4))]], 32)


def test_loads_are_counted_by_modality_and_without_padding():
    pack = _pack()
    experts = jnp.asarray(np.random.default_rng(0).integers(0, 5, (1, 32, 2)), jnp.int32)
    loads = count_loads(experts, pack, 5)
    image = np.zeros(32, bool)
    image[4:8] = True
    real = np.r_[0:20, 20:29]
    text = [i for i in real if not image[i]]
    assert loads.text.tolist() == np.bincount(np.asarray(experts)[0, text].reshape(-1), minlength=5).tolist()
    assert loads.image.tolist() == np.bincount(np.asarray(experts)[0, 4:8].reshape(-1), minlength=5).tolist()


def test_biases_move_by_the_speed_towards_balance():
    gate = {"weight": jnp.zeros((4, 2)), "bias": jnp.asarray([0.0, 0.5, -0.5, 0.25]), "bias_vl": jnp.ones(4)}
    masters = {"layers": {0: {"ffn": {"gate": gate, "x": 1}}, 1: {"ffn": {"gate": gate}}}, "norm": 2}
    loads = Loads(jnp.asarray([[9, 5, 1, 5], [0, 0, 8, 0]]), jnp.zeros((2, 4), jnp.int32))
    new = update_biases(masters, loads)
    first, second = (new["layers"][i]["ffn"]["gate"] for i in (0, 1))
    np.testing.assert_array_equal(first["bias"], np.float32([0, 0.5, -0.5, 0.25]) + np.float32([-1e-3, 0, 1e-3, 0]))
    np.testing.assert_allclose(second["bias"] - gate["bias"], np.float32([1e-3, 1e-3, -1e-3, 1e-3]), rtol=1e-4)
    assert (first["bias_vl"] == 1).all()  # no image in the step
    assert new["norm"] == 2 and new["layers"][0]["ffn"]["x"] == 1
    assert masters["layers"][0]["ffn"]["gate"]["bias"][0] == 0


def test_balance_of_each_document():
    pack, rng = _pack(), np.random.default_rng(1)
    scores = jnp.asarray(rng.random((1, 32, 6)), jnp.float32)
    value, grad = jax.value_and_grad(lambda s: sequence_balance(s, pack, top_k=2, align=4))(scores)
    s, expected = np.asarray(scores, np.float64)[0], []
    for own in (s[:20], s[20:29]):
        best = np.argsort(-own, axis=1)[:, :2]
        f = 6 / (2 * len(own)) * np.bincount(best.reshape(-1), minlength=6)
        expected.append((f * (own / own.sum(1, keepdims=True)).mean(0)).sum())
    np.testing.assert_allclose(value, np.mean(expected), rtol=1e-5)
    assert np.asarray(grad)[0, :29].any(axis=1).all()
    assert not np.asarray(grad)[0, 29:].any()
    equal = sequence_balance(jnp.tile(jnp.eye(6)[None] + 1, (1, 6, 1))[:, :32], pack, top_k=1, align=4)
    np.testing.assert_allclose(equal, 1, atol=0.05)  # almost perfect: the documents are no multiples of six
