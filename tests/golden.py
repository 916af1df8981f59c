"""Reads the golden arrays in `tests/data` (safetensors, bfloat16 and FP8 included) without loading whole files.

    from tests.golden import expected, primitives
    x = primitives()["rmsnorm.x"]
    logits = expected("tiny_text")["prefill.logits"]

Arrays are read-only numpy copies, made one at a time from a memory map. bfloat16 and FP8 come as `ml_dtypes` types,
E8M0 scales as uint8 bytes.
"""

import functools
import json
import pathlib
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

DATA = pathlib.Path(__file__).parent / "data"

_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(np.bool_),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
}


class Golden(Mapping[str, np.ndarray]):
    """The arrays of one safetensors file by name, each mapped when asked for."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        with open(path, "rb") as f:
            header_bytes = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(header_bytes))
        header.pop("__metadata__", None)
        self._entries = header
        self._start = 8 + header_bytes
        self._bytes = np.memmap(path, np.uint8, mode="r")

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            entry = self._entries[name]
        except KeyError:
            raise KeyError(f"{name} is not in {self._path}") from None
        begin, end = (self._start + o for o in entry["data_offsets"])
        # Offsets need not be aligned to the item size, so copy before reinterpreting.
        data = np.frombuffer(self._bytes[begin:end].tobytes(), _DTYPES[entry["dtype"]])
        return data.reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@functools.cache
def golden(path: pathlib.Path | str) -> Golden:
    """The arrays of any safetensors file; opened once a process."""
    return Golden(pathlib.Path(path))


def primitives() -> Golden:
    """Inputs and outputs of single operations."""
    return golden(DATA / "primitives.safetensors")


def expected(name: str) -> Golden:
    """Whole-model results of `tiny_text` or `tiny_bf16`."""
    return golden(DATA / name / "expected.safetensors")


def replay(name: str = "tiny_text") -> Golden:
    """The same prompt prefilled with bounded replay of the decoder."""
    return golden(DATA / name / "replay.safetensors")


def checkpoint(name: str = "tiny_text") -> Golden:
    """The tiny checkpoint's tensors as stored (FP4 and E8M0 as bytes)."""
    return golden(DATA / name / "model.safetensors")
