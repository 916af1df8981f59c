"""Parameters to begin with."""

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.train import training_params_abstract
from dsv41.train.initial import initial_masters
from tests.models_for_tests import small_model


def test_every_parameter_is_made_and_none_twice():
    config = small_model().config
    masters = initial_masters(config, 3)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (masters, training_params_abstract(config)))
    assert shapes[0] == shapes[1]
    again, other = initial_masters(config, 3), initial_masters(config, 4)
    seen = set()
    leaves = zip(*(jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (masters, again, other)), strict=True)
    for (path, x), (_, same), (_, different) in leaves:
        name = jax.tree_util.keystr(path)
        assert np.isfinite(np.asarray(x)).all(), name
        assert np.array_equal(x, same), name
        if np.asarray(x).std() > 0:
            assert not np.array_equal(x, different), name
            first = float(x.reshape(-1)[0])
            assert first not in seen, name
            seen.add(first)
    w1, wo_b = masters["layers"][2]["ffn"]["experts"]["w1"]["weight"], masters["layers"][2]["attn"]["wo_b"]["weight"]
    np.testing.assert_allclose(jnp.std(w1), 128**-0.5, rtol=0.02)
    np.testing.assert_allclose(jnp.std(wo_b), (64 * 2 * len(masters["layers"])) ** -0.5, rtol=0.03)
    assert (masters["layers"][2]["attn_norm"]["weight"] == 1).all()
    assert not masters["layers"][2]["ffn"]["gate"]["bias"].any()
