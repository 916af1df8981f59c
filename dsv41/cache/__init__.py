"""The pytrees that travel through a step, and the layout of the packed cache."""

from dsv41.cache.kv_cache import (
    AttentionState,
    ForwardBatch,
    KVCache,
    abstract_cache,
    assign_pages,
    cache_bytes,
    init_cache,
    read_window,
    take_rows,
)
from dsv41.cache.layer_cache import LayerCache
from dsv41.cache.layout import FORMAT_VERSION, CacheLayout
from dsv41.cache.local_step import cache_specs, local_step
from dsv41.cache.page_io import copy_page, read_page, read_rings, set_page_table, write_page, write_rings
from dsv41.cache.page_owners import PageOwners
from dsv41.cache.pages import PagePool
from dsv41.cache.step_pages import StepPages

__all__ = [
    "FORMAT_VERSION",
    "AttentionState",
    "CacheLayout",
    "ForwardBatch",
    "KVCache",
    "LayerCache",
    "PageOwners",
    "PagePool",
    "StepPages",
    "abstract_cache",
    "assign_pages",
    "cache_bytes",
    "cache_specs",
    "copy_page",
    "init_cache",
    "local_step",
    "read_page",
    "read_rings",
    "read_window",
    "set_page_table",
    "take_rows",
    "write_page",
    "write_rings",
]
