"""All rules together on one small tree (training.md section 3)."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from dsv41.config import DSV41Error, load_config
from dsv41.train import (
    OptimizerConfig,
    labels_of,
    make_optimizer,
    optimizer_state_shardings,
    row_blocks,
    training_params_abstract,
)
from tests.train import reference

TINY = load_config(pathlib.Path(__file__).parents[2] / "configs" / "tiny.json")
RATE, VISION_RATE = 1e-2, 2e-3
# Constants of the report with float32 products, so that float64 is near.
EXACT = OptimizerConfig(newton_schulz_dtype="float32", clip_norm=None)
CLIPPED = dataclasses.replace(EXACT, clip_norm=1.0)
# Updates of 0.18 times the rate, with the errors of float32 in ten Newton-Schulz steps (test_muon.FLOAT32).
FLOAT32 = {"rtol": 2e-5, "atol": 2e-4 * RATE}

# One parameter of every rule and rate; widths that the heads and groups of the tiny model divide.
SHAPES = {
    "embed.weight": (48, 16),
    "norm.weight": (16,),
    "layers.0.attn.wq_b.weight": (32, 16),
    "layers.0.attn.wkv.weight": (8, 16),
    "layers.0.attn.attn_sink": (4,),
    "layers.0.ffn.experts.w1.weight": (8, 8, 16),
    "layers.0.ffn.gate.weight": (8, 16),
    "layers.0.ffn.gate.bias": (8,),
    "layers.0.hc_attn_scale": (3,),
    "layers.1.engram.embed.weight": (64, 8),
    "layers.1.engram.q_weight": (2, 16),
    "vision.blocks.0.attn.wqkv.weight": (24, 8),
    "vision.blocks.0.norm1.weight": (8,),
    "image_start": (16,),
}
# What the table of training.md section 3.1 says of them: reference rule, decay, rate.
EXPECTED = {
    "embed.weight": ("sinkhorn", 0, RATE),
    "norm.weight": ("adam", 0.1, RATE),
    "layers.0.attn.wq_b.weight": ("muon", 0.1, RATE),
    "layers.0.attn.wkv.weight": ("muon", 0.1, RATE),
    "layers.0.attn.attn_sink": ("adam", 0, RATE),
    "layers.0.ffn.experts.w1.weight": ("muon", 0.1, RATE),
    "layers.0.ffn.gate.weight": ("muon", 0.1, RATE),
    "layers.0.ffn.gate.bias": (None, 0, RATE),
    "layers.0.hc_attn_scale": ("adam", 0, RATE),
    "layers.1.engram.embed.weight": ("sinkhorn", 0, 5 * RATE),
    "layers.1.engram.q_weight": ("adam", 0.1, RATE),
    "vision.blocks.0.attn.wqkv.weight": ("muon", 0.1, VISION_RATE),
    "vision.blocks.0.norm1.weight": ("adam", 0.1, VISION_RATE),
    "image_start": ("adam", 0, RATE),
}


def _tree(values):
    tree = {}
    for name, value in values.items():
        *parents, last = [int(key) if key.isdigit() else key for key in name.split(".")]
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _random(seed):
    rng = np.random.default_rng(seed)
    return _tree({name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()})


PARAMS, GRADIENTS = _random(0), [_random(i) for i in (1, 2, 3)]


@functools.cache
def _optimizer(config):
    return make_optimizer(TINY, PARAMS, config)


def _step_of(optimizer):
    @jax.jit
    def step(params, state, g):
        rates = {"learning_rate": RATE, "vision_learning_rate": VISION_RATE}
        updates, state = optimizer.update(g, state, params, **rates)
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def _step(config):
    """A compiled step of the small tree; tests with the same constants share it."""
    return _step_of(_optimizer(config))


def _run(config, gradients):
    """Parameters and state after a step for each gradient."""
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = _optimizer(config).init(params)
    for g in gradients:
        params, state = _step(config)(params, state, jax.tree.map(jnp.asarray, g))
    return params, state


def _same(a, b):
    """Whether trees hold the same numbers; by numpy, which compiles nothing."""
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b))


def _leaves(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(tree)}


# Of every rule, and of Muon's blocks: of heads, of experts, and one of a whole matrix whose shorter side is cut.
SHARDED = (
    "norm.weight", "layers.0.attn.wq_b.weight", "layers.0.ffn.experts.w1.weight", "layers.0.ffn.gate.weight",
    "layers.0.ffn.gate.bias", "layers.0.hc_attn_scale", "layers.1.engram.embed.weight",
)  # fmt: skip


def _part(tree, names):
    return _tree({name: x for name, x in _leaves(tree).items() if name in names})


@pytest.fixture(scope="module")
def trained():
    return _run(EXACT, GRADIENTS)


def test_every_rule_decay_and_rate_equal_the_reference(trained):
    assert EXPECTED.keys() == SHAPES.keys()
    start, gradients, after = _leaves(PARAMS), [_leaves(g) for g in GRADIENTS], _leaves(trained[0])
    for name, (rule, decay, rate) in EXPECTED.items():
        expected = start[name].astype(np.float64)
        for n in range(1, 4):
            history = [g[name].astype(np.float64) for g in gradients[:n]]
            update = {
                "muon": lambda h, name=name: reference.muon_update(h, row_blocks(name, TINY)),
                "sinkhorn": reference.sinkhorn_update,
                "adam": reference.adam_update,
                None: lambda h: 0.0,
            }[rule](history)
            expected = expected * (1 - rate * decay) - rate * update
        np.testing.assert_allclose(np.asarray(after[name]), expected, **FLOAT32, err_msg=name)


def test_without_gradient_only_what_decays_moves():
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    after, _ = _run(EXACT, [zeros])
    before, after = _leaves(PARAMS), _leaves(after)
    for name, (_, decay, rate) in EXPECTED.items():
        moved = np.asarray(after[name]) - before[name]
        if decay:
            np.testing.assert_allclose(moved, -rate * decay * before[name], rtol=1e-3, atol=1e-7, err_msg=name)
            assert (moved != 0).any()
        else:
            assert (moved == 0).all(), name


def test_routing_biases_are_left_alone_and_count_nowhere():
    """Not even in the norm that clips the others."""
    noisy = jax.tree.map(np.copy, GRADIENTS[0])
    noisy["layers"][0]["ffn"]["gate"]["bias"][:] = 1e6
    after, _ = _run(CLIPPED, [noisy])
    other, _ = _run(CLIPPED, [GRADIENTS[0]])
    assert _same(after, other)
    assert (_leaves(after)["layers.0.ffn.gate.bias"] == _leaves(PARAMS)["layers.0.ffn.gate.bias"]).all()


def test_clipping_limits_how_far_one_step_turns_the_momentum():
    """A gradient 10,000 times the one before counts as much as that: both have norm one behind the clip."""
    history = [GRADIENTS[0], jax.tree.map(lambda g: 1e4 * g, GRADIENTS[1])]

    def unit(gradients):
        norm = np.sqrt(sum(float((g**2).sum()) for n, g in _leaves(gradients).items() if EXPECTED[n][0]))
        return jax.tree.map(lambda g: g / np.float32(norm), gradients)

    clipped, by_hand = _run(CLIPPED, history)[0], _run(EXACT, [unit(g) for g in history])[0]
    for name, value in _leaves(clipped).items():
        np.testing.assert_allclose(np.asarray(value), np.asarray(_leaves(by_hand)[name]), **FLOAT32, err_msg=name)


def test_state_is_arrays_only_and_survives_orbax(trained, tmp_path):
    state = trained[1]
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    momenta = {name for name, x in _leaves(state).items() if x.ndim}
    # Muon and Sinkhorn keep one array a parameter, AdamW two, routing biases none.
    assert len(momenta) == sum({"adam": 2, None: 0}.get(rule, 1) for rule, _, _ in EXPECTED.values())
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda s: s, state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert _same(restored, state)


def test_steps_after_a_restore_are_the_same_bits(trained):
    copied = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), _run(EXACT, GRADIENTS[:2]))
    again = _step(EXACT)(*copied, jax.tree.map(jnp.asarray, GRADIENTS[2]))
    assert _same(again, trained)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
@pytest.mark.parametrize("spread", [False, True])
def test_sharded_equals_single(trained, spread):
    """Parameters cut along their longest axis that 8 devices divide; with `spread`, Muon's blocks whole on a device.

    No rule looks at another parameter, so that some of the tree come out as they do among all.
    """
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    named = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))  # noqa: E731

    def shard(x):
        axes = [i for i in np.argsort(x.shape)[::-1] if x.shape[i] % 8 == 0]
        return named(*(None,) * int(axes[0]), "data") if axes else named()

    shardings = jax.tree.map(shard, _part(PARAMS, SHARDED))
    cut = {name for name, s in _leaves(shardings).items() if not s.is_fully_replicated}
    assert cut == set(SHARDED) - {"layers.0.hc_attn_scale"}

    def place(tree):
        return jax.device_put(_part(tree, SHARDED), shardings)

    optimizer = make_optimizer(TINY, _part(PARAMS, SHARDED), EXACT, spread=named("data") if spread else None)
    params, step = place(PARAMS), _step_of(optimizer)
    placed = optimizer_state_shardings(jax.eval_shape(optimizer.init, params), shardings, named())
    state = jax.jit(optimizer.init, out_shardings=placed)(params)
    for g in GRADIENTS:
        params, state = step(params, state, place(g))
    for name, ours in _leaves(params).items():
        np.testing.assert_allclose(np.asarray(ours), np.asarray(_leaves(trained[0])[name]), **FLOAT32, err_msg=name)
    by_name = _leaves(shardings)
    for name, sharding in _leaves(placed).items():
        owner = next((n for n in by_name if name.endswith(f".{n}")), None)
        assert sharding == (named() if owner is None else by_name[owner]), name


@pytest.mark.slow
def test_a_quadratic_converges():
    """Half the squared distance to a target, of every parameter; a cosine takes the rate from 0.1 to 0."""
    target = _random(7)
    optimizer = make_optimizer(TINY, PARAMS, OptimizerConfig(weight_decay=0.0))

    def distance(params):
        return jax.tree.map(lambda p, t: jnp.abs(p - t).mean(), params, target)

    def step(carry, rate):
        params, state = carry
        g = jax.tree.map(lambda p, t: p - t, params, target)
        updates, state = optimizer.update(g, state, params, learning_rate=rate, vision_learning_rate=rate)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def train(params):
        rates = 0.05 * (1 + jnp.cos(jnp.linspace(0, jnp.pi, 600)))
        return jax.lax.scan(step, (params, optimizer.init(params)), rates)[0][0]

    before, after = _leaves(distance(PARAMS)), _leaves(distance(train(PARAMS)))
    for name in SHAPES:
        if EXPECTED[name][0] is None:
            assert after[name] == before[name]
        else:
            assert after[name] < 0.02 * before[name], (name, before[name], after[name])


def test_the_tree_of_the_tiny_model_is_accepted():
    """Every leaf of it, abstractly: shapes and dtypes of the updates are the parameters'."""
    params = training_params_abstract(TINY, engram=True, drafter=True, vision=True)
    optimizer = make_optimizer(TINY, params)
    state = jax.eval_shape(optimizer.init, params)
    rates = {"learning_rate": jax.ShapeDtypeStruct((), jnp.float32)}
    rates["vision_learning_rate"] = rates["learning_rate"]
    updates, after = jax.eval_shape(lambda g, s, p, r: optimizer.update(g, s, p, **r), params, state, params, rates)
    assert (updates, after) == (params, state)
    momenta = [x for x in jax.tree.leaves(state) if x.ndim]
    counts = {"adam_decay": 2, "adam_nodecay": 2, "frozen": 0}
    assert len(momenta) == sum(counts.get(label, 1) for label in jax.tree.leaves(labels_of(params)))


