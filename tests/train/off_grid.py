"""Masters that no stored format holds exactly, so that rounding has something to do."""

import functools

import jax
import numpy as np

from dsv41.train.master_weights import masters_from
from tests.models_for_tests import small_model


def off_grid(masters, seed: int):
    """Every number up to a fifth smaller or larger, as numpy arrays; the model stays about as it was."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.asarray(x) * rng.uniform(0.8, 1.2, x.shape).astype(np.float32), masters)


@functools.cache
def backbone():
    model = small_model()
    return off_grid(masters_from(model.params, model.config, model.engram.tables), 3)


@functools.cache
def drafter():
    model = small_model()
    return off_grid(masters_from(model.drafter, model.config), 4)
