"""Engram rows inside a compiled step: the bytes that the host's look-up gives, from device tables and by callback."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dsv41.config import DSV41Error
from dsv41.engram_store import EngramStore, EngramTable, step_lookup
from dsv41.ops.engram_hash import row_ids
from tests.models_for_tests import tiny_model


def lookup(store=None, **options):
    model = tiny_model()
    store = model.engram if store is None else store
    return step_lookup(store, model._hash_spec, model.token_map, model.config.image_token_id, **options)


def bytes_of(rows) -> list[np.ndarray]:
    return [np.ascontiguousarray(np.asarray(x)).view(np.uint8) for x in rows]


@pytest.mark.parametrize("device_bytes", [1 << 28, 0], ids=["device", "callback"])
def test_same_rows_as_on_the_host(device_bytes):
    """Image tokens and the sequence start block the look-back here as there."""
    model, rng = tiny_model(), np.random.default_rng(3)
    step = lookup(device_bytes=device_bytes)
    assert (step.values is None) == (device_bytes == 0)
    tokens = rng.integers(0, 512, (2, 6)).astype(np.int32)
    tokens[0, 2] = model.config.image_token_id
    history = np.array([[-1, -1, 7], [model.config.image_token_id, 9, 11]], np.int32)
    actual = jax.jit(lambda step, *x: step.rows(*x))(step, tokens, history, np.ones((2, 6), bool))
    ids = row_ids(model._hash_spec, model.token_map, tokens, history, model.config.image_token_id)
    for a, b in zip(bytes_of(actual), bytes_of(model.engram.lookup(ids)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bfloat16_tables():
    model, rng = tiny_model(), np.random.default_rng(0)
    tables = [
        EngramTable(layer=t.layer, values=rng.normal(size=t.values.shape).astype(jnp.bfloat16), scales=None)
        for t in model.engram.tables
    ]
    tokens, history = np.arange(8, dtype=np.int32).reshape(2, 4), np.full((2, 3), -1, np.int32)
    store = EngramStore(tables)
    for device_bytes in (1 << 28, 0):
        values, scales = jax.jit(lambda s: s.rows(tokens, history, np.ones((2, 4), bool)))(
            lookup(store, device_bytes=device_bytes)
        )
        ids = row_ids(model._hash_spec, model.token_map, tokens, history, model.config.image_token_id)
        np.testing.assert_array_equal(np.asarray(values), store.lookup(ids).values)
        assert scales is None


def test_a_nan_scale_is_found_before_the_table_goes_to_the_device():
    table = tiny_model().engram.tables[0]
    scales = np.array(table.scales)
    scales[5, 0] = 255
    broken = [EngramTable(layer=table.layer, values=table.values, scales=scales), *tiny_model().engram.tables[1:]]
    with pytest.raises(DSV41Error, match=f"layer {table.layer}.*NaN scale"):
        lookup(EngramStore(broken))


def test_tokens_that_are_not_verified_read_one_row_of_each_table():
    model, tokens = tiny_model(), np.arange(12, dtype=np.int32).reshape(2, 6)
    valid = np.array([[True, True, False, False, False, False], [False] * 6])
    before = model.engram.stats
    step = lookup(device_bytes=0)
    jax.block_until_ready(jax.jit(lambda s: s.rows(tokens, np.full((2, 3), -1, np.int32), valid))(step))
    columns = 6
    read = model.engram.stats.unique_rows - before.unique_rows
    assert read <= 2 * (2 + 1) * columns


def test_a_broken_row_on_the_host_reaches_its_token_only():
    """Plain decoding refuses it with a message; inside a step its logits become NaN, which ends that request."""
    table = tiny_model().engram.tables[0]
    scales = np.full_like(table.scales, 255)
    store = EngramStore([EngramTable(layer=1, values=table.values, scales=scales), *tiny_model().engram.tables[1:]])
    tokens, history = np.arange(4, dtype=np.int32).reshape(2, 2), np.full((2, 3), -1, np.int32)
    step = lookup(store, device_bytes=0)
    _, scales = jax.jit(lambda s: s.rows(tokens, history, np.ones((2, 2), bool)))(step)
    assert (np.asarray(scales)[:, :, 0] == 255).all() and (np.asarray(scales)[:, :, 1] != 255).all()


@pytest.mark.parametrize("devices", [5, 7])
def test_case_g8_tables_over_devices_give_the_rows_of_the_whole(devices):
    """834 and 1,020 rows are padded to equal runs; no look-up returns the padding."""
    model, rng = tiny_model(), np.random.default_rng(0)
    mesh = Mesh(jax.devices()[:devices], ("data",))
    step = lookup(device_bytes=1 << 28, mesh=mesh, axes=("data",))
    padded = [-(-rows // devices) * devices for rows in (834, 1020)]
    assert [v.shape for v in step.values] == [(rows, 32) for rows in padded]
    assert all(v.addressable_shards[0].data.shape[0] == rows // devices for v, rows in zip(step.values, padded))
    assert padded != [834, 1020]
    for values, scales, table in zip(step.values, step.scales, model.engram.tables, strict=True):
        np.testing.assert_array_equal(np.asarray(values)[: table.rows].view(np.uint8), table.values.view(np.uint8))
        assert (np.asarray(scales)[table.rows :] == 127).all()
    tokens = rng.integers(0, 505, (2 * devices, 12)).astype(np.int32)
    history = rng.integers(-1, 505, (2 * devices, 3)).astype(np.int32)
    rows = PartitionSpec("data")
    look_up = jax.shard_map(
        lambda step, *x: step.rows(*x), mesh=mesh, in_specs=(step.specs(), rows, rows, rows), out_specs=rows
    )
    actual = jax.jit(look_up)(step, tokens, history, np.ones(tokens.shape, bool))
    expected = model.host_lookup.rows(tokens, history)
    for a, b in zip(bytes_of(actual), bytes_of(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    program = jax.jit(look_up).lower(step, tokens, history, np.ones(tokens.shape, bool)).compile().as_text()
    gathered = [line for line in program.splitlines() if " all-gather(" in line]
    assert gathered and not any(f"[{rows},32]" in line for line in gathered for rows in padded)  # ids, never tables


def test_a_nan_scale_of_one_shard_is_named():
    table = tiny_model().engram.tables[1]
    scales = np.array(table.scales)
    scales[-1] = 255
    broken = EngramTable(layer=table.layer, values=table.values, scales=scales)
    mesh = Mesh(jax.devices()[:4], ("data",))
    with pytest.raises(DSV41Error, match=f"layer {table.layer}.*NaN scale"):
        lookup(EngramStore([tiny_model().engram.tables[0], broken]), mesh=mesh, axes=("data",))


def test_tables_on_the_host_need_no_axes():
    mesh = Mesh(jax.devices()[:4], ("data",))
    step = lookup(device_bytes=0, mesh=mesh, axes=("data",))
    assert not step.on_device and step.axes == ()
