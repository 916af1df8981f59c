"""The model on eight devices: every preset gives the logits of one device, and arrays lie where they should.

Pages of sequences over several devices are tested in test_sequence_sharded.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import dsv41
from dsv41.cache import cache_specs
from dsv41.config import DSV41Error, load_config
from dsv41.engine import Engine, EngineOptions, generate
from dsv41.engine.mesh_checks import agreement, on_mesh
from dsv41.engine.speculation import Speculation
from dsv41.engine.speculative_step import compiled_round
from dsv41.models import abstract_params
from dsv41.models.sharded import compiled_forward, param_shardings, param_specs
from dsv41.sharding import LOCAL, PRESETS, ShardingRules, make_mesh, parse_mesh, place, preset_rules
from tests.golden import DATA
from tests.models.filled_cache import filled
from tests.models_for_tests import OVERRIDES, small_model
from tests.test_architecture import ROOT

needs_eight = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")

SLOTS = 8
PRESET_MESHES = [
    ("decode", "data=2,sequence=2,tensor=2"),
    pytest.param("decode", "sequence=4,tensor=2", marks=pytest.mark.slow),
    pytest.param("decode", "data=8", marks=pytest.mark.slow),
    pytest.param("prefill", "data=2,sequence=2,tensor=2", marks=pytest.mark.slow),
    pytest.param("prefill", "data=4,tensor=2", marks=pytest.mark.slow),
    pytest.param("train", "data=2,sequence=2,tensor=2", marks=pytest.mark.slow),
]


def run(model, logits: str = "last") -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits and selections of a step of eight sequences of several lengths, on caches of the same random contents."""
    rng = np.random.default_rng(0)
    cache = filled(model.init_cache(SLOTS, 1024), seed=3)
    if model.mesh is not None:
        cache = place(cache, model.mesh, cache_specs(cache, model.rules))
    past = [rng.integers(3, 500, 200 + 101 * i) for i in range(SLOTS)]
    new = [rng.integers(3, 500, 1 + i % 3) for i in range(SLOTS)]
    logits, _, aux = model.forward(model.make_batch(new, past), cache, logits=logits, capture=("choices",))
    return np.asarray(logits), jax.tree.map(np.asarray, aux)


@functools.cache
def on_one_device():
    return run(small_model())


@needs_eight
@pytest.mark.parametrize("preset, mesh", PRESET_MESHES)
def test_every_preset_equals_one_device(preset, mesh):
    """Sums cross devices only in the output projection of attention, in float32 and before it is rounded, so that the
    last bit of a bfloat16 may differ; with one device along `tensor` nothing may."""
    model = on_mesh(small_model(), mesh, preset)
    (found, choices), (expected, expected_choices) = run(model), on_one_device()
    assert np.isfinite(expected).all()
    if not model.rules.heads:
        np.testing.assert_array_equal(found, expected)
        jax.tree.map(np.testing.assert_array_equal, choices, expected_choices)
        return
    np.testing.assert_allclose(found, expected, atol=0.05)
    assert np.abs(found - expected).mean() < 1e-3


@pytest.mark.slow
@needs_eight
def test_copies_of_hot_experts():
    """Counted in one step, copied, and the same bits in the next one."""
    model = on_mesh(small_model(), "data=2,sequence=2", "decode")
    expected, choices = run(model)
    layers, experts = len(model.schedule.layers), model.config.text_config.n_routed_experts
    loads = np.stack([np.bincount(choices[f"experts.{n}"].reshape(-1), minlength=experts) for n in range(layers)])
    copied = model.with_expert_copies(loads, 1)
    w1 = copied.params["layers"][2]["ffn"]["experts"]["w1"]["weight"]
    assert w1.shape[0] == experts + 4 and w1.sharding.spec == P(("data", "sequence"))
    np.testing.assert_array_equal(run(copied)[0], expected)


def test_copies_that_cannot_be():
    with pytest.raises(DSV41Error, match="the experts are on one device"):
        small_model().with_expert_copies(np.ones((5, 12)), 1)
    rules = ShardingRules(batch=("data",), experts=("data",))
    spread = dataclasses.replace(small_model(), rules=rules)
    with pytest.raises(DSV41Error, match=r"expected counts \[5, 12\], got \[12\]"):
        spread.with_expert_copies(np.ones(12), 1)


