"""The optimiser of a whole model: each parameter by its own rule (training.md section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dsv41.config import DSV41Error, ModelConfig
from dsv41.models import Params
from dsv41.train.labels import Label, RateGroup, key_path_name, labels_of, parameter_names, rate_group, row_blocks
from dsv41.train.muon import scale_by_muon
from dsv41.train.sinkhorn_balance import scale_by_sinkhorn

_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Constants of the rules. Defaults are the report's; it leaves `clip_norm` and the dtypes open.

    Attributes:
      momentum: of Muon.
      update_rms: of Muon's and of Sinkhorn-balanced updates, before the learning rate.
      weight_decay: of matrices and norm gains, multiplied with the learning rate.
      sinkhorn_beta, sinkhorn_steps, sinkhorn_threshold, sinkhorn_eps: as in `scale_by_sinkhorn`.
      adam_b1, adam_b2, adam_eps: of AdamW.
      engram_factor: learning rate of Engram tables as a multiple of the base rate.
      clip_norm: limit of the norm of all gradients together; None: no limit. Muon and Sinkhorn balancing do not see
        the size of a constant gradient, so that it only limits how far one step can turn the momentum.
      momentum_dtype: storage of Muon's and Sinkhorn's momentum. AdamW's is float32.
      newton_schulz_dtype: of the products inside Muon.

    Raises:
      DSV41Error: a value is out of range; the message starts with the field.
    """

    momentum: float = 0.95
    update_rms: float = 0.18
    weight_decay: float = 0.1
    sinkhorn_beta: float = 0.95
    sinkhorn_steps: int = 11
    sinkhorn_threshold: float = 1e-3
    sinkhorn_eps: float = 1e-20
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-20
    engram_factor: float = 5.0
    clip_norm: float | None = 1.0
    momentum_dtype: str = "float32"
    newton_schulz_dtype: str = "bfloat16"

    def __post_init__(self):
        checks = [(field, "at least 0 and below 1") for field in ("momentum", "sinkhorn_beta", "adam_b1", "adam_b2")]
        for field, expected in checks:
            if not 0 <= getattr(self, field) < 1:
                raise DSV41Error(f"{field}: expected {expected}, got {getattr(self, field)!r}")
        for field in ("update_rms", "weight_decay", "sinkhorn_threshold", "engram_factor"):
            if not getattr(self, field) >= 0:
                raise DSV41Error(f"{field}: expected a number of at least 0, got {getattr(self, field)!r}")
        for field in ("sinkhorn_eps", "adam_eps"):
            if not getattr(self, field) >= jnp.finfo(jnp.float32).tiny:
                raise DSV41Error(f"{field}: expected a normal positive float32, got {getattr(self, field)!r}")
        if self.sinkhorn_steps < 1 or self.sinkhorn_steps % 2 == 0:
            raise DSV41Error(f"sinkhorn_steps: expected an odd positive integer, got {self.sinkhorn_steps!r}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise DSV41Error(f"clip_norm: expected a positive number or null, got {self.clip_norm!r}")
        for field in ("momentum_dtype", "newton_schulz_dtype"):
            if getattr(self, field) not in _DTYPES:
                raise DSV41Error(f"{field}: expected one of {', '.join(_DTYPES)}, got {getattr(self, field)!r}")


def make_optimizer(
    model: ModelConfig,
    params: Params,
    config: OptimizerConfig | None = None,
    *,
    spread: jax.sharding.NamedSharding | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimiser for a tree as `training_params_abstract` describes, or a part of it.

    `update(gradients, state, params, learning_rate=..., vision_learning_rate=...)` returns what is to be added. The
    rates are float32 scalars of `TrainingSchedule`, made on the host: they are functions of the tokens seen, which no
    32-bit counter holds. `vision_learning_rate` is needed only where the tree has a vision tower.

    Parameters are to be float32. Gradients of parameters that have no rule, the routing biases, count nowhere. Their
    update is zero.

    Args:
      model: whose heads and groups cut the matrices.
      params: arrays or their abstract forms.
      config: constants; None: the report's.
      spread: as in `dsv41.train.muon.orthogonalize`.

    Raises:
      DSV41Error: no rule knows a parameter, or it is not float32.
    """
    config = config or OptimizerConfig()
    labels, names = labels_of(params), parameter_names(params)
    for name, leaf in zip(jax.tree.leaves(names), jax.tree.leaves(params), strict=True):
        if leaf.dtype != jnp.float32:
            raise DSV41Error(f"parameter {name}: training needs float32 masters, got {leaf.dtype}")
    frozen = jax.tree.map(lambda label: label is Label.FROZEN, labels)
    return optax.chain(
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x.astype(jnp.float32), g)),
        optax.masked(optax.set_to_zero(), frozen),
        optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm),
        optax.partition(_rules(model, config, spread), jax.tree.map(_rule_of, labels)),
        optax.add_decayed_weights(config.weight_decay, jax.tree.map(lambda label: label.decays, labels)),
        _scale_by_rates(jax.tree.map(rate_group, names), config.engram_factor),
    )


def _rules(
    model: ModelConfig, config: OptimizerConfig, spread: jax.sharding.NamedSharding | None
) -> dict[str, optax.GradientTransformation]:
    """Gradients to updates before decay and learning rate, by what `_rule_of` returns."""
    momentum_dtype = jnp.dtype(config.momentum_dtype)
    muon = scale_by_muon(
        lambda name: row_blocks(name, model),
        momentum=config.momentum,
        rms=config.update_rms,
        momentum_dtype=momentum_dtype,
        dtype=jnp.dtype(config.newton_schulz_dtype),
        spread=spread,
    )
    sinkhorn = scale_by_sinkhorn(
        beta=config.sinkhorn_beta,
        steps=config.sinkhorn_steps,
        threshold=config.sinkhorn_threshold,
        eps=config.sinkhorn_eps,
        rms=config.update_rms,
        momentum_dtype=momentum_dtype,
    )
    return {
        "muon": muon,
        "sinkhorn": sinkhorn,
        "adam": optax.scale_by_adam(b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps),
        "frozen": optax.set_to_zero(),
    }


def _rule_of(label: Label) -> str:
    """Both kinds of Muon share one state, and with it the stacks of blocks of one shape."""
    if label.is_muon:
        return "muon"
    return "adam" if label in (Label.ADAM_DECAY, Label.ADAM_NODECAY) else str(label)


def _scale_by_rates(groups: Any, engram_factor: float) -> optax.GradientTransformationExtraArgs:
    """Multiplies by minus the learning rate of each leaf's group, which the caller of `update` gives."""

    def update(updates, state, params=None, *, learning_rate, vision_learning_rate=None, **_):
        del params
        rates = {RateGroup.BASE: learning_rate, RateGroup.ENGRAM_TABLE: engram_factor * learning_rate}
        if vision_learning_rate is not None:
            rates[RateGroup.VISION_TOWER] = vision_learning_rate
        elif RateGroup.VISION_TOWER in jax.tree.leaves(groups):
            raise DSV41Error("optimiser update: parameters of the vision tower need vision_learning_rate")
        return jax.tree.map(lambda u, group: -rates[group] * u, updates, groups), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def optimizer_state_shardings(state: Any, shardings: Params, replicated: jax.sharding.Sharding) -> Any:
    """Shardings of an optimiser's state: what belongs to a parameter lies where the parameter does.

    Args:
      state: of the optimiser, abstract or not.
      shardings: of the parameters, in their tree.
      replicated: for everything else, such as step counters.
    """
    by_name = {
        key_path_name(path): s
        for path, s in jax.tree_util.tree_flatten_with_path(
            shardings, is_leaf=lambda x: isinstance(x, jax.sharding.Sharding)
        )[0]
    }

    def of_leaf(path, _):
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        names = (".".join(map(str, keys[first:])) for first in range(len(keys)))
        return next((by_name[name] for name in names if name in by_name), replicated)

    return jax.tree_util.tree_map_with_path(of_leaf, state)
