"""Which rules a model on a mesh gets, and meshes that no rules fit."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import dsv41
from dsv41.checkpoint.load import mesh_rules
from dsv41.config import DSV41Error
from dsv41.sharding import LOCAL, ShardingRules, make_mesh
from tests.golden import DATA
from tests.models_for_tests import tiny_model


def one_device(*axes: str) -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(axes)), axes)


def test_a_mesh_without_rules_gets_those_for_decoding():
    config = tiny_model().config
    assert mesh_rules(config, None, None) == mesh_rules(config, make_mesh({}, jax.devices()[:1]), None) == LOCAL


@pytest.mark.parametrize(
    "mesh, rules, message",
    [
        (one_device("x"), None, r"mesh axes \['x'\]: expected some of data, sequence, tensor"),
        (one_device("data", "model"), ShardingRules(batch=("data",)), r"mesh axes \['model'\]"),
        (one_device("data"), ShardingRules(heads=("tensor",)), r"name \['tensor'\], the mesh has the axes data only"),
        (None, ShardingRules(batch=("data",)), "sharding rules without a mesh"),
    ],
)
def test_meshes_and_rules_that_do_not_fit(mesh, rules, message):
    with pytest.raises(DSV41Error, match=message):
        dsv41.load(DATA / "tiny_text", mesh=mesh, rules=rules)
