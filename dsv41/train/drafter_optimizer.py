"""Optimisers of the drafter, whose own recipe is unpublished (dspark.md section 3.4)."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
import optax

from dsv41.config import ModelConfig
from dsv41.models import Params
from dsv41.train.labels import Label, labels_of
from dsv41.train.optimizer import OptimizerConfig, make_optimizer


class DrafterRule(enum.StrEnum):
    """Which optimiser."""

    MUON = "muon"  # the backbone's groups: Muon, Sinkhorn-balanced Markov tables, AdamW
    ADAMW = "adamw"  # DeepSpec's, for everything


def make_drafter_optimizer(
    model: ModelConfig,
    masters: Params,
    rule: DrafterRule,
    *,
    clip_norm: float | None = 1.0,
    weight_decay: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimiser of the masters {"mtp": stages}; `update(..., learning_rate=...)` as of `make_optimizer`.

    Args:
      model: whose heads and groups cut the matrices.
      masters: arrays or their abstract forms.
      rule: which one.
      clip_norm: limit of the norm of all gradients together; None: no limit.
      weight_decay: times the learning rate; None: the rule's own, 0.1 of Muon's groups and 0 of AdamW.
    """
    if rule is DrafterRule.MUON:
        decay = OptimizerConfig.weight_decay if weight_decay is None else weight_decay
        return make_optimizer(model, masters, OptimizerConfig(clip_norm=clip_norm, weight_decay=decay))
    labels = labels_of(masters)
    frozen = jax.tree.map(lambda label: label is Label.FROZEN, labels)
    learnt = jax.tree.map(lambda is_frozen: not is_frozen, frozen)
    return optax.chain(
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x.astype(jnp.float32), g)),
        optax.masked(optax.set_to_zero(), frozen),
        optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm),
        optax.masked(optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8), learnt),
        optax.add_decayed_weights(weight_decay or 0.0, learnt),
        _scale_by_rate(),
    )


def _scale_by_rate() -> optax.GradientTransformationExtraArgs:
    """Multiplies by minus the learning rate that the caller of `update` gives."""

    def update(updates, state, params=None, *, learning_rate, **_):
        del params
        return jax.tree.map(lambda u: -learning_rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