def test_gradients_may_be_bfloat16_but_masters_may_not():
    one_of_each_rule = ("norm.weight", "layers.0.attn.wq_b.weight", "layers.1.engram.embed.weight")
    params, g = (_part(tree, one_of_each_rule) for tree in (PARAMS, GRADIENTS[0]))
    rounded = jax.tree.map(lambda g: g.astype(jnp.bfloat16), g)
    wide = jax.tree.map(lambda g: g.astype(np.float32), rounded)
    optimizer = make_optimizer(TINY, params, EXACT)
    step, state = _step_of(optimizer), optimizer.init(params)
    assert _same(step(params, state, rounded), step(params, state, wide))
    params = jax.tree.map(lambda p: p, PARAMS)
    params["norm"] = {"weight": PARAMS["norm"]["weight"].astype(jnp.bfloat16)}
    with pytest.raises(DSV41Error, match=r"norm.weight: training needs float32 masters, got bfloat16"):
        make_optimizer(TINY, params)


def test_a_vision_tower_needs_its_own_rate():
    optimizer = _optimizer(EXACT)
    state = jax.eval_shape(optimizer.init, PARAMS)
    with pytest.raises(DSV41Error, match="vision_learning_rate"):
        jax.eval_shape(lambda s: optimizer.update(GRADIENTS[0], s, PARAMS, learning_rate=RATE), state)


@pytest.mark.parametrize(
    "field, value",
    [
        ("momentum", 1.0), ("sinkhorn_beta", -0.1), ("adam_b1", 1.0), ("adam_b2", 2.0), ("update_rms", -1.0),
        ("weight_decay", float("nan")), ("sinkhorn_steps", 10), ("sinkhorn_steps", 0), ("sinkhorn_threshold", -1.0),
        ("sinkhorn_eps", 0.0), ("adam_eps", 1e-40), ("engram_factor", -5.0), ("clip_norm", 0.0),
        ("momentum_dtype", "float16"), ("newton_schulz_dtype", "float8"),
    ],
)  # fmt: skip
def test_a_constant_out_of_range_names_its_field(field, value):
    with pytest.raises(DSV41Error, match=f"^{field}: expected .*, got"):
        OptimizerConfig(**{field: value})
