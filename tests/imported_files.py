"""What an import holds, for tests."""

import pathlib

import jax
import numpy as np

from dsv41.checkpoint import load_imported, open_imported
from dsv41.checkpoint.piece_files import abstract_arrays

PIECES = 21  # of tiny_text


def abstract_of(directory: pathlib.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter of an import, Engram tables included."""
    structs = {}
    for record in open_imported(directory).records:
        structs |= abstract_arrays(record)
    return structs


def content(directory: pathlib.Path) -> dict[str, bytes]:
    """Every byte that an import holds, and its JSON files; files of orbax have names of their own each time."""
    arrays = load_imported(open_imported(directory), abstract_of(directory))
    files = [*directory.glob("*.json"), *directory.glob("pieces/*.json")]
    return {n: np.asarray(a).tobytes() for n, a in arrays.items()} | {f.name: f.read_bytes() for f in files}


def equal_bytes(ours, theirs) -> bool:
    return ours.dtype == theirs.dtype and np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
