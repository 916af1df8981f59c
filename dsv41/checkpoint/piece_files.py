"""The files of an imported checkpoint's pieces, and the record that says what is in one.

    pieces/NAME/             whole parameters: an orbax tree (OCDBT), uncompressed
    pieces/NAME.json         the record: dtype, shape and SHA-256 of each tensor's stored bytes
    engram/TENSOR            the rows of an Engram table, as plain bytes [rows, columns]

Chunks are cut along the first axis, so that a process that holds some experts or rows reads little else. Random bytes
of FP4 and FP8 do not compress. Tables are plain files because a look-up takes single rows of 264 bytes: from a mapped
file that is a page, from a chunked array a whole chunk. Orbax is imported where it is used: a directory in the released
layout loads without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from dsv41.checkpoint.import_plan import Parameter, Piece, RowPiece, group_parameters
from dsv41.checkpoint.load_parameters import HostParameter
from dsv41.checkpoint.safetensors_reader import CheckpointError, CheckpointReader, TensorInfo
from dsv41.config import DSV41Error
from dsv41.config.atomic_file import cannot_write
from dsv41.config.record_file import read_record, write_record

PIECES, TABLES = "pieces", "engram"
RECORD_VERSION = 1
_CHUNK_BYTES = 16 << 20
_ROW_BLOCK_BYTES = 16 << 20
_SHA256 = re.compile("[0-9a-f]{64}")
# Hashing lets go of the interpreter; threads are worth it from some size on.
_HASHERS = min(8, os.cpu_count() or 1)
_HASH_THREADS_FROM = 4 << 20


class StoredTensor(NamedTuple):
    """A tensor as a piece holds it; of an Engram table, the shape is that of the whole."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


class PieceRecord(NamedTuple):
    """What one piece holds.

    Attributes:
      name: of the piece.
      rows: (begin, end) of an Engram table's rows; None if it holds whole parameters.
      tensors: by name.
    """

    name: str
    rows: tuple[int, int] | None
    tensors: dict[str, StoredTensor]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return group_parameters(self.tensors)


def record_path(out: pathlib.Path, piece: str) -> pathlib.Path:
    return out / PIECES / f"{piece}.json"


def piece_path(out: pathlib.Path, piece: str) -> pathlib.Path:
    return out / PIECES / piece


def table_path(out: pathlib.Path, tensor: str) -> pathlib.Path:
    return out / TABLES / tensor


def write_piece_record(out: pathlib.Path, record: PieceRecord) -> None:
    """Declares a piece complete.

    Raises:
      DSV41Error: the file cannot be written.
    """
    fields = {"rows": list(record.rows or ()), "tensors": {name: list(t) for name, t in record.tensors.items()}}
    write_record(record_path(out, record.name), RECORD_VERSION, fields)


def read_piece_record(out: pathlib.Path, piece: str) -> PieceRecord:
    """Raises:
    DSV41Error: the record is missing or malformed; names the file.
    """
    path = record_path(out, piece)
    fields = read_record(path, RECORD_VERSION, {"rows": list, "tensors": dict})
    tensors = {name: _stored_tensor(path, name, entry) for name, entry in fields["tensors"].items()}
    rows = fields["rows"]
    if rows and (len(rows) != 2 or any(type(n) is not int for n in rows) or not 0 <= rows[0] < rows[1]):
        raise CheckpointError(f"{path}: rows: expected [begin, end], got {rows!r}")
    return PieceRecord(piece, tuple(rows) if rows else None, tensors)


def _stored_tensor(path: pathlib.Path, name: str, entry: Any) -> StoredTensor:
    try:
        dtype, shape, sha256 = entry
        sizes_fit = all(type(n) is int and n >= 0 for n in shape)
        TensorInfo(dtype, tuple(shape), path).array  # noqa: B018  an unknown dtype is refused here
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{path}: tensor {name!r}: expected [dtype, shape, sha256], got {entry!r}") from e
    if not sizes_fit or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise CheckpointError(f"{path}: tensor {name!r}: expected [dtype, shape, sha256], got {entry!r}")
    return StoredTensor(dtype, tuple(shape), sha256)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def digests(parts: Mapping[str, np.ndarray]) -> dict[str, str]:
    """SHA-256 of each array's bytes in C order."""

    def digest(part: np.ndarray) -> str:
        return hashlib.sha256(_bytes_of(part)).hexdigest()

    if sum(part.nbytes for part in parts.values()) < _HASH_THREADS_FROM:
        return {name: digest(part) for name, part in parts.items()}
    with ThreadPoolExecutor(_HASHERS) as pool:
        return dict(zip(parts, pool.map(digest, parts.values()), strict=True))


