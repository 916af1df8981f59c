"""Meshes of devices from their written form."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from dsv41.config import DSV41Error
from dsv41.sharding.rules import AXES


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes of all axes that a text such as "data=4,tensor=2" says; an axis that it leaves out has size 1.

    Raises:
      DSV41Error: the text is malformed; says what is expected.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
        if match is None or match[1] not in AXES or match[1] in sizes or not int(match[2]):
            raise DSV41Error(f"mesh {text!r}: expected each of {', '.join(AXES)} at most once, as in data=4,tensor=2")
        sizes[match[1]] = int(match[2])
    return {axis: sizes.get(axis, 1) for axis in AXES}


def devices_along(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    """How many devices the axes have together; 1 over none. `sizes` are those of a mesh (`Mesh.shape`)."""
    return math.prod(sizes[axis] for axis in axes)


def first_devices(sizes: Mapping[str, int]) -> list[jax.Device]:
    """As many of the devices as a mesh of these sizes has; all of them, if that is more."""
    return jax.devices()[: devices_along(sizes, sizes)]


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the axes `AXES`; neighbours along the last axis are neighbours among the devices.

    Args:
      sizes: of the axes; one that is left out has size 1.
      devices: as many as the sizes multiply to; None: those of all processes.

    Raises:
      DSV41Error: there are more or fewer devices.
    """
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = jax.devices() if devices is None else list(devices)
    if math.prod(shape) != len(devices):
        named = ",".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
        raise DSV41Error(f"mesh {named}: needs {math.prod(shape)} devices, there are {len(devices)}")
    if all(device.platform == "tpu" for device in devices):
        # An axis of 8 may take half of two physical axes of a 4x4x4 slice.
        placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        placed = np.array(devices).reshape(shape)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))
