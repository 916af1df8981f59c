"""Arrays of the host on the devices of a mesh, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def place(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Arrays that every process has whole, each device holding its part.

    Args:
      tree: numpy arrays; `jax.Array`s that lie as they should stay where they are.
      mesh: of the devices.
      specs: `PartitionSpec`s, a prefix of `tree`.

    Returns:
      The same tree of `jax.Array`s.
    """

    def one(spec: PartitionSpec, part: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: _global_array(x, sharding), part)

    return jax.tree.map(one, specs, tree, is_leaf=lambda s: isinstance(s, PartitionSpec))


def _global_array(x: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    x = np.asarray(x)
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def zeros(abstract: Any, mesh: Mesh, specs: Any) -> Any:
    """Zeros of the shapes and dtypes in `abstract`, made where they lie; specs as in `place`."""
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    make: Callable[[], Any] = jax.jit(
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract), out_shardings=shardings
    )
    return make()


def fetch(tree: Any) -> Any:
    """The whole of each array on the host of every process, as numpy arrays; all processes must ask."""
    leaves, structure = jax.tree.flatten(tree)
    far = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not _is_here(x)]
    if far:
        copies = _copy_to_all(leaves[far[0]].sharding.mesh)([leaves[i] for i in far])
        for i, copy in zip(far, copies, strict=True):
            leaves[i] = copy
    return jax.device_get(jax.tree.unflatten(structure, leaves))


def _is_here(x: jax.Array) -> bool:
    return x.is_fully_addressable or x.is_fully_replicated


@functools.cache
def _copy_to_all(mesh: Mesh) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Compiled once a mesh and shapes, so that a fetch in every step costs no compilation."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
