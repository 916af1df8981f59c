"""Small JSON files of our own: one object with a format version and a fixed set of fields."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from dsv41.config.atomic_file import write_file
from dsv41.config.errors import DSV41Error

_VERSION = "format_version"


def write_record(path: str | pathlib.Path, version: int, fields: Mapping[str, Any]) -> None:
    """Writes the fields and the version of their meaning.

    Raises:
      DSV41Error: the file cannot be written; what was there before is untouched.
    """
    text = json.dumps({_VERSION: version, **fields}, indent=1, allow_nan=False)
    write_file(path, f"{text}\n".encode())


def read_record(path: str | pathlib.Path, version: int, types: Mapping[str, type]) -> dict[str, Any]:
    """The fields of a record, in which there must be all of `types` and nothing else.

    Raises:
      DSV41Error: the file is missing, not JSON or of another version, or a field is missing, unknown or of another
        type.
    """
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise DSV41Error(f"{path}: no such file") from e
    except (OSError, ValueError, RecursionError) as e:
        raise DSV41Error(f"{path}: not a readable JSON file ({e})") from e
    if not isinstance(data, dict):
        raise DSV41Error(f"{path}: expected a JSON object, got {type(data).__name__}")
    found = data.pop(_VERSION, None)
    if found != version or isinstance(found, bool):
        raise DSV41Error(f"{path}: {_VERSION}: expected {version}, got {found!r}")
    for word, names in (("missing", types.keys() - data.keys()), ("unknown", data.keys() - types.keys())):
        if names:
            raise DSV41Error(f"{path}: {word} field {', '.join(sorted(names))}")
    for name, kind in types.items():
        if not isinstance(data[name], kind) or isinstance(data[name], bool):
            raise DSV41Error(f"{path}: {name}: expected {kind.__name__}, got {data[name]!r}")
    return data
