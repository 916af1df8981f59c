"""The throughput table: look-ups, and what a file must be to be taken for one."""

import json

import numpy as np
import pytest

from dsv41.config import DSV41Error
from dsv41.engine.throughput_table import ThroughputTable, load_throughput_table, save_throughput_table
from dsv41.ops.verify_schedule import best_budget

TABLE = ThroughputTable(
    block_size=5,
    curves={4: ((4, 80.0), (9, 60.0), (17, 50.0)), 1: ((1, 100.0), (3, 90.5))},
    device_kind="a device",
    jax_version="0.0",
    model="tiny",
    date="2026-01-01",
    command="measure --all",
)


@pytest.mark.parametrize(
    "requests,batch_tokens,rate",
    [
        (1, 1, 100), (1, 2, 100), (1, 3, 90.5), (1, 600, 90.5), (1, 0, 100),
        (4, 4, 80), (4, 8, 80), (4, 9, 60), (4, 16, 60), (4, 17, 50), (0, 0, 100),
        # Between two curves the one of more requests, beyond the last the last, each by the number of drafts.
        (2, 2, 80), (2, 6, 80), (2, 7, 60), (2, 15, 50), (9, 9, 80), (9, 13, 80), (9, 14, 60), (9, 22, 50),
    ],
)  # fmt: skip
def test_look_up(requests, batch_tokens, rate):
    assert TABLE.steps_per_second(requests, batch_tokens) == rate
    dense = TABLE.dense(requests, 30)
    assert dense.dtype == np.float32
    assert dense[min(batch_tokens, 29)] == rate


def test_dense_covers_all_drafts_of_its_requests():
    for requests in (0, 1, 3, 8):
        dense = TABLE.dense(requests)
        assert dense.shape == (6 * requests + 1,)
        assert dense.tolist() == [TABLE.steps_per_second(requests, b) for b in range(len(dense))]


def test_flat_table_verifies_everything():
    table = ThroughputTable.flat(5)
    for requests in (1, 7):
        a = np.full((requests, 5), 0.01)
        caps = np.full(requests, 5)
        assert best_budget(a, caps, table.dense(requests), requests) == 5 * requests
        assert best_budget(a, caps, lambda b, r=requests: table.steps_per_second(r, b), requests) == 5 * requests


def test_step_shaped_curve_decides_as_the_function_it_samples():
    """Case D7, told by the first batch of each width."""
    table = ThroughputTable(block_size=5, curves={1: ((1, 1 / 10), (3, 1 / 16))})
    a = np.array([[0.95, 0.9, 0.85, 0.8, 0.75]])
    assert best_budget(a, np.array([5]), table.dense(1), 1) == 5


def test_file_gives_the_table_back(tmp_path):
    path = tmp_path / "table.json"
    save_throughput_table(TABLE, path)
    assert load_throughput_table(path, 5) == TABLE
    save_throughput_table(ThroughputTable.flat(5), path)
    assert load_throughput_table(path, 5) == ThroughputTable.flat(5)
    assert [f.name for f in tmp_path.iterdir()] == ["table.json"]


def test_numpy_numbers_can_be_saved(tmp_path):
    table = ThroughputTable(block_size=np.int64(5), curves={np.int64(2): ((np.int32(2), np.float32(1.5)),)})
    save_throughput_table(table, tmp_path / "table.json")
    assert load_throughput_table(tmp_path / "table.json", 5) == table


def test_another_block_size_is_refused(tmp_path):
    save_throughput_table(TABLE, tmp_path / "table.json")
    with pytest.raises(DSV41Error, match=r"table\.json: block_size: expected 4, got 5$"):
        load_throughput_table(tmp_path / "table.json", 4)


