"""Every tensor of a checkpoint in the released layout, derived from the config alone (checkpoint.md, "Tensors").

The released config gives 96,085 tensors and 510,286,023,000 bytes. Nothing here reads a file or needs jax.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dsv41.config import LayerSpec, ModelConfig, TextConfig, layer_schedule

PARTS = ("backbone", "engram", "drafter", "vision")

_DTYPE_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
_BLOCK = 32  # columns (and, for dense FP8, rows) that share one scale


class TensorSpec(NamedTuple):
    """One tensor of the files.

    Attributes:
      name: its name, without a `model.` prefix.
      shape: as stored; packed FP4 has half the logical columns.
      dtype: safetensors dtype string: F8_E4M3, F8_E8M0, I8 (two FP4 codes a byte), BF16 or F32.
      part: one of `PARTS`.
      subsystem: the line of checkpoint.md's "Totals" that it is counted in.
      logical_parameters: weights it holds: 0 for scales, two per byte for FP4.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    part: str
    subsystem: str
    logical_parameters: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


class SubsystemTotal(NamedTuple):
    """Tensor count and bytes of one subsystem."""

    tensors: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Logical parameters by part (checkpoint.md, "Parameters"); scales are not counted.

    `active_prefill` is what one token touches in the layers before the decoder half, `active_decode` what it touches in
    all layers and the head: of the routed experts the chosen ones only, of Engram the projections and gains, no
    embedding rows.
    """

    backbone: int
    engram_tables: int
    engram_projections: int
    drafter: int
    vision: int
    active_prefill: int
    active_decode: int

    @property
    def total(self) -> int:
        return self.backbone + self.engram_tables + self.engram_projections + self.drafter + self.vision


class _Writer:
    """Adds tensors of one part and subsystem to `specs`; `quantised` chooses between the stored formats and BF16."""

    def __init__(self, specs: dict[str, TensorSpec], quantised: bool, part: str, subsystem: str):
        self._specs = specs
        self._quantised = quantised
        self._part = part
        self._subsystem = subsystem

    def within(self, subsystem: str, part: str | None = None) -> _Writer:
        return _Writer(self._specs, self._quantised, part or self._part, subsystem)

    def _add(self, name: str, shape: tuple[int, ...], dtype: str, parameters: int) -> None:
        self._specs[name] = TensorSpec(name, shape, dtype, self._part, self._subsystem, parameters)

    def bf16(self, name: str, *shape: int) -> None:
        self._add(name, shape, "BF16", math.prod(shape))

    def f32(self, name: str, *shape: int) -> None:
        self._add(name, shape, "F32", math.prod(shape))

    def fp8(self, stem: str, rows: int, columns: int) -> None:
        """FP8-dense `stem.weight` and its scale, one per 32x32 tile."""
        self._scaled(stem, (rows, columns), "F8_E4M3", (-(-rows // _BLOCK), -(-columns // _BLOCK)), rows * columns)

    def fp8_rows(self, stem: str, rows: int, columns: int) -> None:
        """FP8 `stem.weight` with a scale per row and 32 columns (Engram tables)."""
        self._scaled(stem, (rows, columns), "F8_E4M3", (rows, columns // _BLOCK), rows * columns)

    def fp4(self, stem: str, rows: int, columns: int) -> None:
        """Packed FP4 `stem.weight` with a scale per row and 32 columns (routed experts)."""
        if self._quantised:
            self._scaled(stem, (rows, columns // 2), "I8", (rows, columns // _BLOCK), rows * columns)
        else:
            self.bf16(f"{stem}.weight", rows, columns)

    def _scaled(self, stem: str, shape: tuple[int, int], dtype: str, scale: tuple[int, int], parameters: int) -> None:
        if self._quantised:
            self._add(f"{stem}.weight", shape, dtype, parameters)
            self._add(f"{stem}.scale", scale, "F8_E8M0", 0)
        else:
            self.bf16(f"{stem}.weight", *shape)


def _attention(w: _Writer, p: str, c: TextConfig) -> None:
    group_width = c.num_attention_heads * c.head_dim // c.o_groups
    w.fp8(f"{p}.attn.wq_a", c.q_lora_rank, c.hidden_size)
    w.bf16(f"{p}.attn.q_norm.weight", c.q_lora_rank)
    w.fp8(f"{p}.attn.wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank)
    w.fp8(f"{p}.attn.wkv", c.head_dim, c.hidden_size)
    w.bf16(f"{p}.attn.kv_norm.weight", c.head_dim)
    w.f32(f"{p}.attn.attn_sink", c.num_attention_heads)
    w.fp8(f"{p}.attn.wo_a", c.o_groups * c.o_lora_rank, group_width)
    w.fp8(f"{p}.attn.wo_b", c.hidden_size, c.o_groups * c.o_lora_rank)


def _compressor_and_indexer(w: _Writer, p: str, c: TextConfig, layer: LayerSpec) -> None:
    if layer.owns_kv:
        w.bf16(f"{p}.attn.compressor.wkv.weight", c.head_dim, c.hidden_size)
        if layer.ratio > 1:  # at ratio 1 there is nothing to weigh against
            w.bf16(f"{p}.attn.compressor.wgate.weight", c.head_dim, c.hidden_size)
        w.bf16(f"{p}.attn.compressor.norm.weight", c.head_dim)
        w.bf16(f"{p}.attn.indexer.wk.weight", c.index_head_dim, c.head_dim)
        w.bf16(f"{p}.attn.indexer.k_norm.weight", c.index_head_dim)
    if layer.selects:
        w.fp8(f"{p}.attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        w.bf16(f"{p}.attn.indexer.weights_proj.weight", c.index_n_heads, c.hidden_size)


def _block(w: _Writer, p: str, c: TextConfig, experts: int, subsystems: Mapping[str, str]) -> None:
    """What a backbone layer and a drafter stage have in common; `subsystems` names the lines of the totals."""
    _attention(w.within(subsystems["attention"]), p, c)
    norms = w.within(subsystems["norms"])
    norms.bf16(f"{p}.attn_norm.weight", c.hidden_size)
    norms.bf16(f"{p}.ffn_norm.weight", c.hidden_size)
    router = w.within(subsystems["router"])
    router.bf16(f"{p}.ffn.gate.weight", experts, c.hidden_size)
    router.f32(f"{p}.ffn.gate.bias", experts)
    router.f32(f"{p}.ffn.gate.bias_vl", experts)
    routed = w.within(subsystems["routed"])
    inner, hidden = c.moe_intermediate_size, c.hidden_size
    for j in range(experts):
        routed.fp4(f"{p}.ffn.experts.{j}.w1", inner, hidden)
        routed.fp4(f"{p}.ffn.experts.{j}.w2", hidden, inner)
        routed.fp4(f"{p}.ffn.experts.{j}.w3", inner, hidden)
    shared = w.within(subsystems["shared"])
    shared.fp8(f"{p}.ffn.shared_experts.w1", inner, hidden)
    shared.fp8(f"{p}.ffn.shared_experts.w2", hidden, inner)
    shared.fp8(f"{p}.ffn.shared_experts.w3", inner, hidden)
    hc = w.within("hc_*")
    mix_rows = (2 + c.hc_mult) * c.hc_mult
    for sublayer in ("attn", "ffn"):
        hc.f32(f"{p}.hc_{sublayer}_fn", mix_rows, c.hc_mult * c.hidden_size)
        hc.f32(f"{p}.hc_{sublayer}_base", mix_rows)
        hc.f32(f"{p}.hc_{sublayer}_scale", 3)


_BACKBONE_SUBSYSTEMS = {
    "attention": "attention",
    "norms": "norms, backbone",
    "router": "router, backbone",
    "routed": "routed experts, backbone",
    "shared": "shared experts, backbone",
}
_DRAFTER_SUBSYSTEMS = {
    "attention": "mtp other",
    "norms": "mtp other",
    "router": "router, mtp",
    "routed": "routed experts, mtp",
    "shared": "shared experts, mtp",
}


def _engram(w: _Writer, p: str, c: TextConfig, rows: int) -> None:
    memory_width = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    w.fp8_rows(f"{p}.engram.embed", rows, c.engram_head_dim)
    w.fp8(f"{p}.engram.wkv", (c.hc_mult + 1) * c.hidden_size, memory_width)
    w.bf16(f"{p}.engram.q_weight", c.hc_mult, c.hidden_size)
    w.bf16(f"{p}.engram.k_weight", c.hc_mult, c.hidden_size)


def _drafter(w: _Writer, c: TextConfig) -> None:
    stages = c.num_nextn_predict_layers
    for k in range(stages):
        _block(w, f"mtp.{k}", c, c.dspark_n_routed_experts, _DRAFTER_SUBSYSTEMS)
    if stages:
        last = f"mtp.{stages - 1}"
        w.fp8("mtp.0.main_proj", c.hidden_size, len(c.dspark_target_layer_ids) * c.hidden_size)
        w.bf16("mtp.0.main_norm.weight", c.hidden_size)
        w.bf16(f"{last}.norm.weight", c.hidden_size)
        w.bf16(f"{last}.markov_head.embed.weight", c.vocab_size, c.dspark_markov_rank)
        w.bf16(f"{last}.markov_head.head.weight", c.vocab_size, c.dspark_markov_rank)
        w.bf16(f"{last}.confidence_head.proj.weight", 1, c.hidden_size + c.dspark_markov_rank)


def _vision(w: _Writer, config: ModelConfig) -> None:
    v = config.vision_config
    if v is None:
        return
    width, hidden = v.hidden_size, config.text_config.hidden_size
    images = w.within("embed + 3 image vectors")
    for name in ("image_start", "image_end", "image_newline"):
        images.bf16(name, hidden)
    w.bf16("vision.patch_embed.proj.weight", width, 3 * v.patch_size**2)
    w.bf16("vision.patch_embed.proj.bias", width)
    for b in range(v.num_hidden_layers):
        p = f"vision.blocks.{b}"
        w.bf16(f"{p}.norm1.weight", width)
        w.bf16(f"{p}.norm2.weight", width)
        w.bf16(f"{p}.attn.wqkv.weight", 3 * width, width)
        w.bf16(f"{p}.attn.wqkv.bias", 3 * width)
        w.bf16(f"{p}.attn.wo.weight", width, width)
        w.bf16(f"{p}.attn.wo.bias", width)
        w.bf16(f"{p}.mlp.w1.weight", 2 * v.intermediate_size, width)
        w.bf16(f"{p}.mlp.w2.weight", width, v.intermediate_size)
    w.bf16("vision.norm.weight", width)
    w.bf16("aligner.w1.weight", hidden, width * v.downsample_ratio**2)
    w.bf16("aligner.w1.bias", hidden)
    w.bf16("aligner.w2.weight", hidden, hidden)
    w.bf16("aligner.w2.bias", hidden)


def tensor_inventory(config: ModelConfig) -> dict[str, TensorSpec]:
    """Name -> `TensorSpec` for every tensor that the files of `config` hold, no more and no less.

    Engram tables have the rows that `engram_num_embeddings` states. Without a `quantization_config` every weight is
    BF16, unpacked and without a scale; F32 tensors are F32 either way.
    """
    c = config.text_config
    specs: dict[str, TensorSpec] = {}
    w = _Writer(specs, config.quantization_config is not None, "backbone", "attention")
    w.within("embed + 3 image vectors").bf16("embed.weight", c.vocab_size, c.hidden_size)
    for layer in layer_schedule(c).layers:
        p = f"layers.{layer.index}"
        _block(w, p, c, c.n_routed_experts, _BACKBONE_SUBSYSTEMS)
        _compressor_and_indexer(w.within("compressor + indexer"), p, c, layer)
        if layer.engram is not None:
            _engram(w.within("engram", "engram"), p, c, c.engram_num_embeddings[layer.engram])
    w.within("norms, backbone").bf16("norm.weight", c.hidden_size)
    w.within("head").bf16("head.weight", c.vocab_size, c.hidden_size)
    _drafter(w.within("mtp other", "drafter"), c)
    _vision(w.within("vision + aligner", "vision"), config)
    return specs


def is_engram_table(name: str) -> bool:
    """Whether a tensor belongs to an Engram table, which stays on disk or in host memory."""
    return ".engram.embed." in name


def _active_parameters(config: ModelConfig, inventory: Iterable[TensorSpec]) -> tuple[int, int]:
    """Parameters one token touches: (layers before the decoder half, all layers with final norm and head)."""
    c = config.text_config
    decoder_start = layer_schedule(c).decoder_start
    prefill = decode = 0
    for spec in inventory:
        path = spec.name.split(".")
        if spec.name in ("norm.weight", "head.weight"):
            decode += spec.logical_parameters
        elif path[0] != "layers" or is_engram_table(spec.name):
            continue
        # Experts are alike, so the first k stand for whichever k are chosen.
        elif path[2:4] != ["ffn", "experts"] or int(path[4]) < c.num_experts_per_tok:
            decode += spec.logical_parameters
            if int(path[1]) < decoder_start:
                prefill += spec.logical_parameters
    return prefill, decode


def parameter_counts(config: ModelConfig, inventory: Mapping[str, TensorSpec] | None = None) -> ParameterCounts:
    """Counts logical parameters; pass the config's inventory if you already have it."""
    specs = (tensor_inventory(config) if inventory is None else inventory).values()
    by_part: Counter[str] = Counter()
    for spec in specs:
        part = "engram_tables" if is_engram_table(spec.name) else spec.part
        by_part[part] += spec.logical_parameters
    prefill, decode = _active_parameters(config, specs)
    return ParameterCounts(
        backbone=by_part["backbone"],
        engram_tables=by_part["engram_tables"],
        engram_projections=by_part["engram"],
        drafter=by_part["drafter"],
        vision=by_part["vision"],
        active_prefill=prefill,
        active_decode=decode,
    )


def bytes_by_dtype(inventory: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Stored bytes for each safetensors dtype, largest first."""
    totals: Counter[str] = Counter()
    for spec in inventory.values():
        totals[spec.dtype] += spec.nbytes
    return dict(totals.most_common())


def totals_by_subsystem(inventory: Mapping[str, TensorSpec]) -> dict[str, SubsystemTotal]:
    """Tensor count and stored bytes for each line of checkpoint.md's "Totals", largest first."""
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for spec in inventory.values():
        tensors[spec.subsystem] += 1
        sizes[spec.subsystem] += spec.nbytes
    return {name: SubsystemTotal(tensors[name], size) for name, size in sizes.most_common()}
