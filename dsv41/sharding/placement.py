"""Arrays of the host on the devices of a mesh, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def place(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Arrays that every process has whole, each device holding its part.

    Args:
      tree: numpy arrays.
      mesh: of the devices.
      specs: `PartitionSpec`s, a prefix of `tree`.

    Returns:
      The same tree of `jax.Array`s.
    """

    def one(spec: PartitionSpec, part: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: _global_array(np.asarray(x), sharding), part)

    return jax.tree.map(one, specs, tree, is_leaf=lambda s: isinstance(s, PartitionSpec))


def _global_array(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
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


def fetch(x: jax.Array) -> np.ndarray:
    """The whole of an array on the host of every process; all of them must ask."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
    return np.asarray(whole)
