"""What a sequence's next token may read of a cache, to be compared byte for byte."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import KVCache
from pallas_kernels.page_layout import PAGE_ENTRIES


@jax.jit
def _entries(cache: KVCache) -> dict:
    """All entries of the pools by slot and entry number, and the rings, as (values, scales)."""
    layout, slots = cache.layout, jnp.arange(cache.num_slots)
    capacity = cache.page_table.shape[1] * layout.page_tokens
    found = {}
    for k, ratio in enumerate(layout.ratios):
        entry = jnp.broadcast_to(jnp.arange(capacity // ratio), (cache.num_slots, capacity // ratio))
        page, inside = layout.address(cache.page_table, entry, ratio)
        page = jnp.maximum(page, 0)
        found[f"main.{k}"] = layout.main.gather(cache.main[k], page, inside)
        keys = layout.index.read_pages(cache.index[k], page[:, ::PAGE_ENTRIES])
        found[f"index.{k}"] = tuple(x.reshape(cache.num_slots, -1, x.shape[-1]) for x in keys)
    for name in ("window", "draft_window"):
        for n, ring in enumerate(getattr(cache, name)):
            found[f"{name}.{n}"] = layout.window.read(ring, slots)
    return found


def committed_rows(cache: KVCache, lengths: list[int], window: int = 16) -> list[dict[str, list[np.ndarray]]]:
    """For each slot, name -> arrays: entries, rings by position, and raw rows of a group that is not complete.

    Args:
      cache: of which every slot below `len(lengths)` is looked at.
      lengths: committed tokens of each slot.
      window: the model's sliding_window.
    """
    layout = cache.layout
    entries, pending = jax.device_get((_entries(cache), cache.pending))
    rows = []
    for slot, length in enumerate(lengths):
        found = {}
        last = np.arange(max(length - window, 0), length) % layout.window.length
        for name, pair in entries.items():
            kind, _, k = name.partition(".")
            keep = last if "window" in kind else slice(length // layout.ratios[int(k)])
            found[name] = [x[slot, keep] for x in pair]
        for k, ratio in enumerate(layout.ratios):
            if ratio > 1:
                open_group = np.arange(length // ratio * ratio, length)
                found[f"pending.{k}"] = [pending[k][slot, open_group % layout.pending_rows]]
        rows.append(found)
    return rows


def same_rows(actual: dict[str, list[np.ndarray]], expected: dict[str, list[np.ndarray]]) -> None:
    """Every array of `expected` is in `actual`, bit for bit."""
    for name, arrays in expected.items():
        for a, b in zip(actual[name], arrays, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=name)
