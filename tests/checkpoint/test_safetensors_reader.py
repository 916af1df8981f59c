"""Reading safetensors files, and every way in which they can be broken."""

import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest

from dsv41.checkpoint import PARTS, CheckpointError, check_inventory, open_checkpoint, tensor_inventory
from dsv41.config import DSV41Error, load_config
from tests.checkpoint_files import (
    DATA,
    TINY,
    dequantised_checkpoint,
    header_of,
    stored_tensors,
    write_index,
    write_raw,
    write_safetensors,
    write_sharded,
)

FILE = "model.safetensors"


def refused(directory, *fragments):
    """Opening fails with one line that holds all `fragments`."""
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(directory)
    message = str(error.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message
    return message


def two_tensors(**changes):
    """A header of `a` F32 [2] and `b` BF16 [2, 2], with entries of b replaced."""
    header = header_of({"a": ("F32", (2,)), "b": ("BF16", (2, 2))})
    header["b"].update(changes)
    return header


# --- good files


@pytest.mark.parametrize(
    "dtype, array",
    [
        ("F32", np.arange(6, dtype=np.float32).reshape(2, 3)),
        ("F16", np.arange(6, dtype=np.float16)),
        ("F64", np.arange(3, dtype=np.float64)),
        ("BF16", np.arange(6).astype(ml_dtypes.bfloat16).reshape(3, 2)),
        ("F8_E4M3", np.arange(8, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)),
        ("F8_E5M2", np.arange(8, dtype=np.uint8).view(ml_dtypes.float8_e5m2)),
        ("F8_E8M0", np.array([0, 127, 128, 254, 255], np.uint8)),
        ("U8", np.arange(5, dtype=np.uint8)),
        ("I8", np.arange(250, 256, dtype=np.uint8)),
        ("F4", np.arange(6, dtype=np.uint8).reshape(2, 3)),
        ("BOOL", np.array([True, False])),
        ("I16", np.array([-1, 2], np.int16)),
        ("I32", np.array([-1, 2], np.int32)),
        ("I64", np.array([-1, 2], np.int64)),
        ("U16", np.array([1, 2], np.uint16)),
        ("U32", np.array([1, 2], np.uint32)),
        ("U64", np.array([1, 2], np.uint64)),
        ("F32", np.zeros((0, 4), np.float32)),
        ("F32", np.array(1.5, np.float32)),
    ],
)
def test_dtypes(tmp_path, dtype, array):
    """Bytes come back exactly, behind a tensor of odd length so that the data is not aligned."""
    write_safetensors(tmp_path / FILE, {"odd": ("U8", np.zeros(3, np.uint8)), "x": (dtype, array)})
    reader = open_checkpoint(tmp_path)
    view = reader.read("x")
    assert view.dtype == array.dtype and view.shape == array.shape
    assert view.tobytes() == array.tobytes()
    shape = (2, 6) if dtype == "F4" else array.shape
    assert reader.info("x") == (dtype, shape, tmp_path / FILE)


def test_views_are_mapped_not_copied():
    reader = open_checkpoint(TINY)
    view = reader.read("embed.weight")
    assert not view.flags.owndata and not view.flags.writeable
    assert np.shares_memory(view, reader.read("embed.weight"))
    del reader
    assert np.isfinite(view.astype(np.float32)).all()  # the view keeps its file mapped


def test_expert_bytes_stay_packed(tmp_path):
    """L1 and L3: packed FP4 and scales are raw bytes, never FP8 numbers. 0x3F is -12 and 3 at scale byte 128."""
    write_safetensors(
        tmp_path / FILE,
        {
            "layers.0.ffn.experts.0.w1.weight": ("I8", np.full((2, 16), 0x3F, np.uint8)),
            "layers.0.ffn.experts.0.w1.scale": ("F8_E8M0", np.array([[128], [255]], np.uint8)),
        },
    )
    reader = open_checkpoint(tmp_path)
    packed, scale = (reader.read(f"layers.0.ffn.experts.0.w1.{kind}") for kind in ("weight", "scale"))
    assert packed.dtype == scale.dtype == np.uint8
    assert np.all(packed == 0x3F)
    assert scale.tolist() == [[128], [255]]


def test_tiny_with_and_without_index(tmp_path):
    shutil.copy(TINY / FILE, tmp_path / FILE)
    with_index, without = open_checkpoint(TINY), open_checkpoint(tmp_path)
    assert list(with_index.names) == list(without.names) and len(with_index) == 1535
    assert "embed.weight" in with_index and "nothing" not in with_index
    name = "layers.3.ffn.experts.5.w2.weight"
    assert np.array_equal(with_index.read(name), without.read(name))


def test_shards(tmp_path):
    tensors = stored_tensors()
    names = list(tensors)
    half = len(names) // 2
    shards = {f"model-0000{i + 1}-of-00002.safetensors": part for i, part in enumerate((names[:half], names[half:]))}
    write_sharded(tmp_path, {shard: {n: tensors[n] for n in part} for shard, part in shards.items()})
    reader = open_checkpoint(tmp_path)
    assert sorted(reader.names) == sorted(names)
    assert [f.name for f in reader.files] == list(shards)
    assert reader.info(names[-1]).file.name == "model-00002-of-00002.safetensors"
    assert reader.read(names[-1]).tobytes() == tensors[names[-1]][1].tobytes()
    check_inventory(reader, tensor_inventory(load_config(TINY)), PARTS)


def test_model_prefix_is_dropped(tmp_path):
    write_sharded(tmp_path, {"s.safetensors": {"model.norm.weight": ("F32", np.ones(2, np.float32))}})
    reader = open_checkpoint(tmp_path)
    assert list(reader.names) == ["norm.weight"]
    assert reader.read("norm.weight").tolist() == [1, 1]


# --- files that are missing or cut


def test_missing_directory(tmp_path):
    refused(tmp_path / "no", str(tmp_path / "no"), "no such directory")


def test_missing_file(tmp_path):
    refused(tmp_path, str(tmp_path), "neither", "model.safetensors")


def test_unreadable_file(tmp_path):
    (tmp_path / FILE).mkdir()
    refused(tmp_path, FILE, "cannot be read")


def test_zero_byte_file(tmp_path):
    (tmp_path / FILE).write_bytes(b"")
    refused(tmp_path, FILE, "empty")


@pytest.mark.parametrize("keep, fragment", [(5, "truncated"), (40, "truncated"), (-1, "truncated"), (-17, "truncated")])
def test_truncated_file(tmp_path, keep, fragment):
    write_raw(tmp_path / FILE, two_tensors(), bytes(16))
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:keep])
    refused(tmp_path, FILE, fragment)


