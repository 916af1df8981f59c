"""Collectives over several mesh axes, inside `jax.shard_map`. Over no axis each is the identity and costs nothing."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from dsv41.sharding import MeshAxes


def axis_size(axes: MeshAxes) -> int:
    """Devices along the axes."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def axis_index(axes: MeshAxes) -> jax.Array | int:
    """int32 [] place of this device along the axes, the last one fastest."""
    return jax.lax.axis_index(axes) if axes else 0


def local_index(index: jax.Array, count: int, axes: MeshAxes) -> jax.Array:
    """Integers that count through all devices, `count` on each, as this device counts its own; others are clipped."""
    return jnp.clip(index - axis_index(axes) * count, 0, count - 1) if axes else index


def gather(x: jax.Array, axes: MeshAxes, axis: int = 0) -> jax.Array:
    """The parts of all devices one behind the other along `axis`."""
    return jax.lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x


def total(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """The sum over devices."""
    return jax.lax.psum(x, axes) if axes else x


def scatter_total(x: jax.Array, axes: MeshAxes, axis: int = 0) -> jax.Array:
    """This device's part along `axis` of the sum over devices."""
    return jax.lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True) if axes else x


def exchange(x: jax.Array, axes: MeshAxes, split: int = 0, concat: int = 0) -> jax.Array:
    """Part i along `split` goes to device i, which lays what it gets one behind the other along `concat`."""
    return jax.lax.all_to_all(x, axes, split, concat, tiled=True) if axes else x
