"""Functions of query tokens in tiles."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tiling import map_query_tiles, query_tile


@pytest.mark.parametrize("tile", [1, 3, 4, 7, 16])
def test_tiles_change_nothing(tile):
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(2, 13, 4))), jnp.asarray(rng.integers(0, 9, (2, 13)))

    def fn(x, y):
        return {"scaled": x * y[..., None], "sum": x.sum(-1) + y}

    whole, tiled = fn(x, y), map_query_tiles(fn, tile, x, y)
    for name in whole:
        np.testing.assert_array_equal(tiled[name], whole[name])


@pytest.mark.parametrize(
    ("tokens", "bytes_per_token", "tile"), [(100, 1, 100), (100, 10, 64), (100, 2000, 1), (3, 400, 2)]
)
def test_tile_fits_the_budget(tokens, bytes_per_token, tile):
    assert query_tile(tokens, bytes_per_token, budget=1000) == tile


def test_no_tokens():
    assert query_tile(0, 100) == 1
    assert map_query_tiles(lambda x: x + 1, 1, jnp.zeros((2, 0, 3))).shape == (2, 0, 3)
