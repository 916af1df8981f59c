"""random_model: the layout of a loaded model, numbers that stay numbers, and what is refused."""

import jax
import numpy as np
import pytest

from dsv41.checkpoint.random_model import random_model
from dsv41.config import DSV41Error, load_config
from tests.golden import DATA
from tests.models_for_tests import tiny_model

CONFIGS = DATA.parents[1] / "configs"


def test_has_the_layout_of_a_loaded_model():
    model, loaded = random_model(tiny_model().config), tiny_model()

    def shapes(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    assert shapes(model.params) == shapes(loaded.params) and shapes(model.drafter) == shapes(loaded.drafter)
    rows = np.arange(48).reshape(1, 1, 2, 24)
    for mine, other in zip(model.engram.lookup(rows), loaded.engram.lookup(rows), strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
    assert random_model(model.config, drafter=False).drafter is None


@pytest.mark.slow
def test_logits_are_numbers_and_differ():
    """In the program that the loaded model runs."""
    model = random_model(tiny_model().config, seed=1)
    batch = model.make_batch([[0, *range(40, 79)]])
    logits, _, aux = model.forward(batch, model.init_cache(1, 256), logits="all", capture=("streams",))
    logits = np.asarray(logits)[0, :40]
    assert np.isfinite(logits).all() and 0.1 < logits.std() < 10
    assert len(set(logits.argmax(-1).tolist())) > 10
    last = np.asarray(aux["block_out.11"], np.float32)[0, :40]
    assert 0.1 < np.sqrt((last**2).mean()) < 100


def test_the_seed_decides():
    config = tiny_model().config
    one, two, other = (random_model(config, seed=s).params["head"]["weight"] for s in (1, 1, 2))
    assert (one == two).all() and (one != other).any()


def test_unquantised():
    config = load_config(DATA / "tiny_bf16")
    model = random_model(config)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"bfloat16", "float32"}


def test_a_large_config_is_refused_at_once():
    with pytest.raises(DSV41Error, match=r"random weights of this config take .* GiB, more than 8; use a checkpoint"):
        random_model(load_config(CONFIGS / "flash.json"))
