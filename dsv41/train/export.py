"""Trained weights -> a directory in the released layout, which `dsv41.load` reads (checkpoint.md, "Tensors").

Weights are float32 masters, or stored already, as those of a checkpoint that was loaded; both can be mixed. Masters are
rounded as every forward of training rounds them (`stored_array`), one tensor at a time and the rows of a large one in
pieces, so that beside them memory holds one piece. What is stored already is written as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsv41.checkpoint import PARTS, TensorSpec, check_inventory, is_engram_table, open_checkpoint, tensor_inventory
from dsv41.checkpoint.load import parameter_name, read_tokenizer
from dsv41.checkpoint.load_parameters import EXPERT, Progress, has_non_finite
from dsv41.checkpoint.write import check_space, layer_of, new_directory, shards_of, write_shards
from dsv41.config import DSV41Error, ModelConfig, config_to_dict
from dsv41.config.atomic_file import write_file, write_json
from dsv41.models import Params
from dsv41.ops.linear import WeightFormat
from dsv41.train.master_weights import stored_array, stored_table

SHARD_BYTES = 10 << 30
_PIECE_BYTES = 256 << 20
_ROWS = 32  # of which an FP8 weight shares a scale
_FORMS = {
    "F8_E4M3": WeightFormat.FP8_BLOCK,
    "I8": WeightFormat.FP4_ROW,
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}
# The arrays that hold stored tensors in memory.
_ARRAYS = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}
_WRITTEN = ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json")


def exported_config(config: ModelConfig, *, drafter: bool, vision: bool) -> ModelConfig:
    """The config of a model that lacks its drafter or its vision tower: all else stays."""
    text = config.text_config
    if not drafter and text.num_nextn_predict_layers:
        ratios = text.compress_ratios[: text.num_hidden_layers]
        text = dataclasses.replace(text, num_nextn_predict_layers=0, compress_ratios=ratios)
    return dataclasses.replace(config, text_config=text, vision_config=config.vision_config if vision else None)


def write_checkpoint(
    folder: str | pathlib.Path,
    config: ModelConfig,
    params: Params,
    tables: Sequence[Any] = (),
    *,
    tokenizer: str | pathlib.Path | bytes,
    drafter: Params | None = None,
    vision: Params | None = None,
    files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> dict[str, TensorSpec]:
    """Writes config, tokenizer and all tensors into a new directory, which appears when it is complete.

    Parameters are nested dicts as `dsv41.models` and `training_params_abstract` have them, or flat ones with whole
    names as keys. Each leaf is a float32 master or what is stored; expert stacks [E, ...] are taken apart. A leaf may
    be anything with a shape, a dtype and `__array__`: it is asked for its values when its layer is written.

    Args:
      folder: new or empty.
      config: of the model. Written without the fields of a part that is not given.
      params: of the backbone.
      tables: `EngramTable` or `StoredTable` of each Engram layer; none: masters of them are in `params`, at
        `layers.N.engram.embed.weight`.
      tokenizer: a `tokenizer.json`, or its bytes; copied.
      drafter: under `mtp`; None: the model has none.
      vision: of tower, projector and the image delimiters; None: the model has none.
      files: more files by name, such as README.md.
      shard_bytes: the size that a safetensors file does not exceed unless a single layer does.
      progress: called after each tensor with (bytes done, bytes in all, its name).

    Returns:
      Name -> what was written.

    Raises:
      DSV41Error: parameters are missing, unknown, of another shape or not finite; the tokenizer does not fit the
        config; the folder is not empty, or the disk is full. Names the tensor or file. There is no folder then.
    """
    config = exported_config(config, drafter=drafter is not None, vision=vision is not None)
    inventory = tensor_inventory(config)
    leaves = _leaves(params, drafter or {}, vision or {}, _table_leaves(tables, config))
    sources = _sources(inventory, leaves)
    with new_directory(folder) as partial:
        write_json(partial / "config.json", config_to_dict(config))
        text = tokenizer if isinstance(tokenizer, bytes) else _read(pathlib.Path(tokenizer))
        write_file(partial / "tokenizer.json", text)
        found, _ = read_tokenizer(partial, config)
        write_json(partial / "tokenizer_config.json", tokenizer_config(config, found.id_to_token))
        for name, data in (files or {}).items():
            if name != pathlib.PurePath(name).name or name in _WRITTEN or name.endswith(".safetensors"):
                raise DSV41Error(f"file {name!r}: expected a name beside {', '.join(_WRITTEN)}")
            write_file(partial / name, data)
        check_space(partial, inventory.values())
        shards = shards_of(inventory.values(), shard_bytes)
        write_shards(partial, shards, _Values(config, sources), progress=progress)
        check_inventory(open_checkpoint(partial), inventory, PARTS)
    return inventory


def tokenizer_config(config: ModelConfig, token_of: Any) -> dict[str, Any]:
    """What other libraries want to know beside `tokenizer.json`; nothing here reads it.

    Args:
      config: of the model.
      token_of: the text of a token id.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token_of(config.bos_token_id),
        "eos_token": token_of(config.eos_token_id),
        "pad_token": token_of(config.pad_token_id),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.text_config.max_position_embeddings,
    }


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise DSV41Error(f"{path}: cannot be read ({e.strerror or e})") from e


