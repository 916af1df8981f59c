"""Files that appear complete or not at all: written beside the target, which they then replace."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from dsv41.config.errors import DSV41Error


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


def partial_path(path: pathlib.Path) -> pathlib.Path:
    """Where a file is written before it replaces `path`: hidden, in the same directory, and this process's own."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def cannot_write(path: pathlib.Path, error: OSError) -> DSV41Error:
    """What to raise when the system refuses to write a file."""
    return DSV41Error(f"{path}: cannot write the file ({error.strerror or error})")


def put_in_place(file: int, path: pathlib.Path) -> None:
    """Closes a complete partial file, open for writing, and lets it replace `path`, so that a power cut undoes neither.

    Raises:
      DSV41Error: the system refuses; the partial file is gone then.
    """
    partial = partial_path(path)
    try:
        try:
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(partial, path)
    except OSError as e:
        partial.unlink(missing_ok=True)
        raise cannot_write(path, e) from e
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_file(path: str | pathlib.Path, data: bytes) -> None:
    """Writes a whole file.

    Raises:
      DSV41Error: it cannot be written; what was there before is untouched.
    """
    path = check_target(path)
    partial = partial_path(path)
    try:
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    except OSError as e:
        raise cannot_write(path, e) from e
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
    except BaseException as e:
        os.close(file)
        partial.unlink(missing_ok=True)
        raise (cannot_write(path, e) if isinstance(e, OSError) else e) from e
    put_in_place(file, path)


def write_json(path: str | pathlib.Path, value: Any) -> None:
    """`write_file` of a JSON value, for people to read.

    Raises:
      DSV41Error: as `write_file`.
    """
    write_file(path, f"{json.dumps(value, indent=1)}\n".encode())
