"""Parameters to begin training with.

The report gives none of it (training.md section 10). Matrices are normal with a standard deviation of one over the root
of their inputs, so that activations keep their size, and those that write into the residual streams are smaller by the
root of twice the layers. Gains of norms are one; biases, sinks and the static part of the hyper-connections are zero
but for their scales, which begin small: every stream starts out alike.
"""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp

from dsv41.config import DSV41Error, ModelConfig
from dsv41.models import Params
from dsv41.train.labels import Label, key_path_name, label_of
from dsv41.train.parameters import training_params_abstract

# What a sublayer adds to the streams.
_WRITES = re.compile(r"(layers|mtp)\.\d+\.(attn\.wo_b|ffn\.(shared_)?experts\.w2)\.weight")
_HYPER_SCALE = 0.01


def initial_masters(config: ModelConfig, seed: int = 0, *, engram: bool = True) -> Params:
    """Float32 masters of the backbone, as `training_params_abstract` describes them; the same for one seed on any
    device.

    Args:
      config: of the model.
      seed: of all random numbers; a parameter's depend on its name alone besides.
      engram: with Engram tables.
    """
    return _initial(training_params_abstract(config, engram=engram), config.text_config.num_hidden_layers, seed)


def initial_drafter_masters(config: ModelConfig, seed: int = 0) -> Params:
    """Float32 masters of the drafter, {"mtp": stages}, made as those of the backbone are.

    The Markov head begins with no bias at all, so that the stages learn first what they can say themselves.

    Args:
      config: of the model.
      seed: as for `initial_masters`.

    Raises:
      DSV41Error: the model has no drafter.
    """
    stages = config.text_config.num_nextn_predict_layers
    if not stages:
        raise DSV41Error("drafter: the model has none (num_nextn_predict_layers is 0)")
    tree = training_params_abstract(config, engram=False, drafter=True)
    masters = _initial({"mtp": tree["mtp"]}, stages, seed)
    head = masters["mtp"][stages - 1]["markov_head"]["head"]
    head["weight"] = jnp.zeros_like(head["weight"])
    return masters


def _initial(tree: Params, layers: int, seed: int) -> Params:
    """Masters of the parameters in an abstract tree of so many layers."""
    key = jax.random.key(seed)

    def make(path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = key_path_name(path)
        label = label_of(name, leaf.shape)
        if label is Label.ADAM_DECAY:
            return jnp.ones(leaf.shape, jnp.float32)
        if re.search(r"hc_(attn|ffn)_scale", name):
            return jnp.full(leaf.shape, _HYPER_SCALE, jnp.float32)
        if label in (Label.ADAM_NODECAY, Label.FROZEN):
            return jnp.zeros(leaf.shape, jnp.float32)
        table = name == "embed.weight" or ".engram.embed." in name or ".markov_head.embed." in name
        spread = 1.0 if table else 1 / math.sqrt(leaf.shape[-1])
        if _WRITES.fullmatch(name):
            spread /= math.sqrt(2 * layers)
        own = jax.random.fold_in(key, _number_of(name))
        return spread * jax.random.normal(own, leaf.shape, jnp.float32)

    return jax.tree_util.tree_map_with_path(make, tree)


def _number_of(name: str) -> int:
    """A number below 2^31 for each name."""
    number = 0
    for byte in name.encode():
        number = (number * 257 + byte) % ((1 << 31) - 1)
    return number