class _Source(NamedTuple):
    """Where the values of a tensor are.

    Attributes:
      name: of the parameter.
      leaf: the parameter.
      expert: which of a stack; None: the whole parameter.
      master: float32 that is still to be stored; the scales come with it.
    """

    name: str
    leaf: Any
    expert: int | None
    master: bool


def _leaves(*trees: Params) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for tree in trees:
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = parameter_name(tuple(key.key for key in path))
            if name in leaves:
                raise DSV41Error(f"parameter {name}: is given twice")
            leaves[name] = leaf
    return leaves


def _table_leaves(tables: Sequence[Any], config: ModelConfig) -> dict[str, Any]:
    layers = config.text_config.engram_layer_ids
    if tables and len(tables) != len(layers):
        raise DSV41Error(f"Engram tables: expected one for each of the layers {list(layers)}, got {len(tables)}")
    leaves = {}
    for layer, table in zip(layers, tables, strict=False):
        leaves[f"layers.{layer}.engram.embed.weight"] = table.values
        if table.scales is not None:
            leaves[f"layers.{layer}.engram.embed.scale"] = table.scales
    return leaves


def _parameter_of(spec: TensorSpec) -> tuple[str, int | None]:
    """The parameter that a tensor belongs to, and its number in it if that is a stack of experts."""
    match = EXPERT.fullmatch(spec.name)
    return (f"{match['experts']}.{match['leaf']}", int(match["number"])) if match else (spec.name, None)


def _sources(inventory: Mapping[str, TensorSpec], leaves: Mapping[str, Any]) -> dict[str, _Source]:
    """Where each tensor comes from but for scales that are made with their weights; nothing is read.

    Raises:
      DSV41Error: a parameter is missing, unknown, or of another shape or dtype.
    """
    stacks: dict[str, int] = {}
    for spec in inventory.values():
        name, expert = _parameter_of(spec)
        if expert is not None:
            stacks[name] = max(stacks.get(name, 0), expert + 1)
    sources, used = {}, set()
    for spec in inventory.values():
        name, expert = _parameter_of(spec)
        weight = sources.get(f"{spec.name.removesuffix('.scale')}.weight")
        if spec.dtype == "F8_E8M0" and weight is not None and weight.master:
            continue
        if name not in leaves:
            raise DSV41Error(f"parameter {name}: is missing, tensor {spec.name} is made of it")
        leaf, lead = leaves[name], () if expert is None else (stacks[name],)
        master = leaf.dtype == np.float32 and spec.dtype not in ("F32", "F8_E8M0")
        _check_leaf(name, leaf, spec, lead, master)
        sources[spec.name] = _Source(name, leaf, expert, master)
        used.add(name)
    if unknown := [name for name in leaves if name not in used]:
        raise DSV41Error(f"parameter {unknown[0]}: the config has no such tensor")
    return sources


