"""Rows (token, expert) in blocks of one expert each, and the order in which a token's are summed."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class BlockLayout(NamedTuple):
    """Where the rows (token, expert) of a step lie in blocks.

    Attributes:
      source: int32 [blocks, block], token of each row; the number of tokens where the row is empty.
      row_weight: float32 [blocks, block].
      block_expert: int32 [blocks], ascending; the number of experts for unused blocks, which come last.
      place: int32 [T, K], row of each token's k-th expert, counted through the blocks; blocks * block if it has none.
    """

    source: jax.Array
    row_weight: jax.Array
    block_expert: jax.Array
    place: jax.Array


# Rows of a block, and an expert's share up to which they are used. What blocks cost decides, not what is padded: on a
# GPU, a block of 32 rows takes less than two of 8, and one of 128 as much as three (docs/benchmarks.md).
_BLOCKS = ((8, 10), (32, 28), (64, 60), (128, math.inf))


def block_rows(rows: int, num_experts: int) -> int:
    """Rows of a block, 8, 32, 64 or 128, where `rows` are spread evenly over the experts, as far as chance does that.

    Up to ten rows an expert go into as many blocks of 8 as it takes; more get room, so that most experts fill one
    block only.
    """
    return next(block for block, most in _BLOCKS if rows <= most * num_experts)


def layout_by_expert(chosen: jax.Array, weights: jax.Array, num_experts: int, *, block: int) -> BlockLayout:
    """Sorts (token, expert) rows by expert and begins a block with each.

    Args:
      chosen: int32 [T, K], `num_experts` where there is none.
      weights: float32 [T, K].
      num_experts: that there are.
      block: rows of a block.
    """
    tokens, k = chosen.shape
    rows = tokens * k
    blocks = min(rows, rows // block + num_experts)
    expert_of_row = chosen.reshape(rows)
    order = jnp.argsort(expert_of_row, stable=True)
    counts = jnp.zeros(num_experts, jnp.int32).at[expert_of_row].add(1, mode="drop")
    blocks_of = -(-counts // block)
    first_block = jnp.cumsum(blocks_of) - blocks_of
    first_row = jnp.cumsum(counts) - counts

    sorted_expert = expert_of_row[order]
    safe = jnp.minimum(sorted_expert, num_experts - 1)
    place = first_block[safe] * block + jnp.arange(rows) - first_row[safe]
    place = jnp.where(sorted_expert < num_experts, place, blocks * block)
    source = jnp.full(blocks * block, tokens, jnp.int32).at[place].set(order // k, mode="drop")
    row_weight = jnp.zeros(blocks * block, jnp.float32).at[place].set(weights.reshape(rows)[order], mode="drop")
    block_expert = jnp.searchsorted(jnp.cumsum(blocks_of), jnp.arange(blocks), side="right")
    return BlockLayout(
        source.reshape(blocks, block),
        row_weight.reshape(blocks, block),
        block_expert.astype(jnp.int32),
        jnp.zeros(rows, jnp.int32).at[order].set(place).reshape(tokens, k),
    )


def sum_in_order(y: jax.Array) -> jax.Array:
    """What a token's experts gave, bfloat16 [T, K, D], summed one after the other: float32 [T, D]."""
    y = y.astype(jnp.float32)
    total = y[:, 0]
    for i in range(1, y.shape[1]):
        total = total + y[:, i]
    return total
