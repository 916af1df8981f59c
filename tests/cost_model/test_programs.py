"""Steps described by sizes alone: what devices hold and have to do, against the checkpoint's inventory."""

import functools
import pathlib

import jax
import pytest

from dsv41.cache import init_cache
from dsv41.checkpoint import parameter_counts, tensor_inventory, totals_by_subsystem
from dsv41.config import DSV41Error, load_config
from dsv41.cost_model import (
    StepSizes,
    abstract_step,
    cache_bytes,
    chip_of,
    parameter_bytes,
    step_work,
    total_bytes,
)
from dsv41.cost_model.memory import local_shapes
from dsv41.cost_model.roofline import roofline
from dsv41.sharding import make_mesh

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def released():
    return load_config(CONFIGS / "flash.json")


@pytest.fixture(scope="module")
def tiny():
    return load_config(CONFIGS / "tiny.json")


@functools.cache
def inventory(config):
    return tensor_inventory(config)


@functools.cache
def step_of(config, **sizes):
    described = StepSizes(**sizes)
    devices = jax.devices()[: described.devices]
    return described, abstract_step(config, described, make_mesh(described.mesh_sizes, devices))


def inventory_bytes(config):
    """Bytes of the backbone's parameters, by the words of the memory table."""
    found = {name: total.bytes for name, total in totals_by_subsystem(inventory(config)).items()}
    return {
        "routed experts": found["routed experts, backbone"],
        "shared experts": found["shared experts, backbone"],
        "routers": found["router, backbone"],
        "attention": found["attention"],
        "compressors and indexers": found["compressor + indexer"],
        "head": found["head"],
    }


def test_one_device_holds_what_the_files_do(released):
    _, step = step_of(released, program="decode", rows=1, context=65536)
    found = parameter_bytes(step.params)
    assert {kind: found[kind] for kind in inventory_bytes(released)} == inventory_bytes(released)


@pytest.mark.skipif(jax.device_count() < 8, reason="eight devices are needed")
def test_pages_that_do_not_divide_over_a_group(tiny):
    """One page of a sequence over 8 devices: each has room for one of every sequence, as in a cache that runs."""
    described, step = step_of(tiny, program="decode", rows=8, context=128, mesh="sequence=8")
    mesh = make_mesh(described.mesh_sizes, jax.devices()[:8])
    real = init_cache(tiny.text_config, num_slots=8, max_tokens=128, mesh=mesh, rules=described.rules_for(tiny))
    assert [x.shape for x in jax.tree.leaves(step.cache)] == [x.shape for x in jax.tree.leaves(real)]


@pytest.mark.parametrize(("mesh", "heads", "vocabulary"), [("data=8", 1, 1), ("data=2,tensor=4", 4, 4)])
def test_devices_share_experts_heads_and_vocabulary(released, mesh, heads, vocabulary):
    whole = inventory_bytes(released)
    _, step = step_of(released, program="decode", rows=8, context=65536, mesh=mesh)
    found = parameter_bytes(step.params)
    assert found["routed experts"] * 8 == whole["routed experts"]
    assert found["head"] * vocabulary == found["embedding"] * vocabulary == whole["head"]
    assert found["shared experts"] == whole["shared experts"] and found["routers"] == whole["routers"]
    if heads == 1:
        assert found["attention"] == whole["attention"]
    else:
        assert whole["attention"] / heads < found["attention"] < whole["attention"] / heads * 1.5


def test_cache_and_batch(released):
    """Of 8 rows on 4 parts, each device has the pages of two; KV is the released 890 bytes a token."""
    _, step = step_of(released, program="decode", rows=8, context=1 << 20, mesh="data=4,tensor=2")
    found = cache_bytes(step.cache)
    assert found["main KV"] + found["index keys"] == 890 * 2 * (1 << 20)
    assert found["window KV"] == 2 * 2703360
    rows = 2 * 24 * (256 + 8)  # two Engram layers, 24 rows a token
    assert total_bytes(step.batch) == 2 * (rows + 4 * 4 + 1)


def test_cache_is_that_of_a_run(tiny):
    """What is compiled ahead of time has the very arrays that a run makes."""
    _, step = step_of(tiny, program="verify", rows=2, context=128)
    real = init_cache(tiny.text_config, num_slots=2, max_tokens=128, draft_tokens=tiny.text_config.dspark_block_size)
    assert jax.tree.structure(real) == jax.tree.structure(step.cache)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(real)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(step.cache)
    ]


def test_flops_of_a_token_are_its_active_parameters(released):
    """On one device, two for every weight that a token meets; what is no matrix is left out."""
    work = step_work(released, *step_of(released, program="decode", rows=1, context=65536))
    products = sum(flops for kind, flops in work.flops.items() if not kind.endswith("scores"))
    vectors = sum(
        spec.logical_parameters
        for name, spec in inventory(released).items()
        if name.startswith(("layers.", "norm.")) and len(spec.shape) == 1
    )
    # Gains of Engram's keys and queries are matrices that multiply elementwise; the inventory calls them active too.
    assert products == 2 * (parameter_counts(released, inventory(released)).active_decode - vectors)


