"""Safetensors files with their index, written tensor by tensor, and the directory they appear in (checkpoint.md)."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from dsv41.checkpoint.inventory import TensorSpec, is_engram_table
from dsv41.checkpoint.load_parameters import Progress
from dsv41.checkpoint.safetensors_reader import INDEX_NAME, SINGLE_NAME
from dsv41.config import DSV41Error
from dsv41.config.atomic_file import partial_path, write_file

# The arrays whose bytes, one after the other, are the tensor's.
Values = Callable[[TensorSpec], Iterable[np.ndarray]]

# The tensors' bytes begin at a multiple of it, as the format's own writer has it.
_ALIGNMENT = 8
# Headers, config and tokenizer.
_SPARE_BYTES = 16 << 20


@contextlib.contextmanager
def new_directory(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory that appears complete or not at all: yields a hidden one beside it, which becomes `path` in the end.

    Directories above it are made. A process that is killed leaves the hidden one behind.

    Raises:
      DSV41Error: `path` is a file or a directory that is not empty, or the system refuses to write.
    """
    path = pathlib.Path(path).absolute()
    for file in (path, path.parent):
        if file.exists() and not file.is_dir():
            raise DSV41Error(f"{file}: is a file, expected a directory")
    partial = partial_path(path)
    try:
        if path.is_dir() and any(path.iterdir()):
            raise DSV41Error(f"{path}: is not empty; expected a new directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        try:
            yield partial
            _sync(partial)
            os.replace(partial, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as e:
        raise DSV41Error(f"{path}: cannot write the directory ({e.strerror or e})") from e


def _sync(directory: pathlib.Path) -> None:
    """Waits until the entries of a directory are on the disk."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def check_space(directory: pathlib.Path, specs: Iterable[TensorSpec]) -> None:
    """Raises DSV41Error if the tensors do not fit onto the disk of an existing directory."""
    need, free = sum(spec.nbytes for spec in specs), shutil.disk_usage(directory).free
    if need + _SPARE_BYTES > free:
        raise DSV41Error(
            f"{directory}: the disk has {free / 2**30:,.2f} GiB free, the tensors take {need / 2**30:,.2f}"
        )


def shards_of(specs: Iterable[TensorSpec], most_bytes: int) -> list[list[TensorSpec]]:
    """Whole layers, one after the other, in shards of at most `most_bytes`; then the Engram tables.

    What belongs together is in one shard, also if it is larger: a layer, the values of a table with their scales.

    Raises:
      DSV41Error: `most_bytes` is not positive.
    """
    if most_bytes < 1:
        raise DSV41Error(f"shard bytes: expected a positive number, got {most_bytes}")
    groups: dict[tuple[bool, str], list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault((is_engram_table(spec.name), layer_of(spec)), []).append(spec)
    shards, room = [], 0
    for _, group in sorted(groups.items(), key=lambda item: item[0][0]):
        size = sum(spec.nbytes for spec in group)
        if not shards or size > room:
            shards.append([])
            room = most_bytes
        shards[-1] += group
        room -= size
    return shards


def layer_of(spec: TensorSpec) -> str:
    """The layer or drafter stage of a tensor, as it begins its name; "" for what is in none."""
    path = spec.name.split(".")
    return ".".join(path[:2]) if path[0] in ("layers", "mtp") else ""


def write_shards(
    directory: pathlib.Path,
    shards: Sequence[Sequence[TensorSpec]],
    values: Values,
    *,
    progress: Progress | None = None,
) -> None:
    """Writes safetensors files and their index.

    Args:
      directory: where to.
      shards: the tensors of each file, in the order in which they lie in it.
      values: asked for one tensor after the other.
      progress: called after each tensor with (bytes done, bytes in all, its name).

    Raises:
      OSError: the system refuses to write.
      DSV41Error: the values of a tensor are too many or too few.
    """
    total, done = sum(spec.nbytes for shard in shards for spec in shard), 0
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for spec in _write_shard(directory / name, shard, values):
            done += spec.nbytes
            if progress is not None:
                progress(done, total, spec.name)
        weight_map |= dict.fromkeys((spec.name for spec in shard), name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_file(directory / INDEX_NAME, json.dumps(index).encode())


def _write_shard(path: pathlib.Path, specs: Sequence[TensorSpec], values: Values) -> Iterator[TensorSpec]:
    """Yields each tensor when it is written."""
    # Other readers of the format expect the metadata.
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for spec in specs:
        begin, end = end, end + spec.nbytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            written = 0
            for array in values(spec):
                # A view of bytes, because not all dtypes have the buffer protocol.
                written += file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            if written != spec.nbytes:
                raise DSV41Error(
                    f"tensor {spec.name!r}: expected {spec.nbytes:,} bytes as {spec.dtype} "
                    f"{list(spec.shape)}, got {written:,}"
                )
            yield spec
        file.flush()
        os.fsync(file.fileno())
