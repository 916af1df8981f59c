"""The tree that training works on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dsv41.config import ModelConfig
from dsv41.models import Params, abstract_drafter_params, abstract_params, abstract_vision_params


def training_params_abstract(
    config: ModelConfig, *, engram: bool = True, drafter: bool = False, vision: bool = False
) -> Params:
    """Master parameters as nested dicts of `jax.ShapeDtypeStruct`.

    The nested dicts of `dsv41.models.abstract_params`, with every leaf float32. A quantised weight is one array
    [..., out, in] and has no `scale` beside it: its stored form is made from the master in each forward, which is what
    quantisation-aware training means. With experts stacked, names are those of the checkpoint.

    Args:
      config: of the model.
      engram: Engram tables, which are no parameters of the model that serves, as
        `layers.N.engram.embed.weight` [rows, engram_head_dim].
      drafter: the drafter's parameters, under `mtp`.
      vision: the vision tower's, the projector's and the image delimiters, if the config has a tower.
    """
    tree = abstract_params(config)
    if drafter and config.text_config.num_nextn_predict_layers:
        tree |= abstract_drafter_params(config)
    if vision and config.vision_config is not None:
        tree |= abstract_vision_params(config)
    tree = _masters(tree)
    if engram:
        text = config.text_config
        for layer, rows in zip(text.engram_layer_ids, text.engram_num_embeddings, strict=True):
            table = jax.ShapeDtypeStruct((rows, text.engram_head_dim), jnp.float32)
            tree["layers"][layer]["engram"]["embed"] = {"weight": table}
    return tree


def _masters(stored: Any) -> Any:
    if not isinstance(stored, dict):
        return jax.ShapeDtypeStruct(stored.shape, jnp.float32)
    quantized = {"weight", "scale"} <= stored.keys()
    tree = {name: _masters(leaf) for name, leaf in stored.items() if not (quantized and name == "scale")}
    if quantized and stored["weight"].dtype == jnp.uint8:  # two FP4 codes a byte
        *lead, packed = stored["weight"].shape
        tree["weight"] = jax.ShapeDtypeStruct((*lead, 2 * packed), jnp.float32)
    return tree
