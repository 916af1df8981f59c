"""A model spread over several devices of one host: whether it is right, and where a step's time goes.

    python -m launch.bench_mesh --part=exact --part=links --meshes=data=2,sequence=2,tensor=2
    python -m launch.bench_mesh --part=steps --config=configs/expert_groups.json --meshes=data=2 --rows=64,256
    python -m launch.bench_mesh --part=selection --config=configs/flash_groups.json --meshes=sequence=2 --rows=8

Parts:
  exact      every preset on every mesh against one device, without --checkpoint on the tiny model: logits, selected
             entries, experts of a step of --tokens new tokens.
  links      bytes a second of all_to_all, all_gather, reduce-scatter and (not on CPUs) the ragged exchange that brings
             rows to experts, by size: the peak of what links between these devices give; wall time of a queue of them.
  steps      a decode step for each of --rows, or with --tokens a chunk of a prompt: time of exchange, experts and the
             rest, from the profiler (NVIDIA GPUs), and wall time. --per_device takes --rows for each device. Launches
             inside CUDA graphs are not put down to parts: set XLA_FLAGS=--xla_gpu_enable_command_buffer= for them, and
             leave it out for the wall time that users have.
  selection  sequences of --context tokens whose pages lie on all devices: time of a step's selection, and the share of
             queries that select alike on one device (the same scores, at --check_context).

Meshes are separated by semicolons or given several times; data=1 is one device. With --config weights are random, made
on the devices. Times of collectives hold what devices wait for one another. Steps of all --rows are compiled side by
side, and run one after another.
"""

import dataclasses
import functools
import json
import logging
import math
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from dsv41.checkpoint.random_model import random_model
from dsv41.config import DSV41Error
from dsv41.engine.mesh_checks import agreement, on_mesh, selection_agreement
from dsv41.engine.step_profile import LayerKernels, StepProfile, StepShape, profile_steps
from dsv41.models import Model
from dsv41.ops.expert_transport import ragged_all_to_all, update_pieces
from dsv41.sharding import PRESETS, ShardingRules, devices_along, first_devices, make_mesh, parse_mesh, preset_rules
from launch.cli import new_flags, run
from launch.load_model import ModelFlags

_log = logging.getLogger(__name__)

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS, config=True)
_PARTS = ("exact", "links", "steps", "selection")
_PART = flags.DEFINE_multi_enum("part", ["exact"], _PARTS, "What to run, see above.", flag_values=FLAGS)
_MESHES = flags.DEFINE_multi_string("meshes", ["data=1"], "Meshes, such as data=2;tensor=2.", flag_values=FLAGS)
_SHARDING = flags.DEFINE_enum("sharding", "decode", PRESETS, "Preset for steps and selection.", flag_values=FLAGS)
_ROWS = flags.DEFINE_list("rows", ["8"], "Sequences of a step, of all devices.", flag_values=FLAGS)
_PER_DEVICE = flags.DEFINE_bool("per_device", False, "--rows counts those of one device.", flag_values=FLAGS)
_TOKENS = flags.DEFINE_integer("tokens", 1, "New tokens of each sequence.", lower_bound=1, flag_values=FLAGS)
_CONTEXT = flags.DEFINE_integer("context", 4096, "Tokens in the cache of each.", lower_bound=0, flag_values=FLAGS)
_CHECK = flags.DEFINE_integer(
    "check_context", 131072, "Tokens in the cache where selections are compared.", lower_bound=0, flag_values=FLAGS
)
_STEPS = flags.DEFINE_integer("steps", 5, "Steps that are traced.", lower_bound=1, flag_values=FLAGS)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object a line instead of tables.", flag_values=FLAGS)

Row = dict[str, Any]

_ROW_WORDS = 2048  # float32
_SIZES = (1 << 14, 1 << 18, 1 << 22, 1 << 26, 1 << 28)  # bytes of each device


