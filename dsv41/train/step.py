"""One optimiser step: gradients of a batch, the update, routing biases, and what there is to report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from dsv41.config import DSV41Error, ModelConfig
from dsv41.models import Params
from dsv41.train.forward import ForwardOptions, train_forward
from dsv41.train.labels import Label, labels_of
from dsv41.train.pack import PackedBatch
from dsv41.train.placement import Placement
from dsv41.train.router_balance import Loads, update_biases
from dsv41.train.row_spread import total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes.

    Attributes:
      masters: float32, as `training_params_abstract` describes.
      optimizer: state of the optimiser.
      key: of the random numbers of the steps to come.
    """

    masters: Params
    optimizer: Any
    key: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a step is made.

    Attributes:
      micro_batches: parts of the batch's rows that are worked on one after the other; gradients are summed in float32.
      bias_speed: of the routing biases.
    """

    micro_batches: int = 1
    bias_speed: float = 1e-3


def init_state(masters: Params, optimizer: optax.GradientTransformationExtraArgs, seed: int) -> TrainState:
    """The state before the first step."""
    return TrainState(masters, optimizer.init(masters), jax.random.key(seed))


def make_train_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformationExtraArgs,
    forward: ForwardOptions,
    options: StepOptions | None = None,
    placement: Placement | None = None,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """A function to be compiled, with its first argument donated.

    It takes (state, pack, rope, learning_rate float32 []) and returns the next state and metrics, float32 []: loss,
    lm_loss, indexer_loss, balance_loss, tokens (that count in the loss), grad_norm (before clipping), imbalance (of
    the most used expert of any layer: its share over the mean share), finite (1, or 0 where loss or gradient is not a
    number: then nothing but the key has changed), with `AttentionOptions.recall` also recall.

    With micro-batches lm_loss is the mean over all tokens, as without; the indexer's loss and the balance loss are
    means weighted by the tokens of each part.

    Args:
      config: of the model.
      optimizer: of `make_optimizer`.
      forward: what is trained.
      options: how.
      placement: on a mesh, where state and pack lie; outputs are to be placed by `placement.state`. None: on one
        device.
    """
    options = options or StepOptions()
    gradients_of = batch_gradients(config, forward, options, placement)

    def step(state: TrainState, pack: PackedBatch, rope: Any, learning_rate: jax.Array):
        key, own = jax.random.split(state.key)
        (numbers, gradients), loads = gradients_of(state.masters, pack, rope, own)
        state, applied = apply_gradients(
            state, key, numbers["loss"], gradients, optimizer, learning_rate,
            lambda masters: update_biases(masters, loads, speed=options.bias_speed),
        )  # fmt: skip
        numbers |= {"tokens": pack.loss_mask.sum().astype(jnp.float32), "grad_norm": applied["grad_norm"]}
        return state, numbers | {"imbalance": imbalance(loads), "finite": applied["finite"]}

    return step


def batch_gradients(
    config: ModelConfig, forward: ForwardOptions, options: StepOptions, placement: Placement | None = None
) -> Callable[..., tuple[tuple[dict[str, jax.Array], Params], Loads]]:
    """A function (masters, pack, rope, key) -> (losses of the batch float32 [], gradients), loads of its experts.

    Args:
      config, forward, options, placement: as of `make_train_step`.
    """

    def loss(masters, pack, rope, key):
        whole = masters if placement is None else placement.gather(masters)
        return train_forward(whole, pack, rope, key, config=config, options=forward)

    of_batch = _in_parts(jax.value_and_grad(loss, has_aux=True), options.micro_batches)
    if placement is None:
        return of_batch

    def of_rows(masters, pack, rope, key):
        (numbers, gradients), loads = of_batch(masters, pack, rope, key)
        return (placement.rows.total(numbers), placement.add(gradients)), placement.rows.total(loads)

    everywhere = PartitionSpec()
    return placement.on_rows(of_rows, ((everywhere, placement.specs), everywhere))


def _in_parts(grad: Callable[..., Any], parts: int) -> Callable[..., Any]:
    """The gradients of a batch as sums over parts of it; see `batch_gradients`."""
    reported = ("lm_loss", "indexer_loss", "balance_loss")

    def of_part(masters, pack, rope, key, tokens):
        (loss, aux), gradients = grad(masters, pack, rope, key)
        weight = aux["tokens"] / tokens
        numbers = {"loss": loss} | {name: aux[name] for name in reported}
        recalls = {"recall": aux["recall"].mean()} if "recall" in aux else {}
        # Of all devices together already, where the other numbers are shares.
        recalls = recalls if pack.spread is None else jax.tree.map(lambda x: x / pack.spread.devices, recalls)
        return jax.tree.map(lambda x: x * weight, (numbers | recalls, gradients)), aux["loads"]

    def of_batch(masters, pack, rope, key):
        tokens = jnp.maximum(total(pack.loss_mask.sum(), pack.spread), 1)
        if parts == 1:
            return of_part(masters, pack, rope, key, tokens)
        cut = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), pack)
        shapes = jax.eval_shape(of_part, masters, jax.tree.map(lambda x: x[0], cut), rope, key, tokens)

        def add(so_far, part):
            pack, key = part
            return jax.tree.map(jnp.add, so_far, of_part(masters, pack, rope, key, tokens)), None

        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(add, zeros, (cut, jax.random.split(key, parts)))[0]

    return of_batch


def apply_gradients(
    state: TrainState,
    key: jax.Array,
    loss: jax.Array,
    gradients: Params,
    optimizer: optax.GradientTransformationExtraArgs,
    learning_rate: jax.Array,
    move_biases: Callable[[Params], Params],
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after a step, with `key` for those to come; as before where loss or gradient is not a number.

    Also grad_norm of what the optimiser may change, and finite, float32 [].
    """
    with jax.named_scope("optimizer"):
        labels = labels_of(state.masters)
        learnt = jax.tree.map(lambda g, label: g * (label is not Label.FROZEN), gradients, labels)
        norm = optax.tree.norm(learnt)
        updates, changed = optimizer.update(gradients, state.optimizer, state.masters, learning_rate=learning_rate)
        masters = move_biases(optax.apply_updates(state.masters, updates))
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        old = (state.masters, state.optimizer)
        masters, changed = jax.tree.map(lambda new, old: jnp.where(finite, new, old), (masters, changed), old)
    return TrainState(masters, changed, key), {"grad_norm": norm, "finite": finite.astype(jnp.float32)}


def imbalance(loads: Loads) -> jax.Array:
    """float32 []: tokens of the most used expert of a layer over the mean of its experts, of the worst layer."""
    load = (loads.text + loads.image).astype(jnp.float32)
    return (load.max(axis=-1) / jnp.maximum(load.mean(axis=-1), 1e-9)).max()


def check_rows(rows: int, options: StepOptions, devices: int = 1) -> None:
    """Raises DSV41Error if so many rows of a batch cannot be divided."""
    parts = options.micro_batches * devices
    if rows % parts:
        raise DSV41Error(
            f"batch: expected a multiple of {options.micro_batches} micro-batches x {devices} devices as rows, "
            f"got {rows}"
        )
