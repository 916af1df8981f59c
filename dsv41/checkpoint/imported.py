"""Reading an imported checkpoint: tensors by name, parameters on any mesh, Engram tables as mapped files."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping

import jax
import numpy as np

from dsv41.checkpoint.import_plan import Parameter
from dsv41.checkpoint.load_parameters import Progress, has_non_finite, load_parameters
from dsv41.checkpoint.piece_files import (
    PieceRecord,
    abstract_arrays,
    check_digests,
    check_piece,
    map_table,
    piece_path,
    read_piece_record,
    record_digest,
    record_path,
    restore_arrays,
    table_path,
    tensor_parts,
)
from dsv41.checkpoint.safetensors_reader import CheckpointError, CheckpointReader, TensorInfo, open_checkpoint
from dsv41.config.record_file import read_record

START_NAME = "import.json"
MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
MANIFEST_FIELDS = {"source": str, "tensors": int, "bytes": int, "pieces": dict}


def is_imported(directory: str | os.PathLike[str]) -> bool:
    """Whether an import wrote the directory, or began to."""
    return (pathlib.Path(directory) / START_NAME).is_file()


class ImportedCheckpoint:
    """Tensors of an imported checkpoint by name. Made by `open_imported`.

    Attributes:
      directory: the import.
      records: of all pieces, in the order they were written.
      files: the pieces and tables.
    """

    def __init__(self, directory: pathlib.Path, records: tuple[PieceRecord, ...]):
        self.directory = directory
        self.records = records
        self._infos: dict[str, TensorInfo] = {}
        for record in records:
            for name, stored in record.tensors.items():
                file = table_path(directory, name) if record.rows else piece_path(directory, record.name)
                self._infos[name] = TensorInfo(stored.dtype, stored.shape, file)
        self.files = tuple(dict.fromkeys(info.file for info in self._infos.values()))
        self._tables = {name: stored for r in records if r.rows for name, stored in r.tensors.items()}

    @property
    def names(self) -> Collection[str]:
        """All tensor names."""
        return self._infos.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, name: str) -> TensorInfo:
        """(dtype string, shape, file) as in the files that were imported, but for the file.

        Raises:
          CheckpointError: there is no such tensor.
        """
        try:
            return self._infos[name]
        except KeyError:
            raise CheckpointError(f"{self.directory}: no tensor {name!r}") from None

    def read(self, name: str) -> np.ndarray:
        """A tensor of an Engram table: a read-only view [rows, columns] of its mapped file, no copy. Its bytes are not
        compared with their checksums, which would read the whole table; `check_import` does that.

        Raises:
          CheckpointError: there is no such table, or its file is missing or has another size.
        """
        if name not in self._tables:
            raise CheckpointError(f"{self.directory}: no Engram table {name!r}")
        return map_table(self.directory, name, self._tables[name])


def open_imported(directory: str | os.PathLike[str]) -> ImportedCheckpoint:
    """Opens a complete import; reads its manifest and records, no tensor data.

    Raises:
      DSV41Error: the import is not complete, or a record is missing or is not the one that the manifest names.
    """
    directory = pathlib.Path(directory)
    if not (directory / MANIFEST_NAME).is_file():
        raise CheckpointError(f"{directory}: the import is not complete; run launch.import_checkpoint again")
    manifest = read_record(directory / MANIFEST_NAME, MANIFEST_VERSION, MANIFEST_FIELDS)
    records = []
    for piece, sha256 in manifest["pieces"].items():
        if record_digest(directory, piece) != sha256:
            raise CheckpointError(f"{record_path(directory, piece)}: not the record that {MANIFEST_NAME} names")
        records.append(read_piece_record(directory, piece))
    return ImportedCheckpoint(directory, tuple(records))


def open_either(directory: str | os.PathLike[str]) -> CheckpointReader | ImportedCheckpoint:
    """Opens a directory in the released layout or an import of one.

    Raises:
      DSV41Error: see `open_checkpoint` and `open_imported`.
    """
    return open_imported(directory) if is_imported(directory) else open_checkpoint(directory)


def check_import(directory: str | os.PathLike[str], *, progress: Progress | None = None) -> ImportedCheckpoint:
    """Reads all of an import and compares every tensor with its checksum.

    Args:
      directory: a complete import.
      progress: called after each piece with (bytes done, bytes in all, its name).

    Raises:
      DSV41Error: the import is not complete, or pieces are damaged; lists all of them.
    """
    imported = open_imported(directory)
    sizes = [record_bytes(record) for record in imported.records]
    damaged, done = [], 0
    for record, size in zip(imported.records, sizes, strict=True):
        try:
            check_piece(imported.directory, record)
        except CheckpointError as e:
            damaged.append(str(e))
        done += size
        if progress is not None:
            progress(done, sum(sizes), record.name)
    if damaged:
        raise CheckpointError("; ".join(damaged))
    return imported


def record_bytes(record: PieceRecord) -> int:
    """Stored bytes of what a piece holds."""
    total = 0
    for name, stored in record.tensors.items():
        shape, dtype = TensorInfo(stored.dtype, stored.shape, pathlib.Path(name)).array
        if record.rows is not None:
            shape = (record.rows[1] - record.rows[0], *shape[1:])
        total += math.prod(shape) * dtype.itemsize
    return total


def load_either(
    source: CheckpointReader | ImportedCheckpoint,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    *,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """`load_parameters` or `load_imported`, as the checkpoint is.

    Raises:
      CheckpointError: see there.
    """
    load = load_imported if isinstance(source, ImportedCheckpoint) else load_parameters
    return load(source, abstract, progress=progress)


def load_imported(
    imported: ImportedCheckpoint,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    *,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Loads the parameters that `abstract` lists; what `load_parameters` does with the released files.

    The shardings are free: they need not be those of any earlier run. Every tensor that this process holds whole is
    compared with its checksum; of one that is cut, it is only checked that its values are finite. Host memory holds one
    piece at a time beside what has been placed.

    Args:
      imported: the open import.
      abstract: in-memory shape and dtype by name, and optionally a sharding. Tensors of Engram tables may be among
        them, to have a small table on the device; they are not compared with their checksums.
      progress: called after each parameter with (bytes done, bytes in all, its name).

    Returns:
      Name -> array, on the default device or as sharded in `abstract`.

    Raises:
      CheckpointError: a parameter is missing, of another shape or dtype, unreadable or damaged; names piece and tensor.
    """
    sizes = {name: math.prod(s.shape) * np.dtype(s.dtype).itemsize for name, s in abstract.items()}
    total, done = sum(sizes.values()), 0
    loaded: dict[str, jax.Array] = {}
    _check_abstract(imported, abstract)
    for record in imported.records:
        wanted = {p.name: p for p in record.parameters if p.name in abstract and p.name not in loaded}
        if not wanted:
            continue
        if record.rows is None:
            arrays = restore_arrays(imported.directory, record.name, {name: abstract[name] for name in wanted})
        else:
            arrays = {name: _place_table(imported.read(name), abstract[name]) for name in wanted}
        for name, parameter in wanted.items():
            array = arrays.pop(name)
            if record.rows is None:
                _check_values(imported, record, parameter, array)
            loaded[name] = jax.block_until_ready(jax.device_put(array) if isinstance(array, np.ndarray) else array)
            done += sizes[name]
            if progress is not None:
                progress(done, total, name)
    return {name: loaded[name] for name in abstract}


