"""A directory in the released layout, or an import of one, to a runnable model."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokenizers import Tokenizer

from dsv41.checkpoint.imported import ImportedCheckpoint, load_either, open_either
from dsv41.checkpoint.inventory import tensor_inventory
from dsv41.checkpoint.load_parameters import Progress
from dsv41.checkpoint.safetensors_reader import CheckpointReader, check_inventory
from dsv41.checkpoint.token_map import check_token_map, check_vocabulary, engram_token_map, load_tokenizer
from dsv41.config import DSV41Error, ModelConfig, load_config, with_overrides
from dsv41.engram_store import EngramStore, EngramTable
from dsv41.models import Model, Params, abstract_drafter_params, abstract_params, abstract_vision_params
from dsv41.models.sharded import param_shardings, param_specs
from dsv41.ops.engram_hash import engram_hash_spec
from dsv41.sharding import AXES, LOCAL, ShardingRules, preset_rules

Path = tuple[str | int, ...]


def parameter_name(path: Path) -> str:
    """A parameter's place in the nested dicts -> its tensor name."""
    return ".".join(str(k) for k in path)


def flatten(params: Params) -> dict[Path, jax.ShapeDtypeStruct]:
    """The leaves of nested dicts by their place, in the order of `jax.tree`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {tuple(k.key for k in path): leaf for path, leaf in leaves}


def engram_store(reader: CheckpointReader | ImportedCheckpoint, config: ModelConfig) -> EngramStore | None:
    """The Engram tables as views of the mapped files; None if the model has none."""
    layers = config.text_config.engram_layer_ids
    if not layers:
        return None
    tables = []
    for layer in layers:
        stem = f"layers.{layer}.engram.embed"
        scales = reader.read(f"{stem}.scale") if config.quantization_config is not None else None
        tables.append(EngramTable(layer=layer, values=reader.read(f"{stem}.weight"), scales=scales))
    # Rows of a mapped file are page faults: several threads wait for the disk at once.
    return EngramStore(tables, readers=min(32, 4 * (os.cpu_count() or 1)))


def check_memory(path: pathlib.Path | str, structs: Iterable[jax.ShapeDtypeStruct]) -> None:
    """Refuses a model of which a device cannot hold its part, where the backend says how much it has."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    need = sum(
        math.prod(s.shape if s.sharding is None else s.sharding.shard_shape(s.shape)) * s.dtype.itemsize
        for s in structs
    )
    if limit is not None and need > limit:
        raise DSV41Error(
            f"{path}: the parameters take {need / 2**30:.1f} GiB of a device, {device.device_kind} has "
            f"{limit / 2**30:.1f} GiB"
        )


def load(
    path: str | pathlib.Path,
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
    overrides: dict[str, str] | None = None,
    drafter: bool = True,
    vision: bool = True,
    progress: Progress | None = None,
) -> Model:
    """Reads the model of a directory in the released layout, or of one that `import_checkpoint` wrote.

    Everything that can be wrong with the directory is checked before the first tensor is read: config, tensor names,
    shapes and dtypes, tokenizer and token map, sizes of the Engram tables, and whether the device can hold it. Weights
    keep their stored formats; Engram tables stay on the mapped files.

    Args:
      path: directory with config.json, tokenizer.json, and *.safetensors (with or without index) or an import.
      mesh: devices to spread the model over; None: the default device. Each process reads what its own devices hold.
      rules: how it is spread; None: the preset "decode".
      overrides: config fields to change, as dotted names and JSON values.
      drafter: also read the drafter, if the config has one; its tensors may be absent otherwise.
      vision: the same for the vision tower and projector.
      progress: called with (bytes done, bytes in all, parameter name).

    Raises:
      DSV41Error: the directory cannot be used; the message names the file and the tensor or field.
    """
    path = pathlib.Path(path)
    config = with_overrides(load_config(path), overrides or {})
    reader = open_either(path)
    rules = mesh_rules(config, mesh, rules)
    trees = abstract_trees(config, drafter=drafter, vision=vision)
    if mesh is not None:
        trees = {part: sharded_structs(part, tree, config, mesh, rules) for part, tree in trees.items()}
    check_inventory(reader, tensor_inventory(config), ("engram", *trees))
    tokenizer, token_map = read_tokenizer(path, config)
    if token_map is not None:
        engram_hash_spec(config.text_config, int(token_map[config.text_config.engram_pad_token_id]))
    # Names of different parts never meet, so that they can be read in one go.
    structs = {parameter_name(p): s for tree in trees.values() for p, s in flatten(tree).items()}
    check_memory(path, structs.values())
    arrays = load_either(reader, structs, progress=progress)
    params = {
        part: jax.tree.unflatten(jax.tree.structure(tree), [arrays[parameter_name(p)] for p in flatten(tree)])
        for part, tree in trees.items()
    }
    return Model(
        config=config,
        params=params["backbone"],
        drafter=params.get("drafter"),
        vision=params.get("vision"),
        token_map=token_map,
        engram=engram_store(reader, config),
        tokenizer=tokenizer,
        mesh=mesh,
        rules=rules,
    )


