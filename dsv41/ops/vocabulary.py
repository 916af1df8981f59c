"""The two ends of a model whose vocabulary may be spread over devices (`ShardingRules.vocab`)."""

from __future__ import annotations

import jax

from dsv41.config import DSV41Error
from dsv41.ops import collectives
from dsv41.ops.sharded_rows import take_sharded_rows
from dsv41.sharding import ShardingRules
from pallas_kernels.fixed_order import contract


def embed(table: jax.Array, ids: jax.Array, rules: ShardingRules) -> jax.Array:
    """bfloat16 [..., D] of this device's tokens int32 [...]; table bfloat16 [rows of this device, D]."""
    return take_sharded_rows(table, ids, rules.vocab)


def head_logits(x: jax.Array, head: jax.Array, rules: ShardingRules) -> jax.Array:
    """float32 [B, T, V] of rows x bfloat16 [B, T, D], the same on all devices along `rules.heads`.

    Inputs go to every part of the head, bfloat16 [rows of this device, D], and the parts of a row's logits come back.

    Raises:
      DSV41Error: the vocabulary is spread over axes of heads before those of rows, whose parts would come back in
        another order.
    """
    rows = tuple(axis for axis in rules.vocab if axis in rules.batch)
    shared = tuple(axis for axis in rules.vocab if axis in rules.heads)
    if rules.vocab != rows + shared:
        raise DSV41Error(f"sharding rules: vocab={rules.vocab}: expected axes of batch first, then those of heads")
    parts = contract(collectives.gather(x, rows), head)
    return collectives.exchange(collectives.gather(parts, shared, axis=2), rows, split=0, concat=2)
