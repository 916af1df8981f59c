"""Writes safetensors files for tests: well formed, malformed, sparse, and tiny_text dequantised to BF16."""

import json
import math
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from dsv41.checkpoint import CheckpointReader, open_checkpoint

DATA = pathlib.Path(__file__).parent / "data"
TINY = DATA / "tiny_text"

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