def _meshes() -> list[str]:
    meshes = [mesh for text in _MESHES.value for mesh in text.split(";")]
    for mesh in meshes:
        if (need := math.prod(parse_mesh(mesh).values())) > len(jax.devices()):
            raise DSV41Error(f"--meshes: {mesh} needs {need} devices, there are {len(jax.devices())}")
    return meshes


def _counts() -> list[int]:
    if not all(text.isdigit() and int(text) for text in _ROWS.value):
        raise DSV41Error(f"--rows: expected positive numbers separated by commas, got {','.join(_ROWS.value)}")
    return [int(text) for text in _ROWS.value]


def exact(meshes: list[str]) -> list[Row]:
    """One row a mesh and preset; presets that are the same there share one."""
    alone, _ = _MODEL.load()
    rows = []
    for mesh in meshes:
        presets: dict[ShardingRules, list[str]] = {}
        for preset in PRESETS:
            rules = preset_rules(preset, parse_mesh(mesh), alone.config.text_config)
            presets.setdefault(rules, []).append(preset)
        for names in presets.values():
            spread = on_mesh(alone, mesh, names[0])
            found = agreement(alone, spread, rows=8, context=64, tokens=_TOKENS.value)
            row = {"mesh": mesh, "presets": ", ".join(names), "tokens": _TOKENS.value}
            rows.append(row | dataclasses.asdict(found))
            _log.info("%s, %s: done", mesh, row["presets"])
    return rows


def links(meshes: list[str]) -> list[Row]:
    """One row a mesh, collective and size."""
    rows = []
    for text in meshes:
        sizes = parse_mesh(text)
        devices = devices_along(sizes, sizes)
        if devices == 1:
            continue
        mesh = make_mesh(sizes, first_devices(sizes))
        ragged = () if jax.default_backend() == "cpu" else ("ragged_all_to_all",)  # XLA has none for CPUs
        for name in ("all_to_all", "all_gather", "reduce_scatter", *ragged):
            for size in _SIZES:
                seconds = _collective_seconds(mesh, name, size)
                # What leaves a device: all but its own part.
                sent = size * (devices - 1) / devices * (devices if name == "all_gather" else 1)
                row = {"mesh": text, "collective": name, "bytes": size, "us": seconds * 1e6}
                rows.append(row | {"GB_per_s": sent / seconds / 1e9})
    return rows


