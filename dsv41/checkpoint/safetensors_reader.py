"""Safetensors checkpoints as read-only numpy views of memory-mapped files; every header is checked on opening."""

from __future__ import annotations

import json
import math
import mmap
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dsv41.checkpoint.inventory import TensorSpec
from dsv41.config import DSV41Error

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The header is parsed here because the safetensors library's numpy front end refuses F8_E8M0, F8_E4M3 and F4 (numpy
# has no such types) and copies whatever it does return.
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit

# dtype string -> (bits an element, numpy dtype of the view). Formats that numpy cannot compute with stay bytes:
# packed FP4 (written as I8, U8 or F4) and E8M0 scales.
_STORAGE: dict[str, tuple[int, np.dtype]] = {
    name: (bits, np.dtype(dtype))
    for name, bits, dtype in (
        ("BOOL", 8, np.bool_),
        ("F4", 4, np.uint8),
        ("I8", 8, np.uint8),
        ("U8", 8, np.uint8),
        ("F8_E8M0", 8, np.uint8),
        ("F8_E4M3", 8, ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", 8, ml_dtypes.float8_e5m2),
        ("I16", 16, np.int16),
        ("U16", 16, np.uint16),
        ("F16", 16, np.float16),
        ("BF16", 16, ml_dtypes.bfloat16),
        ("I32", 32, np.int32),
        ("U32", 32, np.uint32),
        ("F32", 32, np.float32),
        ("I64", 64, np.int64),
        ("U64", 64, np.uint64),
        ("F64", 64, np.float64),
    )
}
# Other dtypes that hold the same bytes: writers older than the 8- and 4-bit types used plain bytes.
_EQUIVALENT = {"F8_E8M0": ("U8",), "I8": ("U8", "F4")}


class CheckpointError(DSV41Error):
    """A checkpoint that cannot be used; the message names the file and the tensor."""


class TensorInfo(NamedTuple):
    """Stored dtype (safetensors string), stored shape and file of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    file: pathlib.Path

    @property
    def array(self) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of the array that it is read as; of F4 the last axis is halved, two codes a byte."""
        shape = (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" else self.shape
        return shape, _STORAGE[self.dtype][1]


class _Tensor(NamedTuple):
    info: TensorInfo
    begin: int  # bytes from the start of the file
    end: int


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise ValueError(f"key {next(k for k, _ in pairs if k in seen or seen.add(k))!r} appears twice")
    return result


def _strip_prefix(name: str) -> str:
    """Drops a leading `model.`, the one renaming that the release's own converter needs for other writers' files."""
    return name.removeprefix("model.")


def _parse_tensor(file: pathlib.Path, name: str, entry: Any, data_start: int, data_bytes: int) -> _Tensor:
    where = f"{file}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where}: header entry needs dtype, shape and data_offsets, got {entry!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _STORAGE:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}")
    for key, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
            raise CheckpointError(f"{where}: {key} must be a list of non-negative integers, got {value!r}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets must be [begin, end], got {offsets}")
    if dtype == "F4" and (not shape or shape[-1] % 2):
        raise CheckpointError(f"{where}: packed F4 needs an even last dimension, got shape {shape}")
    begin, end = offsets
    expected = math.prod(shape) * _STORAGE[dtype][0] // 8
    if end - begin != expected:
        raise CheckpointError(f"{where}: {dtype} {shape} takes {expected} bytes, data_offsets span {end - begin}")
    if end > data_bytes:
        raise CheckpointError(f"{where}: data ends at byte {end} of {data_bytes}; the file is truncated")
    return _Tensor(TensorInfo(dtype, tuple(shape), file), data_start + begin, data_start + end)


def _check_contiguous(file: pathlib.Path, tensors: Mapping[str, _Tensor], data_start: int, file_bytes: int) -> None:
    """The format wants every data byte to belong to exactly one tensor."""
    position, previous = data_start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            problem = "overlaps" if tensor.begin < position else f"leaves {tensor.begin - position} unused bytes after"
            raise CheckpointError(f"{file}: tensor {name!r} {problem} {previous}")
        position, previous = tensor.end, repr(name)
    if position != file_bytes:
        raise CheckpointError(f"{file}: {file_bytes - position} unused bytes after {previous}, the last tensor")


def _read_header(file: pathlib.Path) -> tuple[dict[str, _Tensor], mmap.mmap]:
    """Maps one file and checks its header. Tensor names lose their `model.` prefix.

    Raises:
      CheckpointError: the file is missing or empty, or its header breaks the format.
    """
    try:
        with open(file, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            if size == 0:
                raise CheckpointError(f"{file}: empty file")
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise CheckpointError(f"{file}: cannot be read ({e.strerror or e})") from e
    header_bytes = int.from_bytes(data[:8], "little")
    if size < 8:
        raise CheckpointError(f"{file}: {size} bytes cannot hold a safetensors header; the file is truncated")
    if header_bytes > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{file}: header length {header_bytes} is absurd; not a safetensors file")
    start = 8 + header_bytes
    if start > size:
        raise CheckpointError(f"{file}: header of {header_bytes} bytes in a file of {size}; the file is truncated")
    try:
        header = json.loads(data[8:start].decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{file}: header is not valid JSON ({e})") from e
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: header is not a JSON object")
    tensors: dict[str, _Tensor] = {}
    for stored_name, entry in header.items():
        if stored_name == "__metadata__":
            continue
        name = _strip_prefix(stored_name)
        if name in tensors:
            raise CheckpointError(f"{file}: tensor {name!r} is stored twice, with and without the prefix 'model.'")
        tensors[name] = _parse_tensor(file, stored_name, entry, start, size - start)
    _check_contiguous(file, tensors, start, size)
    return tensors, data


def _read_index(path: pathlib.Path) -> dict[str, str]:
    """Tensor name (without `model.`) -> shard file name."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: not a readable JSON file ({e})") from e
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map: missing or not a JSON object of tensor names")
    result: dict[str, str] = {}
    for name, shard in weight_map.items():
        # A shard is a plain file beside its index; anything else could read outside the checkpoint.
        if not isinstance(shard, str) or shard != os.path.basename(shard) or shard in ("", ".", ".."):
            raise CheckpointError(f"{path}: tensor {name!r}: expected a file name, got {shard!r}")
        if _strip_prefix(name) in result:
            raise CheckpointError(f"{path}: tensor {_strip_prefix(name)!r} is listed twice")
        result[_strip_prefix(name)] = shard
    return result


def _listing(kind: str, items: Collection[str], limit: int = 20) -> str:
    more = ", ..." if len(items) > limit else ""
    return f"{len(items)} {kind}: {', '.join(list(items)[:limit])}{more}"


class CheckpointReader:
    """Tensors of one checkpoint directory by name. Made by `open_checkpoint`.

    Views stay valid after the reader is gone: each keeps its file mapped.
    """

    def __init__(self, directory: pathlib.Path, tensors: dict[str, _Tensor], maps: dict[pathlib.Path, mmap.mmap]):
        self.directory = directory
        self.files = tuple(maps)
        self._tensors = tensors
        self._maps = maps

    @property
    def names(self) -> Collection[str]:
        """All tensor names, without a `model.` prefix, in file order."""
        return self._tensors.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _tensor(self, name: str) -> _Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.directory}: no tensor {name!r}") from None

    def info(self, name: str) -> TensorInfo:
        """(dtype string, shape, file) as stored; F4 shapes are logical, twice the bytes of the last axis.

        Raises:
          CheckpointError: there is no such tensor.
        """
        return self._tensor(name).info

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the mapped file, no copy.

        F8_E4M3 is `ml_dtypes.float8_e4m3fn`, BF16 `ml_dtypes.bfloat16`. F8_E8M0, I8 and F4 are raw uint8; of F4 the
        last axis is halved, two codes a byte.

        Raises:
          CheckpointError: there is no such tensor.
        """
        info, begin, _ = self._tensor(name)
        shape, dtype = info.array
        return np.frombuffer(self._maps[info.file], dtype, math.prod(shape), begin).reshape(shape)


def open_checkpoint(directory: str | os.PathLike[str]) -> CheckpointReader:
    """Opens a directory with `model.safetensors.index.json` and its shards, or a single `model.safetensors`.

    All headers are read and checked; no tensor data is.

    Raises:
      CheckpointError: directory or file missing, a file truncated or malformed, or index and shards disagree; names
        file and tensor.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    index_path = directory / INDEX_NAME
    if not index_path.exists():
        file = directory / SINGLE_NAME
        if not file.exists():
            raise CheckpointError(f"{directory}: holds neither {INDEX_NAME} nor {SINGLE_NAME}")
        tensors, data = _read_header(file)
        return CheckpointReader(directory, tensors, {file: data})
    index = _read_index(index_path)
    shards = sorted(set(index.values()))
    absent = [shard for shard in shards if not (directory / shard).is_file()]
    if absent:
        raise CheckpointError(f"{index_path}: {_listing('missing shards', absent)}")
    tensors, maps, doubled = {}, {}, []
    for shard in shards:
        here, maps[directory / shard] = _read_header(directory / shard)
        doubled += [f"{n} ({tensors[n].info.file.name} and {shard})" for n in here if n in tensors]
        tensors.update(here)
    lacking = [f"{n} (not in {s})" for n, s in index.items() if n not in tensors or tensors[n].info.file.name != s]
    surplus = [f"{n} ({t.info.file.name})" for n, t in tensors.items() if n not in index]
    kinds = (
        ("tensors in two shards", doubled),
        ("tensors missing from their shard", [] if doubled else lacking),
        ("unexpected tensors that the index lacks", surplus),
    )
    problems = [_listing(kind, items) for kind, items in kinds if items]
    if problems:
        raise CheckpointError(f"{index_path}: {'; '.join(problems)}")
    return CheckpointReader(directory, tensors, maps)


def _storage_matches(info: TensorInfo, spec: TensorSpec) -> tuple[bool, bool]:
    """(dtype fits, shape fits)."""
    shape = info.array[0] if spec.dtype == "I8" else info.shape
    dtype_fits = info.dtype == spec.dtype or info.dtype in _EQUIVALENT.get(spec.dtype, ())
    return dtype_fits, shape == spec.shape


def check_inventory(reader: CheckpointReader, inventory: Mapping[str, TensorSpec], parts: Collection[str]) -> None:
    """Compares the files with what the config says they hold.

    Every tensor of the wanted parts must be there with its stored shape and dtype; tensors of other parts may be
    absent, but a name that no part knows is refused, whatever the parts. E8M0 scales may be stored as U8, packed FP4
    as U8 or F4.

    Args:
      reader: the open checkpoint.
      inventory: `tensor_inventory` of the config.
      parts: some of `inventory.PARTS`.

    Raises:
      CheckpointError: lists all problems at once, the first 20 of each kind.
    """
    missing, shapes, dtypes = [], [], []
    for name, spec in inventory.items():
        if spec.part not in parts:
            continue
        if name not in reader:
            missing.append(name)
            continue
        info = reader.info(name)
        dtype_fits, shape_fits = _storage_matches(info, spec)
        if not dtype_fits:
            dtypes.append(f"{name} ({info.file.name}: expected {spec.dtype}, got {info.dtype})")
        elif not shape_fits:
            expected, got = f"{spec.dtype} {list(spec.shape)}", f"{info.dtype} {list(info.shape)}"
            shapes.append(f"{name} ({info.file.name}: expected {expected}, got {got})")
    unexpected = [f"{name} ({reader.info(name).file.name})" for name in reader if name not in inventory]
    kinds = (
        ("missing tensors", missing),
        ("unexpected tensors", unexpected),
        ("tensors of the wrong shape", shapes),
        ("tensors of the wrong dtype", dtypes),
    )
    problems = [_listing(kind, items) for kind, items in kinds if items]
    if problems:
        raise CheckpointError(f"{reader.directory}: does not match its config: {'; '.join(problems)}")
