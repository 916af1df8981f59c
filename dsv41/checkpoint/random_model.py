"""A model with random weights, to measure a config of which there is no checkpoint."""

from __future__ import annotations

import functools
import math
import statistics

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from dsv41.checkpoint.inventory import is_engram_table, tensor_inventory
from dsv41.checkpoint.load import abstract_trees, check_memory, flatten, mesh_rules, sharded_structs
from dsv41.config import DSV41Error, ModelConfig
from dsv41.engram_store import EngramStore, EngramTable
from dsv41.models import Model, Params
from dsv41.sharding import ShardingRules

MOST_BYTES = 8 << 30
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
# Root mean squares of random codes: E2M1 codes at random, and the FP8 values drawn here.
_FP4_RMS, _FP8_RMS = 3.0, 64.0
_QUANTILES = [statistics.NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)]
_FP8_CODES = np.clip(_FP8_RMS * np.array(_QUANTILES), -448, 448).astype(_FP8)


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    drafter: bool = True,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
) -> Model:
    """Weights with the spread that keeps activations near one; what the model says means nothing.

    They are made on the devices, and the same on any mesh. There is no vision tower and no tokenizer; Engram classes
    are token ids cut to their number.

    Args:
      config: of the model.
      seed: of the weights.
      drafter: also make the drafter's.
      mesh, rules: as in `dsv41.load`.

    Raises:
      DSV41Error: Engram tables, or on a CPU all weights, would take more than 8 GiB; or a device cannot hold its part.
    """
    rules = mesh_rules(config, mesh, rules)
    trees = abstract_trees(config, drafter=drafter, vision=False)
    if mesh is not None:
        trees = {part: sharded_structs(part, tree, config, mesh, rules) for part, tree in trees.items()}
    _check_size(config, trees)
    keys = jax.random.split(jax.random.key(seed), len(trees))
    params = {part: _fill(tree, key) for (part, tree), key in zip(trees.items(), keys, strict=True)}
    text = config.text_config
    classes = np.arange(text.vocab_size, dtype=np.int32) % max(text.engram_compressed_vocab_size, 1)
    has_engram = bool(text.engram_layer_ids)
    return Model(
        config=config,
        params=params["backbone"],
        drafter=params.get("drafter"),
        token_map=classes if has_engram else None,
        engram=_engram(config, np.random.default_rng(seed)) if has_engram else None,
        mesh=mesh,
        rules=rules,
    )


def _check_size(config: ModelConfig, trees: dict[str, Params]) -> None:
    structs = [struct for tree in trees.values() for struct in flatten(tree).values()]
    tables = sum(spec.nbytes for name, spec in tensor_inventory(config).items() if is_engram_table(name))
    if jax.default_backend() == "cpu":
        tables += sum(math.prod(s.shape) * s.dtype.itemsize for s in structs)
    else:
        check_memory("random weights", structs)
    if tables > MOST_BYTES:
        raise DSV41Error(f"random weights of this config take {tables / 2**30:,.1f} GiB, more than 8; use a checkpoint")


def _fill(tree: Params, key: jax.Array) -> Params:
    leaves = flatten(tree)
    keys = jax.random.split(key, len(leaves))
    filled = [_weight(path, leaf, leaves, k) for (path, leaf), k in zip(leaves.items(), keys, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), filled)


def _weight(path: tuple, leaf: jax.ShapeDtypeStruct, leaves: dict, key: jax.Array) -> jax.Array:
    name, shape, dtype = str(path[-1]), leaf.shape, np.dtype(leaf.dtype)
    law, mean, spread = "normal", 0.0, 1.0
    if name == "scale" and dtype == np.uint8:
        weight = leaves[(*path[:-1], "weight")]
        packed = np.dtype(weight.dtype) == np.uint8
        inputs, rms = (2 * weight.shape[-1], _FP4_RMS) if packed else (weight.shape[-1], _FP8_RMS)
        law, mean = "constant", 127 - round(math.log2(math.sqrt(inputs) * rms))
    elif dtype in (np.uint8, _FP8):
        law = "codes"
    elif len(shape) == 1 or name in ("q_weight", "k_weight"):
        gain = dtype != np.float32 or name.endswith("_scale")  # norms and gains are near one, biases near zero
        mean, spread = float(gain), 0.1
    elif "embed" not in map(str, path):
        spread = 1 / math.sqrt(shape[-1])
    return _draw(key, mean, spread, shape=shape, dtype=dtype, law=law, sharding=leaf.sharding)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "law", "sharding"))
def _draw(key: jax.Array, mean: float, spread: float, *, shape, dtype, law: str, sharding) -> jax.Array:
    if law == "constant":
        x = jnp.full(shape, mean).astype(dtype)
    elif law == "normal":
        x = (mean + spread * jax.random.normal(key, shape)).astype(dtype)
    else:
        x = jax.random.bits(key, shape, jnp.uint8)
        if dtype == _FP8:
            x = jax.lax.bitcast_convert_type(jnp.asarray(_FP8_CODES.view(np.uint8))[x], dtype)
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def _fp8(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A normal law in 256 steps: drawing and rounding float32 values would take minutes."""
    return _FP8_CODES[rng.integers(0, 256, math.prod(shape), np.uint8)].reshape(shape)


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
