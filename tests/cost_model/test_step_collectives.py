"""Collectives of whole compiled steps: nothing moves that should stay, and no layer communicates more than planned."""

import functools
import pathlib
from collections import Counter

import jax
import pytest

from dsv41.config import LayerMode, layer_schedule, load_config, with_overrides
from dsv41.cost_model import StepSizes, abstract_step, collectives, count_by_layer, kept_shapes, moved_like, parse
from dsv41.sharding import make_mesh
from tests.collective_counts import collective_operands

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="eight devices are needed")
compiles = pytest.mark.slow  # a whole step

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "tiny.json"


@pytest.mark.parametrize("mesh", ["data=2,sequence=2,tensor=2", "data=4,tensor=2", "data=2,sequence=4"])
def test_decode_as_written(mesh):
    """Before any compiler: no collective is given a device's part of a weight or a page pool that is spread, and no
    layer has more collectives than planned."""
    config = load_config(CONFIG)
    described = StepSizes(program="decode", rows=8, context=4096, mesh=mesh)
    config = with_overrides(config, {"text_config.max_position_embeddings": "4096"})
    step = abstract_step(config, described, make_mesh(described.mesh_sizes, jax.devices()[:8]))
    found = collective_operands(
        functools.partial(step.function.__wrapped__, **step.static), step.params, step.batch, step.cache
    )
    kept = {shape.dims for shape in kept_shapes(step) if len(shape.dims) > 1}
    assert kept and [f for f in found if set(f.shapes) & kept] == []
    for spec in layer_schedule(config.text_config).layers:
        kinds = Counter(f.kind for f in found if f.scope == f"layer_{spec.index}")
        made = {"all-to-all": kinds["all_to_all"], "all-gather": kinds["all_gather"]}
        made["sums"] = kinds["psum"] + kinds["reduce_scatter"]
        assert sum(made.values()) == sum(kinds.values())
        limits = planned(spec, mesh)
        assert all(made[kind] <= limits[kind] for kind in made), (spec.index, made, limits)


def compiled_step(config, **sizes):
    described = StepSizes(**sizes)
    step = abstract_step(config, described, make_mesh(described.mesh_sizes, jax.devices()[:8]))
    return step, collectives(parse(step.lower().compile().as_text()), 8)


def planned(spec, mesh):
    """The most collectives of a layer, by kind.

    Experts: there and back. Heads: tokens are joined before attention and its output is summed into parts. A selecting
    layer whose devices share rows joins what each selected. One whose pages are spread gathers new entries if it has
    any, queries, and what is asked for; ranks go to owners, and so do the entries that were selected.
    """
    kinds = {"all-to-all": 2, "all-gather": 0, "sums": 0}
    if "tensor" in mesh:
        kinds["all-gather"] += 1 + spec.selects + spec.builds_candidates
        kinds["sums"] += 1
    if "sequence" in mesh and spec.selects:
        kinds["all-to-all"] += 2
        kinds["all-gather"] += 3 if spec.mode is LayerMode.FULL else 2
    return kinds


@compiles
@pytest.mark.parametrize("mesh", ["data=4,tensor=2", "data=2,sequence=4"])
def test_decode(mesh):
    config = load_config(CONFIG)
    step, found = compiled_step(config, program="decode", rows=8, context=128, mesh=mesh)
    assert moved_like(found, kept_shapes(step)) == []
    counts = count_by_layer(found)
    for spec in layer_schedule(config.text_config).layers:
        made = counts[f"layer_{spec.index}"]
        # A compiler may write a sum whose parts stay apart as a sum and a slice of it.
        made["sums"] = made.pop("all-reduce", 0) + made.pop("reduce-scatter", 0)
        limits = planned(spec, mesh)
        assert all(made.get(kind, 0) <= limits.get(kind, 0) for kind in made), (spec.index, made, limits)
    # Embedding and head: ids and the input of the head are gathered, rows and logits come back.
    assert sum(counts[None].values()) <= 5