def _check_leaf(name: str, leaf: Any, spec: TensorSpec, lead: tuple[int, ...], master: bool) -> None:
    shape = (*spec.shape[:-1], 2 * spec.shape[-1]) if master and spec.dtype == "I8" else spec.shape
    dtype = np.dtype(np.float32) if master else _ARRAYS[spec.dtype]
    if tuple(leaf.shape) != (*lead, *shape) or np.dtype(leaf.dtype) != dtype:
        raise DSV41Error(
            f"parameter {name}: expected {dtype.name} {[*lead, *shape]}, got {leaf.dtype} {list(leaf.shape)}"
        )


class _Values:
    """The arrays of one tensor after the other, in the order of the inventory."""

    def __init__(self, config: ModelConfig, sources: Mapping[str, _Source]):
        self._config, self._sources = config, sources
        self._layer: str | None = None
        self._read: dict[str, Any] = {}  # parameters of the layer
        self._scales: dict[str, list[np.ndarray]] = {}  # made with their weights, not yet written

    def __call__(self, spec: TensorSpec) -> Iterator[np.ndarray]:
        if layer_of(spec) != self._layer:
            self._layer, self._read = layer_of(spec), {}
        if spec.name in self._scales:
            yield from self._scales.pop(spec.name)
            return
        source = self._sources[spec.name]
        x = self._array(source)
        if source.expert is not None:
            x = x[source.expert]
        if not source.master:
            yield _finite(np.asarray(jax.device_get(x)), spec)
            return
        scales = []
        for piece in _pieces(x):
            values, scale, finite = _stored(piece, _form(spec), self._config)
            if not finite:
                raise DSV41Error(f"parameter {source.name}: tensor {spec.name!r} holds NaN or infinite values")
            yield _finite(np.asarray(values), spec)
            if scale is not None:
                scales.append(np.asarray(scale))
        if scales:
            self._scales[f"{spec.name.removesuffix('.weight')}.scale"] = scales

    def _array(self, source: _Source) -> Any:
        if isinstance(source.leaf, jax.Array | np.ndarray):
            return source.leaf
        if source.name not in self._read:
            self._read[source.name] = np.asarray(source.leaf)
        return self._read[source.name]


def _finite(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    array = np.ascontiguousarray(array)
    if has_non_finite(array, is_scale=spec.dtype == "F8_E8M0"):
        raise DSV41Error(f"tensor {spec.name!r} holds NaN or infinite values")
    return array


def _pieces(x: Any) -> Iterator[Any]:
    """Runs of rows, which do not cut a tile of an FP8 weight."""
    row_bytes = max(x.nbytes // max(x.shape[0], 1), 1)
    count = max(_PIECE_BYTES // (row_bytes * _ROWS), 1) * _ROWS
    if count >= x.shape[0]:
        yield x
        return
    for first in range(0, x.shape[0], count):
        rows = min(count, x.shape[0] - first)
        # A slice of a device's array would be compiled anew for every beginning.
        on_device = isinstance(x, jax.Array)
        yield jax.lax.dynamic_slice_in_dim(x, first, rows) if on_device else x[first : first + rows]


def _form(spec: TensorSpec) -> Any:
    """How a master is stored; None: as rows of an Engram table."""
    return None if is_engram_table(spec.name) else _FORMS[spec.dtype]


@functools.partial(jax.jit, static_argnames=("form", "config"))
def _stored(x: jax.Array, form: Any, config: ModelConfig) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """(values, scales if the format has them, whether the master is finite)."""
    stored = stored_table(x, config) if form is None else stored_array(form, x)
    finite = jnp.isfinite(x).all()
    return (stored, None, finite) if isinstance(stored, jax.Array) else (stored.values, stored.scales, finite)
