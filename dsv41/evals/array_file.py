"""A safetensors file of one float32 array that is written piece by piece and appears only when it is complete."""

from __future__ import annotations

import errno
import json
import math
import os
import pathlib

import numpy as np

from dsv41.config.atomic_file import cannot_write, check_target, partial_path, put_in_place

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
        self._partial = partial_path(self._path)
        end = 4 * math.prod(shape)
        text = json.dumps({name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, end]}}).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        self._start = len(header)
        self._step_bytes = 4 * math.prod(shape[2:])
        try:
            self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as e:
            raise cannot_write(self._path, e) from e
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
        put_in_place(self._file, self._path)

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
                raise cannot_write(self._path, e) from e

    def _write_at(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._file, view, offset)
                view, offset = view[written:], offset + written
        except OSError as e:
            raise cannot_write(self._path, e) from e

    def _discard(self) -> None:
        os.close(self._file)
        self._partial.unlink(missing_ok=True)
