"""Float32 masters, what a forward sees of them, and the released formats (training.md section 2).

In every forward the stored form of a weight is made from its master and dequantised again, so that training runs on the
values that will be served. Export makes the same stored form and keeps it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv41.config import DSV41Error, ModelConfig
from dsv41.layers import BlockFormats
from dsv41.models import Params, abstract_params
from dsv41.ops import straight_through
from dsv41.ops.linear import QuantizedArray, WeightFormat
from pallas_kernels.quantize import ops as quantize
from pallas_kernels.rounding import round_to_bf16


@dataclasses.dataclass(frozen=True)
class QAT:
    """What training rounds as serving does.

    Attributes:
      weights: FP8 and FP4 weights, Engram rows, and the FP8 activations that enter their products. Nothing in a model
        whose checkpoint is bfloat16.
      window: FP8 of window KV.
      main: FP4 of compressed KV, index queries and index keys; the report trains with it after pre-training.
    """

    weights: bool = True
    window: bool = True
    main: bool = True

    def formats(self, config: ModelConfig) -> BlockFormats:
        """Of the modules that take `forward_params`."""
        of = WeightFormat.QAT if self.weights and config.quantization_config is not None else WeightFormat.BF16
        return BlockFormats(of, of)


FULL_QAT = QAT()
NO_QAT = QAT(weights=False, window=False, main=False)


class StoredTable(NamedTuple):
    """An Engram table: float8_e4m3fn [rows, D] and E8M0 uint8 [rows, D / 32], or bfloat16 [rows, D] and None."""

    values: Any
    scales: Any


def _formats(stored: Params) -> Any:
    """The tree of what is stored, cut above quantised weights, with a format (or a dtype) for each array."""
    if not isinstance(stored, dict):
        return stored.dtype
    if "scale" in stored:
        fp4 = stored["weight"].dtype == jnp.uint8
        return {"weight": WeightFormat.FP4_ROW if fp4 else WeightFormat.FP8_BLOCK}
    return {name: _formats(leaf) for name, leaf in stored.items()}


def _by_format(masters: Params, stored: Params, fn: Callable[[Any, jax.Array], Any]) -> Params:
    """`fn(format or dtype, master)` of every parameter of the abstract tree `stored`."""

    def walk(formats: Any, tree: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(formats, dict):
            return fn(formats, tree)
        if missing := [name for name in formats if name not in tree]:
            raise DSV41Error(f"parameter {'.'.join(map(str, (*path, missing[0])))}: there is no master of it")
        return {name: walk(part, tree[name], (*path, name)) for name, part in formats.items()}

    return walk(_formats(stored), masters, ())


def forward_params(masters: Params, config: ModelConfig, qat: QAT, stored: Params | None = None) -> Params:
    """What `Backbone(config, formats=qat.formats(config))` takes, differentiable in the masters.

    Args:
      masters: float32, as `training_params_abstract` describes; Engram tables are left out, rows of them come with the
        batch.
      config: of the model.
      qat: whether quantised weights are rounded to their formats, or only to bfloat16.
      stored: of which parameters, as `abstract_params` describes those of the backbone; None: those. Others in the
        masters are left out.

    Raises:
      DSV41Error: a parameter has no master.
    """
    quantized = qat.formats(config).dense is WeightFormat.QAT
    rounded = {WeightFormat.FP8_BLOCK: straight_through.weight_fp8, WeightFormat.FP4_ROW: straight_through.weight_fp4}

    def seen(form: Any, x: jax.Array) -> jax.Array:
        if isinstance(form, WeightFormat):
            return rounded[form](x) if quantized else round_to_bf16(x)
        return round_to_bf16(x) if form == jnp.bfloat16 else x.astype(form)

    return _by_format(masters, abstract_params(config) if stored is None else stored, seen)


def stored_from(masters: Params, config: ModelConfig) -> tuple[Params, list[StoredTable]]:
    """The backbone's parameters and the Engram tables in the released formats.

    What `masters_from` made comes back with the same values. Scales may differ: they are the smallest that do.

    Raises:
      DSV41Error: a parameter or table has no master.
    """

    tables = [stored_table(t, config) for t in engram_tables(masters, config)]
    return _with_scales(_by_format(masters, abstract_params(config), stored_array)), tables


def stored_array(form: Any, x: jax.Array) -> Any:
    """A master, float32 [..., out, in] or of any shape, as it is stored.

    Args:
      form: `WeightFormat.FP8_BLOCK` or `WeightFormat.FP4_ROW` gives a `QuantizedArray`; a dtype gives an array of it.
      x: the master.
    """
    if form is WeightFormat.FP8_BLOCK:
        return QuantizedArray(*quantize.quantize_weight_fp8(x), form)
    if form is WeightFormat.FP4_ROW:
        return QuantizedArray(*quantize.quantize_weight_fp4(x), form)
    return round_to_bf16(x) if form == jnp.bfloat16 else x.astype(form)


def stored_table(table: jax.Array, config: ModelConfig) -> StoredTable:
    """Rows of an Engram table, float32 [rows, D], as they are stored."""
    if config.quantization_config is None:
        return StoredTable(round_to_bf16(table), None)
    return StoredTable(*quantize.quantize_rows_fp8(table))


def _with_scales(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if isinstance(weight := tree.get("weight"), QuantizedArray):
        return {"weight": weight.values, "scale": weight.scales}
    return {name: _with_scales(part) for name, part in tree.items()}


def masters_from(stored: Params, config: ModelConfig, tables: Sequence[Any] = ()) -> Params:
    """Float32 masters with the values of stored parameters.

    Args:
      stored: of the backbone, as `dsv41.load` has them.
      config: of the model.
      tables: `EngramTable` or `StoredTable` of each Engram layer; none: the masters have no tables.

    Raises:
      DSV41Error: as many tables as there are Engram layers, or none, are expected.
    """

    def master(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return jnp.asarray(tree).astype(jnp.float32)
        if "scale" in tree:
            form = WeightFormat.FP4_ROW if tree["weight"].dtype == jnp.uint8 else WeightFormat.FP8_BLOCK
            return {"weight": QuantizedArray(tree["weight"], tree["scale"], form).dequantize().astype(jnp.float32)}
        return {name: master(part) for name, part in tree.items()}

    layers = config.text_config.engram_layer_ids
    if tables and len(tables) != len(layers):
        raise DSV41Error(f"Engram tables: expected one for each of the layers {list(layers)}, got {len(tables)}")
    masters = master(stored)
    for layer, table in zip(layers, tables, strict=False):
        values = jnp.asarray(table.values)
        if table.scales is not None:
            values = quantize.dequantize_fp8(values, jnp.asarray(table.scales))
        masters["layers"][layer]["engram"]["embed"] = {"weight": values.astype(jnp.float32)}
    return masters


def engram_tables(masters: Params, config: ModelConfig) -> list[jax.Array]:
    """float32 [rows, D] of each Engram layer.

    Raises:
      DSV41Error: the masters have no tables.
    """
    found = []
    for layer in config.text_config.engram_layer_ids:
        table = masters["layers"][layer]["engram"].get("embed")
        if table is None:
            raise DSV41Error(f"parameter layers.{layer}.engram.embed.weight: there is no master of it")
        found.append(table["weight"])
    return found
