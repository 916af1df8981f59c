"""Tables in the memory of several hosts, each holding a run of their rows.

No host asks another. Every process knows all tokens of a step, so each hashes all of them, reads the rows that it has
and leaves zeros for the others. The devices then add these parts up, each getting the rows of its own tokens: one
reduce-scatter of B x T rows. Bytes are added as integers, of which all parts but one are zero, so that rows come out
bit for bit. The other choice, whole tables mapped by every host from a disk of its own, needs no exchange: then each
process reads the rows of its own tokens only (`Model.own_rows`).

Axis letters: A groups of devices of one process, B sequences, T tokens, L Engram layers, K rows a token and layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41.engram_store.row_shards import RowShards, take_shard
from dsv41.engram_store.store import EngramRows, EngramStore, EngramTable
from dsv41.ops import collectives
from dsv41.sharding import MeshAxes, devices_along

Parts = tuple[np.ndarray, np.ndarray | None]


class HostShard(EngramStore):
    """One host's run of rows of every table, copied into its memory. A look-up gives zeros for rows of other hosts.

    Args:
      tables: the whole ones, usually on mapped files; only this host's rows are read.
      shard, shards: which run this is, and of how many.
      readers: threads that copy.

    Raises:
      DSV41Error: as `EngramStore`; or there is too little memory.
    """

    def __init__(self, tables: Sequence[EngramTable], *, shard: int, shards: int, readers: int = 1):
        self._shard = shard
        self._cuts = tuple(RowShards(rows=table.rows, shards=shards) for table in tables)
        own = [take_shard(table, cut, shard) for table, cut in zip(tables, self._cuts, strict=True)]
        super().__init__([table.in_memory(threads=readers) for table in own])

    @property
    def whole(self) -> bool:
        return False

    @property
    def rows_per_layer(self) -> tuple[int, ...]:
        return tuple(cut.rows for cut in self._cuts)

    def _look_up(
        self, ordinals: range, row_ids: np.ndarray, valid: np.ndarray | None, refuse_broken: bool
    ) -> EngramRows:
        dtype, width, groups = self.row_format
        values = np.zeros((*row_ids.shape, width), dtype)
        scales = np.zeros((*row_ids.shape, groups), np.uint8) if groups else None
        wanted = np.ones(row_ids.shape[:2], bool) if valid is None else valid
        for i, ordinal in enumerate(ordinals):
            ids = row_ids[wanted][:, i]
            shard, local = self._cuts[ordinal].locate(ids)
            own = np.zeros((*wanted.shape, ids.shape[-1]), bool)
            own[wanted] = shard == self._shard
            asked = local[shard == self._shard].reshape(1, -1, 1, 1)
            found = super()._look_up(range(ordinal, ordinal + 1), asked, None, refuse_broken)
            for whole, part in zip((values, scales), found, strict=True):
                if whole is not None:
                    word = f"u{whole.itemsize}"
                    whole.view(word)[:, :, i][own] = part.view(word)[0, :, 0, 0]
        return EngramRows(values, scales)


def process_axes(mesh: Mesh) -> MeshAxes:
    """The mesh axes along which devices belong to different processes."""
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    return tuple(name for i, name in enumerate(mesh.axis_names) if (np.diff(owners, axis=i) != 0).any())


def join_rows(rows: EngramRows, mesh: Mesh, spec: PartitionSpec) -> tuple[jax.Array, jax.Array | None]:
    """The rows of a step from the parts that all processes have read; all of them must call, in the same order.

    Args:
      rows: [B, T, L, K, ...] this process's part.
      mesh: of all devices.
      spec: how the step's rows are spread.

    Returns:
      values and scales [B, T, L, K, ...], spread so.
    """
    axes = process_axes(mesh)
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    kept = [i for i, name in enumerate(mesh.axis_names) if name in axes]
    groups = np.moveaxis(owners, kept, range(len(kept))).reshape(devices_along(mesh.shape, axes), -1)[:, 0]
    # A process with several groups gives its part to the first of them, else it would be added twice.
    first = int(np.argmax(groups == jax.process_index()))
    none = EngramRows(*(None if x is None else np.zeros_like(x) for x in rows))
    return add_parts(lambda group: rows if group == first else none, mesh, axes, spec)


def add_parts(
    part: Callable[[int], EngramRows], mesh: Mesh, axes: MeshAxes, spec: PartitionSpec
) -> tuple[jax.Array, jax.Array | None]:
    """The sum of the parts of all groups of devices along `axes`; `part` is asked for groups of this process only."""
    count = devices_along(mesh.shape, axes)
    sharding = NamedSharding(mesh, PartitionSpec(axes or None))
    mine = next(iter(sharding.addressable_devices_indices_map((count,)).values()))[0].start or 0
    found = []
    for place, like in enumerate(part(mine)):
        if like is None:
            found.append(None)
            continue
        word = np.dtype(f"u{like.itemsize}")
        shape = (count, *like.shape)
        parts = jax.make_array_from_callback(
            shape, sharding, lambda index, place=place, word=word: part(index[0].start or 0)[place].view(word)[None]
        )
        found.append(_compiled_sum(mesh, axes, spec, like.dtype, like.shape[0] % count == 0)(parts))
    return found[0], found[1]


@functools.cache
def _compiled_sum(mesh: Mesh, axes: MeshAxes, spec: PartitionSpec, dtype: np.dtype, divides: bool):
    """Integers [A, B, ...], a group's part each -> `dtype` [B, ...]."""

    def add(part: jax.Array) -> jax.Array:
        return collectives.scatter_total(part[0], axes) if divides else collectives.total(part[0], axes)

    each, whole = PartitionSpec(axes or None), PartitionSpec()
    added = jax.shard_map(add, mesh=mesh, in_specs=each, out_specs=each if divides else whole, check_vma=False)
    return jax.jit(
        lambda parts: jax.lax.bitcast_convert_type(added(parts), jnp.dtype(dtype)),
        out_shardings=NamedSharding(mesh, spec),
    )
