"""A checkpoint with every tensor name of a config and small shapes, to try tools on without the real files.

All that is counted stays: layers, experts, drafter stages, vision blocks, heads of the Engram hash. All that has a
width shrinks. Vocabulary, tokenizer and Engram table sizes are those of the bundled tiny model, so that the directory
is a valid one in the released layout; what such a model says means nothing.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterable, Sequence

import ml_dtypes
import numpy as np

from dsv41.checkpoint.inventory import TensorSpec, is_engram_table, tensor_inventory
from dsv41.checkpoint.load_parameters import Progress
from dsv41.checkpoint.write import layer_of, new_directory, write_shards
from dsv41.config import DSV41Error, ModelConfig, TextConfig, VisionConfig, config_to_dict, load_config
from dsv41.config.atomic_file import write_file
from dsv41.data import TINY_MODEL
from dsv41.ops.engram_hash import first_primes

_GROUP = 32  # every width that carries scales is a multiple of it


def _shrink(value: int, factor: int, multiple: int = _GROUP) -> int:
    return -(-value // (factor * multiple)) * multiple


def _power_of_two(value: int, factor: int) -> int:
    return max(_GROUP, 1 << (value // factor).bit_length() - 1) if value >= factor else _GROUP


def shrunk_config(config: ModelConfig, factor: int) -> ModelConfig:
    """The config with its widths divided by `factor`, rounded up to what the formats allow (32 columns a scale).

    Raises:
      DSV41Error: the factor is not positive.
    """
    if factor < 1:
        raise DSV41Error(f"factor: expected a positive number, got {factor}")
    tiny = load_config(TINY_MODEL)
    ids = {name: getattr(tiny, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")}
    vision = config.vision_config
    return dataclasses.replace(
        config,
        **ids,
        text_config=_shrunk_text(config.text_config, tiny.text_config, factor),
        vision_config=None if vision is None else _shrunk_vision(vision, factor),
    )


def _shrunk_text(c: TextConfig, tiny: TextConfig, factor: int) -> TextConfig:
    multiples = ("hidden_size", "moe_intermediate_size", "q_lora_rank", "o_lora_rank", "dspark_markov_rank")
    powers = ("head_dim", "index_head_dim")
    vocabulary = ("vocab_size", "engram_vocab_size", "engram_pad_token_id", "engram_compressed_vocab_size",
                  "dspark_noise_token_id")  # fmt: skip
    layers, per_layer = len(c.engram_layer_ids), (c.engram_max_ngram_size - 1) * c.engram_n_heads
    primes = first_primes(tiny.engram_vocab_size, layers * per_layer).reshape(layers, per_layer)
    return dataclasses.replace(
        c,
        **{name: _shrink(getattr(c, name), factor) for name in multiples},
        **{name: _power_of_two(getattr(c, name), factor) for name in powers},
        **{name: getattr(tiny, name) for name in vocabulary},
        num_attention_heads=_shrink(c.num_attention_heads, factor, c.o_groups),
        index_n_heads=_shrink(c.index_n_heads, factor, 1),
        qk_rope_head_dim=min(_GROUP, _shrink(c.qk_rope_head_dim, factor, 2)),
        engram_head_dim=_shrink(c.engram_head_dim, factor),
        engram_num_embeddings=tuple(int(rows) for rows in primes.sum(axis=1)),
    )


def _shrunk_vision(v: VisionConfig, factor: int) -> VisionConfig:
    return dataclasses.replace(
        v,
        hidden_size=_shrink(v.hidden_size, factor, 4 * v.num_attention_heads),
        intermediate_size=_shrink(v.intermediate_size, factor),
    )


def write_synthetic_checkpoint(
    directory: str | pathlib.Path,
    config: ModelConfig,
    *,
    factor: int,
    shards: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, TensorSpec]:
    """Writes a directory in the released layout with random values in all the tensors of `shrunk_config`.

    As in the release, the Engram tables are in the last shard and each layer in one of the others.

    Args:
      directory: made if it is missing, otherwise empty.
      config: whose names to write.
      factor: widths are divided by it.
      shards: safetensors files, at least 2.
      seed: of the values.
      progress: called after each tensor with (bytes done, bytes in all, its name).

    Returns:
      Name -> what was written.

    Raises:
      DSV41Error: an argument is impossible, the directory is not empty or cannot be written.
    """
    if shards < 2:
        raise DSV41Error(f"shards: expected at least 2, got {shards}")
    small = shrunk_config(config, factor)
    inventory = tensor_inventory(small)
    rng = np.random.default_rng(seed)
    with new_directory(directory) as partial:
        write_shards(partial, _cut(list(inventory.values()), shards), lambda s: [_values(s, rng)], progress=progress)
        shutil.copy(TINY_MODEL / "tokenizer.json", partial / "tokenizer.json")
        write_file(partial / "config.json", json.dumps(config_to_dict(small), indent=1).encode())
    return inventory


def _cut(specs: Sequence[TensorSpec], shards: int) -> Iterable[list[TensorSpec]]:
    """Runs of whole layers of about equal tensor counts, then the Engram tables."""
    rest = [spec for spec in specs if not is_engram_table(spec.name)]
    groups: dict[str, list[TensorSpec]] = {}
    for spec in rest:
        groups.setdefault(layer_of(spec), []).append(spec)
    cuts: list[list[TensorSpec]] = [[] for _ in range(shards - 1)]
    begun = 0
    for group in groups.values():
        cuts[begun * (shards - 1) // len(rest)] += group
        begun += len(group)
    return [*cuts, [spec for spec in specs if is_engram_table(spec.name)]]


def _values(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    """Random finite values of a stored format."""
    if spec.dtype == "I8":
        return rng.integers(0, 256, spec.shape, np.uint8)
    if spec.dtype == "F8_E8M0":
        return rng.integers(117, 122, spec.shape, np.uint8)
    if spec.dtype == "F8_E4M3":
        return rng.integers(0, 127, spec.shape, np.uint8) | rng.integers(0, 2, spec.shape, np.uint8) << 7
    values = rng.standard_normal(spec.shape, np.float32)
    return values.astype(ml_dtypes.bfloat16) if spec.dtype == "BF16" else values
