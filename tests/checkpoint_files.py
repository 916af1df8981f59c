"""Writes safetensors files for tests: well formed, malformed, sparse, tiny_text with few layers or dequantised."""

import atexit
import functools
import json
import math
import pathlib
import re
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from dsv41.checkpoint import CheckpointReader, open_checkpoint

DATA = pathlib.Path(__file__).parent / "data"
TINY = DATA / "tiny_text"

# Of the tiny model, by what they are there: with Engram; full at ratio 2; full at ratio 1, with the candidate pool. The
# first layer of few gets the Engram even if another is left out.
_FEW_LAYERS = {
    1: ([6], {"compress_ratios": [1], "kv_source_layer_ids": [0], "index_source_layer_ids": [0]}),
    2: ([1, 6], {"compress_ratios": [0, 1], "kv_source_layer_ids": [1], "index_source_layer_ids": [1]}),
    3: ([1, 2, 6], {"compress_ratios": [0, 2, 1], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2]}),
}

_BITS = {"F4": 4, "BF16": 16, "F16": 16, "I16": 16, "U16": 16, "F32": 32, "I32": 32, "U32": 32}
_BITS |= {"F64": 64, "I64": 64, "U64": 64}  # the others take a byte
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def write_raw(path: pathlib.Path, header: Any, data: bytes = b"") -> None:
    """A file of `header` (bytes as they are, anything else as JSON) with its length before it and `data` after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def header_of(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """The header of tensors that lie one after another; name -> (dtype, stored shape)."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + math.prod(shape) * _BITS.get(dtype, 8) // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return header


def write_safetensors(path: pathlib.Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """Writes name -> (safetensors dtype, array of that width). F4 arrays are packed bytes; their shape is doubled."""

    def stored(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], 2 * shape[-1]) if dtype == "F4" else shape

    header = header_of({name: (dtype, stored(dtype, a.shape)) for name, (dtype, a) in tensors.items()})
    write_raw(path, header, b"".join(np.ascontiguousarray(a).tobytes() for _, a in tensors.values()))


def write_sparse(path: pathlib.Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Writes zeros that take no disk space; name -> (dtype, stored shape)."""
    header = header_of(shapes)
    write_raw(path, header)
    with open(path, "r+b") as f:
        f.truncate(path.stat().st_size + max(entry["data_offsets"][1] for entry in header.values()))


def write_sharded(directory: pathlib.Path, shards: Mapping[str, Mapping[str, tuple[str, np.ndarray]]]) -> None:
    """Writes shard file -> its tensors, and the index."""
    for shard, tensors in shards.items():
        write_safetensors(directory / shard, tensors)
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    write_index(directory, weight_map)


def write_index(directory: pathlib.Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def stored_tensors(directory: pathlib.Path = TINY) -> dict[str, tuple[str, np.ndarray]]:
    """All tensors of a checkpoint in the form `write_safetensors` takes."""
    reader = open_checkpoint(directory)
    return {name: (reader.info(name).dtype, reader.read(name)) for name in reader.names}


def few_layers(directory: pathlib.Path, number: int) -> pathlib.Path:
    """A checkpoint of some layers of the tiny model, without drafter: it compiles in a fraction of the time."""
    layers, changes = _FEW_LAYERS[number]
    config = json.loads((TINY / "config.json").read_text())
    config["text_config"] |= changes | {
        "num_hidden_layers": number,
        "candidate_source_layer_id": number - 1,
        "engram_layer_ids": [0],
        "engram_num_embeddings": [834],
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }
    tensors = {}
    for name, tensor in stored_tensors().items():
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
        if match is None and not name.startswith("mtp."):
            tensors[name] = tensor
        elif match is not None and int(match[1]) in layers:
            tensors[f"layers.{layers.index(int(match[1]))}.{match[2]}"] = tensor
        elif match is not None and match[1] == "1" and match[2].startswith("engram."):
            tensors[f"layers.0.{match[2]}"] = tensor
    directory.mkdir()
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(TINY / "tokenizer.json", directory)
    return directory


@functools.cache
def _kept(number: int) -> pathlib.Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return few_layers(pathlib.Path(folder.name) / "few_layers", number)


def one_layer() -> pathlib.Path:
    """`few_layers` of one, written once a process: for tests of scripts and of what is above the models."""
    return _kept(1)


def script_model() -> tuple[str, str]:
    """Flags of `one_layer`, for the tests of scripts that look at no golden number.

    Tests of several scripts whose steps have the same shapes find the same programs in the compile cache.
    """
    return f"--checkpoint={one_layer()}", "--set=text_config.max_position_embeddings=4096"


def three_layers() -> pathlib.Path:
    """`few_layers` of three, written once a process, for what needs a decoder behind the encoder."""
    return _kept(3)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    rounded = values.astype(ml_dtypes.bfloat16)
    assert np.array_equal(rounded.astype(np.float32), values), "code * scale must be exact in bfloat16"
    return rounded


def dequantised_weight(reader: CheckpointReader, name: str) -> np.ndarray:
    """bfloat16 `[out, in]` values of a quantised `X.weight` (code times scale)."""
    codes = reader.read(name)
    exponents = reader.read(name.removesuffix(".weight") + ".scale").astype(np.int32) - 127
    scales = np.ldexp(np.float32(1), exponents).repeat(32, axis=1)
    if codes.dtype == np.uint8:  # packed FP4: the low nibble is the even column
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
        values = _E2M1[nibbles & 7] * np.where(nibbles & 8, np.float32(-1), np.float32(1))
    else:
        values = codes.astype(np.float32)
        if ".engram.embed." not in name:  # dense FP8 shares a scale over 32 rows too
            scales = scales.repeat(32, axis=0)
    return _to_bf16(values * scales[: values.shape[0], : values.shape[1]])


def dequantised_checkpoint(src_dir: pathlib.Path, dst_dir: pathlib.Path) -> pathlib.Path:
    """The BF16 twin of tiny_text that `tests/data/tiny_bf16/expected.safetensors` was made with.

    Quantised weights become BF16 `[out, in]` and lose their scales; BF16 and F32 tensors stay. `config.json` is that of
    tests/data/tiny_bf16, `tokenizer.json` that of `src_dir`. Returns `dst_dir`.
    """
    reader = open_checkpoint(src_dir)
    tensors = {}
    for name in reader.names:
        if name.removesuffix(".weight") + ".scale" in reader and name.endswith(".weight"):
            tensors[name] = ("BF16", dequantised_weight(reader, name))
        elif not name.endswith(".scale"):
            tensors[name] = (reader.info(name).dtype, reader.read(name))
    dst_dir.mkdir(parents=True, exist_ok=True)
    write_safetensors(dst_dir / "model.safetensors", tensors)
    shutil.copy(DATA / "tiny_bf16" / "config.json", dst_dir / "config.json")
    shutil.copy(src_dir / "tokenizer.json", dst_dir / "tokenizer.json")
    return dst_dir
