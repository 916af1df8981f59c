"""Collectives of whole compiled steps: nothing moves that should stay, and no layer communicates more than planned."""

import pathlib

import jax
import pytest

from dsv41.config import LayerMode, layer_schedule, load_config
from dsv41.cost_model import StepSizes, abstract_step, collectives, count_by_layer, kept_shapes, moved_like, parse
from dsv41.sharding import make_mesh

pytestmark = [
    pytest.mark.slow,  # each compiles a whole step
    pytest.mark.skipif(jax.device_count() < 8, reason="eight devices are needed"),
]

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "tiny.json"


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
    elif spec.selects:
        kinds["all-to-all"] += 2
        kinds["all-gather"] += 3 if spec.mode is LayerMode.FULL else 2
    return kinds


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