def mesh_rules(config: ModelConfig, mesh: Mesh | None, rules: ShardingRules | None) -> ShardingRules:
    """The rules of a model on a mesh, by default those of the preset "decode"; `LOCAL` without a mesh.

    Raises:
      DSV41Error: rules without a mesh, rules for another one, a mesh that has other axes than `AXES` or that does not
        divide the model.
    """
    if mesh is None:
        if rules not in (None, LOCAL):
            raise DSV41Error("sharding rules without a mesh to spread the model over")
        return LOCAL
    # Along axes that no rule knows every device would do the whole work, and nothing would say so.
    if unknown := [axis for axis in mesh.axis_names if axis not in AXES]:
        raise DSV41Error(f"mesh axes {unknown}: expected some of {', '.join(AXES)}; see dsv41.sharding.make_mesh")
    if rules is not None and (missing := [axis for axis in rules.tokens if axis not in mesh.axis_names]):
        raise DSV41Error(f"sharding rules name {missing}, the mesh has the axes {', '.join(mesh.axis_names)} only")
    return preset_rules("decode", mesh.shape, config.text_config) if rules is None else rules


def sharded_structs(part: str, tree: Params, config: ModelConfig, mesh: Mesh, rules: ShardingRules) -> Params:
    """Abstract parameters of a part with their shardings; the vision tower is whole on every device."""
    if part == "vision":
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole), tree)
    return param_shardings(tree, param_specs(config, rules, part), mesh)


def spread_model(model: Model, mesh: Mesh, rules: ShardingRules) -> Model:
    """A model of one device on a mesh, without its vision tower.

    Raises:
      DSV41Error: the mesh does not divide a parameter.
    """
    held = {"backbone": model.params, "drafter": model.drafter}
    spread = {}
    for part, tree in abstract_trees(model.config, drafter=model.drafter is not None, vision=False).items():
        structs = sharded_structs(part, tree, model.config, mesh, rules)
        spread[part] = jax.tree.map(lambda x, struct: jax.device_put(x, struct.sharding), held[part], structs)
    return dataclasses.replace(
        model, params=spread["backbone"], drafter=spread.get("drafter"), vision=None, mesh=mesh, rules=rules
    )


def abstract_trees(config: ModelConfig, *, drafter: bool, vision: bool) -> dict[str, Params]:
    """Abstract parameters of the parts that are wanted and that the config has, by their name in `PARTS`."""
    trees = {"backbone": abstract_params(config)}
    if drafter and config.text_config.num_nextn_predict_layers:
        trees["drafter"] = abstract_drafter_params(config)
    if vision and config.vision_config is not None:
        trees["vision"] = abstract_vision_params(config)
    return trees


def read_tokenizer(path: pathlib.Path, config: ModelConfig) -> tuple[Tokenizer | None, np.ndarray | None]:
    """The tokenizer and the token map, int32 [V]. A model without Engram runs on token ids alone and needs neither.

    Raises:
      DSV41Error: the tokenizer is missing, unreadable, or does not fit the config.
    """
    file = path / "tokenizer.json"
    text = config.text_config
    if not file.exists():
        if text.engram_layer_ids:
            raise DSV41Error(f"{file}: no such tokenizer file; Engram hashes depend on it")
        return None, None
    tokenizer = load_tokenizer(file)
    check_vocabulary(tokenizer, text.vocab_size, file)
    if not text.engram_layer_ids:
        return tokenizer, None
    token_map = engram_token_map(tokenizer, text.vocab_size)
    check_token_map(token_map, text, file)
    return tokenizer, token_map
