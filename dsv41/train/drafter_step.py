"""Training steps of the drafter: behind a frozen backbone, or alongside one that learns (dspark.md section 3.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dsv41.config import ModelConfig
from dsv41.models import Params
from dsv41.train.drafter_anchors import Anchors, draw_anchors
from dsv41.train.drafter_forward import DrafterOptions, bind_masters, run_stages
from dsv41.train.drafter_loss import (
    Compared,
    DrafterSums,
    acceptance,
    compare,
    drafter_metrics,
    mean_loss,
    run_heads,
    target_states,
    weighted_sums,
)
from dsv41.train.forward import ForwardOptions, run_layers, train_forward
from dsv41.train.pack import PackedBatch
from dsv41.train.router_balance import Loads, update_biases
from dsv41.train.step import TrainState, apply_gradients, imbalance

Rope = tuple[jax.Array, jax.Array]
Metrics = dict[str, jax.Array]


class Features(NamedTuple):
    """What the drafter takes from the backbone; it learns nothing through them."""

    main_hidden: jax.Array  # bfloat16 [B, T, taps * D]
    hidden: jax.Array  # bfloat16 [B, T, D], behind the final norm
    embed: jax.Array  # float32 or bfloat16 [V, D]
    head: jax.Array  # float32 or bfloat16 [V, D]


class Outcome(NamedTuple):
    """What a batch gave."""

    sums: DrafterSums
    loads: jax.Array  # int32 [stages, E]
    confidence: jax.Array  # float32 [B, N, K] raw logits
    accepted: jax.Array  # float32 [B, N, K] probability that the draft is accepted
    valid: jax.Array  # bool [B, N, K]


def features_of(
    masters: Params, pack: PackedBatch, rope: Rope, key: jax.Array, *, config: ModelConfig, options: ForwardOptions
) -> Features:
    """Of a frozen backbone; arguments as of `train_forward`."""
    # Without a backward pass there is nothing to compute again.
    options = dataclasses.replace(options, taps=True, rematerialize=False)
    found = run_layers(masters, pack, rope, key, config=config, options=options)
    return Features(found.taps, found.x, masters["embed"]["weight"], masters["head"]["weight"])


def drafter_loss(
    masters: Params,
    features: Features,
    pack: PackedBatch,
    anchors: Anchors,
    rope: jax.Array,
    *,
    config: ModelConfig,
    options: DrafterOptions,
) -> tuple[jax.Array, Outcome]:
    """The mean loss of the blocks at `anchors`, differentiable in the masters {"mtp": stages} alone.

    Args:
      masters: float32, of the drafter.
      features: of the backbone on the same rows.
      pack: the rows.
      anchors: their blocks.
      rope: float32 [at least T + K, 2, r], of sliding layers.
      config, options: static.
    """
    features = Features(*jax.lax.stop_gradient(tuple(features)))
    text = config.text_config
    drafter = bind_masters(masters, config, options.qat)
    blocks = run_stages(drafter, features.embed, features.main_hidden, pack, anchors, rope, options=options)
    shape = anchors.tokens.shape
    tokens, labels, valid = (x.reshape(-1, shape[-1]) for x in (anchors.tokens, anchors.labels, anchors.valid))
    heads = run_heads(masters, blocks.x, tokens, text, options)
    markov = masters["mtp"][text.num_nextn_predict_layers - 1]["markov_head"]["head"]["weight"]
    compared: Compared = compare(heads, features.head, markov, target_states(features.hidden, anchors), labels)
    total, sums = weighted_sums(compared, heads.confidence, valid, options)
    found = (heads.confidence.reshape(shape), acceptance(compared).reshape(shape), anchors.valid)
    return mean_loss(total, sums), Outcome(sums, blocks.loads, *found)


def make_drafter_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformationExtraArgs,
    options: DrafterOptions,
    *,
    backbone: ForwardOptions,
    bias_speed: float | None = 1e-3,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """A function to be compiled, with its first argument donated, that trains behind a frozen backbone.

    It takes (state, masters of the backbone, pack, rope, learning_rate float32 []) and returns the next state and
    metrics: those of `drafter_metrics`, grad_norm (before clipping), imbalance (as of `make_train_step`) and finite
    (1, or 0 where loss or gradient is not a number: then nothing but the key has changed). rope is of `rope_tables`
    for T + K tokens.

    Args:
      config: of the model.
      optimizer: of the state's masters, {"mtp": stages}.
      options: how the drafter is trained.
      backbone: how the backbone runs.
      bias_speed: of the routing biases of the stages; None: they stay, as for a drafter that is only tuned.
    """

    def step(state: TrainState, masters: Params, pack: PackedBatch, rope: Rope, learning_rate: jax.Array):
        key, drawn, explored = jax.random.split(state.key, 3)
        features = features_of(masters, pack, rope, explored, config=config, options=backbone)
        anchors = draw_anchors(drawn, pack, options.anchors, config.text_config.dspark_block_size)

        def loss(drafter):
            return drafter_loss(drafter, features, pack, anchors, rope[0], config=config, options=options)

        (value, outcome), gradients = jax.value_and_grad(loss, has_aux=True)(state.masters)
        state, applied = apply_gradients(
            state, key, value, gradients, optimizer, learning_rate,
            lambda masters: move_draft_biases(masters, outcome.loads, bias_speed),
        )  # fmt: skip
        return state, drafter_metrics(outcome.sums, options) | applied | {"imbalance": imbalance(_text(outcome.loads))}

    return step


def make_drafter_evaluation(
    config: ModelConfig, options: DrafterOptions, *, backbone: ForwardOptions
) -> Callable[..., Outcome]:
    """A function to be compiled: (masters of the drafter, of the backbone, pack, rope, key) -> `Outcome`."""

    def evaluate(drafter: Params, masters: Params, pack: PackedBatch, rope: Rope, key: jax.Array) -> Outcome:
        drawn, explored = jax.random.split(key)
        features = features_of(masters, pack, rope, explored, config=config, options=backbone)
        anchors = draw_anchors(drawn, pack, options.anchors, config.text_config.dspark_block_size)
        return drafter_loss(drafter, features, pack, anchors, rope[0], config=config, options=options)[1]

    return evaluate


def alongside_loss(
    masters: Params,
    drafter: Params,
    pack: PackedBatch,
    rope: Rope,
    key: jax.Array,
    *,
    config: ModelConfig,
    options: DrafterOptions,
    backbone: ForwardOptions,
) -> tuple[jax.Array, tuple[jax.Array, dict[str, Any], jax.Array, Outcome]]:
    """The losses of backbone and drafter together; nothing of the second reaches the first.

    Returns the sum, and (the backbone's loss, its aux as of `train_forward`, the drafter's loss, its outcome).
    """
    drawn, explored = jax.random.split(key)
    forward = dataclasses.replace(backbone, taps=True)
    loss, aux = train_forward(masters, pack, rope, explored, config=config, options=forward)
    features = Features(aux["main_hidden"], aux["hidden"], masters["embed"]["weight"], masters["head"]["weight"])
    anchors = draw_anchors(drawn, pack, options.anchors, config.text_config.dspark_block_size)
    own, outcome = drafter_loss(drafter, features, pack, anchors, rope[0], config=config, options=options)
    return loss + own, (loss, aux, own, outcome)


def make_alongside_step(
    config: ModelConfig,
    optimizers: tuple[optax.GradientTransformationExtraArgs, optax.GradientTransformationExtraArgs],
    options: DrafterOptions,
    *,
    backbone: ForwardOptions,
    bias_speed: float | None = 1e-3,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """A function to be compiled, with its first argument donated, that trains backbone and drafter in one pass.

    It takes (state, pack, rope, (learning rate of the backbone, of the drafter)), and returns the next state and
    metrics: the drafter's as of `make_drafter_step` with finite for both, and lm_loss, indexer_loss, balance_loss,
    backbone_grad_norm. Its state has the masters of both in one tree, and the states of both optimisers as a pair. Each
    has a limit of its gradient of its own, so that the backbone goes the way it would go alone.

    Args:
      config: of the model.
      optimizers: of the backbone's and of the drafter's masters.
      options: how the drafter is trained.
      backbone: how the backbone is.
      bias_speed: of the routing biases of the drafter; None: they stay.
    """

    def step(state: TrainState, pack: PackedBatch, rope: Rope, learning_rates: tuple[jax.Array, jax.Array]):
        key, own = jax.random.split(state.key)
        trees = split_masters(state.masters)

        def loss(trees):
            return alongside_loss(*trees, pack, rope, own, config=config, options=options, backbone=backbone)

        (_, (value, aux, own_value, outcome)), gradients = jax.value_and_grad(loss, has_aux=True)(trees)
        states = [TrainState(tree, opt, key) for tree, opt in zip(trees, state.optimizer, strict=True)]
        first, applied = apply_gradients(
            states[0], key, value, gradients[0], optimizers[0], learning_rates[0],
            lambda masters: update_biases(masters, aux["loads"]),
        )  # fmt: skip
        second, drafted = apply_gradients(
            states[1], key, own_value, gradients[1], optimizers[1], learning_rates[1],
            lambda masters: move_draft_biases(masters, outcome.loads, bias_speed),
        )  # fmt: skip
        metrics = drafter_metrics(outcome.sums, options) | drafted | {"imbalance": imbalance(_text(outcome.loads))}
        metrics |= {name: aux[name] for name in ("lm_loss", "indexer_loss", "balance_loss")}
        metrics |= {"backbone_grad_norm": applied["grad_norm"], "finite": applied["finite"] * drafted["finite"]}
        return TrainState(first.masters | second.masters, (first.optimizer, second.optimizer), key), metrics

    return step


def split_masters(masters: Params) -> tuple[Params, Params]:
    """The masters of the backbone, and those of the drafter, {"mtp": stages}."""
    return {name: x for name, x in masters.items() if name != "mtp"}, {"mtp": masters["mtp"]}


def move_draft_biases(masters: Params, loads: jax.Array, speed: float | None) -> Params:
    """The drafter's masters with routing biases moved as the backbone's are; loads int32 [stages, E] of text."""
    if speed is None:
        return masters
    return masters | {"mtp": update_biases({"layers": masters["mtp"]}, _text(loads), speed=speed)["layers"]}


def _text(loads: jax.Array) -> Loads:
    return Loads(loads, jnp.zeros_like(loads))
