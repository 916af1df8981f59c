"""Where pages of global KV and window snapshots live beside the device, and what they are found by.

Everything here is host bookkeeping over bytes: nothing knows the model, and only the fingerprint knows the layout.
"""

from dsv41.kv_store.host_pages import HostPages
from dsv41.kv_store.page_keys import (
    ImageSpan,
    PageId,
    PageImage,
    cache_fingerprint,
    make_page,
    page_images,
    snapshot_key,
    split_row,
)
from dsv41.kv_store.page_record import StoredPage
from dsv41.kv_store.page_store import PageStore
from dsv41.kv_store.page_tiers import Found, PageTiers, TierCounts
from dsv41.kv_store.prefix_index import Evicted, IndexCounts, Match, PrefixIndex, usable_hit
from dsv41.kv_store.snapshot_pool import PoolStats, Snapshot, SnapshotPool, default_budget, host_memory_bytes
from dsv41.kv_store.store_stats import StoreStats

__all__ = [
    "Evicted",
    "Found",
    "HostPages",
    "ImageSpan",
    "IndexCounts",
    "Match",
    "PageId",
    "PageImage",
    "PageStore",
    "PageTiers",
    "PoolStats",
    "PrefixIndex",
    "Snapshot",
    "SnapshotPool",
    "StoreStats",
    "StoredPage",
    "TierCounts",
    "cache_fingerprint",
    "default_budget",
    "host_memory_bytes",
    "make_page",
    "page_images",
    "snapshot_key",
    "split_row",
    "usable_hit",
]
