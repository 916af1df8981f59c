"""Training on a mesh: rows of the batch on all devices, and every large array of the state in parts on all of them.

Every device has some rows of the batch and a part of each large master with its optimiser's state. Its part of the loss
is computed in one `jax.shard_map`: masters are gathered for it, gradients are summed and scattered back behind it, and
what else the devices tell each other are counts. Tables of Engrams are never gathered (`RowSpread.look_up`). The
optimiser works on the parts, as XLA divides it, but for Muon, which needs whole matrices (`dsv41.train.muon`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41.config import DSV41Error, ModelConfig
from dsv41.models import Params
from dsv41.sharding.mesh import devices_along
from dsv41.sharding.placement import place
from dsv41.sharding.presets import preset_rules
from dsv41.train.labels import RateGroup, key_path_name, rate_group
from dsv41.train.optimizer import optimizer_state_shardings
from dsv41.train.pack import PackedBatch
from dsv41.train.row_spread import RowSpread

# Arrays of fewer values, and vectors, are whole on every device.
_SMALL = 1 << 12


def check_axes(sizes: Mapping[str, int]) -> None:
    """Raises DSV41Error if a mesh of these sizes has an axis along which training spreads nothing."""
    if sizes.get("tensor", 1) > 1:
        raise DSV41Error(
            f"mesh axis tensor={sizes['tensor']}: training spreads the rows of a batch alone, over data and sequence; "
            f"give data={devices_along(sizes, sizes)}"
        )


def split_axis(name: str, shape: tuple[int, ...], devices: int) -> int:
    """The axis along which a master is cut; -1: every device has all of it.

    Stacked experts by experts, tables of Engrams by columns (`RowSpread.look_up`; their rows are as many as primes
    add up to, which nothing divides), all else along its longest axis; where that does not divide, along the next one.
    """
    if devices == 1 or len(shape) < 2 or math.prod(shape) < _SMALL:
        return -1
    axes = sorted(range(len(shape)), key=lambda axis: -shape[axis])
    if len(shape) > 2:
        axes.sort(key=lambda axis: axis != 0)
    if rate_group(name) is RateGroup.ENGRAM_TABLE:
        axes = [1, 0]
    return next((axis for axis in axes if shape[axis] % devices == 0), -1)


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Where what a training step works on lies on a mesh.

    Attributes:
      mesh: of the devices.
      rows: how the batch is spread.
      splits: the masters' tree, with the axis along which each is cut, or -1.
    """

    mesh: Mesh
    rows: RowSpread
    splits: Any

    @classmethod
    def of(cls, mesh: Mesh, masters: Params, config: ModelConfig) -> Placement:
        """As the rules of the preset `train` spread the batch.

        Args:
          mesh: of the devices of all processes.
          masters: arrays or their abstract forms.
          config: of the model.

        Raises:
          DSV41Error: the mesh has axes that training does not use, or processes have different numbers of devices.
        """
        check_axes(mesh.shape)
        axes = preset_rules("train", mesh.shape, config.text_config).batch
        rows = RowSpread(axes, _numbers(mesh))
        splits = jax.tree_util.tree_map_with_path(
            lambda path, x: split_axis(key_path_name(path), x.shape, rows.devices), masters
        )
        return cls(mesh, rows, splits)

    @property
    def batch_spec(self) -> PartitionSpec:
        """Of arrays [B, ...]."""
        return PartitionSpec(self.rows.axes or None)

    @property
    def specs(self) -> Any:
        """Of the masters."""
        return jax.tree.map(lambda axis: PartitionSpec(*[None] * axis, *[self.rows.axes][: axis + 1]), self.splits)

    @property
    def everywhere(self) -> NamedSharding:
        """Of what every device has whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def masters(self) -> Any:
        """The masters' shardings."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs, is_leaf=_is_spec)

    @property
    def matrices(self) -> NamedSharding:
        """Of a stack of matrices, whole ones on each device."""
        return NamedSharding(self.mesh, self.batch_spec)

    def state(self, state: Any) -> Any:
        """The shardings of a `TrainState`, abstract or not."""
        optimizer = optimizer_state_shardings(state.optimizer, self.masters, self.everywhere)
        return dataclasses.replace(state, masters=self.masters, optimizer=optimizer, key=self.everywhere)

    def gather(self, masters: Params) -> Params:
        """Inside `jax.shard_map`: whole masters from the parts of all devices, but for the columns of Engram tables.

        Differentiated, gradients are summed and scattered.
        """

        def whole(path, x: jax.Array, axis: int) -> jax.Array:
            if axis < 0 or self._looks_up(path, axis):
                return x
            return jax.lax.all_gather(x, self.rows.axes, axis=axis, tiled=True)

        return jax.tree_util.tree_map_with_path(whole, masters, self.splits)

    def _looks_up(self, path: Any, axis: int) -> bool:
        return axis == 1 and rate_group(key_path_name(path)) is RateGroup.ENGRAM_TABLE

    def add(self, gradients: Params) -> Params:
        """Inside `jax.shard_map`: the sums over devices of the gradients of what each of them has whole."""
        return jax.tree.map(lambda g, axis: self.rows.total(g) if axis < 0 else g, gradients, self.splits)

    def batch(self, pack: PackedBatch) -> PackedBatch:
        """A batch on the devices, from the rows of it that `BatchOptions.process` and `processes` give this process."""
        processes = len({device.process_index for device in self.mesh.devices.flat})
        sharding = NamedSharding(self.mesh, self.batch_spec)

        def spread(x: np.ndarray) -> jax.Array:
            rows = x.shape[0] * processes
            each = rows // self.rows.devices

            def of_device(index: tuple[slice, ...]) -> np.ndarray:
                number = self.rows.numbers[(index[0].start or 0) // each]
                return x[number // processes :: self.rows.devices // processes]

            return jax.make_array_from_callback((rows, *x.shape[1:]), sharding, of_device)

        return jax.tree.map(spread, pack)

    def whole_batch(self, pack: PackedBatch) -> PackedBatch:
        """A batch of which every process has all rows, on the devices, with empty rows where they do not divide it."""
        missing = -pack.tokens.shape[0] % self.rows.devices
        blank = {"document": -1}

        def padded(name: str, x: np.ndarray) -> np.ndarray:
            return np.concatenate([x, np.full((missing, *x.shape[1:]), blank.get(name, 0), x.dtype)])

        arrays = {name: padded(name, x) for name, x in vars(pack).items() if x is not None}
        return place(dataclasses.replace(pack, **arrays), self.mesh, self.batch_spec)

    def on_rows(self, function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        """`function(masters, pack, *others)` of each device's parts of masters and rows, others being everywhere."""

        @functools.wraps(function)
        def run(masters: Params, pack: PackedBatch, *others: Any) -> Any:
            def here(masters, pack, *others):
                return function(masters, dataclasses.replace(pack, spread=self.rows), *others)

            specs = (self.specs, self.batch_spec, *[PartitionSpec()] * len(others))
            spread = jax.shard_map(here, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
            return spread(masters, pack, *others)

        return run


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _numbers(mesh: Mesh) -> tuple[int, ...]:
    """`RowSpread.numbers`: a process's devices have rows that the process reads, number p, p + processes, ..."""
    owners = [device.process_index for device in mesh.devices.flat]
    counts = collections.Counter(owners)
    if len(set(counts.values())) > 1:
        raise DSV41Error(f"mesh: expected as many devices in every process, got {[counts[p] for p in sorted(counts)]}")
    seen, numbers = collections.Counter(), []
    for owner in owners:
        numbers.append(seen[owner] * len(counts) + owner)
        seen[owner] += 1
    return tuple(numbers)
