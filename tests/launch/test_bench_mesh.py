"""launch.bench_mesh: its parts on virtual devices, how a step is shared out, and bad input."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dsv41.engine.step_profile import LayerKernels
from dsv41.sharding import make_mesh
from launch import bench_mesh
from launch.cli import run
from tests.ragged_emulation import emulated_ragged_all_to_all

needs_two = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")


def start(*arguments):
    return run(bench_mesh.main, bench_mesh.FLAGS, ["launch/bench_mesh.py", *arguments])


def rows(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@needs_two
def test_links(capsys, monkeypatch):
    monkeypatch.setattr(bench_mesh, "_SIZES", (1 << 10, 1 << 12))
    assert start("--part=links", "--meshes=data=1;data=2", "--json") == 0
    found = rows(capsys)
    assert [(r["mesh"], r["collective"], r["bytes"]) for r in found] == [
        ("data=2", name, size) for name in ("all_to_all", "all_gather", "reduce_scatter") for size in (1024, 4096)
    ]
    assert all(r["us"] > 0 and r["GB_per_s"] > 0 for r in found)


@needs_two
@pytest.mark.slow
def test_exact(capsys):
    assert start("--part=exact", "--meshes=data=2", "--json") == 0
    found = rows(capsys)
    assert [(r["presets"], r["tokens"]) for r in found] == [("decode, prefill, train", 1)]
    # On CPU rows have the same bits however many are beside them.
    assert all((r["largest"], r["selections"], r["experts"]) == (0, 1, 1) for r in found)


def test_shares():
    parts = {
        "moe/experts": (9, 10.0), "moe/experts/products": (2, 40.0), "moe/experts/collective": (2, 7.0),
        "moe/route": (1, 1.0), "moe/shared_expert": (1, 2.0), "moe": (1, 6.0), "attention/attend": (1, 5.0),
        "attention/select": (3, 4.0), "attention/select/collective": (1, 3.0),
    }  # fmt: skip
    found = bench_mesh._shares([LayerKernels(0, 21, 78.0, parts), LayerKernels(None, 1, 10.0, {"other": (1, 10.0)})])
    assert found == {
        "us": 88, "exchange": 7, "expert_products": 40, "expert_rows": 10, "shared_expert": 2, "route": 1, "select": 4,
        "attend": 5, "other_collectives": 3, "rest": 16,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--meshes=data=4096"], r"--meshes: data=4096 needs 4096 devices, there are \d+"),
        (["--meshes=model=2"], "expected each of data, sequence, tensor at most once"),
        (["--rows=8,x"], "--rows: expected positive numbers separated by commas, got 8,x"),
    ],
)
def test_bad_input(argv, message, capsys):
    assert start("--part=steps", *argv) == 2
    assert re.search(message, capsys.readouterr().err)


@needs_two
@pytest.mark.parametrize("words", [8 * bench_mesh._ROW_WORDS, 16])  # the second: less than a row for each device
def test_equal_parts_of_a_ragged_exchange(monkeypatch, words):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    monkeypatch.setattr(bench_mesh, "update_pieces", lambda devices, rows: 3)
    mesh = make_mesh({"data": 2}, jax.devices()[:2])
    x = jnp.arange(2 * words, dtype=jnp.float32)

    def spread(collective):
        spec = PartitionSpec("data")
        return jax.jit(jax.shard_map(collective, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(x)

    found = spread(functools.partial(bench_mesh._equal_parts_ragged, mesh=mesh))
    np.testing.assert_array_equal(found, spread(lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True)))
