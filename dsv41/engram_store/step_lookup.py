"""Engram rows inside a compiled step, whose tokens the host does not know yet.

A speculative step verifies tokens that it has just drafted, so it hashes them itself. The rows come from tables on the
device where those are small, otherwise through a callback from the store in host memory or on the mapped file.

On a mesh, tables of any size can lie on the devices, cut by row into equal runs (`RowShards`). Inside `jax.shard_map`
each device then asks all of them for the rows of its own tokens (`dsv41.ops.sharded_rows`): ids and rows travel, the
tables never do. Ids come from the hash, which names no row of the padding at the end of the last run.

Axis letters: B sequences, T tokens, L Engram layers, K rows a token and layer, D row width, N look-back slots.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41.config import DSV41Error
from dsv41.engram_store.row_shards import RowShards, take_shard
from dsv41.engram_store.store import EngramStore, EngramTable
from dsv41.ops.engram_hash import EngramHashSpec
from dsv41.ops.engram_hash_device import EngramHashArrays, classes_window_device, engram_hash_arrays, row_ids_device
from dsv41.ops.sharded_rows import take_sharded_rows
from dsv41.sharding import MeshAxes, devices_along, place

# Tables up to this size are copied to the device.
DEVICE_BYTES = 1 << 28


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepLookup:
    """Everything needed to turn token ids into rows under `jax.jit`; an argument of the compiled step."""

    hashing: EngramHashArrays
    token_map: jax.Array  # int32 [V] Engram class of each token id
    values: tuple[jax.Array, ...] | None  # per table float8_e4m3fn or bfloat16 [rows, D]; None: ask `store`
    scales: tuple[jax.Array, ...] | None  # per table uint8 [rows, D / 32]
    store: EngramStore = dataclasses.field(metadata={"static": True})
    image_token_id: int = dataclasses.field(metadata={"static": True})
    axes: MeshAxes = dataclasses.field(default=(), metadata={"static": True})  # that rows of tables are spread over

    def specs(self) -> StepLookup:
        """How each array lies on a mesh: rows of tables over `axes`, all else everywhere."""
        tables = jax.tree.map(lambda _: PartitionSpec(self.axes or None), (self.values, self.scales))
        everywhere = jax.tree.map(lambda _: PartitionSpec(), self)
        return dataclasses.replace(everywhere, values=tables[0], scales=tables[1])

    @property
    def on_device(self) -> bool:
        """Whether the tables are on the device."""
        return self.values is not None

    def rows(self, tokens: jax.Array, history: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Rows of new tokens.

        Args:
          tokens: int32 [B, T].
          history: int32 [B, N - 1] tokens before them, newest last, -1 before the sequence start.
          valid: bool [B, T]; the rows of other tokens mean nothing, so that all of them read the same ones.

        Returns:
          values float8_e4m3fn or bfloat16 [B, T, L, K, D] and scales uint8 [B, T, L, K, D / 32] or None, the same bytes
          as `EngramStore.lookup` gives for the same tokens. A row with a NaN scale comes as it is. With `axes` this is
          one device's part of a step (inside `jax.shard_map`): B rows of its own, as many on each.
        """
        with jax.named_scope("engram_lookup"):
            window = classes_window_device(self.hashing, self.token_map, tokens, history, self.image_token_id)
            ids = jnp.where(valid[..., None, None], row_ids_device(self.hashing, window), self.hashing.offsets)
            if self.values is None:
                return self._from_host(ids)
            return self._gather(self.values, ids), None if self.scales is None else self._gather(self.scales, ids)

    def _gather(self, tables: tuple[jax.Array, ...], ids: jax.Array) -> jax.Array:
        rows = [take_sharded_rows(table, ids[:, :, i], self.axes) for i, table in enumerate(tables)]
        return jnp.stack(rows, axis=2)

    def _from_host(self, ids: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        dtype, width, groups = self.store.row_format
        raw = np.dtype(f"u{dtype.itemsize}")  # callbacks hand over plain integers on every backend

        def look_up(ids):
            values, scales = self.store.lookup(np.asarray(ids), refuse_broken=False)
            return values.view(raw), np.zeros((0,), np.uint8) if scales is None else scales

        shapes = (
            jax.ShapeDtypeStruct((*ids.shape, width), raw),
            jax.ShapeDtypeStruct((*ids.shape, groups) if groups else (0,), np.uint8),
        )
        values, scales = jax.pure_callback(look_up, shapes, ids)
        return jax.lax.bitcast_convert_type(values, dtype), scales if groups else None


def step_lookup(
    store: EngramStore,
    spec: EngramHashSpec,
    token_map: np.ndarray,
    image_token_id: int,
    *,
    device_bytes: int = DEVICE_BYTES,
    mesh: Mesh | None = None,
    axes: MeshAxes = (),
) -> StepLookup:
    """A `StepLookup` over `store`.

    Args:
      store: the tables.
      spec: the hash.
      token_map: int32 [V].
      image_token_id: the id that marks an image span and blocks the look-back.
      device_bytes: tables of at most this many bytes in all are copied to the device.
      mesh: on which the steps run; None: one device.
      axes: of the mesh, over which tables on devices are spread by row; over none every device has them whole. Each
        process reads the rows of its own devices only.

    Raises:
      DSV41Error: a table that goes to the device holds a NaN scale, which names the layer; the tables do not fit the
        device; tables that stay on the host need the CPU backend, which was left out; or this host has not all rows.
      ConfigError: the hash does not fit 32-bit arithmetic.
    """
    if not store.whole:
        raise DSV41Error("engram: look-ups inside a step need whole tables, and hosts keep a part of the rows each")
    values = scales = None
    if store.nbytes <= device_bytes:
        values, scales = _on_devices(store, mesh, axes)
    else:
        axes = ()
        _check_callbacks()
    everywhere: Any = (engram_hash_arrays(spec), np.asarray(token_map, np.int32))
    everywhere = jax.tree.map(jnp.asarray, everywhere) if mesh is None else place(everywhere, mesh, PartitionSpec())
    return StepLookup(
        hashing=everywhere[0],
        token_map=everywhere[1],
        values=values,
        scales=scales,
        store=store,
        image_token_id=image_token_id,
        axes=axes,
    )


def _on_devices(
    store: EngramStore, mesh: Mesh | None, axes: MeshAxes
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...] | None]:
    """Values and scales of all tables, as global arrays where there is a mesh."""
    put = _place_table if mesh is None else lambda table: _shard_table(table, mesh, axes)
    try:
        tables = jax.block_until_ready([put(table) for table in store.tables])
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise DSV41Error(f"engram: the device has no room for tables of {store.nbytes:,} bytes") from e
    values, scales = zip(*tables, strict=True)
    return values, None if scales[0] is None else scales


