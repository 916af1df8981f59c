"""Parts of queries on devices that share rows."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dsv41.ops.query_split import QuerySplit

AXES, DEVICES, GROUPS = ("tensor",), 2, 3


@pytest.mark.parametrize(("rows", "tokens", "axis"), [(4, 6, 0), (3, 6, 1), (3, 5, None), (2, 1, 0), (1, 1, None)])
def test_parts_are_equal_and_join_again(rows, tokens, axis):
    x = np.arange(rows * tokens).reshape(rows, tokens)
    group = np.arange(GROUPS * rows * tokens).reshape(GROUPS * rows, tokens)

    def step(x, group):
        split = QuerySplit.of(rows, tokens, AXES)
        assert split.axis == axis
        part = split.queries(x)
        return part[None], split.join(part)[None], split.queries(group, GROUPS)[None], split.rows(group, GROUPS)[None]

    mesh = Mesh(np.array(jax.devices()[:DEVICES]), AXES)
    run = jax.shard_map(step, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(AXES), check_vma=False)
    part, joined, group_part, group_rows = (np.asarray(a) for a in jax.jit(run)(x, group))
    parts = [x] * DEVICES if axis is None else np.split(x, DEVICES, axis)
    by_group = group.reshape(GROUPS, rows, tokens)
    group_parts = [by_group] * DEVICES if axis is None else np.split(by_group, DEVICES, axis + 1)
    for device in range(DEVICES):
        np.testing.assert_array_equal(part[device], parts[device])
        np.testing.assert_array_equal(joined[device], x)
        np.testing.assert_array_equal(group_part[device], group_parts[device].reshape(group_part[device].shape))
        kept = group_parts[device] if axis == 0 else by_group
        np.testing.assert_array_equal(group_rows[device], kept.reshape(-1, tokens))


def test_over_no_axis_nothing_happens():
    x, split = np.ones((2, 2)), QuerySplit.of(2, 2, ())
    assert split.queries(x) is split.rows(x) is split.join(x) is x