def test_work_of_a_mesh_adds_up(released):
    """What devices do is shared where it can be, and 8 rows on 8 devices are 8 times one row."""
    one = step_work(released, *step_of(released, program="decode", rows=1, context=65536))
    eight = step_work(released, *step_of(released, program="decode", rows=8, context=65536, mesh="data=8"))
    assert eight.flops == pytest.approx(one.flops)
    assert eight.bytes["index keys"] == one.bytes["index keys"]
    # Eight tokens choose 48 experts of 384, less those chosen twice; each device reads its eighth of them.
    chosen = eight.bytes["routed experts"] * 8 / one.bytes["routed experts"]
    assert 7.5 < chosen < 8


def test_context_costs_by_the_entries_that_are_scored(released):
    """Candidates bound what reindexing layers score; main KV is read by selections of one size."""
    near = step_work(released, *step_of(released, program="decode", rows=1, context=65536))
    away = step_work(released, *step_of(released, program="decode", rows=1, context=1 << 20))
    key, per_token = 68, (3 / 2 + 1)  # three layers of ratio 2 and one of ratio 1 score all
    assert away.bytes["index keys"] - near.bytes["index keys"] == key * per_token * ((1 << 20) - 65536)
    assert away.bytes["selected KV"] == near.bytes["selected KV"] == 38 * 512 * 288
    assert away.flops["index scores"] == away.bytes["index keys"] / key * 2 * 32 * 128


def test_a_round_has_the_drafter_too(released):
    """Its parameters are the files', and its work that of a block of drafts; the head sees both."""
    _, step = step_of(released, program="verify", rows=1, context=65536)
    work = step_work(released, *step_of(released, program="verify", rows=1, context=65536))
    assert total_bytes(step.drafter) == sum(s.nbytes for s in inventory(released).values() if s.part == "drafter")
    assert step.batch.tokens.shape == (1, 6) and len(step.cache.draft_window) == 3
    one = step_work(released, *step_of(released, program="decode", rows=1, context=65536))
    assert work.flops["attention"] == 6 * one.flops["attention"]
    assert work.flops["head"] == (6 + 5) * one.flops["head"]
    # Three stages of 40 layers' size with half of the experts, and the Markov head: each of 5 tokens.
    layer = (one.flops["attention"] + one.flops["shared experts"] + one.flops["routed experts"] / 2) / 40
    assert 1.0 < work.flops["drafter"] / (5 * 3 * layer) < 1.5


def test_prefill_runs_the_decoder_on_the_tail(released):
    sizes, step = step_of(released, program="prefill", rows=1, context=65536, tokens=4096)
    assert step.static["tail"] == 128 and step.batch.tokens.shape == (1, 4096)
    work = step_work(released, sizes, step)
    one = step_work(released, *step_of(released, program="decode", rows=1, context=65536))
    halves = one.flops["shared experts"] / 2
    assert work.flops["shared experts"] == halves * 4096 + halves * 128


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"program": "train", "rows": 1, "context": 8}, "program 'train': expected one of"),
        ({"program": "decode", "rows": 0, "context": 8}, "rows must be positive"),
        ({"program": "decode", "rows": 1, "context": 8, "tokens": 4}, "tokens=4"),
        ({"program": "prefill", "rows": 1, "context": 8}, "tokens=0"),
        ({"program": "decode", "rows": 3, "context": 128, "mesh": "data=2"}, "rows=3"),
        ({"program": "decode", "rows": 2, "context": 128, "mesh": "model=2"}, "mesh 'model=2'"),
        ({"program": "prefill", "rows": 1, "context": 8, "tokens": 16}, "context=8"),
        ({"program": "decode", "rows": 1, "context": 1 << 30}, "context=1073741824"),
        ({"program": "decode", "rows": 1, "context": 128, "rules": "serve"}, "sharding preset 'serve'"),
    ],
)
def test_bad_sizes(tiny, sizes, message):
    with pytest.raises(DSV41Error, match=message):
        step_of(tiny, **sizes)


def test_nothing_to_verify_without_a_drafter():
    with pytest.raises(DSV41Error, match="no drafter"):
        step_of(load_config(CONFIGS / "flash_groups.json"), program="verify", rows=1, context=128)


def test_kinds_cover_all_parameters(released):
    _, step = step_of(released, program="decode", rows=1, context=65536)
    assert sum(parameter_bytes(step.params).values()) == total_bytes(step.params)
    # Nothing large may be called a norm for want of a better word.
    assert parameter_bytes(step.params)["norms"] < 2 << 20
    assert len(list(local_shapes(step.params))) == len(jax.tree.leaves(step.params))


def test_roofline():
    chip = chip_of("tpu7x:2x2x1")
    assert chip.devices == 2 and chip.flops == 2307e12 / 2
    line = roofline(chip, bytes=3690e9, flops=2307e12, sent_bytes=600e9)
    assert (line.memory, line.products, line.links) == (1.0, 2.0, 2.0)
    assert line.overlapped == 2.0 and line.in_turn == 5.0
    with pytest.raises(DSV41Error, match="v5e, v5p, v6e, tpu7x"):
        chip_of("v4:2x2x1")
