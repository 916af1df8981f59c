"""The MoE layer on a mesh: each device's part of it gives the bits of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dsv41.config import DSV41Error
from dsv41.layers.linear import logical_axes_of, parameters_of, with_parameters
from dsv41.layers.moe import MoE
from dsv41.ops.expert_copies import with_copies
from dsv41.ops.linear import WeightFormat
from dsv41.sharding import LOCAL, ShardingRules, make_mesh, plan_copies
from tests.models_for_tests import tiny_model

EXPERTS = 12
SIZES = {"data": 2, "tensor": 2}
AXES = ("data", "tensor")
RULES = ShardingRules(batch=("data",), heads=("tensor",), experts=AXES)


def _layer(rules=LOCAL, placement=None) -> MoE:
    formats = {"dense": WeightFormat.FP8_BLOCK, "routed": WeightFormat.FP4_ROW}
    config = tiny_model().config.text_config
    return MoE(config, **formats, experts=EXPERTS, top_k=3, rules=rules, placement=placement)


def _run(layer: MoE, params, *args):
    y, chosen, weights = with_parameters(layer, params)(*args, None)
    return y, chosen, weights


@pytest.mark.parametrize("extra", [None, 1])
def test_a_layer_on_four_devices(extra):
    """Twenty tokens of two rows; each device has five of them and three experts, or four with one copy."""
    mesh, params = make_mesh(SIZES, jax.devices()[:4]), tiny_model().params["layers"][3]["ffn"]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 20, 128)), jnp.bfloat16)
    valid, images = jnp.asarray(rng.random((1, 20)) < 0.8), jnp.asarray(rng.random((1, 20)) < 0.3)
    y, chosen, weights = jax.jit(lambda *args: _run(_layer(), *args))(params, x, valid, images)

    placement = None
    if extra is not None:
        placement = plan_copies(np.bincount(np.asarray(chosen).reshape(-1), minlength=EXPERTS), devices=4, extra=extra)
        params = params | {"experts": with_copies(params["experts"], placement, mesh, RULES)}
    layer = _layer(RULES, placement)
    assert jax.tree.map(lambda a: a.shape, parameters_of(layer)) == jax.tree.map(lambda a: a.shape, params)
    specs = jax.tree.map(
        lambda axes: RULES.spec(*axes), logical_axes_of(layer), is_leaf=lambda axes: isinstance(axes, tuple)
    )
    assert specs["experts"]["w1"]["weight"] == PartitionSpec(AXES) and specs["gate"]["weight"] == PartitionSpec()

    tokens = PartitionSpec(None, AXES)
    step = jax.shard_map(
        lambda *args: _run(layer, *args), mesh=mesh, in_specs=(specs, *(tokens,) * 3), out_specs=tokens, check_vma=False
    )
    for found, expected in zip(jax.jit(step)(params, x, valid, images), (y, chosen, weights), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rules, experts", [(LOCAL, EXPERTS), (RULES, 16)])
def test_a_placement_for_another_layer_is_refused(rules, experts):
    placement = plan_copies(np.ones(experts), devices=4, extra=1)
    with pytest.raises(DSV41Error, match=f"made for {experts} experts on 4 devices, the layer has 12 over"):
        _layer(rules, placement)
