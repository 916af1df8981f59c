"""Arrays worked on a part at a time, so that what a part makes fits into memory."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def cut(arrays: Sequence[jax.Array], part: int) -> tuple[jax.Array, ...]:
    """[rows, ...] each -> [parts, part, ...], padded by zeros; one part if there are fewer rows."""
    rows = arrays[0].shape[0]
    part = min(part, rows)

    def of_one(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, -rows % part),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, part, *x.shape[1:])

    return tuple(of_one(x) for x in arrays)
