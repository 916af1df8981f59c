"""Masters out of the checkpoint of a training run, without its optimiser."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from dsv41.config import DSV41Error
from dsv41.models import Params
from dsv41.train.checkpoints import CHECKPOINTS, Checkpoints
from dsv41.train.labels import key_path_name


def saved_masters(run: str | pathlib.Path, like: Params, step: int | None = None) -> tuple[Params, int]:
    """Float32 masters of a run of launch.train or launch.train_dspark, on the default device, and their step.

    A run may be saving meanwhile.

    Args:
      run: its directory.
      like: which ones: nested dicts of anything with a shape, as `training_params_abstract` describes them.
      step: of which checkpoint; None: the last.

    Raises:
      DSV41Error: there is no such checkpoint, or a parameter is missing in it or has another shape; names it.
    """
    with Checkpoints(pathlib.Path(run) / CHECKPOINTS, read_only=True) as checkpoints:
        step = checkpoints.chosen(step)
        arrays = checkpoints.arrays(step)

        def read(path: tuple[Any, ...], wanted: Any) -> jax.Array:
            name = f"masters.{key_path_name(path)}"
            found = arrays.get(name)
            if found is None or found.shape != tuple(wanted.shape):
                shape = "nothing" if found is None else list(found.shape)
                raise DSV41Error(
                    f"{checkpoints.folder / str(step)}: {name}: expected {list(wanted.shape)}, found {shape}"
                )
            # A copy, which a step may be given for good; a view of numpy's memory may not.
            return jnp.array(checkpoints.read(found))

        return jax.tree_util.tree_map_with_path(read, like), step
