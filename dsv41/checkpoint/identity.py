"""What tells one checkpoint from another without reading it whole."""

from __future__ import annotations

import hashlib
import os
import pathlib

from dsv41.checkpoint.imported import MANIFEST_NAME, is_imported
from dsv41.checkpoint.safetensors_reader import INDEX_NAME
from dsv41.config import DSV41Error

# Files that are read whole: small, and each of them changes what token ids mean or where tensors are.
_WHOLE = ("config.json", "tokenizer.json", INDEX_NAME)
_SAMPLES, _SAMPLE_BYTES = 32, 4096


def checkpoint_identity(directory: str | pathlib.Path) -> str:
    """Text that differs for checkpoints with different weights, in milliseconds; for keys of what was computed by them.

    A hash over config.json, tokenizer.json and the index, the names and sizes of the safetensors files, and 32 samples
    of 4 KiB from each, evenly spread with its beginning and end; of an import, over its manifest, which every byte
    changes. Copies of a directory have the same identity wherever they lie. Files that differ only between the samples
    are not told apart: give such a directory a store of its own.

    Raises:
      DSV41Error: the directory cannot be read.
    """
    directory = pathlib.Path(directory)
    digest = hashlib.sha256()
    try:
        for name in (*_WHOLE, MANIFEST_NAME) if is_imported(directory) else _WHOLE:
            path = directory / name
            data = path.read_bytes() if path.is_file() else b""
            digest.update(f"{name} {len(data)}\n".encode() + data)
        for path in sorted(directory.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with open(path, "rb") as file:
                for i in range(_SAMPLES):
                    file.seek(max(size - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1), os.SEEK_SET)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as e:
        raise DSV41Error(f"{directory}: cannot read the checkpoint ({e.strerror or e})") from e
    return digest.hexdigest()
