"""Moving single pages, page table lines and window rings of a cache; each a small compiled function.

Bytes leave and enter as they are: nothing is decoded, so that what comes back is what was stored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache.kv_cache import KVCache

Arrays = tuple[np.ndarray, ...]


def _physical(cache: KVCache, page: jax.Array, source: int) -> jax.Array:
    """int32 [n] physical pages of logical page `page` in the pool of a source; they are adjacent."""
    n = cache.layout.pages_per_logical(cache.layout.ratios[source])
    return page * n + jnp.arange(n)


def _pools(cache: KVCache) -> list[tuple[str, int]]:
    return [(kind, k) for k in range(len(cache.layout.ratios)) for kind in ("main", "index")]


def _with_pools(cache: KVCache, pools: dict[tuple[str, int], jax.Array]) -> KVCache:
    count = len(cache.layout.ratios)
    return dataclasses.replace(
        cache,
        main=tuple(pools["main", k] for k in range(count)),
        index=tuple(pools["index", k] for k in range(count)),
    )


@jax.jit
def _read(cache: KVCache, page: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(getattr(cache, kind)[k][_physical(cache, page, k)] for kind, k in _pools(cache))


def read_page(cache: KVCache, page: int) -> tuple[jax.Array, ...]:
    """The bytes of a logical page, uint8 [physical pages, rows, 4, 128] for main KV and index keys of each source.

    The copy is made in the order of the device's work: later steps do not change it, and reading it as numpy waits.
    """
    return _read(cache, jnp.int32(page))


@functools.partial(jax.jit, donate_argnames=("cache",))
def _write(cache: KVCache, page: jax.Array, arrays: tuple[jax.Array, ...]) -> KVCache:
    pools = {
        (kind, k): getattr(cache, kind)[k].at[_physical(cache, page, k)].set(a)
        for (kind, k), a in zip(_pools(cache), arrays, strict=True)
    }
    return _with_pools(cache, pools)


def write_page(cache: KVCache, page: int, arrays: Sequence[np.ndarray]) -> KVCache:
    """The cache with a logical page's bytes as `read_page` gave them."""
    return _write(cache, jnp.int32(page), tuple(jnp.asarray(a) for a in arrays))


@functools.partial(jax.jit, donate_argnames=("cache",))
def _copy(cache: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
    pools = {
        (kind, k): pool.at[_physical(cache, target, k)].set(pool[_physical(cache, source, k)])
        for kind, k in _pools(cache)
        for pool in [getattr(cache, kind)[k]]
    }
    return _with_pools(cache, pools)


def copy_page(cache: KVCache, source: int, target: int) -> KVCache:
    """The cache with logical page `source` copied over `target`."""
    return _copy(cache, jnp.int32(source), jnp.int32(target))


@functools.partial(jax.jit, donate_argnames=("cache",))
def _set_table(cache: KVCache, slot: jax.Array, line: jax.Array) -> KVCache:
    return dataclasses.replace(cache, page_table=cache.page_table.at[slot].set(line))


def set_page_table(cache: KVCache, slot: int, pages: Sequence[int]) -> KVCache:
    """The cache with the slot's whole page table line: `pages`, then nothing."""
    line = np.full(cache.page_table.shape[1], -1, np.int32)
    line[: len(pages)] = pages
    return _set_table(cache, jnp.int32(slot), jnp.asarray(line))


@functools.partial(jax.jit, static_argnames=("layers",))
def _read_rings(cache: KVCache, slot: jax.Array, layers: int) -> tuple[jax.Array, ...]:
    return tuple(ring[slot] for ring in cache.window[:layers])


def read_rings(cache: KVCache, slot: int, layers: int) -> tuple[jax.Array, ...]:
    """The window rings uint8 [rows, 4, 128] of the first `layers` layers of a slot; a copy, as of `read_page`."""
    return _read_rings(cache, jnp.int32(slot), layers)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _write_rings(cache: KVCache, slot: jax.Array, rings: tuple[jax.Array, ...]) -> KVCache:
    written = tuple(old.at[slot].set(new) for old, new in zip(cache.window, rings, strict=False))
    return dataclasses.replace(cache, window=(*written, *cache.window[len(rings) :]))


def write_rings(cache: KVCache, slot: int, rings: Sequence[np.ndarray]) -> KVCache:
    """The cache with the rings of a slot's first layers as `read_rings` gave them, in any slot of an equal layout."""
    return _write_rings(cache, jnp.int32(slot), tuple(jnp.asarray(r) for r in rings))
