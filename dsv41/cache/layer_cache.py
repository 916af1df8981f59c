"""What one layer reads and writes of a cache: the same for every layer of a kind, whatever its number."""

from __future__ import annotations

import dataclasses

import jax

from dsv41.cache.kv_cache import KVCache
from dsv41.cache.layout import CacheLayout
from dsv41.config import LayerSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """A layer's window KV and the compressed entries of its KV source. Fields as in `KVCache`.

    `main`, `index` and `pending` are None where the layer has no KV source, `pending` also where its ratio is 1.
    """

    window: jax.Array
    main: jax.Array | None
    index: jax.Array | None
    pending: jax.Array | None
    page_table: jax.Array
    rope: tuple[jax.Array, jax.Array]
    layout: CacheLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, cache: KVCache, spec: LayerSpec) -> LayerCache:
        """That of one layer."""
        source = {name: None if spec.kv is None else getattr(cache, name)[spec.kv] for name in _OF_SOURCE}
        window = cache.window[spec.index]
        return cls(window, page_table=cache.page_table, rope=cache.rope, layout=cache.layout, **source)

    def written_to(self, cache: KVCache, spec: LayerSpec) -> KVCache:
        """`cache` with what the layer has written."""
        changed = {"window": _replaced(cache.window, spec.index, self.window)}
        if spec.owns_kv:
            changed |= {name: _replaced(getattr(cache, name), spec.kv, getattr(self, name)) for name in _OF_SOURCE}
        return dataclasses.replace(cache, **changed)

    @property
    def max_tokens(self) -> int:
        """Tokens one sequence can hold."""
        return self.rope[0].shape[0]


_OF_SOURCE = ("main", "index", "pending")


def _replaced(items: tuple, index: int, value: jax.Array | None) -> tuple:
    return (*items[:index], value, *items[index + 1 :])