def test_where_parameters_lie():
    """The released model on 64 devices."""
    config = load_config(ROOT / "configs" / "flash.json")
    rules = preset_rules("decode", parse_mesh("data=4,sequence=2,tensor=8"), config.text_config)
    assert rules == ShardingRules(
        batch=("data", "sequence"),
        pages=("sequence",),
        heads=("tensor",),
        experts=("data", "sequence", "tensor"),
        vocab=("sequence", "tensor"),
        engram_rows=("data", "sequence", "tensor"),
    )
    specs = param_specs(config, rules)
    layer, experts = specs["layers"][20], P(("data", "sequence", "tensor"))
    assert specs["embed"]["weight"] == specs["head"]["weight"] == P(("sequence", "tensor"))
    for name in ("w1", "w2", "w3"):
        assert layer["ffn"]["experts"][name] == {"weight": experts, "scale": experts}
        assert layer["ffn"]["shared_experts"][name] == {"weight": P(), "scale": P()}
    heads = {"weight": P("tensor"), "scale": P("tensor")}
    assert layer["attn"]["wq_b"] == layer["attn"]["wo_a"] == heads
    assert layer["attn"]["wo_b"] == {"weight": P(None, "tensor"), "scale": P(None, "tensor")}
    assert layer["attn"]["attn_sink"] == P("tensor")
    for name in ("wq_a", "wkv"):
        assert layer["attn"][name] == {"weight": P(), "scale": P()}
    drafter = param_specs(config, rules, "drafter")["mtp"][2]
    assert drafter["ffn"]["experts"]["w1"]["weight"] == experts
    assert drafter["markov_head"] == {"embed": {"weight": P()}, "head": {"weight": P()}}


@pytest.mark.parametrize(
    "preset, mesh, expected",
    [
        ("decode", "data=256", ShardingRules(batch=("data",), vocab=(), experts=(), engram_rows=("data",))),
        ("decode", "data=4,tensor=2", {"pages": (), "vocab": ("tensor",)}),
        ("prefill", "sequence=4,tensor=2", {"pages": (), "batch": ("sequence",), "vocab": ("tensor",)}),
        ("train", "data=2,sequence=4", {"pages": (), "vocab": ("sequence",), "experts": ("data", "sequence")}),
        ("decode", "data=1", LOCAL),
    ],
)
def test_presets(preset, mesh, expected):
    config = load_config(ROOT / "configs" / "flash.json").text_config
    rules = preset_rules(preset, parse_mesh(mesh), config)
    if isinstance(expected, ShardingRules):
        assert rules == expected
    else:
        assert {name: getattr(rules, name) for name in expected} == expected


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"batch": ("data", "data")}, "batch=('data', 'data') names an axis twice"),
        ({"batch": ("data",), "heads": ("data",)}, "batch and heads share ['data']"),
        ({"batch": ("data", "sequence"), "pages": ("data",)}, "are not the last axes of batch"),
        ({"batch": ("data",), "experts": ("tensor",)}, "experts is spread over ['tensor']"),
    ],
)
def test_contradictory_rules(rules, message):
    with pytest.raises(DSV41Error) as error:
        ShardingRules(**rules)
    assert message in str(error.value)


def test_an_axis_is_used_once_in_an_array():
    rules = ShardingRules(batch=("data",), heads=("tensor",), experts=("data", "tensor"))
    assert rules.spec("experts", None, None) == P(("data", "tensor"))
    with pytest.raises(DSV41Error, match="would use \\['tensor'\\] twice"):
        rules.spec("heads", "experts")
    with pytest.raises(DSV41Error, match="no logical axis 'head'"):
        rules.spec("head")


@needs_eight
def test_what_a_mesh_cannot_divide():
    model = small_model()
    with pytest.raises(DSV41Error, match=r"tensor=4: does not divide the 2 groups of heads"):
        preset_rules("decode", {"tensor": 4}, model.config.text_config)
    mesh, rules = make_mesh({"data": 8}, jax.devices()[:8]), ShardingRules(batch=("data",), experts=("data",))
    with pytest.raises(DSV41Error, match=r"layers.0.ffn.experts.w1.scale .*: 12 is not divisible by 8 devices"):
        param_shardings(abstract_params(model.config), param_specs(model.config, rules), mesh)
    with pytest.raises(DSV41Error, match="mesh data=3,sequence=1,tensor=1: needs 3 devices, there are 8"):
        make_mesh({"data": 3})


