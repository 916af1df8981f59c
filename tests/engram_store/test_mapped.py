"""Tables on mapped files: pages that look-ups touch, advice, and copies in memory."""

import mmap

import ml_dtypes
import numpy as np
import pytest

from dsv41.config import DSV41Error, TextConfig
from dsv41.engram_store import EngramStore, EngramTable
from dsv41.engram_store.mapped import advise_random, mapping_of, pages_touched
from dsv41.ops.engram_hash import engram_hash_spec, row_ids
from tests.models_for_tests import tiny_model

WIDTH = 256


def mapped_table(path, rows, offset=0) -> EngramTable:
    """Values behind `offset` bytes of one file, scales in another."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 120, (rows, WIDTH), np.uint8)
    (path / "values").write_bytes(bytes(offset) + values.tobytes())
    (path / "scales").write_bytes(rng.integers(100, 140, (rows, WIDTH // 32), np.uint8).tobytes())
    maps = []
    for name, begin, shape in (("values", offset, (rows, WIDTH)), ("scales", 0, (rows, WIDTH // 32))):
        with open(path / name, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        maps.append(np.frombuffer(data, np.uint8, offset=begin).reshape(shape))
    return EngramTable(layer=1, values=maps[0].view(ml_dtypes.float8_e4m3fn), scales=maps[1])


@pytest.mark.parametrize("offset", [0, 8, 4000])
def test_pages_touched_are_those_of_the_addresses(tmp_path, offset):
    table, rng = mapped_table(tmp_path, 4000, offset), np.random.default_rng(1)
    for count in (0, 1, 7, 500, 4000):
        rows = np.sort(rng.choice(4000, count, replace=False))
        for array, width in ((table.values, WIDTH), (table.scales, WIDTH // 32)):
            begin = array.__array_interface__["data"][0]
            pages = {(begin + r * width + byte) // 4096 for r in rows.tolist() for byte in (0, width - 1)}
            assert pages_touched(array, rows) == len(pages)


def test_reads_of_a_mapped_table_are_counted_in_pages(tmp_path):
    store = EngramStore([mapped_table(tmp_path, 4000)], readers=3)
    assert store.mapped
    before = store.stats
    # 16 rows of values a page, 512 of scales; the repeats cost nothing.
    store.lookup(np.array([0, 15, 0, 16, 3999, 3999]).reshape(1, 1, 1, 6))
    done = store.stats - before
    assert (done.rows, done.unique_rows, done.physical_reads) == (6, 4, 3 + 2)
    assert done.read_bytes == 5 * 4096 and done.read_s > 0
    memory = store.in_memory()
    assert not memory.mapped and memory.in_memory() is memory
    memory.lookup(np.array([0, 15, 0, 16, 3999, 3999]).reshape(1, 1, 1, 6))
    assert (memory.stats.physical_reads, memory.stats.read_bytes) == (4, 4 * 264)
    for a, b in zip(memory.tables[0].arrays, store.tables[0].arrays, strict=True):
        assert mapping_of(a) is None and mapping_of(b) is not None
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
    store.close()


def test_only_the_tables_own_pages_are_advised(tmp_path):
    table = mapped_table(tmp_path, 4000, offset=5000)
    assert advise_random(table.values) == hasattr(mmap, "MADV_RANDOM")
    assert not advise_random(np.zeros((3, 4), np.uint8))


def test_a_table_that_memory_cannot_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dsv41.engram_store.mapped.available_bytes", lambda: 1000)
    with pytest.raises(DSV41Error, match=r"layer 1: takes 1,024,000 bytes of memory, 1,000 are available"):
        EngramStore([mapped_table(tmp_path, 4000)]).in_memory()


def test_case_g6_arithmetic():
    """48,000 tokens ask for 2,304,000 rows: 0.608 GB, or 9.44 GB if each came in a page of its own."""
    spec = engram_hash_spec(TextConfig(), 2)
    rows = 48_000 * spec.columns * len(spec.layer_ids)
    assert rows == 2_304_000
    assert round(rows * 264 / 1e9, 3) == 0.608 and round(rows * 4096 / 1e9, 2) == 9.44


def test_case_g6_a_repeated_sentence_is_not_read_again(tmp_path):
    """100 times as many tokens touch the same pages, and a few more where one sentence joins the next."""
    spec = engram_hash_spec(TextConfig(), 2)
    rows = 20_000
    store = EngramStore([mapped_table(tmp_path, rows)])
    sentence, token_map = np.random.default_rng(0).integers(3, 99_000, (1, 20)), np.arange(99_092)

    def reads(tokens):
        before = store.stats
        ids = row_ids(spec, token_map, tokens, np.full((1, 3), -1), 99_091)[:, :, :1]
        store.lookup(ids % rows)
        return store.stats - before

    once, many = reads(sentence), reads(np.tile(sentence, (1, 100)))
    assert many.rows == 100 * once.rows
    assert once.physical_reads < many.physical_reads <= once.physical_reads + 2 * 3 * 24
    assert many.read_bytes == many.physical_reads * 4096


@pytest.mark.parametrize("readers", [1, 4])
def test_one_layer_and_padding(readers):
    store = EngramStore(tiny_model().engram.tables, readers=readers)
    ids = np.random.default_rng(0).integers(0, 834, (3, 5, 2, 6))
    valid = np.random.default_rng(1).random((3, 5)) < 0.5
    whole = store.lookup(ids)
    for given in (None, valid):
        before = store.stats
        some = store.lookup(ids, valid=given)
        assert (store.stats - before).rows == (15 if given is None else valid.sum()) * 12
        for layer in range(2):
            one = store.lookup_layer(layer, ids[:, :, layer], valid=given)
            for part, both, all_rows in zip(one, some, whole, strict=True):
                assert part.tobytes() == both[:, :, layer].tobytes()
                keep = np.ones((3, 5), bool) if given is None else given
                assert part[keep].tobytes() == all_rows[:, :, layer][keep].tobytes()
                assert not part[~keep].view(np.uint8).any()
    # What is not valid may name anything.
    ids[~valid] = 10**6
    store.lookup(ids, valid=valid)
    store.close()
