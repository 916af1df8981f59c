"""Says what a model consists of: parameters, bytes, cache bytes and the layer table.

    python -m launch.inspect --checkpoint=DIR
    python -m launch.inspect --config=FILE [--set=text_config.max_position_embeddings=4096 ...] [--json]
    python -m launch.inspect --config=FILE --mesh=data=8,tensor=8 [--sharding=decode --rows=64 --context=131072]

With --checkpoint the names, shapes and dtypes in the files are compared with what its config.json says they hold; no
tensor data is read. With --mesh it also says what every device of such a mesh holds of parameters and cache; no device
is needed. With --json, stdout is exactly one JSON object.
"""

import dataclasses
import json
import sys
from typing import Any

from absl import flags
from jax.sharding import AbstractMesh
from rich.console import Console
from rich.table import Table

from dsv41.cache.layout import CacheLayout
from dsv41.checkpoint import (
    PARTS,
    TensorSpec,
    bytes_by_dtype,
    check_inventory,
    open_either,
    parameter_counts,
    tensor_inventory,
    totals_by_subsystem,
)
from dsv41.config import DSV41Error, LayerSpec, ModelConfig, TextConfig, layer_schedule, load_config, with_overrides
from dsv41.cost_model import StepSizes, abstract_step, cache_bytes, parameter_bytes, total_bytes
from dsv41.models import abstract_drafter_params, abstract_vision_params
from dsv41.models.sharded import param_shardings, param_specs
from dsv41.sharding import LOGICAL_AXES, PRESETS, devices_along, parse_mesh, preset_rules
from launch.cli import new_flags, overrides, run

FLAGS = new_flags()
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Directory in the released layout, or an import of one.", flag_values=FLAGS
)
_CONFIG = flags.DEFINE_string("config", None, "A config.json, or a directory that holds one.", flag_values=FLAGS)
_SET = flags.DEFINE_multi_string(
    "set", [], "key=value: changes one field of the config, such as text_config.sliding_window=64.", flag_values=FLAGS
)
_MESH = flags.DEFINE_string(
    "mesh", None, "Sizes of mesh axes, such as data=8,tensor=8: also show the bytes of one device.", flag_values=FLAGS
)
_SHARDING = flags.DEFINE_enum(
    "sharding", "decode", PRESETS, "How a model is spread over --mesh (dsv41/sharding/presets.py).", flag_values=FLAGS
)
_ROWS = flags.DEFINE_integer(
    "rows", None, "With --mesh: sequences in the cache, of all devices. One a group of devices.", flag_values=FLAGS
)
_CONTEXT = flags.DEFINE_integer(
    "context", None, "With --mesh: tokens a sequence in the cache. The config's longest.", flag_values=FLAGS
)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of tables.", flag_values=FLAGS)


def _layer_row(layer: LayerSpec) -> dict[str, Any]:
    return {
        "layer": layer.index,
        "m": layer.ratio,
        "mode": layer.mode.value,
        "kv_source": layer.kv_source,
        "selection_source": layer.index_source,
        "candidate_pool": "builds" if layer.builds_candidates else "reads" if layer.reads_candidates else None,
        "engram": layer.engram,
        "half": "decoder" if layer.in_decoder else "encoder",
    }


def _cache_bytes(config: TextConfig) -> dict[str, float]:
    """Cache sizes. Stored bytes exceed the records where a tiny model's widths do not fill the rows of a page."""
    layout = CacheLayout.from_config(config)
    sizes = {
        "kv_bytes_per_token": layout.payload_bytes_per_token,
        "kv_bytes_per_token_stored": layout.global_bytes_per_token,
        "max_position_embeddings": config.max_position_embeddings,
        "kv_bytes_per_sequence": layout.record_bytes(config.max_position_embeddings),
        "window_bytes_per_sequence": layout.window_bytes_per_sequence,
    }
    return {name: int(size) if size == int(size) else size for name, size in sizes.items()}


def describe(config: ModelConfig, inventory: dict[str, TensorSpec]) -> dict[str, Any]:
    """Everything that follows from the config alone, as plain JSON values. `inventory` is the config's own."""
    counts = parameter_counts(config, inventory)
    return {
        "parameters": {"total": counts.total, **dataclasses.asdict(counts)},
        "tensors": len(inventory),
        "bytes": sum(spec.nbytes for spec in inventory.values()),
        "bytes_by_dtype": bytes_by_dtype(inventory),
        "bytes_by_subsystem": {name: total._asdict() for name, total in totals_by_subsystem(inventory).items()},
        "cache": _cache_bytes(config.text_config),
        "layers": [_layer_row(layer) for layer in layer_schedule(config.text_config).layers],
    }


def _describe_mesh(config: ModelConfig) -> dict[str, Any]:
    """Bytes of one device, by kind."""
    text, sizes = config.text_config, parse_mesh(_MESH.value)
    rules = preset_rules(_SHARDING.value, sizes, text)
    context = text.max_position_embeddings if _CONTEXT.value is None else _CONTEXT.value
    rows = devices_along(sizes, rules.batch) if _ROWS.value is None else _ROWS.value
    step = StepSizes(program="decode", rows=rows, context=context, mesh=_MESH.value, rules=_SHARDING.value)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    abstract = abstract_step(config, step, mesh)
    parameters = parameter_bytes(abstract.params)
    if text.num_nextn_predict_layers:
        specs = param_specs(config, rules, "drafter")
        parameters["drafter"] = total_bytes(param_shardings(abstract_drafter_params(config), specs, mesh))
    if config.vision_config is not None:
        parameters["vision"] = total_bytes(abstract_vision_params(config))
    cache = cache_bytes(abstract.cache)
    return {
        "mesh": sizes,
        "sharding": _SHARDING.value,
        "rules": {axis: getattr(rules, axis) for axis in LOGICAL_AXES},
        "devices": devices_along(sizes, sizes),
        "rows": rows,
        "context": context,
        "parameters": parameters,
        "cache": cache,
        "total": sum(parameters.values()) + sum(cache.values()),
    }