def test_truncated_data_names_the_tensor(tmp_path):
    write_raw(tmp_path / FILE, two_tensors(), bytes(12))
    refused(tmp_path, FILE, "'b'", "truncated")


# --- headers that break the format


def test_absurd_header_length(tmp_path):
    (tmp_path / FILE).write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    refused(tmp_path, FILE, "absurd")


@pytest.mark.parametrize("text", [b"not json", b"\xff\xfe{}", b'{"a": 1, "a": 2}', b"[" * 100_000])
def test_header_not_json(tmp_path, text):
    write_raw(tmp_path / FILE, text)
    refused(tmp_path, FILE, "not valid JSON")


def test_header_not_an_object(tmp_path):
    write_raw(tmp_path / FILE, [1])
    refused(tmp_path, FILE, "not a JSON object")


@pytest.mark.parametrize(
    "changes, fragment",
    [
        ({"dtype": "F3"}, "unknown dtype 'F3'"),
        ({"dtype": 7}, "unknown dtype 7"),
        ({"shape": [2, -2]}, "shape"),
        ({"shape": [True, 4]}, "shape"),
        ({"shape": 4}, "shape"),
        ({"data_offsets": [8]}, "data_offsets"),
        ({"data_offsets": [16, 8]}, "data_offsets"),
        ({"data_offsets": "8,16"}, "data_offsets"),
        ({"shape": [2, 3]}, "takes 12 bytes, data_offsets span 8"),
        ({"shape": [1 << 40, 1 << 40]}, "data_offsets span 8"),
        ({"dtype": "F32"}, "takes 16 bytes"),
        ({"dtype": "F4", "shape": [16, 1]}, "even last dimension"),
        ({"data_offsets": [4, 12]}, "overlaps 'a'"),
        ({"data_offsets": [0, 8]}, "overlaps"),
        ({"data_offsets": [12, 20]}, "4 unused bytes after 'a'"),
    ],
)
def test_bad_entry(tmp_path, changes, fragment):
    write_raw(tmp_path / FILE, two_tensors(**changes), bytes(20))
    refused(tmp_path, FILE, "'b'", fragment)


