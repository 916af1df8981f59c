"""Where Engram tables live and how their rows reach the model. Host side only."""

from dsv41.engram_store.row_shards import RowShards, take_shard
from dsv41.engram_store.store import EngramRows, EngramStore, EngramTable, StoreStats

__all__ = ["EngramRows", "EngramStore", "EngramTable", "RowShards", "StoreStats", "take_shard"]
