"""Masters that no stored format holds exactly, so that rounding has something to do."""

import functools

import jax
import numpy as np

from dsv41.train.master_weights import StoredTable, masters_from
from tests.models_for_tests import small_model


@jax.jit
def _part(stored):
    return masters_from(stored, small_model().config)  # which says how many tables to expect; there are none


_with_tables = jax.jit(masters_from, static_argnums=1)


def masters(stored, config, tables=()):
    """`masters_from` in a program for each kind of layer: operations one by one are a program for every shape."""
    found = {
        name: {i: _part(layer) for i, layer in part.items()} if name in ("layers", "mtp") else _part(part)
        for name, part in stored.items()
    }
    if tables:
        layers = config.text_config.engram_layer_ids
        bare = {"layers": {i: {"engram": {}} for i in layers}}
        rows = _with_tables(bare, config, [StoredTable(table.values, table.scales) for table in tables])
        for i in layers:
            found["layers"][i]["engram"] |= rows["layers"][i]["engram"]
    return found


def off_grid(masters, seed: int):
    """Every number up to a fifth smaller or larger, as numpy arrays; the model stays about as it was."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.asarray(x) * rng.uniform(0.8, 1.2, x.shape).astype(np.float32), masters)


@functools.cache
def backbone():
    model = small_model()
    return off_grid(masters(model.params, model.config, model.engram.tables), 3)


@functools.cache
def drafter():
    model = small_model()
    return off_grid(masters(model.drafter, model.config), 4)