def _mesh_line(found: dict[str, Any]) -> str:
    """How the model lies on the mesh."""
    # Engram tables are not counted: they are with the hosts, unless a run asks for them on the devices.
    named = {name: axes for name, axes in found["rules"].items() if name != "engram_rows"}
    spread = {name: " x ".join(axes) for name, axes in named.items() if axes}
    over = ", ".join(f"{name} over {axes}" for name, axes in spread.items()) or "nothing spread"
    return f"{found['rows']:,} sequences of {found['context']:,} tokens; {found['sharding']}: {over}"


def _mesh_table(found: dict[str, Any]) -> Table:
    table = _table(f"One of {found['devices']} devices", "what", "bytes", "GiB")
    for part in ("parameters", "cache"):
        for name, size in found[part].items():
            table.add_row(name, _number(size), _gib(size))
        table.add_section()
    table.add_row("total", _number(found["total"]), _gib(found["total"]))
    return table


def _table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose other columns are flush right."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _gib(size: float) -> str:
    return f"{size / 2**30:,.3f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def _size_tables(report: dict[str, Any]) -> list[Table]:
    parameters = _table("Parameters", "part", "parameters")
    for name, count in report["parameters"].items():
        label = name.replace("active_", "active a token, ").replace("_", " ")
        parameters.add_row(label, _number(count), end_section=name in ("total", "vision"))
    dtypes = _table("Bytes by dtype", "dtype", "bytes", "GiB")
    for name, size in report["bytes_by_dtype"].items():
        dtypes.add_row(name, _number(size), _gib(size))
    subsystems = _table("Bytes by subsystem", "subsystem", "tensors", "bytes", "GiB")
    for name, total in report["bytes_by_subsystem"].items():
        subsystems.add_row(name, _number(total["tensors"]), _number(total["bytes"]), _gib(total["bytes"]))
    subsystems.add_section()
    subsystems.add_row("total", _number(report["tensors"]), _number(report["bytes"]), _gib(report["bytes"]))
    cache = report["cache"]
    caches = _table("Cache", "what", "bytes")
    caches.add_row("KV and index keys, a token", _number(cache["kv_bytes_per_token"]))
    if cache["kv_bytes_per_token_stored"] != cache["kv_bytes_per_token"]:
        caches.add_row("the same with row padding, as stored", _number(cache["kv_bytes_per_token_stored"]))
    caches.add_row(
        f"KV and index keys, a sequence of {_number(cache['max_position_embeddings'])} tokens",
        _number(cache["kv_bytes_per_sequence"]),
    )
    caches.add_row("window, a sequence", _number(cache["window_bytes_per_sequence"]))
    return [parameters, dtypes, subsystems, caches]


def _layer_table(layers: list[dict[str, Any]]) -> Table:
    columns = ("layer", "m", "mode", "KV source", "selection source", "candidate pool", "Engram", "half")
    table = Table(*columns, title="Layers", title_justify="left")
    for row in layers:
        values = {**row, "m": row["m"] or None}
        if row["engram"] is not None:
            values["engram"] = f"table {row['engram']}"
        table.add_row(*("-" if value is None else str(value) for value in values.values()))
    return table


def _print_tables(report: dict[str, Any]) -> None:
    # Without a terminal rich assumes 80 columns and would fold cells.
    width = None if sys.stdout.isatty() else 120
    console = Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)
    tables = [*_size_tables(report), _layer_table(report["layers"])]
    if report["mesh"] is not None:
        tables.append(_mesh_table(report["mesh"]))
    for table in tables:
        console.print(table)
    if report["mesh"]:
        console.print(_mesh_line(report["mesh"]))
    if report["checkpoint"]:
        found = report["checkpoint"]
        console.print(f"{found['directory']}: all {_number(found['tensors'])} tensors are as the config says")


def main() -> None:
    if (_CHECKPOINT.value is None) == (_CONFIG.value is None):
        raise DSV41Error("give either --checkpoint=DIR or --config=FILE")
    path = _CONFIG.value if _CHECKPOINT.value is None else _CHECKPOINT.value
    config = with_overrides(load_config(path), overrides(_SET.value))
    inventory = tensor_inventory(config)
    mesh = None if _MESH.value is None else _describe_mesh(config)
    report = {"config": path, **describe(config, inventory), "mesh": mesh, "checkpoint": None}
    if _CHECKPOINT.value is not None:
        reader = open_either(_CHECKPOINT.value)
        check_inventory(reader, inventory, PARTS)
        found = {"directory": str(reader.directory), "files": len(reader.files), "tensors": len(reader)}
        report["checkpoint"] = found
    if _JSON.value:
        print(json.dumps(report))
    else:
        _print_tables(report)


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
