"""Blocks of one expert each: their size, and where rows lie in them."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.ops.expert_exchange import _limits
from dsv41.ops.expert_layout import block_rows, layout_by_expert
from pallas_kernels.experts.block_sizes import FEW_ROWS, MANY_ROWS

# Microseconds of 192 blocks on an H200 ("Rows of a block" in docs/benchmarks.md).
COST = {8: 980, 16: 1605, 32: 1783, 64: 2175, 128: 2967}


@given(st.integers(0, 1 << 16), st.integers(1, 384))
def test_blocks_have_a_size_that_kernels_take(rows, experts):
    block = block_rows(rows, experts)
    assert block in FEW_ROWS + MANY_ROWS
    assert block <= block_rows(rows + 1, experts)


@pytest.mark.parametrize("share", range(1, 129))
def test_blocks_of_random_routing_cost_little_more_than_the_best(share):
    counts = np.random.default_rng(share).multinomial(share * 192, np.full(192, 1 / 192))
    cost = {block: (-(-counts // block)).sum() * us for block, us in COST.items()}
    assert cost[block_rows(share * 192, 192)] <= 1.08 * min(cost.values())


@pytest.mark.parametrize(
    "devices, slots, tokens", [(2, 192, 2048), (2, 192, 4096), (4, 96, 2048), (8, 48, 1024), (32, 12, 512)]
)
def test_a_device_reads_its_experts_once_for_a_quarter_more_than_its_share(devices, slots, tokens):
    capacity, at_once = _limits(True, devices, slots, tokens, 6, None, None)
    assert capacity == tokens and at_once >= 1.25 * tokens * 6


@given(st.integers(1, 384), st.integers(1, 1 << 14))
def test_parts_of_the_product_are_about_equal(slots, tokens):
    _, at_once = _limits(True, 2, slots, tokens, 6, None, None)
    parts = -(-tokens * 6 // at_once)
    assert parts == 1 or at_once <= 1.5 * tokens * 6 / parts
    assert at_once <= max(8192, 192 * slots)


_layout = jax.jit(layout_by_expert, static_argnames=("num_experts", "block"))


@settings(max_examples=30)
@given(st.integers(0, 1 << 30), st.sampled_from([8, 32]), st.booleans())
def test_each_row_lies_in_a_block_of_its_expert(seed, block, skewed):
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, 6, (20, 3))  # 5 is nobody
    chosen = np.where(rng.random(chosen.shape) < 0.8, 2, chosen) if skewed else chosen
    weights = rng.random(chosen.shape).astype(np.float32)
    source, row_weight, block_expert, place = map(np.asarray, _layout(chosen, weights, num_experts=5, block=block))
    assert (np.diff(block_expert) >= 0).all()
    has = chosen < 5
    assert (place[~has] == source.size).all() and len(set(place[has])) == has.sum()
    assert (source < len(chosen)).sum() == has.sum()
    np.testing.assert_array_equal(source.reshape(-1)[place[has]], np.nonzero(has)[0])
    np.testing.assert_array_equal(row_weight.reshape(-1)[place[has]], weights[has])
    np.testing.assert_array_equal(block_expert[place[has] // block], chosen[has])
    used = np.bincount(chosen[has], minlength=5)
    np.testing.assert_array_equal(np.bincount(block_expert, minlength=6)[:5], -(-used // block))
