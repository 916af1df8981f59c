"""A directory in the released layout -> an import: pieces that are read onto any mesh, with a checksum for each tensor.

    import.json        which checkpoint this is an import of; written first
    pieces/, engram/   see `piece_files`
    *.json             config, tokenizer and what else lies beside them, copied
    manifest.json      the pieces and the checksums of their records; written last

A piece is recorded when it is complete and on the disk, so that an import that was killed goes on behind its last
piece. Nothing is converted. Memory holds one piece at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
import shutil
from collections.abc import Collection, Iterator
from typing import NamedTuple

from dsv41.checkpoint.identity import checkpoint_identity
from dsv41.checkpoint.import_plan import Piece, RowPiece, plan_pieces
from dsv41.checkpoint.imported import MANIFEST_NAME, MANIFEST_VERSION, START_NAME, is_imported
from dsv41.checkpoint.inventory import PARTS, TensorSpec, tensor_inventory
from dsv41.checkpoint.load import read_tokenizer
from dsv41.checkpoint.load_parameters import Progress
from dsv41.checkpoint.piece_files import (
    PIECES,
    TABLES,
    PieceRecord,
    check_piece,
    read_piece_record,
    record_digest,
    record_path,
    remove_leftovers,
    write_piece,
    write_piece_record,
)
from dsv41.checkpoint.safetensors_reader import INDEX_NAME, CheckpointReader, check_inventory, open_checkpoint
from dsv41.config import DSV41Error, load_config
from dsv41.config.atomic_file import write_file
from dsv41.config.record_file import read_record, write_record

_log = logging.getLogger(__name__)

LOCK_NAME = "import.lock"
PIECE_BYTES = 1 << 30
_START_VERSION = 1
# Metadata of orbax and of the file system.
_SPARE_BYTES = 64 << 20


class ImportReport(NamedTuple):
    """What an import consists of and how it came about.

    Attributes:
      tensors: in all.
      bytes: of them.
      pieces: in all.
      kept: pieces of an earlier run that were complete and good.
      mended: pieces of an earlier run that were damaged and written again.
    """

    tensors: int
    bytes: int
    pieces: int
    kept: int
    mended: tuple[str, ...]


def import_checkpoint(
    source: str | pathlib.Path,
    out: str | pathlib.Path,
    *,
    verify: bool = True,
    piece_bytes: int = PIECE_BYTES,
    progress: Progress | None = None,
) -> ImportReport:
    """Imports a checkpoint, or goes on with an import that was interrupted.

    Everything that can be wrong with the source is checked before the first tensor is read: config, tensor names,
    shapes and dtypes, tokenizer and token map. The drafter and the vision tower may be absent as a whole.

    Args:
      source: directory in the released layout.
      out: made if it is missing; otherwise empty, or an import of the same checkpoint.
      verify: read the pieces of an earlier run back and write damaged ones again; else they are trusted.
      piece_bytes: how much is written at once, at least one parameter. An import that goes on keeps what it began with.
      progress: called after each piece with (bytes done, bytes in all, its name).

    Raises:
      DSV41Error: source or target cannot be used, or the disk is full; names the file, and the tensor if it is one's
        fault. What was written stays for the next attempt.
    """
    source, out = pathlib.Path(source), pathlib.Path(out)
    reader, inventory = _open_source(source)
    if out.resolve() == source.resolve():
        raise DSV41Error(f"{out}: is the checkpoint itself; expected another directory")
    with _claim(out):
        identity = checkpoint_identity(source)
        pieces = plan_pieces(inventory, _begin(out, identity, piece_bytes))
        sizes = _piece_sizes(pieces, inventory)
        records = _recorded(out, pieces)
        remove_leftovers(out, records)
        _check_space(out, sum(size for name, size in sizes.items() if name not in records))
        _copy_files(source, out)
        kept, mended, done = 0, [], 0
        for piece in pieces:
            record = records.get(piece.name)
            if record is not None and verify and not _is_good(out, record):
                mended.append(piece.name)
                record = None
            if record is None:
                record = records[piece.name] = write_piece(out, piece, reader)
                write_piece_record(out, record)
            else:
                kept += 1
            done += sizes[piece.name]
            if progress is not None:
                progress(done, sum(sizes.values()), piece.name)
        report = ImportReport(len(inventory), sum(sizes.values()), len(pieces), kept, tuple(mended))
        digests = {piece.name: record_digest(out, piece.name) for piece in pieces}
        fields = {"source": identity, "tensors": report.tensors, "bytes": report.bytes, "pieces": digests}
        write_record(out / MANIFEST_NAME, MANIFEST_VERSION, fields)
    return report


def _open_source(source: pathlib.Path) -> tuple[CheckpointReader, list[TensorSpec]]:
    """The checkpoint, and the tensors that it holds as they are stored."""
    config = load_config(source)
    if is_imported(source):
        raise DSV41Error(f"{source}: is an import already, expected a directory in the released layout")
    reader = open_checkpoint(source)
    inventory = tensor_inventory(config)
    present = {spec.part for spec in inventory.values() if spec.name in reader}
    parts = [part for part in PARTS if part in ("backbone", "engram") or part in present]
    check_inventory(reader, inventory, parts)
    read_tokenizer(source, config)
    return reader, [spec for spec in inventory.values() if spec.part in parts]


@contextlib.contextmanager
def _claim(out: pathlib.Path) -> Iterator[None]:
    """Makes the directories, and keeps other imports out; the system lets go of the lock however the process ends."""
    if out.exists() and not out.is_dir():
        raise DSV41Error(f"{out}: is a file, expected a directory to write to")
    if out.is_dir() and not is_imported(out):
        strange = sorted(path.name for path in out.iterdir() if path.name not in (LOCK_NAME, PIECES, TABLES))
        strange = [name for name in strange if not name.endswith(".partial")]
        if strange:
            raise DSV41Error(f"{out}: holds no import but other files ({strange[0]}), expected an empty directory")
    try:
        for directory in (out, out / PIECES, out / TABLES):
            directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(out / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as e:
        raise DSV41Error(f"{out}: cannot write to the directory ({e.strerror or e})") from e
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise DSV41Error(f"{out}: another process imports to this directory ({e.strerror or e})") from e
        yield
    finally:
        os.close(lock)


def _begin(out: pathlib.Path, identity: str, piece_bytes: int) -> int:
    """Writes what is imported, or checks that it is the same; returns the size of pieces that the import began with."""
    path = out / START_NAME
    if not path.exists():
        write_record(path, _START_VERSION, {"source": identity, "piece_bytes": piece_bytes})
        return piece_bytes
    begun = read_record(path, _START_VERSION, {"source": str, "piece_bytes": int})
    if begun["source"] != identity:
        raise DSV41Error(f"{path}: this is the import of another checkpoint; give another directory")
    return begun["piece_bytes"]


def _piece_sizes(pieces: Collection[Piece], inventory: Collection[TensorSpec]) -> dict[str, int]:
    specs = {spec.name: spec for spec in inventory}
    sizes = {}
    for piece in pieces:
        size = sum(specs[name].nbytes for name in piece.tensors)
        if isinstance(piece, RowPiece):
            size = size * (piece.end - piece.begin) // specs[piece.tensor].shape[0]
        sizes[piece.name] = size
    return sizes


def _recorded(out: pathlib.Path, pieces: Collection[Piece]) -> dict[str, PieceRecord]:
    """Records of the pieces that an earlier run completed."""
    records = {}
    for piece in pieces:
        if not record_path(out, piece.name).exists():
            continue
        try:
            record = read_piece_record(out, piece.name)
        except DSV41Error as e:
            _log.warning("%s; the piece is written again", e)
            continue
        rows = (piece.begin, piece.end) if isinstance(piece, RowPiece) else None
        if record.rows == rows and record.tensors.keys() == set(piece.tensors):
            records[piece.name] = record
    return records


def _check_space(out: pathlib.Path, need: int) -> None:
    free = shutil.disk_usage(out).free
    if need and need + _SPARE_BYTES > free:
        raise DSV41Error(
            f"{out}: the disk has {free / 2**30:,.1f} GiB free, what is left to import takes {need / 2**30:,.1f}"
        )


def _is_good(out: pathlib.Path, record: PieceRecord) -> bool:
    """Whether a piece has its checksums; if not, the import is no longer complete."""
    try:
        check_piece(out, record)
        return True
    except DSV41Error as e:
        _log.warning("%s; the piece is written again", e)
    try:
        # In this order: what is left is never taken for complete.
        (out / MANIFEST_NAME).unlink(missing_ok=True)
        record_path(out, record.name).unlink()
        if record.rows is None:
            shutil.rmtree(out / PIECES / record.name, ignore_errors=True)
    except OSError as e:
        raise DSV41Error(f"{out}: cannot remove the damaged piece {record.name} ({e.strerror or e})") from e
    return False


def _copy_files(source: pathlib.Path, out: pathlib.Path) -> None:
    """Copies config, tokenizer and the other JSON files beside them, but for the index of the files that are gone."""
    for path in sorted(source.glob("*.json")):
        if path.name in (INDEX_NAME, START_NAME, MANIFEST_NAME) or not path.is_file():
            continue
        try:
            data = path.read_bytes()
        except OSError as e:
            raise DSV41Error(f"{path}: cannot be read ({e.strerror or e})") from e
        write_file(out / path.name, data)