def _place_table(table: EngramTable) -> tuple[jax.Array, jax.Array | None]:
    _refuse_broken(table)
    # On CPU an array would otherwise alias the mapped file.
    copied = jax.default_backend() == "cpu"
    values, *scales = (jnp.asarray(np.array(a) if copied else a) for a in table.arrays)
    return values, scales[0] if scales else None


def _shard_table(table: EngramTable, mesh: Mesh, axes: MeshAxes) -> tuple[jax.Array, jax.Array | None]:
    shards = RowShards(rows=table.rows, shards=devices_along(mesh.shape, axes))
    sharding = NamedSharding(mesh, PartitionSpec(axes or None))
    parts: dict[int, EngramTable] = {}

    def part(index: tuple[slice, ...]) -> EngramTable:
        shard = (index[0].start or 0) // shards.rows_per_shard
        if shard not in parts:
            parts[shard] = take_shard(table, shards, shard)
            _refuse_broken(parts[shard])
        return parts[shard]

    def put(array: np.ndarray, place: int) -> jax.Array:
        shape = (shards.rows_per_shard * shards.shards, array.shape[1])
        return jax.make_array_from_callback(shape, sharding, lambda index: np.array(part(index).arrays[place]))

    values, *scales = (put(array, place) for place, array in enumerate(table.arrays))
    return values, scales[0] if scales else None


def _refuse_broken(table: EngramTable) -> None:
    if table.scales is not None and (table.scales == 255).any():
        raise DSV41Error(f"engram table of layer {table.layer}: a row has a NaN scale (byte 255)")


def _check_callbacks() -> None:
    """A step calls back through the CPU backend, which JAX_PLATFORMS may leave out."""
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as e:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise DSV41Error(
            f"engram: steps read rows of large tables through the CPU backend, which JAX_PLATFORMS={platforms!r} "
            f"leaves out; set it to {platforms or 'cuda'},cpu"
        ) from e
