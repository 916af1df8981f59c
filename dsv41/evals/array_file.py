"""A safetensors file of one float32 array that is written piece by piece and appears only when it is complete."""

from __future__ import annotations

import errno
import json
import math
import os
import pathlib

import numpy as np

from dsv41.config import DSV41Error

_HEADER_ALIGNMENT = 8
# What file systems answer that take space only when it is written.
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL)


class ArrayFileWriter:
    """Writes beside the target, and replaces the target when the block of `with` ends without an exception.

    Memory holds no more than the piece being written. A process that is killed leaves a hidden `.NAME.PID.partial`
    behind and the target as it was.
    """

    def __init__(self, path: str | pathlib.Path, name: str, shape: tuple[int, ...]):
        """path: the target, replaced if it exists; name, shape: of the array, whose first two axes are rows and steps.

        Raises:
          DSV41Error: the directory does not exist or is not writable, or the disk lacks the space.
        """
        self._path = check_target(path)
        self._shape = shape
        self._partial = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
        end = 4 * math.prod(shape)
        text = json.dumps({name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, end]}}).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        self._start = len(header)
        self._step_bytes = 4 * math.prod(shape[2:])
        try:
            self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as e:
            raise self._error(e) from e
        try:
            self._reserve(self._start + end)
            self._write_at(header, 0)
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> ArrayFileWriter:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            try:
                os.fsync(self._file)
            finally:
                os.close(self._file)
            os.replace(self._partial, self._path)
        except OSError as e:
            self._partial.unlink(missing_ok=True)
            raise self._error(e) from e
        self._sync_directory()

    def write(self, row: int, step: int, values: np.ndarray) -> None:
        """Puts values [rows, steps, ...] at [row:, step:] of the array."""
        for i, one in enumerate(np.asarray(values, "<f4")):
            place = ((row + i) * self._shape[1] + step) * self._step_bytes
            self._write_at(np.ascontiguousarray(one).reshape(-1).view(np.uint8).data, self._start + place)

    def _reserve(self, size: int) -> None:
        """Takes the space now, so that a disk that is too full is found out before the work."""
        try:
            os.ftruncate(self._file, size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, size)
        except OSError as e:
            if e.errno not in _CANNOT_RESERVE:
                raise self._error(e) from e

    def _write_at(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._file, view, offset)
                view, offset = view[written:], offset + written
        except OSError as e:
            raise self._error(e) from e

    def _discard(self) -> None:
        os.close(self._file)
        self._partial.unlink(missing_ok=True)

    def _sync_directory(self) -> None:
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _error(self, error: OSError) -> DSV41Error:
        return DSV41Error(f"{self._path}: cannot write the file ({error.strerror or error})")


def check_target(path: str | pathlib.Path) -> pathlib.Path:
    """The path, if a file can be put there as far as that shows without trying.

    Raises:
      DSV41Error: its directory does not exist, or it is itself a directory.
    """
    path = pathlib.Path(path)
    if not path.parent.is_dir():
        raise DSV41Error(f"{path}: no such directory {path.parent}")
    if path.is_dir():
        raise DSV41Error(f"{path}: is a directory, expected the name of a file")
    return path
