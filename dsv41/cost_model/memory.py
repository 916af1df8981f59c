"""Bytes that each device holds of a step's arguments, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from dsv41.cost_model.hlo import Shape
from dsv41.cost_model.programs import Step

# The kind of a parameter is that of the first of these that its path contains.
_KINDS = (
    ("shared_experts", "shared experts"),
    ("experts", "routed experts"),
    ("gate", "routers"),
    ("compressor", "compressors and indexers"),
    ("indexer", "compressors and indexers"),
    ("engram", "Engram projections"),
    ("attn", "attention"),
    ("hc_attn_fn", "mHC mixes"),
    ("hc_ffn_fn", "mHC mixes"),
    ("markov_head", "Markov head"),
    ("embed", "embedding"),
    ("head", "head"),
    ("main_proj", "input of the drafter"),
)
_CACHE = {
    "main": "main KV", "index": "index keys", "window": "window KV", "draft_window": "drafter window KV",
    "pending": "pending rows", "page_table": "page tables", "rope": "RoPE tables",
}  # fmt: skip

# HLO's names of the dtypes that a model's state has.
_DTYPES = {
    "uint8": "u8", "int32": "s32", "float32": "f32", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn", "bool": "pred",
}  # fmt: skip


def local_shapes(tree: Any) -> Iterator[tuple[tuple[str, ...], Shape]]:
    """(path, one device's part) of every abstract array with a sharding in a tree; without one, the whole array."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        dims = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        yield tuple(_key(entry) for entry in path), Shape(_DTYPES[str(leaf.dtype)], tuple(dims))


def kept_shapes(step: Step) -> list[Shape]:
    """One device's parts of what no collective of a step should move: weights and page pools that are spread."""
    trees = (step.params, step.drafter, step.cache.main, step.cache.index)
    return [shape for _, shape in local_shapes([x for x in jax.tree.leaves(trees) if _is_spread(x)])]


def _is_spread(leaf: jax.ShapeDtypeStruct) -> bool:
    return leaf.sharding is not None and not leaf.sharding.is_fully_replicated


def _key(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def kind_of(path: tuple[str, ...]) -> str:
    """What a parameter belongs to; "norms" if nothing else."""
    return next((kind for part, kind in _KINDS if part in path), "norms")


def parameter_bytes(params: Any) -> dict[str, int]:
    """Bytes of a device's parameters of backbone or drafter by kind, largest first."""
    return _totals((kind_of(path), shape) for path, shape in local_shapes(params))


def cache_bytes(cache: Any) -> dict[str, int]:
    """Bytes of a device's part of a `KVCache` by kind, largest first."""
    return _totals((_CACHE[path[0]], shape) for path, shape in local_shapes(cache))


def total_bytes(tree: Any) -> int:
    """Bytes of a device's part of a tree."""
    return sum(shape.bytes for _, shape in local_shapes(tree))


def _totals(parts: Iterator[tuple[str, Shape]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for kind, shape in parts:
        sums[kind] += shape.bytes
    return {kind: size for kind, size in sums.most_common() if size}
