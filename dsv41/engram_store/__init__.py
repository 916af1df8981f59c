"""Where Engram tables live and how their rows reach the model."""

from dsv41.engram_store.host_lookup import HostLookup
from dsv41.engram_store.host_shards import HostShard, join_rows
from dsv41.engram_store.prefetch import Prefetcher
from dsv41.engram_store.row_shards import RowShards, take_shard
from dsv41.engram_store.step_lookup import DEVICE_BYTES, StepLookup, step_lookup
from dsv41.engram_store.store import EngramRows, EngramStore, EngramTable, StoreStats

__all__ = [
    "DEVICE_BYTES",
    "EngramRows",
    "EngramStore",
    "EngramTable",
    "HostLookup",
    "HostShard",
    "Prefetcher",
    "RowShards",
    "StepLookup",
    "StoreStats",
    "join_rows",
    "step_lookup",
    "take_shard",
]