def _check_abstract(imported: ImportedCheckpoint, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Refuses what the import lacks or holds in another form."""
    found: dict[str, tuple[pathlib.Path, jax.ShapeDtypeStruct]] = {}
    for record in imported.records:
        for name, struct in abstract_arrays(record).items():
            found[name] = (imported.info(next(iter(record.tensors))).file, struct)
    for name, struct in abstract.items():
        if name not in found:
            raise CheckpointError(f"{imported.directory}: no tensor {name!r}")
        file, stored = found[name]
        if (struct.shape, np.dtype(struct.dtype)) != (stored.shape, stored.dtype):
            raise CheckpointError(
                f"{file}: tensor {name!r}: expected {np.dtype(struct.dtype).name} {list(struct.shape)}, "
                f"got {stored.dtype.name} {list(stored.shape)}"
            )


def _place_table(view: np.ndarray, struct: jax.ShapeDtypeStruct) -> np.ndarray | jax.Array:
    """Rows of a table, copied: an array that aliased the mapping would change, or fault, with the file."""
    if struct.sharding is None:
        return np.array(view)
    return jax.make_array_from_callback(struct.shape, struct.sharding, lambda index: np.array(view[index]))


def _check_values(
    imported: ImportedCheckpoint, record: PieceRecord, parameter: Parameter, array: np.ndarray | jax.Array
) -> None:
    """Compares the tensors that this process holds whole with their checksums, and looks for NaN in the others.

    Raises:
      CheckpointError: a tensor is damaged.
    """
    if isinstance(array, np.ndarray) or array.is_fully_addressable:
        check_digests(imported.directory, record, tensor_parts(parameter, np.asarray(array)))
        return
    checked = set()
    for shard in array.addressable_shards:
        bounds = tuple(s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True))
        if bounds in checked:  # replicas are alike
            continue
        checked.add(bounds)
        held = Parameter(parameter.name, parameter.tensors[slice(*bounds[0])], True) if parameter.stacked else parameter
        cut = bounds[1:] if parameter.stacked else bounds
        whole = array.shape[1:] if parameter.stacked else array.shape
        data = np.asarray(shard.data)
        if cut == tuple((0, n) for n in whole):
            check_digests(imported.directory, record, tensor_parts(held, data))
        elif has_non_finite(np.ascontiguousarray(data), is_scale=parameter.name.endswith(".scale")):
            raise CheckpointError(
                f"{piece_path(imported.directory, record.name)}: tensor {parameter.name!r} holds NaN or infinite values"
            )