def _collective_seconds(mesh, name: str, size: int, calls: int = 20) -> float:
    """Of one call on `size` bytes of each device."""
    axes = mesh.axis_names

    collective = {
        "all_to_all": lambda x: jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
        "all_gather": lambda x: jax.lax.all_gather(x, axes, tiled=True),
        "reduce_scatter": lambda x: jax.lax.psum_scatter(x, axes, tiled=True),
        "ragged_all_to_all": functools.partial(_equal_parts_ragged, mesh=mesh),
    }[name]
    spec = PartitionSpec(axes)
    call = jax.jit(jax.shard_map(collective, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    make = functools.partial(jax.random.normal, jax.random.key(0), (size // 4 * mesh.size,))
    x = jax.jit(make, out_shardings=NamedSharding(mesh, spec))()
    jax.block_until_ready(call(x))
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(calls):
            y = call(x)
        jax.block_until_ready(y)
        seconds.append((time.perf_counter() - started) / calls)
    return min(seconds)


def _equal_parts_ragged(x: jax.Array, *, mesh: Mesh) -> jax.Array:
    """An all_to_all of rows as wide as those of the released experts."""
    axes, devices = mesh.axis_names, mesh.size
    rows = x.reshape(-1, min(_ROW_WORDS, x.size // devices))
    count = jnp.full(devices, rows.shape[0] // devices, jnp.int32)
    first, at = jnp.arange(devices) * count, jax.lax.axis_index(axes) * count
    pieces = update_pieces(devices, rows.shape[0])
    return ragged_all_to_all(rows, jnp.zeros_like(rows), first, count, at, count, axes=axes, pieces=pieces).reshape(-1)


def _random_on(mesh: str) -> Model:
    config, sizes = _MODEL.config(), parse_mesh(mesh)
    if devices_along(sizes, sizes) == 1:
        return random_model(config, drafter=False)
    rules = preset_rules(_SHARDING.value, sizes, config.text_config)
    return random_model(config, drafter=False, mesh=make_mesh(sizes, first_devices(sizes)), rules=rules)


def steps(meshes: list[str]) -> list[Row]:
    """One row a mesh and number of sequences."""
    rows = []
    for mesh in meshes:
        model = _random_on(mesh)
        devices = math.prod(parse_mesh(mesh).values()) if _PER_DEVICE.value else 1
        counts = [count * devices for count in _counts()]
        for count, (layers, wall_us) in zip(counts, _profiled(model, counts), strict=True):
            rows.append({"mesh": mesh, "rows": count, "tokens": _TOKENS.value, "wall_us": wall_us, **_shares(layers)})
        del model
    return rows


def _profiled(model: Model, counts: list[int]) -> list[StepProfile]:
    shapes = [StepShape(count, _CONTEXT.value, _TOKENS.value) for count in counts]
    return profile_steps(model, shapes, steps=_STEPS.value)


_SHARES = (
    "exchange", "expert_products", "expert_rows", "shared_expert", "route", "select", "attend", "other_collectives",
    "rest",
)  # fmt: skip


def _shares(layers: list[LayerKernels]) -> dict[str, float]:
    """Microseconds of a step by what they are spent on; "expert_rows": arranging rows for products and exchange."""
    us = dict.fromkeys(_SHARES, 0.0)
    for layer in layers:
        for part, (_, time_us) in layer.parts.items():
            names = part.split("/")
            if names[-1] == "collective":
                us["exchange" if names[0] == "moe" else "other_collectives"] += time_us
            elif names[:2] == ["moe", "experts"]:
                us["expert_products" if names[-1] == "products" else "expert_rows"] += time_us
            else:
                us[names[1] if len(names) > 1 and names[1] in us else "rest"] += time_us
    return {"us": sum(us.values())} | {name: us[name] for name in _SHARES}


def selection(meshes: list[str]) -> list[Row]:
    """One row a mesh and number of sequences."""
    rows = []
    alone, counts = _random_on("data=1"), _counts()
    for mesh in meshes:
        model = alone if mesh == "data=1" else _random_on(mesh)
        for count, (found, wall_us) in zip(counts, _profiled(model, counts), strict=True):
            parts = [(name, us) for layer in found for name, (_, us) in layer.parts.items()]
            us = sum(t for name, t in parts if name == "attention/select")
            moved = sum(t for name, t in parts if name.startswith("attention/") and name.endswith("/collective"))
            row = {"mesh": mesh, "rows": count, "context": _CONTEXT.value, "select_us": us, "collectives_us": moved}
            row |= {"step_us": sum(layer.us for layer in found), "wall_us": wall_us}
            if model is not alone:
                row["alike"] = selection_agreement(alone, model, rows=count, context=_CHECK.value)
            rows.append(row)
    return rows


def _print(part: str, rows: list[Row]) -> None:
    if _JSON.value:
        for row in rows:
            print(json.dumps({"part": part, **row}))
        return
    table = Table(title=part, title_justify="left", box=None, header_style="bold")
    for name in rows[0] if rows else ():
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{x:,.4g}" if isinstance(x, float) else str(x) for x in row.values()))
    Console(file=sys.stdout, width=180, markup=False, highlight=False, emoji=False).print(table)


def main() -> None:
    _MODEL.start_device()
    meshes = _meshes()
    _counts()
    kinds = {"exact": exact, "links": links, "steps": steps, "selection": selection}
    for part in dict.fromkeys(_PART.value):
        _print(part, kinds[part](meshes))


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
