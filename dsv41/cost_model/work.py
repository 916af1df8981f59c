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
from dsv41.cost_model.hlo import Shape
from dsv41.cost_model.memory import kind_of, local_shapes
from dsv41.cost_model.programs import Step, StepSizes
from dsv41.sharding import ShardingRules, devices_along
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
        local = rows / devices_along(sizes, rules.batch)
        own = local * of_row / devices_along(sizes, rules.heads)
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
        in_decoder = path[0] == "layers" and int(path[1]) >= schedule.decoder_start
        tokens = decoder if in_decoder else encoder
        _add_weight(c, path, shape, tokens, _head_rows(sizes, c, step, shape), flops, moved)
    for spec in schedule.layers:
        tokens = decoder if spec.in_decoder else encoder
        _attention(c, spec, sizes.context, tokens, sharing, flops, moved)
        moved["residual streams"] += 2 * tokens.own * (2 * c.hc_mult + 2) * c.hidden_size * 2
    if step.drafter is not None:
        block = Tokens.of(sizes.rows, c.dspark_block_size, mesh, rules)
        inner: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        drafter = dataclasses.replace(
            c, n_routed_experts=c.dspark_n_routed_experts, num_experts_per_tok=c.dspark_num_experts_per_tok
        )
        for path, shape in local_shapes(step.drafter):
            tokens = encoder if "main_proj" in path else block
            _add_weight(drafter, path, shape, tokens, block.joined, *inner)
        flops["drafter"], moved["drafter"] = (sum(part.values()) for part in inner)
    return Work(flops=dict(flops.most_common()), bytes=dict(moved.most_common()))


def _add_weight(
    c: TextConfig, path: tuple[str, ...], shape: Shape, tokens: Tokens, head_rows: float, flops: Counter, moved: Counter
) -> None:
    """Adds one device's part of a parameter: read once, and multiplied with every row that meets it."""
    kind = kind_of(path)
    if kind == "embedding" or path[-2:] == ("embed", "weight"):
        moved[kind] += tokens.own * shape.dims[1] * 2  # rows of it, no product
        return
    moved[kind] += shape.bytes * _used_share(c, kind, tokens)
    if len(shape.dims) < 2 or path[-1] == _SCALES:
        return
    weights = math.prod(shape.dims) * _PACKED.get(shape.dtype, 1)
    flops[kind] += 2 * weights * _rows_of(kind, c, tokens, head_rows)


def _used_share(c: TextConfig, kind: str, tokens: Tokens) -> float:
    """Share of the weights that a step reads; of routed experts those expected to be chosen by any token."""
    if kind != "routed experts":
        return 1.0
    return 1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** tokens.everywhere


def _rows_of(kind: str, c: TextConfig, tokens: Tokens, head_rows: float) -> float:
    """Rows that a device multiplies with each of its weights of a kind."""
    if kind == "routed experts":
        # All devices share the rows of all experts evenly; each row meets one expert.
        return tokens.everywhere * c.num_experts_per_tok / c.n_routed_experts
    if kind in ("head", "Markov head"):
        return head_rows
    return tokens.joined if kind in _JOINED else tokens.own


def _head_rows(sizes: StepSizes, c: TextConfig, step: Step, head: Shape) -> float:
    """Rows that a device multiplies with its part of the head: those of all devices that have other parts.

    A step that verifies makes logits of all tokens, and of the block that it drafts.
    """
    of_row = step.batch.tokens.shape[1] + c.dspark_block_size if step.drafter is not None else 1
    return sizes.rows * of_row / sizes.devices * (c.vocab_size // head.dims[0])


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