def test_entry_lacks_a_key(tmp_path):
    write_raw(tmp_path / FILE, {"b": {"dtype": "F32", "shape": [0]}})
    refused(tmp_path, FILE, "'b'", "data_offsets")


def test_bytes_after_the_last_tensor(tmp_path):
    write_raw(tmp_path / FILE, two_tensors(), bytes(17))
    refused(tmp_path, FILE, "1 unused bytes after 'b'")


def test_order_of_header_entries_is_free(tmp_path):
    header = two_tensors()
    write_raw(tmp_path / FILE, dict(reversed(header.items())), bytes(16))
    assert len(open_checkpoint(tmp_path)) == 2


def test_prefix_collision(tmp_path):
    write_raw(tmp_path / FILE, header_of({"a": ("U8", (1,)), "model.a": ("U8", (1,))}), bytes(2))
    refused(tmp_path, FILE, "'a'", "twice")


# --- index and shards that disagree

ONE = ("U8", np.ones(1, np.uint8))


def test_duplicate_tensor_in_two_shards(tmp_path):
    write_sharded(tmp_path, {"1.safetensors": {"a": ONE, "b": ONE}, "2.safetensors": {"b": ONE, "c": ONE}})
    refused(tmp_path, "index.json", "1 tensors in two shards: b (1.safetensors and 2.safetensors)")


def test_index_names_a_missing_shard(tmp_path):
    write_sharded(tmp_path, {"1.safetensors": {"a": ONE}, "2.safetensors": {"b": ONE}})
    (tmp_path / "2.safetensors").unlink()
    refused(tmp_path, "index.json", "1 missing shards: 2.safetensors")


def test_index_names_a_tensor_its_shard_lacks(tmp_path):
    write_sharded(tmp_path, {"1.safetensors": {"a": ONE}, "2.safetensors": {"b": ONE}})
    write_index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    message = refused(tmp_path, "index.json", "2 tensors missing from their shard")
    assert "b (not in 1.safetensors)" in message and "c (not in 2.safetensors)" in message


def test_shard_holds_a_tensor_the_index_lacks(tmp_path):
    write_sharded(tmp_path, {"1.safetensors": {"a": ONE, "b": ONE}})
    write_index(tmp_path, {"a": "1.safetensors"})
    refused(tmp_path, "1 unexpected tensors that the index lacks: b (1.safetensors)")


@pytest.mark.parametrize(
    "weight_map, fragment",
    [
        (None, "weight_map"),
        ({}, "weight_map"),
        ({"a": "../1.safetensors"}, "'../1.safetensors'"),
        ({"a": ".."}, "file name"),
        ({"a": 3}, "got 3"),
        ({"a": "1.safetensors", "model.a": "1.safetensors"}, "'a' is listed twice"),
    ],
)
def test_bad_weight_map(tmp_path, weight_map, fragment):
    write_index(tmp_path, weight_map)
    refused(tmp_path, "index.json", fragment)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"a": "x", "a": "y"}}'])
def test_bad_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "index.json")


def test_errors_are_for_users():
    assert issubclass(CheckpointError, DSV41Error)
    with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
        open_checkpoint(TINY).info("nothing")
    with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
        open_checkpoint(TINY).read("nothing")


# --- against the inventory

