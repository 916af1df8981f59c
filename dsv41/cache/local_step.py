"""A cache and a step spread over a mesh, and one device's part of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dsv41.cache.kv_cache import ForwardBatch, KVCache
from dsv41.cache.step_pages import StepPages
from dsv41.ops import collectives
from dsv41.sharding import ShardingRules


def cache_specs(cache: KVCache, rules: ShardingRules) -> KVCache:
    """How each array of a cache (or of its abstract shapes) is spread: slots and pages over `rules.batch`."""
    rows = rules.spec("batch")
    specs = jax.tree.map(lambda _: rows, cache)
    return dataclasses.replace(specs, rope=(PartitionSpec(),) * len(cache.rope))


def local_step(batch: ForwardBatch, cache: KVCache, rules: ShardingRules) -> tuple[ForwardBatch, KVCache]:
    """Slots and page tables of a step as one device counts them, inside `jax.shard_map`.

    Slots and pages are numbered through all devices in a batch and in page tables; here from the first of their device.
    A row's slot must lie on the device of the row, and pages where `PageOwners` says: others count as not assigned.
    With `rules.pages` the batch also says which pages of the group's rows lie here.
    """
    if not rules.batch:
        return batch, cache
    shard = collectives.axis_index(rules.batch)
    # A padding row may name any slot; what it reads is not used.
    slot = jnp.clip(batch.slot - shard * cache.num_slots, 0, cache.num_slots - 1)
    batch = dataclasses.replace(batch, slot=slot)
    if not cache.main:
        return batch, cache
    pages = cache.main[0].shape[0] // cache.layout.pages_per_logical(cache.layout.ratios[0])
    group = shard - collectives.axis_index(rules.pages)
    owner = group + jnp.arange(cache.page_table.shape[1]) % collectives.axis_size(rules.pages)
    page = cache.page_table - owner * pages
    table = jnp.where((cache.page_table >= 0) & (page >= 0) & (page < pages), page, -1)
    if rules.pages:
        batch = dataclasses.replace(batch, pages=StepPages.of(batch, table, rules.pages))
    return batch, dataclasses.replace(cache, page_table=table)
