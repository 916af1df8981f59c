"""Rows of a table whose rows are spread over devices: embedding and Engram tables on devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv41.ops import collectives
from dsv41.sharding import MeshAxes

_WORD = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def take_sharded_rows(table: jax.Array, ids: jax.Array, axes: MeshAxes) -> jax.Array:
    """Rows `ids` of the whole table, bit for bit; each device asks for its own.

    Every device hears what all ask for and answers with the rows that it has; the table itself never moves. An id
    outside the table gives zeros.

    Args:
      table: [rows of this device, ...], the table's rows in order over `axes`.
      ids: integers [...], of any number, the same on all devices.
      axes: mesh axes of the table's rows; over none this is plain indexing.

    Returns:
      [..., ...] in the table's dtype.
    """
    if not axes:
        return table[ids]
    asked = collectives.gather(ids.reshape(-1), axes) - collectives.axis_index(axes) * table.shape[0]
    # As integers: a sum of floats would turn -0.0 into 0.0 and could change a NaN.
    word = _WORD[table.dtype.itemsize]
    own = (asked >= 0) & (asked < table.shape[0])
    # Rows, not the table: the TPU compiler would make a copy of it.
    found = jax.lax.bitcast_convert_type(table[jnp.clip(asked, 0, table.shape[0] - 1)], word)
    found = jnp.where(own.reshape(-1, *(1,) * (found.ndim - 1)), found, jnp.zeros_like(found))
    rows = collectives.scatter_total(found, axes)
    return jax.lax.bitcast_convert_type(rows, table.dtype).reshape(*ids.shape, *table.shape[1:])
