"""Steps of the drafter: what learns, what does not, and that it learns (dspark.md sections 3.1 and 3.5)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.train import make_optimizer
from dsv41.train.drafter_anchors import draw_anchors
from dsv41.train.drafter_forward import DrafterOptions
from dsv41.train.drafter_loss import drafter_metrics
from dsv41.train.drafter_optimizer import DrafterRule, make_drafter_optimizer
from dsv41.train.drafter_step import (
    Features,
    alongside_loss,
    drafter_loss,
    make_alongside_step,
    make_drafter_evaluation,
    make_drafter_step,
    move_draft_biases,
)
from dsv41.train.forward import ForwardOptions, train_forward
from dsv41.train.initial import initial_drafter_masters, initial_masters
from dsv41.train.pack import Document
from dsv41.train.step import TrainState, apply_gradients, init_state
from tests.models_for_tests import small_model
from tests.train import drafters, packs

OPTIONS = DrafterOptions(anchors=16)
BACKBONE = ForwardOptions()
RATE = jnp.float32(0.02)


@functools.cache
def optimizer():
    config = small_model().config
    return make_drafter_optimizer(config, initial_drafter_masters(config), DrafterRule.MUON)


@functools.cache
def compiled():
    """(state, features, pack) -> (state, metrics, gradients of masters, of features), by given features."""
    config = small_model().config
    rope = jnp.asarray(drafters.rope(small_model().config)[0])

    @jax.jit
    def step(state, features, pack):
        key, drawn = jax.random.split(state.key)
        anchors = draw_anchors(drawn, pack, OPTIONS.anchors, 5)

        def loss(masters, features):
            return drafter_loss(masters, features, pack, anchors, rope, config=config, options=OPTIONS)

        (value, outcome), (grads, of_features) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            state.masters, features
        )
        state, applied = apply_gradients(
            state, key, value, grads, optimizer(), RATE, lambda m: move_draft_biases(m, outcome.loads, 1e-3)
        )
        return state, drafter_metrics(outcome.sums, OPTIONS) | applied, grads, of_features

    return step


def without_markov(state: TrainState) -> TrainState:
    stage = state.masters["mtp"][0]
    head = stage["markov_head"] | {"head": {"weight": jnp.zeros_like(stage["markov_head"]["head"]["weight"])}}
    return TrainState({"mtp": {0: stage | {"markov_head": head}}}, state.optimizer, state.key)


def test_a_document_is_learnt_without_the_markov_head_and_nothing_but_the_drafter_learns():
    model = small_model()
    pack = drafters.pack(model.config, [[Document(packs.random_tokens(60, 1))]])
    features = drafters.features(model, pack.tokens.shape)
    state, l1 = init_state(initial_drafter_masters(model.config), optimizer(), 0), []
    for i in range(100):
        state, metrics, grads, of_features = compiled()(state, features, pack)
        if i == 1:  # at step 0 both heads say nothing yet
            for path, g in jax.tree_util.tree_flatten_with_path(grads)[0]:
                name = jax.tree_util.keystr(path)
                assert np.isfinite(np.asarray(g)).all(), name
                assert np.asarray(g).any() == ("bias" not in name), name
            for name, g in zip(Features._fields, of_features, strict=True):
                assert not np.asarray(g, np.float32).any(), name
        state = without_markov(state)
        l1.append(float(metrics["l1"]))
    assert np.mean(l1[-5:]) < 0.4 * l1[0]  # measured: 1.03 to 0.31
    bias = np.asarray(state.masters["mtp"][0]["ffn"]["gate"]["bias"])
    assert bias.any() and np.abs(bias).max() <= 100 * 1e-3 + 1e-6
    assert not np.asarray(state.masters["mtp"][0]["ffn"]["gate"]["bias_vl"]).any()


def test_a_step_without_numbers_changes_nothing():
    model = small_model()
    pack = drafters.pack(model.config, [[Document(packs.random_tokens(60, 1))]])
    features = drafters.features(model, pack.tokens.shape)
    state = init_state(initial_drafter_masters(model.config), optimizer(), 0)
    broken = features._replace(main_hidden=features.main_hidden.at[0, 30].set(jnp.nan))
    after, metrics, _, _ = compiled()(state, broken, pack)
    assert metrics["finite"] == 0
    for a, b in zip(jax.tree.leaves(after.masters), jax.tree.leaves(state.masters), strict=True):
        assert np.array_equal(a, b)
    assert after.key != state.key


@pytest.mark.slow
def test_adamw_leaves_the_routing_biases():
    masters = initial_drafter_masters(small_model().config)
    chosen = make_drafter_optimizer(small_model().config, masters, DrafterRule.ADAMW)
    grads = jax.tree.map(jnp.ones_like, masters)
    updates, _ = chosen.update(grads, chosen.init(masters), masters, learning_rate=RATE)
    for path, u in jax.tree_util.tree_flatten_with_path(updates)[0]:
        expected = 0 if "bias" in jax.tree_util.keystr(path) else -RATE  # of the first step, whatever the clipped size
        np.testing.assert_allclose(u, np.full(u.shape, expected), rtol=1e-3)


@pytest.mark.slow
def test_biases_stay_when_a_drafter_is_tuned():
    masters, loads = initial_drafter_masters(small_model().config), jnp.arange(8)[None]
    assert move_draft_biases(masters, loads, None) is masters
    moved = move_draft_biases(masters, loads, 1e-3)["mtp"][0]["ffn"]["gate"]
    np.testing.assert_allclose(moved["bias"], np.where(np.arange(8) < 3.5, 1e-3, -1e-3))


@pytest.mark.slow
def test_behind_a_frozen_backbone():
    """Taps and target come from the backbone in the same step; evaluation sees what training does."""
    config = drafters.mini_config()
    masters, drafter = initial_masters(config), initial_drafter_masters(config)
    pack, rope = drafters.pack(config, [[Document(packs.random_tokens(60, 1))]]), drafters.rope(config)
    rule = make_drafter_optimizer(config, drafter, DrafterRule.MUON)
    step = jax.jit(make_drafter_step(config, rule, OPTIONS, backbone=BACKBONE))
    evaluate = jax.jit(make_drafter_evaluation(config, OPTIONS, backbone=BACKBONE))
    state, losses = init_state(drafter, rule, 0), []
    before = evaluate(state.masters, masters, pack, rope, jax.random.key(5))
    for _ in range(60):
        state, metrics = step(state, masters, pack, rope, RATE)
        losses.append(float(metrics["loss"]))
        assert metrics["finite"] == 1
    after = evaluate(state.masters, masters, pack, rope, jax.random.key(5))
    lengths = [float(drafter_metrics(x.sums, OPTIONS)["expected_tokens"]) for x in (before, after)]
    assert losses[-1] < 0.6 * losses[0] and lengths[1] > lengths[0] + 0.5
    assert before.confidence.shape == before.valid.shape == (1, OPTIONS.anchors, 5)


@pytest.mark.slow
def test_alongside_the_backbone_learns_as_it_would_alone():
    config, key = drafters.mini_config(), jax.random.key(0)
    masters, drafter = initial_masters(config), initial_drafter_masters(config)
    pack, rope = drafters.pack(config, [[Document(packs.random_tokens(60, 1))]]), drafters.rope(config)

    @jax.jit
    def together(masters, drafter):
        loss = functools.partial(alongside_loss, config=config, backbone=BACKBONE, options=OPTIONS)
        return jax.grad(loss, argnums=(0, 1), has_aux=True)(masters, drafter, pack, rope, key)[0]

    @jax.jit
    def alone(masters):
        loss = functools.partial(train_forward, config=config, options=BACKBONE)
        return jax.grad(loss, has_aux=True)(masters, pack, rope, jax.random.split(key)[1])[0]

    got, of_drafter = together(masters, drafter)
    expected = alone(masters)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(expected)[0], jax.tree.leaves(got), strict=True):
        assert np.array_equal(a, b), jax.tree_util.keystr(path)
    assert np.asarray(of_drafter["mtp"][0]["attn"]["wkv"]["weight"]).any()

    optimizers = make_optimizer(config, masters), make_drafter_optimizer(config, drafter, DrafterRule.ADAMW)
    step = jax.jit(make_alongside_step(config, optimizers, OPTIONS, backbone=BACKBONE))
    states = optimizers[0].init(masters), optimizers[1].init(drafter)
    state, metrics = step(TrainState(masters | drafter, states, key), pack, rope, (RATE, RATE))
    assert metrics["finite"] == 1
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), state.masters, masters | drafter)
    for path, changed in jax.tree_util.tree_flatten_with_path(moved)[0]:
        name = jax.tree_util.keystr(path)
        assert changed or "bias" in name or "markov_head" in name, name
