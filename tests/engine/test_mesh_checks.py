"""Comparing a model on a mesh with one on one device."""

import dataclasses

import jax
import numpy as np
import pytest

from dsv41.engine.mesh_checks import agreement_row_by_row, on_mesh
from tests.models_for_tests import small_model


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_row_by_row():
    model = small_model()
    spread = on_mesh(model, "sequence=2", "decode")
    found = agreement_row_by_row(model, spread, rows=2, context=700, tokens=1)
    assert (found.largest, found.selections, found.experts) == (0, 1, 1)
    other = jax.tree.map(lambda x: np.asarray(x).copy(), model.params)
    other["layers"][2]["attn"]["indexer"]["weights_proj"]["weight"] *= -1
    found = agreement_row_by_row(dataclasses.replace(model, params=other), spread, rows=2, context=700, tokens=1)
    assert found.largest > 0 and found.selections < 1
