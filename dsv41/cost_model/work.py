"""FLOPs and bytes that a device's part of a step needs, counted from the config.

A compiler's own count knows nothing of the insides of Pallas kernels. Here products count two FLOPs a weight and token,
attention and index scores count by the entries that a query meets, and all else is left out. Bytes are what any
implementation has to move: every weight that is used once, and of the cache what queries read.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping

from dsv41.config import LayerSpec, ModelConfig, TextConfig, layer_schedule
from dsv41.cost_model.memory import kind_of, local_shapes
from dsv41.cost_model.programs import Step, StepSizes
from dsv41.sharding import ShardingRules
from pallas_kernels.page_layout import WindowLayout
from pallas_kernels.quantize.ops import KV_FP4_GROUP, MXFP4_GROUP

_PACKED = {"u8": 2}  # FP4 weights hold two values a byte
_SCALES = "scale"
# Products whose tokens all devices of a group of `heads` compute, since attention joins them.
_JOINED = ("attention", "compressors and indexers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of one device in a half of a step.

    Attributes:
      rows: sequences that attention sees.
      of_row: tokens of each of them.
      own: tokens that residual streams, experts and Engram treat.
      everywhere: of all devices.
    """

    rows: float
    of_row: int
    own: float
    everywhere: int

    @property
    def joined(self) -> float:
        """That attention sees: the tokens of all devices that share heads."""
        return self.rows * self.of_row

    @classmethod
    def of(cls, rows: int, of_row: int, sizes: Mapping[str, int], rules: ShardingRules) -> Tokens:
        local = rows / math.prod(sizes[a] for a in rules.batch)
        own = local * of_row / math.prod(sizes[a] for a in rules.heads)
        return cls(rows=local, of_row=of_row, own=own, everywhere=rows * of_row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a device has to do in a step.

    Attributes:
      flops, bytes: by kind.
    """

    flops: dict[str, float]
    bytes: dict[str, float]

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes.values())


def step_work(config: ModelConfig, sizes: StepSizes, step: Step) -> Work:
    """FLOPs and bytes of a device in `step`, all rows having the full context and experts being chosen evenly."""
    c, rules, mesh = config.text_config, sizes.rules_for(config), sizes.mesh_sizes
    schedule, tail = layer_schedule(c), sizes.tail(config)
    encoder = Tokens.of(sizes.rows, sizes.new_tokens(config), mesh, rules)
    decoder = encoder if tail is None else Tokens.of(sizes.rows, tail, mesh, rules)
    sharing = math.prod(mesh[a] for a in rules.heads)
    flops: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for path, shape in local_shapes(step.params):
        kind = kind_of(path)
        layer = int(path[1]) if path[0] == "layers" else None
        tokens = decoder if layer is not None and layer >= schedule.decoder_start else encoder
        used = _used_share(c, kind, tokens)
        if kind == "embedding":
            moved[kind] += encoder.own * shape.dims[1] * 2
            continue
        moved[kind] += shape.bytes * used
        if len(shape.dims) < 2 or path[-1] == _SCALES:
            continue
        weights = math.prod(shape.dims) * (_PACKED.get(shape.dtype, 1))
        flops[kind] += 2 * weights * _rows_of(kind, c, tokens, sizes, step, shape.dims[0])
    for spec in schedule.layers:
        tokens = decoder if spec.in_decoder else encoder
        _attention(c, spec, sizes.context, tokens, sharing, flops, moved)
        moved["residual streams"] += 2 * tokens.own * (2 * c.hc_mult + 2) * c.hidden_size * 2
    return Work(flops=dict(flops.most_common()), bytes=dict(moved.most_common()))


def _used_share(c: TextConfig, kind: str, tokens: Tokens) -> float:
    """Share of the weights that a step reads; of routed experts those expected to be chosen by any token."""
    if kind != "routed experts":
        return 1.0
    return 1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** tokens.everywhere


def _rows_of(kind: str, c: TextConfig, tokens: Tokens, sizes: StepSizes, step: Step, leading: int) -> float:
    """Rows that a device multiplies with each of its weights of a kind.

    Args:
      leading: first axis of the device's part: its experts, where there is one for each.
    """
    if kind == "routed experts":
        # All devices share the rows of all experts evenly; each row meets one expert.
        return tokens.everywhere * c.num_experts_per_tok / c.n_routed_experts
    if kind == "head":
        parts = c.vocab_size // leading
        rows = sizes.rows * (sizes.new_tokens(step.static["config"]) if step.static["logits"] == "all" else 1)
        # A device multiplies its part of the vocabulary with the rows of all devices that have other parts.
        return rows / sizes.devices * parts
    return tokens.joined if kind in _JOINED else tokens.own


def _attention(
    c: TextConfig, spec: LayerSpec, context: int, tokens: Tokens, sharing: int, flops: Counter, moved: Counter
) -> None:
    """Adds what a layer does with cached entries, which is no product with a weight; `sharing` devices have the rows.

    Queries of one row may share what they read, so no more counts than all that the row has. Pages spread over devices
    change nothing: a device then scores its part of the entries of several rows.
    """
    selected = c.index_topk if spec.is_compressed else 0
    heads = c.num_attention_heads / sharing
    flops["attention scores"] += 4 * tokens.joined * heads * c.head_dim * (c.sliding_window + selected)
    moved["window KV"] += tokens.rows * WindowLayout(c.head_dim, c.sliding_window).slot_bytes
    if spec.is_compressed:
        entry = c.head_dim // 2 + c.head_dim // KV_FP4_GROUP
        moved["selected KV"] += tokens.rows * min(tokens.of_row * selected, context // spec.ratio) * entry
    if spec.selects:
        every = context // spec.ratio
        scored = min(every, c.candidate_topk_blocks * c.candidate_block_size) if spec.reads_candidates else every
        # Devices that share rows share their queries too (`QuerySplit`).
        rows, of_row = tokens.rows, tokens.of_row
        if rows % sharing == 0:
            rows /= sharing
        elif of_row % sharing == 0:
            of_row //= sharing
        flops["index scores"] += 2 * rows * of_row * scored * c.index_n_heads * c.index_head_dim
        key = c.index_head_dim // 2 + c.index_head_dim // MXFP4_GROUP
        moved["index keys"] += rows * min(of_row * scored, every) * key