def tensor_parts(parameter: Parameter, array: np.ndarray) -> dict[str, np.ndarray]:
    """A parameter's array -> the tensors it is made of, as views."""
    return dict(zip(parameter.tensors, array if parameter.stacked else (array,), strict=True))


@contextlib.contextmanager
def one_error() -> Iterator[None]:
    """Keeps orbax from telling of one failure many times: the caller raises a single error instead.

    Each of its threads logs the failure, and reads and writes that fail after the first find its event loop closed.
    """
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    level = log.level

    def tell(unraisable) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    log.setLevel(logging.CRITICAL)
    sys.unraisablehook = tell
    try:
        yield
    finally:
        log.setLevel(level)
        sys.unraisablehook = hook


def write_piece(out: pathlib.Path, piece: Piece, reader: CheckpointReader) -> PieceRecord:
    """Writes a piece whole and on to the disk; the caller records it.

    Raises:
      CheckpointError: a tensor holds NaN or infinity.
      DSV41Error: the system refuses to write; names the piece.
    """
    if isinstance(piece, RowPiece):
        return _write_rows(out, piece, reader)
    arrays, tensors = {}, {}
    for parameter in piece.parameters:
        shape, dtype = reader.info(parameter.tensors[0]).array
        shape = (len(parameter.tensors), *shape) if parameter.stacked else shape
        struct = jax.ShapeDtypeStruct(shape, dtype)
        array = HostParameter(reader, parameter.name, struct).read(tuple(slice(0, n) for n in shape), copy=False)
        arrays[parameter.name] = array
        for name, sha256 in digests(tensor_parts(parameter, array)).items():
            info = reader.info(name)
            tensors[name] = StoredTensor(info.dtype, info.shape, sha256)
    _save(piece_path(out, piece.name), arrays)
    return PieceRecord(piece.name, None, tensors)


