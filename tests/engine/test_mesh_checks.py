"""Comparing a model on a mesh with one on one device."""

import jax
import numpy as np
import pytest

from dsv41.engine import mesh_checks
from dsv41.engine.mesh_checks import on_mesh, selection_agreement
from tests.models_for_tests import small_model


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@pytest.mark.parametrize("mesh", ["sequence=2", pytest.param("tensor=2", marks=pytest.mark.slow)])
def test_selections(mesh, monkeypatch):
    model = small_model()
    spread = on_mesh(model, mesh, "decode")
    # Behind 9 tokens a query sees fewer entries than it may select.
    assert [selection_agreement(model, spread, rows=2, context=context) for context in (700, 9)] == [1, 1]
    queries = mesh_checks._random_queries(model.config, 2)
    sets, there = (mesh_checks._selections(m, queries, 700) for m in (model, spread))
    assert len(sets) == sum(layer.selects for layer in model.schedule.layers)
    for here, other in zip(sets, there, strict=True):
        np.testing.assert_array_equal(here, other)  # plain XLA takes the first of equal scores everywhere
        assert (np.diff(here) > 0).all() and here.min() >= 0
    if mesh == "sequence=2":  # a merge that takes what lies on one device only is found out

        def no_merge(found, axes, ordered):
            return [jax.tree.map(lambda x: x[:1], part) for part in found]

        monkeypatch.setattr("dsv41.layers.indexer.merge_ranked", no_merge)
        assert selection_agreement(model, spread, rows=2, context=700) < 1
