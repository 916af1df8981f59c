"""Engram rows inside a compiled step, whose tokens the host does not know yet.

A speculative step verifies tokens that it has just drafted, so it hashes them itself. The rows come from tables on the
device where those are small, otherwise through a callback from the store in host memory or on the mapped file.

Axis letters: B sequences, T tokens, L Engram layers, K rows a token and layer, D row width, N look-back slots.
"""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import DSV41Error
from dsv41.engram_store.store import EngramStore
from dsv41.ops.engram_hash import EngramHashSpec
from dsv41.ops.engram_hash_device import EngramHashArrays, classes_window_device, engram_hash_arrays, row_ids_device

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
          as `EngramStore.lookup` gives for the same tokens. A row with a NaN scale comes as it is.
        """
        with jax.named_scope("engram_lookup"):
            window = classes_window_device(self.hashing, self.token_map, tokens, history, self.image_token_id)
            ids = jnp.where(valid[..., None, None], row_ids_device(self.hashing, window), self.hashing.offsets)
            if self.values is None:
                return self._from_host(ids)
            return self._gather(self.values, ids), None if self.scales is None else self._gather(self.scales, ids)

    @staticmethod
    def _gather(tables: tuple[jax.Array, ...], ids: jax.Array) -> jax.Array:
        return jnp.stack([table[ids[:, :, i]] for i, table in enumerate(tables)], axis=2)

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
) -> StepLookup:
    """A `StepLookup` over `store`.

    Args:
      store: the tables.
      spec: the hash.
      token_map: int32 [V].
      image_token_id: the id that marks an image span and blocks the look-back.
      device_bytes: tables of at most this many bytes in all are copied to the default device.

    Raises:
      DSV41Error: a table that goes to the device holds a NaN scale, which names the layer; or tables that stay on the
        host need the CPU backend, which was left out.
      ConfigError: the hash does not fit 32-bit arithmetic.
    """
    hashing = jax.tree.map(jnp.asarray, engram_hash_arrays(spec))
    values = scales = None
    if store.nbytes <= device_bytes:
        for table in store.tables:
            if table.scales is not None and (table.scales == 255).any():
                raise DSV41Error(f"engram table of layer {table.layer}: a row has a NaN scale (byte 255)")
        # A copy: on CPU an array would otherwise alias the mapped file.
        values = tuple(jnp.array(np.array(t.values)) for t in store.tables)
        if store.tables[0].scales is not None:
            scales = tuple(jnp.array(np.array(t.scales)) for t in store.tables)
    else:
        _check_callbacks()
    return StepLookup(
        hashing=hashing,
        token_map=jnp.asarray(token_map, jnp.int32),
        values=values,
        scales=scales,
        store=store,
        image_token_id=image_token_id,
    )


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
