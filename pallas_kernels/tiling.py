"""Bounding temporary memory: functions of query tokens applied tile by tile."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Bytes of temporaries a tile may make; a throughput choice, not a limit of any device.
TILE_BYTES = 64 << 20


def query_tile(tokens: int, bytes_per_token: int, budget: int = TILE_BYTES) -> int:
    """Query tokens a tile, a power of two, so that a tile's temporaries stay within `budget` bytes."""
    fit = max(budget // max(bytes_per_token, 1), 1)
    return max(1, min(tokens, 1 << (fit.bit_length() - 1)))


def map_query_tiles(fn: Callable[..., Any], tile: int, *arrays: jax.Array | None) -> Any:
    """Applies `fn` to arrays [B, T, ...] (or None) cut into [B, tile, ...] along T, one tile after the other.

    Rows of T are independent in `fn`; the last tile is padded with zeros and cut again. Returns fn's pytree of [B, T,
    ...].
    """
    tokens = arrays[0].shape[1]
    tiles = -(-tokens // tile)
    if tiles == 1:
        return fn(*arrays)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, tiles * tile - tokens)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], tiles, tile, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], tiles * tile, *x.shape[3:])[:, :tokens]

    out = jax.lax.map(lambda parts: fn(*parts), jax.tree.map(split, arrays))
    return jax.tree.map(join, out)
