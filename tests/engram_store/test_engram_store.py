"""The Engram store: values, bounds, and the number of rows it really reads."""

import ml_dtypes
import numpy as np
import pytest

from dsv41.config import DSV41Error, load_config
from dsv41.engram_store import EngramStore, EngramTable
from dsv41.ops.engram_hash import engram_hash_spec, row_ids
from tests.golden import DATA, checkpoint, expected, primitives

TINY = load_config(DATA / "tiny_text")


def tiny_table(layer):
    weights = checkpoint()
    stem = f"layers.{layer}.engram.embed"
    return EngramTable(layer=layer, values=weights[f"{stem}.weight"], scales=weights[f"{stem}.scale"])


@pytest.fixture
def store():
    return EngramStore([tiny_table(1), tiny_table(4)])


def bits(array):
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


def assert_rows_equal(rows, tables, ids):
    for i, table in enumerate(tables):
        np.testing.assert_array_equal(bits(rows.values)[:, :, i], bits(table.values)[ids[:, :, i]])
        if table.scales is not None:
            np.testing.assert_array_equal(rows.scales[:, :, i], table.scales[ids[:, :, i]])


def test_golden_rows(store):
    g = primitives()
    first = g["engram.L1.hash_ids"]
    rows = store.lookup(np.stack([first, first], axis=2))
    assert rows.values.dtype == ml_dtypes.float8_e4m3fn and rows.values.shape == (2, 6, 2, 6, 32)
    assert rows.scales.dtype == np.uint8 and rows.scales.shape == (2, 6, 2, 6, 1)
    decoded = np.ldexp(rows.values.astype(np.float32), rows.scales.astype(np.int32) - 127)
    np.testing.assert_array_equal(decoded[:, :, 0], g["engram.L1.rows"].astype(np.float32))


def test_rows_of_the_golden_prompt(store):
    ids = expected("tiny_text")["prefill.engram_hash"]
    assert store.rows_per_layer == TINY.text_config.engram_num_embeddings
    assert_rows_equal(store.lookup(ids), [tiny_table(1), tiny_table(4)], ids)


def test_bfloat16_table_without_scales():
    values = np.arange(40 * 32).astype(ml_dtypes.bfloat16).reshape(40, 32)
    table = EngramTable(layer=1, values=values, scales=None)
    ids = np.random.default_rng(0).integers(0, 40, (2, 3, 1, 6))
    rows = EngramStore([table]).lookup(ids)
    assert rows.scales is None and rows.values.dtype == ml_dtypes.bfloat16
    assert_rows_equal(rows, [table], ids)


@pytest.mark.parametrize("shape", [(0, 3, 2, 6), (2, 0, 2, 6), (2, 3, 2, 0)])
def test_empty_batch(store, shape):
    rows = store.lookup(np.zeros(shape, np.int64))
    assert rows.values.shape == (*shape, 32) and rows.scales.shape == (*shape, 1)


# Case G4: ids outside the table never wrap into a valid row.
@pytest.mark.parametrize("bad", [-1, -834, 834, 2**40, -(2**40)])
def test_row_outside_the_table(store, bad):
    ids = np.full((1, 2, 2, 6), 5)
    ids[0, 1, 0, 3] = bad
    with pytest.raises(DSV41Error, match=rf"layer 1: row {bad} is outside \[0, 834\)"):
        store.lookup(ids)
    # Valid in layer 4's longer table only.
    ids[0, 1] = [[5] * 6, [900] * 6]
    store.lookup(ids)


def test_nan_scale_names_layer_and_row():
    table = tiny_table(4)
    scales = table.scales.copy()
    scales[17] = 255
    store = EngramStore([tiny_table(1), EngramTable(layer=4, values=table.values, scales=scales)])
    ids = np.full((1, 1, 2, 6), 17)
    with pytest.raises(DSV41Error, match="layer 4: row 17 has a NaN scale"):
        store.lookup(ids)
    ids[:, :, 1] = 18
    store.lookup(ids)


