"""Balancing experts: biases without a gradient, and the loss of unbalanced documents (training.md section 5)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv41.models import Params
from dsv41.train.pack import PackedBatch


class Loads(NamedTuple):
    """How often each expert was chosen: int32 [layers, E] by text and by image tokens."""

    text: jax.Array
    image: jax.Array


def count_loads(experts: jax.Array, pack: PackedBatch, num_experts: int) -> Loads:
    """Of one layer, int32 [E] each; experts int32 [B, T, K]. Padding does not count."""
    text, image = pack.valid & ~pack.image_mask, pack.valid & pack.image_mask
    return Loads(count_chosen(experts, text, num_experts), count_chosen(experts, image, num_experts))


def count_chosen(experts: jax.Array, mask: jax.Array, num_experts: int) -> jax.Array:
    """int32 [E], how often each expert was chosen; experts int32 [..., K], mask bool [...] of the tokens that count."""
    chosen = jnp.where(mask[..., None], experts, num_experts)
    return jnp.zeros(num_experts, jnp.int32).at[chosen.reshape(-1)].add(1, mode="drop")


def update_biases(masters: Params, loads: Loads, *, speed: float = 1e-3) -> Params:
    """The masters with every layer's routing biases moved towards balance: b += speed * sign(mean load - load).

    Args:
      masters: as `training_params_abstract` describes.
      loads: summed over everything that one optimiser step saw, all devices and micro-batches.
      speed: of both biases.

    A modality without tokens in the step keeps its biases.
    """

    def moved(bias: jax.Array, load: jax.Array) -> jax.Array:
        # Times E in integers: the mean of an exactly balanced load is met exactly.
        return bias + speed * jnp.sign(load.sum() - load * load.shape[0]).astype(jnp.float32)

    layers = dict(masters["layers"])
    for i, n in enumerate(sorted(layers)):
        gate = layers[n]["ffn"]["gate"]
        gate = gate | {"bias": moved(gate["bias"], loads.text[i]), "bias_vl": moved(gate["bias_vl"], loads.image[i])}
        layers[n] = layers[n] | {"ffn": layers[n]["ffn"] | {"gate": gate}}
    return masters | {"layers": layers}


def sequence_balance(scores: jax.Array, pack: PackedBatch, *, top_k: int, align: int) -> jax.Array:
    """Mean over documents of sum over experts of f P.

    f = E / (K T) times how often the expert is among the K best of a token, without biases; P = the mean over tokens of
    its share in the scores. Perfect balance gives 1. Only P has a gradient.

    Args:
      scores: float32 [B, T, E].
      pack: the rows.
      top_k: K.
      align: static; documents begin at its multiples.

    Returns:
      float32 [].
    """
    b, t, e = scores.shape
    places = t // align
    segment = jnp.arange(b)[:, None] * places + pack.start // align
    segment = jnp.where(pack.valid, segment, b * places).reshape(-1)
    best = jax.lax.top_k(jax.lax.stop_gradient(scores), top_k)[1].reshape(b * t, top_k)
    chosen = jnp.zeros((b * places, e), jnp.float32).at[segment[:, None], best].add(1.0, mode="drop")
    share = scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)
    share = jnp.zeros((b * places, e), jnp.float32).at[segment].add(share.reshape(b * t, e), mode="drop")
    length = jnp.zeros(b * places, jnp.float32).at[segment].add(1.0, mode="drop")
    known = length > 0
    length = jnp.maximum(length, 1.0)[:, None]
    loss = (chosen * e / (top_k * length) * share / length).sum(axis=-1)
    return jnp.where(known, loss, 0.0).sum() / jnp.maximum(known.sum(), 1)