@needs_eight
def test_rows_that_are_not_where_their_slots_are():
    model = dataclasses.replace(
        small_model(), mesh=make_mesh({"data": 4}, jax.devices()[:4]), rules=ShardingRules(batch=("data",))
    )
    cache = model.init_cache(4, 256)
    with pytest.raises(DSV41Error, match="batch row 0: slot 3 lies on device 3 of 4, the row on device 0"):
        model.forward(model.make_batch([[5], [6]], slots=[3, 1]), cache)
    with pytest.raises(DSV41Error, match="2 rows cannot be spread equally over 4 devices"):
        model.forward(model.make_batch([[5], [6]], padded=False), cache)
    with pytest.raises(DSV41Error, match="num_slots=2 cannot be spread equally over 4 devices"):
        model.init_cache(2, 256)


def test_one_device_has_one_program():
    """However a caller says that there is no mesh."""
    assert compiled_forward() is compiled_forward(None, LOCAL) is compiled_forward(rules=LOCAL)
    assert compiled_round() is compiled_round(None, LOCAL)


@needs_eight
def test_a_checkpoint_on_a_mesh():
    """Each device holds its part of every parameter, and the parts are those of the files."""
    mesh = make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])
    spread = dsv41.load(DATA / "tiny_text", mesh=mesh, overrides=OVERRIDES, vision=False)
    assert spread.rules == preset_rules("decode", mesh.shape, spread.config.text_config)
    whole = dsv41.load(DATA / "tiny_text", overrides=OVERRIDES, vision=False)
    for part in ("backbone", "drafter"):
        specs = param_specs(spread.config, spread.rules, part)
        mine, theirs = (m.params if part == "backbone" else m.drafter for m in (spread, whole))
        assert jax.tree.map(lambda x: x.sharding.spec, mine) == specs
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    with pytest.raises(DSV41Error, match="sharding rules without a mesh"):
        dsv41.load(DATA / "tiny_text", rules=spread.rules)


PROMPTS = ([0, 17, 42, 5, 6, 7], [0, 5, 9], [0, 3, 3, 3, 3, 3, 3, 8, 9])


@needs_eight
@pytest.mark.slow
@pytest.mark.parametrize("speculate", [None, Speculation()], ids=["plain", "speculative"])
def test_generated_tokens(speculate):
    """Three requests on four groups of devices: one group has nothing to do."""
    model = small_model()
    options = {"max_new_tokens": 8, "stop_ids": [], "speculate": speculate}
    expected, found = (
        [r.token_ids for r in generate(m, PROMPTS, **options)]
        for m in (model, on_mesh(model, "data=2,sequence=2,tensor=2", "decode"))
    )
    assert found == expected


@needs_eight
@pytest.mark.slow
def test_engine_on_a_mesh_that_spreads_heads():
    engines = [
        Engine(m, EngineOptions(max_requests=4, max_tokens=256, speculation=Speculation()))
        for m in (small_model(), on_mesh(small_model(), "tensor=2", "decode"))
    ]
    answers = []
    for engine in engines:
        requests = [engine.add(p, max_new_tokens=8, stop_ids=[]) for p in PROMPTS]
        answers.append([list(engine.stream(r)) for r in requests])
    assert answers[0] == answers[1]


@needs_eight
def test_the_engine_refuses_a_mesh_that_spreads_rows():
    model = dataclasses.replace(
        small_model(), mesh=make_mesh({"data": 4}, jax.devices()[:4]), rules=ShardingRules(batch=("data",))
    )
    with pytest.raises(DSV41Error, match="the mesh spreads rows over 4 groups of devices"):
        Engine(model, EngineOptions(max_requests=4, max_tokens=256))


@pytest.mark.skipif(
    jax.default_backend() != "gpu" or len(jax.devices()) < 2, reason="needs two GPUs, and JAX_PLATFORMS=cuda,cpu"
)
@pytest.mark.parametrize("mesh", ["data=2", "sequence=2", "tensor=2"])
@pytest.mark.parametrize("preset", PRESETS)
def test_two_gpus(preset, mesh):
    """Through NCCL. Products of other shapes are summed in another order, which may decide near-ties otherwise."""
    found = agreement(small_model(), on_mesh(small_model(), mesh, preset), rows=8, context=300, tokens=2)
    assert found.mean < 0.05 and found.selections > 0.9 and found.experts > 0.95