# Case G6: physical reads follow the distinct rows, not the tokens.
def test_repeated_sentence_is_read_once(store):
    spec = engram_hash_spec(TINY.text_config, 2)
    token_map = expected("tiny_text")["engram_token_map"]
    sentence = expected("tiny_text")["input_ids"][:1, :40]
    start = np.full((1, 3), -1)

    def reads(tokens):
        before = (store.stats.rows, store.stats.unique_rows)
        ids = row_ids(spec, token_map, tokens, start, TINY.image_token_id)
        store.lookup(ids)
        distinct = sum(len(np.unique(ids[:, :, i])) for i in range(2))
        assert store.stats.unique_rows - before[1] == distinct
        return store.stats.rows - before[0], store.stats.unique_rows - before[1]

    once_asked, once_read = reads(sentence)
    many_asked, many_read = reads(np.tile(sentence, (1, 100)))
    assert many_asked == 100 * once_asked
    # New are only the n-grams that join one sentence to the next: 3 tokens' worth.
    assert many_read <= once_read + 3 * 12
    assert store.stats.lookups == 2


class CountingTable(np.ndarray):
    """Notes the rows that are taken out of it."""

    def __array_finalize__(self, parent):
        self.taken = getattr(parent, "taken", [])

    def take(self, ids, **kwargs):
        self.taken.append(np.array(ids))
        return np.asarray(self).take(ids, **kwargs)

    def __getitem__(self, key):
        raise AssertionError("rows must be taken in one batch")


@pytest.mark.parametrize("readers", [1, 3])
def test_each_row_is_read_once_in_ascending_order(readers):
    table = tiny_table(1)
    counting = table.values.view(CountingTable)
    store = EngramStore([EngramTable(layer=1, values=counting, scales=table.scales)], readers=readers)
    ids = np.random.default_rng(0).integers(0, 834, (2, 50, 1, 6))
    rows = store.lookup(ids)
    assert_rows_equal(rows, [table], ids)
    assert len(counting.taken) == readers
    read = np.concatenate(sorted(counting.taken, key=lambda part: part[0]))
    np.testing.assert_array_equal(read, np.unique(ids))
    store.close()


def test_mapped_file(tmp_path):
    """A large sparse file, read at both ends."""
    rows, width = 1 << 24, 256  # 4 GiB
    path = tmp_path / "table"
    values = np.memmap(path, np.uint8, mode="w+", shape=(rows, width))
    values[rows - 1] = np.arange(width, dtype=np.uint8) % 120
    scales = np.broadcast_to(np.full(width // 32, 127, np.uint8), (rows, width // 32))
    table = EngramTable(layer=1, values=values.view(ml_dtypes.float8_e4m3fn), scales=scales)
    ids = np.array([rows - 1, 0, rows - 1]).reshape(1, 1, 1, 3)
    for readers in (1, 2):
        got = bits(EngramStore([table], readers=readers).lookup(ids).values)[0, 0, 0]
        np.testing.assert_array_equal(got[0], np.arange(width) % 120)
        np.testing.assert_array_equal(got[2], got[0])
        assert not got[1].any()


def test_results_are_the_callers_to_keep(store):
    ids = np.full((1, 1, 2, 6), 3)
    first = store.lookup(ids)
    kept = bits(first.values).copy()
    bits(store.lookup(ids).values)[:] = 0
    np.testing.assert_array_equal(bits(first.values), kept)


def test_tables_that_do_not_fit():
    good = tiny_table(1)
    fp8, bf16 = good.values, np.zeros((4, 32), ml_dtypes.bfloat16)
    for values, scales, message in (
        (np.zeros((4, 32), np.float32), None, "layer 1: expected float8_e4m3fn or bfloat16"),
        (fp8[0], good.scales, "layer 1: expected float8_e4m3fn or bfloat16"),
        (fp8, None, "float8_e4m3fn values need scales"),
        (bf16, np.zeros((4, 1), np.uint8), "bfloat16 values have no scales"),
        (fp8, good.scales[:-1], "expected scales uint8"),
        (fp8, good.scales.astype(np.int32), "expected scales uint8"),
        (fp8[:, :31], good.scales, "expected scales uint8"),
    ):
        with pytest.raises(DSV41Error, match=message):
            EngramTable(layer=1, values=values, scales=scales)
    with pytest.raises(DSV41Error, match="layer 4: rows are bfloat16 x 32, those of layer 1 float8_e4m3fn x 32"):
        EngramStore([good, EngramTable(layer=4, values=bf16, scales=None)])
    with pytest.raises(DSV41Error, match="at least one table"):
        EngramStore([])


@pytest.mark.parametrize("ids", [np.zeros((1, 2, 6), int), np.zeros((1, 1, 3, 6), int), np.zeros((1, 1, 2, 6))])
def test_malformed_row_ids(store, ids):
    with pytest.raises(DSV41Error, match=r"integer row ids \[B, T, 2, K\]"):
        store.lookup(ids)
