"""A model with random weights, to measure a config of which there is no checkpoint."""

from __future__ import annotations

import math
import statistics

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsv41.checkpoint.inventory import is_engram_table, tensor_inventory
from dsv41.checkpoint.load import abstract_trees, flatten
from dsv41.config import DSV41Error, ModelConfig
from dsv41.engram_store import EngramStore, EngramTable
from dsv41.models import Model, Params

MOST_BYTES = 8 << 30
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
# Root mean squares of random codes: E2M1 codes at random, and the FP8 values drawn here.
_FP4_RMS, _FP8_RMS = 3.0, 64.0
_QUANTILES = [statistics.NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)]
_FP8_CODES = np.clip(_FP8_RMS * np.array(_QUANTILES), -448, 448).astype(_FP8).view(np.uint8)


def random_model(config: ModelConfig, *, seed: int = 0, drafter: bool = True) -> Model:
    """Weights with the spread that keeps activations near one; what the model says means nothing.

    There is no vision tower and no tokenizer; Engram classes are token ids cut to their number.

    Raises:
      DSV41Error: the weights and Engram tables would take more than 8 GiB.
    """
    wanted = {"backbone", "engram", "drafter"} if drafter else {"backbone", "engram"}
    size = sum(spec.nbytes for spec in tensor_inventory(config).values() if spec.part in wanted)
    if size > MOST_BYTES:
        raise DSV41Error(f"random weights of this config take {size / 2**30:,.1f} GiB, more than 8; use a checkpoint")
    rng = np.random.default_rng(seed)
    trees = abstract_trees(config, drafter=drafter, vision=False)
    params = {part: _fill(tree, rng) for part, tree in trees.items()}
    text = config.text_config
    classes = np.arange(text.vocab_size, dtype=np.int32) % max(text.engram_compressed_vocab_size, 1)
    has_engram = bool(text.engram_layer_ids)
    return Model(
        config=config,
        params=params["backbone"],
        drafter=params.get("drafter"),
        token_map=classes if has_engram else None,
        engram=_engram(config, rng) if has_engram else None,
    )


def _fill(tree: Params, rng: np.random.Generator) -> Params:
    leaves = flatten(tree)
    filled = [jnp.asarray(_weight(path, leaf, leaves, rng)) for path, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(tree), filled)


def _weight(path: tuple, leaf: jax.ShapeDtypeStruct, leaves: dict, rng: np.random.Generator) -> np.ndarray:
    name, shape, dtype = str(path[-1]), leaf.shape, np.dtype(leaf.dtype)
    if name == "scale" and dtype == np.uint8:
        weight = leaves[(*path[:-1], "weight")]
        packed = np.dtype(weight.dtype) == np.uint8
        inputs, rms = (2 * weight.shape[-1], _FP4_RMS) if packed else (weight.shape[-1], _FP8_RMS)
        return np.full(shape, 127 - round(math.log2(math.sqrt(inputs) * rms)), np.uint8)
    if dtype == np.uint8:
        return rng.integers(0, 256, shape, np.uint8)
    if dtype == _FP8:
        return _fp8(shape, rng)
    if len(shape) == 1 or name in ("q_weight", "k_weight"):
        gain = dtype != np.float32 or name.endswith("_scale")  # norms and gains are near one, biases near zero
        return (float(gain) + 0.1 * rng.standard_normal(shape, np.float32)).astype(dtype)
    spread = 1.0 if "embed" in map(str, path) else 1 / math.sqrt(shape[-1])
    return (spread * rng.standard_normal(shape, np.float32)).astype(dtype)


def _fp8(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A normal law in 256 steps: drawing and rounding float32 values would take minutes."""
    codes = rng.integers(0, 256, math.prod(shape), np.uint8)
    return _FP8_CODES[codes].view(_FP8).reshape(shape)


def _engram(config: ModelConfig, rng: np.random.Generator) -> EngramStore:
    specs = {name: spec for name, spec in tensor_inventory(config).items() if is_engram_table(name)}
    tables = []
    for layer in config.text_config.engram_layer_ids:
        stem = f"layers.{layer}.engram.embed"
        shape = specs[f"{stem}.weight"].shape
        values, scales = _fp8(shape, rng), None
        if config.quantization_config is None:
            values = (values.astype(np.float32) / _FP8_RMS).astype(ml_dtypes.bfloat16)
        else:
            scales = np.full((shape[0], shape[1] // 32), 127 - round(math.log2(_FP8_RMS)), np.uint8)
        tables.append(EngramTable(layer=layer, values=values, scales=scales))
    return EngramStore(tables)