TINY_INVENTORY = tensor_inventory(load_config(TINY))


def checked(directory, tensors, parts=PARTS, inventory=TINY_INVENTORY):
    write_safetensors(directory / FILE, tensors)
    check_inventory(open_checkpoint(directory), inventory, parts)


def test_inventory_lists_every_problem_at_once(tmp_path):
    tensors = stored_tensors()
    del tensors["norm.weight"], tensors["mtp.2.norm.weight"]
    tensors["layers.0.attn.wq_a.bias"] = ONE
    tensors["embed.weight"] = ("BF16", tensors["embed.weight"][1][:-1])
    tensors["head.weight"] = ("F32", np.zeros((512, 128), np.float32))
    with pytest.raises(CheckpointError) as error:
        checked(tmp_path, tensors)
    assert str(error.value) == (
        f"{tmp_path}: does not match its config: 2 missing tensors: norm.weight, mtp.2.norm.weight; "
        f"1 unexpected tensors: layers.0.attn.wq_a.bias ({FILE}); "
        f"1 tensors of the wrong shape: embed.weight ({FILE}: expected BF16 [512, 128], got BF16 [511, 128]); "
        f"1 tensors of the wrong dtype: head.weight ({FILE}: expected BF16, got F32)"
    )


def test_long_lists_are_cut(tmp_path):
    tensors = {name: t for name, t in stored_tensors().items() if not name.startswith("layers.7.")}
    with pytest.raises(CheckpointError) as error:
        checked(tmp_path, tensors)
    count = sum(name.startswith("layers.7.") for name in TINY_INVENTORY)
    assert f"{count} missing tensors: " in str(error.value) and str(error.value).endswith(", ...")
    assert len(re.findall(r"layers\.7\.", str(error.value))) == 20


def test_only_wanted_parts_are_needed(tmp_path):
    text_only = {name: t for name, t in stored_tensors().items() if TINY_INVENTORY[name].part in ("backbone", "engram")}
    checked(tmp_path, text_only, ("backbone", "engram"))
    with pytest.raises(CheckpointError, match=r"missing tensors: mtp\.0"):
        checked(tmp_path, text_only, ("backbone", "drafter"))


def test_unwanted_parts_are_not_unexpected(tmp_path):
    checked(tmp_path, stored_tensors(), ("backbone",))


def test_byte_types_of_older_writers(tmp_path):
    """E8M0 as U8, packed FP4 as U8 or F4; but not E8M0 as I8, FP8 codes as U8, or F4 of the packed shape."""
    tensors = stored_tensors()
    expert, dense = "layers.0.ffn.experts.0.w1", "layers.0.attn.wq_a"
    good = {f"{expert}.scale": "U8", f"{expert}.weight": "F4", "layers.0.ffn.experts.1.w1.weight": "U8"}
    checked(tmp_path, tensors | {name: (dtype, tensors[name][1]) for name, dtype in good.items()})
    bad = {f"{expert}.scale": "I8", f"{dense}.weight": "U8"}
    with pytest.raises(CheckpointError, match="2 tensors of the wrong dtype"):
        checked(tmp_path, tensors | {name: (dtype, tensors[name][1]) for name, dtype in bad.items()})
    half = np.ascontiguousarray(tensors[f"{expert}.weight"][1][:, ::2])
    with pytest.raises(CheckpointError, match=r"wrong shape: .*expected I8 \[64, 64\], got F4 \[64, 64\]"):
        checked(tmp_path, tensors | {f"{expert}.weight": ("F4", half)})


def test_bf16_checkpoint_is_what_its_config_says(tmp_path):
    directory = dequantised_checkpoint(TINY, tmp_path / "bf16")
    config = load_config(directory)
    assert config == load_config(DATA / "tiny_bf16")
    check_inventory(open_checkpoint(directory), tensor_inventory(config), PARTS)
    assert json.loads((directory / "tokenizer.json").read_text())
    with pytest.raises(CheckpointError, match="unexpected tensors"):
        check_inventory(open_checkpoint(TINY), tensor_inventory(config), PARTS)
