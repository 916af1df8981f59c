"""Large Engram tables of random bytes, made fast, to measure look-ups with."""

from __future__ import annotations

import math
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np

from dsv41.config import DSV41Error, ModelConfig, with_overrides
from dsv41.engram_store import EngramStore, EngramTable
from dsv41.engram_store.mapped import available_bytes
from dsv41.ops.engram_hash import first_primes

_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_BLOCK = 1 << 26
_SCALE = 121  # E8M0 byte of 2^-6: about the spread of one that random codes need


def with_table_rows(config: ModelConfig, rows: int) -> ModelConfig:
    """The config with tables of about `rows` rows each: its hash has smaller or larger primes, all else stays.

    Raises:
      ConfigError: too few rows.
    """
    text = config.text_config
    layers, columns = len(text.engram_layer_ids), (text.engram_max_ngram_size - 1) * text.engram_n_heads
    start = max(rows // columns, 2)
    sums = first_primes(start, layers * columns).reshape(layers, columns).sum(axis=1).tolist()
    overrides = {"text_config.engram_vocab_size": str(start), "text_config.engram_num_embeddings": str(sums)}
    return with_overrides(config, overrides)


def random_store(config: ModelConfig, *, directory: pathlib.Path | None = None, seed: int = 0) -> EngramStore:
    """Tables of the config's sizes in memory, or on mapped files in `directory`, of which nothing is cached.

    Rows repeat every 64 MiB. What matters for a look-up is where they lie, not what they hold.

    Raises:
      DSV41Error: they do not fit into memory or onto the disk.
    """
    text, rng = config.text_config, np.random.default_rng(seed)
    width, threads = text.engram_head_dim, os.cpu_count() or 1
    # Codes without NaN, of either sign.
    block = rng.integers(0, 0x78, _BLOCK, np.uint8) | rng.integers(0, 2, _BLOCK, np.uint8) << 7
    need = sum(rows * (width + width // 32) for rows in text.engram_num_embeddings)
    free = available_bytes()
    if directory is None and free is not None and need > free:
        raise DSV41Error(f"engram tables take {need:,} bytes of memory, {free:,} are available; choose fewer rows")
    tables, scales = [], np.full(_BLOCK, _SCALE, np.uint8)
    for layer, rows in zip(text.engram_layer_ids, text.engram_num_embeddings, strict=True):
        arrays = []
        for name, columns, source in (("values", width, block), ("scales", width // 32, scales)):
            path = None if directory is None else directory / f"engram.{layer}.{name}"
            arrays.append(_filled((rows, columns), source, path, threads))
        tables.append(EngramTable(layer=layer, values=arrays[0].view(_FP8), scales=arrays[1]))
    return EngramStore(tables, readers=1 if directory is None else min(64, 8 * threads))


def _filled(shape: tuple[int, int], source: np.ndarray, path: pathlib.Path | None, threads: int) -> np.ndarray:
    """uint8 of a shape, the source again and again."""
    size = math.prod(shape)
    if path is not None:
        _write(path, size, source)
        return np.memmap(path, np.uint8, mode="r", shape=shape)
    out = np.empty(size, np.uint8)

    def fill(begin: int) -> None:
        part = out[begin : begin + len(source)]
        part[:] = source[: len(part)]

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, range(0, size, len(source))))
    return out.reshape(shape)


def _write(path: pathlib.Path, size: int, source: np.ndarray) -> None:
    """Writes the file and has the system forget what it keeps of it in memory."""
    try:
        with open(path, "wb") as file:
            for begin in range(0, size, len(source)):
                file.write(memoryview(source[: size - begin]))
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as e:
        raise DSV41Error(f"{path}: an Engram table of {size:,} bytes cannot be written ({e.strerror})") from e