def curve(*points):
    return [{"requests": 1, "points": list(points)}]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"format_version": 2}, "format_version: expected 1, got 2"),
        ({"format_version": True}, "format_version: expected 1"),
        ({"block_size": "5"}, "block_size: expected int, got '5'"),
        ({"block_size": True}, "block_size: expected int"),
        ({"block_size": 0}, "block_size: expected an integer, 1 or more"),
        ({"device_kind": 3}, "device_kind: expected str, got 3"),
        ({"surprise": 1}, "unknown field surprise"),
        ({"curves": None}, "curves: expected list"),
        ({"curves": []}, "curves: expected at least one"),
        ({"curves": [[1, 2]]}, r"curves\[0\]: expected an object of requests and points"),
        ({"curves": [{"requests": 0, "points": [[1, 2]]}]}, r"curves\[0\]\.requests: expected an integer, 1 or more"),
        ({"curves": curve([1, 2]) * 2}, r"curves\[1\]\.requests: expected each number once"),
        ({"curves": curve()}, "curve of 1 requests: expected at least one point"),
        ({"curves": curve([1, 2, 3])}, r"curves\[0\]\.points: expected a list of"),
        ({"curves": curve([1.5, 2])}, r"curve of 1 requests\[0\]: expected batch tokens"),
        ({"curves": curve([2, 3], [2, 3])}, r"curve of 1 requests\[1\]: expected more than 2 batch tokens, got 2"),
        ({"curves": curve([4, 3], [2, 3])}, r"curve of 1 requests\[1\]: expected more than 4 batch tokens"),
        ({"curves": curve([1, 0])}, r"curve of 1 requests\[0\]: expected a finite rate above 0, got 0"),
        ({"curves": curve([1, -1])}, "expected a finite rate above 0"),
        ({"curves": curve([1, float("nan")])}, "expected a finite rate above 0"),
        ({"curves": curve([1, float("inf")])}, "expected a finite rate above 0"),
        ({"curves": curve([1, 10**400])}, "expected a finite rate above 0"),
        ({"curves": curve([1, "9"])}, "expected a finite rate above 0"),
    ],
)
def test_bad_file_is_refused(tmp_path, change, message):
    path = tmp_path / "table.json"
    save_throughput_table(TABLE, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DSV41Error, match=rf"table\.json: .*{message}"):
        load_throughput_table(path, 5)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", b"\xff\xfe"])
def test_what_is_not_a_json_object_is_refused(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DSV41Error, match=r"table\.json: (not a readable JSON file|expected a JSON object)"):
        load_throughput_table(path, 5)


def test_missing_field_or_file_is_refused(tmp_path):
    path = tmp_path / "table.json"
    with pytest.raises(DSV41Error, match=r"table\.json: no such file"):
        load_throughput_table(path, 5)
    save_throughput_table(TABLE, path)
    data = json.loads(path.read_text())
    del data["date"], data["curves"]
    path.write_text(json.dumps(data))
    with pytest.raises(DSV41Error, match=r"table\.json: missing field curves, date"):
        load_throughput_table(path, 5)


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    save_throughput_table(TABLE, path)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(DSV41Error, match=r"table\.json: cannot write the file \(No space left on device\)"):
            save_throughput_table(ThroughputTable.flat(5), path)
    with monkeypatch.context() as patch:
        patch.setattr("os.write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(DSV41Error, match="cannot write the file"):
            save_throughput_table(ThroughputTable.flat(5), path)
    assert load_throughput_table(path, 5) == TABLE
    assert [f.name for f in tmp_path.iterdir()] == ["table.json"]
    with pytest.raises(DSV41Error, match="no such directory"):
        save_throughput_table(TABLE, tmp_path / "absent" / "table.json")
    with pytest.raises(DSV41Error, match="is a directory"):
        save_throughput_table(TABLE, tmp_path)


def test_a_batch_that_was_not_measured_decides_like_its_neighbour():
    """Where a step costs as much as it is wide, nothing is worth verifying, whatever the number of requests."""
    table = ThroughputTable(block_size=5, curves={4: ((4, 1.0), (5, 1 / 2), (6, 1 / 4), (8, 1 / 6), (24, 1 / 6))})
    for requests in (2, 4, 16):
        a = np.cumprod(np.full((requests, 5), 0.7), axis=1)
        dense = table.dense(requests)
        assert dense[requests : requests + 5].tolist() == np.float32([1, 1 / 2, 1 / 4, 1 / 4, 1 / 6]).tolist()
        assert best_budget(a, np.full(requests, 5), dense, requests) == 0


def test_fewer_drafts_were_measured(tmp_path):
    table = ThroughputTable(block_size=5, draft_tokens=2, curves={1: ((1, 1.0),)})
    save_throughput_table(table, tmp_path / "table.json")
    assert load_throughput_table(tmp_path / "table.json", 5).draft_tokens == 2
    for wrong in (0, 6):
        with pytest.raises(DSV41Error, match="draft_tokens: expected an integer from 1 to block_size=5"):
            ThroughputTable(block_size=5, draft_tokens=wrong, curves={1: ((1, 1.0),)})
