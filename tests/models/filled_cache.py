"""A cache with contents, so that a step somewhere in long sequences needs no steps before it."""

import dataclasses

import numpy as np

from dsv41.cache import KVCache


def filled(cache: KVCache, seed: int) -> KVCache:
    """The cache, on the host, where page j of a slot has the same random bytes wherever it lies."""
    rng, layout = np.random.default_rng(seed), cache.layout
    table = np.asarray(cache.page_table)

    def fill(array, part, scale_bytes, where):
        data = rng.integers(0, 256, (where.size, *array.shape[1:])).astype(np.uint8)
        data = np.where(data & 0x7F == 0x7F, 0, data)  # NaN in a window
        rows = (where.size, array.shape[1] - part.value_rows, *array.shape[2:])
        data[:, part.value_rows :] = rng.integers(*scale_bytes, rows)  # finite, and of everyday size
        full = np.zeros(array.shape, np.uint8)
        full[where.reshape(-1)] = data
        return full

    pools = {"main": [], "index": []}
    for k, ratio in enumerate(layout.ratios):
        pages = np.asarray(layout.physical_pages(cache.page_table, ratio))
        assert pages.shape[1] == table.shape[1] * layout.pages_per_logical(ratio)
        pools["main"].append(fill(cache.main[k], layout.main, (40, 60), pages))
        pools["index"].append(fill(cache.index[k], layout.index, (120, 124), pages))
    window = [fill(ring, layout.window, (118, 122), np.arange(cache.num_slots)) for ring in cache.window]
    pending = [None if p is None else rng.normal(size=p.shape).astype(np.float32) for p in cache.pending]
    return dataclasses.replace(
        cache, main=tuple(pools["main"]), index=tuple(pools["index"]), window=tuple(window), pending=tuple(pending)
    )