def _save(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an orbax tree beside its place and puts it there.

    Raises:
      DSV41Error: the system refuses; what was written is gone then.
    """
    import orbax.checkpoint as ocp

    layout = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,))
    args = ocp.args.PyTreeSave(dict(arrays), save_args=dict.fromkeys(arrays, layout))
    # Saving waits until the files are written, so that orbax needs no copy of the arrays.
    types = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False))
    )
    with one_error():
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False, type_handler_registry=types)
        try:
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(path.absolute(), args=args)
            sync_tree(path)
        except Exception as e:  # orbax raises whatever its layers do, tensorstore ValueError if the system refuses
            for left in path.parent.glob(f"{path.name}.orbax-checkpoint-tmp*"):
                remove_directory(left)
            if isinstance(e, OSError):
                raise cannot_write(path, e) from e
            raise DSV41Error(f"{path}: cannot write the piece ({e})") from e


def remove_directory(directory: pathlib.Path) -> None:
    """Removes a directory in which threads of a save that failed may still be creating files."""
    for _ in range(40):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.05)


def sync_tree(path: pathlib.Path) -> None:
    """Waits until a directory, all below it and its own entry are on the disk."""
    for name in (*path.rglob("*"), path, path.parent):
        file = os.open(name, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _write_rows(out: pathlib.Path, piece: RowPiece, reader: CheckpointReader) -> PieceRecord:
    """Writes rows into their place in the table's file, which has its full size from the first piece on."""
    info, table = reader.info(piece.tensor), reader.read(piece.tensor)
    path, digest = table_path(out, piece.tensor), hashlib.sha256()
    row_bytes = table.nbytes // len(table)
    step = max(1, _ROW_BLOCK_BYTES // row_bytes)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            if os.fstat(file).st_size != table.nbytes:
                os.ftruncate(file, table.nbytes)
            for row in range(piece.begin, piece.end, step):
                block = memoryview(_bytes_of(table[row : min(row + step, piece.end)]))
                digest.update(block)
                position = row * row_bytes
                while block:
                    written = os.pwrite(file, block, position)
                    block, position = block[written:], position + written
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as e:
        raise cannot_write(path, e) from e
    tensors = {piece.tensor: StoredTensor(info.dtype, info.shape, digest.hexdigest())}
    return PieceRecord(piece.name, (piece.begin, piece.end), tensors)


def map_table(out: pathlib.Path, tensor: str, stored: StoredTensor) -> np.ndarray:
    """A read-only view of a table's mapped file.

    Raises:
      CheckpointError: the file is missing or has another size.
    """
    path = table_path(out, tensor)
    shape, dtype = TensorInfo(stored.dtype, stored.shape, path).array
    need = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != need:
                raise CheckpointError(f"{path}: tensor {tensor!r} takes {need} bytes, the file has {size}")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise CheckpointError(f"{path}: tensor {tensor!r} cannot be read ({e.strerror or e})") from e
    return np.frombuffer(data, dtype).reshape(shape)


def restore_arrays(
    out: pathlib.Path, piece: str, structs: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray | jax.Array]:
    """Some parameters of a piece: arrays as `structs` shards them, numpy arrays where it has no sharding.

    Raises:
      CheckpointError: one cannot be read; names the piece and the tensor.
    """

    import orbax.checkpoint as ocp

    def restore_args(struct: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
        if struct.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=struct.sharding)

    def restore(names: Iterable[str]) -> dict[str, np.ndarray | jax.Array]:
        item = {name: structs[name] for name in names}
        args = {name: restore_args(struct) for name, struct in item.items()}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
            return checkpointer.restore(
                path.absolute(), args=ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)
            )

    path = piece_path(out, piece)
    with one_error():
        try:
            return restore(structs)
        except Exception as e:  # orbax raises whatever its layers do
            raise CheckpointError(f"{path}: {_unreadable(structs, restore)} cannot be read ({e})") from e


def _unreadable(names: Iterable[str], restore: Callable[[list[str]], Any]) -> str:
    """Which of them it is that fails."""
    failing = []
    for name in names:
        try:
            restore([name])
        except Exception:
            failing.append(repr(name))
    return f"tensor {failing[0]}" + (f" and {len(failing) - 1} more" if len(failing) > 1 else "") if failing else "it"


def abstract_arrays(record: PieceRecord) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each parameter of a piece."""
    structs = {}
    for parameter in record.parameters:
        first = record.tensors[parameter.tensors[0]]
        shape, dtype = TensorInfo(first.dtype, first.shape, pathlib.Path()).array
        structs[parameter.name] = jax.ShapeDtypeStruct(
            (len(parameter.tensors), *shape) if parameter.stacked else shape, dtype
        )
    return structs


def check_digests(out: pathlib.Path, record: PieceRecord, parts: Mapping[str, np.ndarray]) -> None:
    """Raises:
    CheckpointError: a tensor's bytes are not those that were imported; names it and the piece.
    """
    for name, sha256 in digests(parts).items():
        if sha256 != record.tensors[name].sha256:
            raise CheckpointError(
                f"{piece_path(out, record.name)}: tensor {name!r} is damaged: its bytes do not have the checksum that "
                f"the import recorded"
            )


def check_piece(out: pathlib.Path, record: PieceRecord) -> None:
    """Reads a piece back and compares it with its checksums.

    Raises:
      CheckpointError: something is missing or damaged; names file and tensor.
    """
    if record.rows is not None:
        (name, stored), *_ = record.tensors.items()
        table, (begin, end) = map_table(out, name, stored), record.rows
        step, digest = max(1, _ROW_BLOCK_BYTES * len(table) // table.nbytes), hashlib.sha256()
        for row in range(begin, end, step):
            digest.update(_bytes_of(table[row : min(row + step, end)]))
        if digest.hexdigest() != stored.sha256:
            raise CheckpointError(
                f"{table_path(out, name)}: tensor {name!r} is damaged: rows {begin} to {end - 1} do not have the "
                f"checksum that the import recorded"
            )
        return
    arrays = restore_arrays(out, record.name, abstract_arrays(record))
    for parameter in record.parameters:
        check_digests(out, record, tensor_parts(parameter, arrays.pop(parameter.name)))


def remove_leftovers(out: pathlib.Path, complete: Iterable[str]) -> None:
    """Removes what a killed import left in the directory of pieces: everything that no complete piece owns.

    Raises:
      DSV41Error: something cannot be removed.
    """
    keep = {name for piece in complete for name in (piece, f"{piece}.json")}
    for path in (out / PIECES).iterdir():
        if path.name not in keep:
            try:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            except OSError as e:
                raise DSV41Error(f"{path}: cannot remove what is left of an earlier import ({e.strerror})") from e


def record_digest(out: pathlib.Path, piece: str) -> str:
    """SHA-256 of a record's file."""
    try:
        return hashlib.sha256(record_path(out, piece).read_bytes()).hexdigest()
    except OSError as e:
        raise CheckpointError(f"{record_path(out, piece)}: cannot be read ({e.strerror or e})") from e
