"""Masters and stored formats (training.md section 2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.config import DSV41Error
from dsv41.models import abstract_params
from dsv41.ops.linear import QuantizedArray, WeightFormat
from dsv41.train import training_params_abstract
from dsv41.train.master_weights import NO_QAT, QAT, forward_params, masters_from, stored_from
from tests.models_for_tests import small_model


def _shapes(tree):
    return jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype)), tree)


def test_masters_have_the_tree_that_is_optimised_and_come_back_as_stored():
    model = small_model()
    masters = masters_from(model.params, model.config, model.engram.tables)
    assert _shapes(masters) == _shapes(training_params_abstract(model.config))
    stored, tables = stored_from(masters, model.config)
    assert _shapes(stored) == _shapes(abstract_params(model.config))
    again = masters_from(stored, model.config, tables)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), masters, again)))


def test_the_forward_sees_what_is_stored():
    model = small_model()
    masters = masters_from(model.params, model.config, model.engram.tables)
    # Off the grid, so that rounding has something to do.
    masters = jax.tree.map(lambda x: x * 1.07, masters)
    seen = forward_params(masters, model.config, QAT())
    stored, _ = stored_from(masters, model.config)
    layer, w1 = seen["layers"][1], stored["layers"][1]["ffn"]["experts"]["w1"]
    assert layer["ffn"]["experts"]["w1"].keys() == {"weight"}
    dequantized = QuantizedArray(w1["weight"], w1["scale"], WeightFormat.FP4_ROW).dequantize()
    assert (layer["ffn"]["experts"]["w1"]["weight"] == dequantized).all()
    wq_a = stored["layers"][1]["attn"]["wq_a"]
    dequantized = QuantizedArray(wq_a["weight"], wq_a["scale"], WeightFormat.FP8_BLOCK).dequantize()
    assert (layer["attn"]["wq_a"]["weight"] == dequantized).all()
    assert "embed" not in layer["engram"]
    plain = forward_params(masters, model.config, NO_QAT)["layers"][1]["attn"]["wq_a"]["weight"]
    assert (plain == masters["layers"][1]["attn"]["wq_a"]["weight"].astype(jnp.bfloat16)).all()


def test_what_is_missing_is_named():
    model = small_model()
    masters = masters_from(model.params, model.config)
    with pytest.raises(DSV41Error, match=r"layers\.1\.engram\.embed\.weight"):
        stored_from(masters, model.config)
    del masters["layers"][2]["attn"]["wkv"]
    with pytest.raises(DSV41Error, match=r"parameter layers\.2\.attn\.wkv: there is no master"):
        forward_params(masters, model.config, QAT())
    with pytest.raises(DSV41Error, match=r"one for each of the layers \[1\], got 2"):
        masters_from(model.params, model.config, [np.zeros(1)] * 2)
