"""Which rule optimises which parameter, decided by its name alone (training.md section 3.1).

Names are those of the checkpoint, with experts stacked: `layers.3.attn.wq_b.weight`, `layers.3.ffn.experts.w1.weight`.
Where the report names no group the choice is ours: attention sinks, base and scale vectors of the hyper-connections,
image delimiters and the drafter's confidence head (one row) are treated as the biases are; both Markov tables of the
drafter as embedding and head are; the vision tower by the same rules as the language model.
"""

from __future__ import annotations

import enum
import re
from typing import Any

import jax

from dsv41.config import DSV41Error, ModelConfig


class Label(enum.StrEnum):
    """The rule of a parameter."""

    MUON_HEAD = "muon_head"  # queries and keys, each head for itself
    MUON = "muon"  # other matrices
    SINKHORN = "sinkhorn"  # tables with a row for each token or n-gram
    ADAM_DECAY = "adam_decay"  # gains of norms
    ADAM_NODECAY = "adam_nodecay"  # biases and scaling factors
    FROZEN = "frozen"  # not the optimiser's: routing biases have a rule of their own

    @property
    def decays(self) -> bool:
        return self in (Label.MUON_HEAD, Label.MUON, Label.ADAM_DECAY)

    @property
    def is_muon(self) -> bool:
        return self in (Label.MUON_HEAD, Label.MUON)


class RateGroup(enum.StrEnum):
    """What a parameter's learning rate is derived from."""

    BASE = "base"
    ENGRAM_TABLE = "engram_table"  # a multiple of the base rate
    VISION_TOWER = "vision_tower"  # has a schedule of its own


_BLOCK_RULES = (
    (Label.MUON_HEAD, r"attn\.(wq_b|wkv|compressor\.wkv|indexer\.wq_b|indexer\.wk)\.weight"),
    (Label.MUON, r"attn\.(wq_a|wo_a|wo_b|compressor\.wgate|indexer\.weights_proj)\.weight"),
    (Label.MUON, r"ffn\.(gate|(shared_)?experts\.w[123])\.weight"),
    (Label.MUON, r"hc_(attn|ffn)_fn|engram\.wkv\.weight|main_proj\.weight"),
    (Label.SINKHORN, r"engram\.embed\.weight|markov_head\.(embed|head)\.weight"),
    (Label.ADAM_DECAY, r"(attn_norm|ffn_norm|main_norm|norm)\.weight"),
    (Label.ADAM_DECAY, r"attn\.(q_norm|kv_norm|compressor\.norm|indexer\.k_norm)\.weight|engram\.[qk]_weight"),
    (Label.ADAM_NODECAY, r"attn\.attn_sink|hc_(attn|ffn)_(base|scale)|confidence_head\.proj\.weight"),
    (Label.FROZEN, r"ffn\.gate\.(bias|bias_vl)"),
)
_BLOCK = r"(?:layers|mtp)\.\d+\."
_RULES = tuple((label, re.compile(rf"{_BLOCK}(?:{rule})")) for label, rule in _BLOCK_RULES) + tuple(
    (label, re.compile(rule))
    for label, rule in (
        (Label.SINKHORN, r"(embed|head)\.weight"),
        (Label.ADAM_DECAY, r"norm\.weight|vision\.(norm|blocks\.\d+\.norm[12])\.weight"),
        (Label.ADAM_NODECAY, r"image_(start|newline|end)|(vision|aligner)\..+\.bias"),
        (Label.MUON, r"vision\.(patch_embed\.proj|blocks\.\d+\.(attn\.(wqkv|wo)|mlp\.w[12]))\.weight"),
        (Label.MUON, r"aligner\.w[12]\.weight"),
    )
)


def label_of(path: str, shape: tuple[int, ...]) -> Label:
    """The rule for the parameter called `path`, of this shape.

    Raises:
      DSV41Error: no rule knows the name, or the rule needs another shape: matrices for Muon, possibly stacked, and one
        matrix for a Sinkhorn-balanced table.
    """
    label = next((label for label, rule in _RULES if rule.fullmatch(path)), None)
    if label is None:
        raise DSV41Error(f"parameter {path}: no optimiser rule knows this name")
    if (label.is_muon and len(shape) < 2) or (label is Label.SINKHORN and len(shape) != 2):
        raise DSV41Error(f"parameter {path}: expected a matrix, got shape {list(shape)}")
    return label


def rate_group(path: str) -> RateGroup:
    """What the learning rate of the parameter called `path` is derived from.

    The Engram factor is read as one of the tables only, not of the projection and gains behind them. The tower's final
    norm and the projector train at the base rate from the start.
    """
    if ".engram.embed." in path:
        return RateGroup.ENGRAM_TABLE
    if path.startswith("vision.") and path != "vision.norm.weight":
        return RateGroup.VISION_TOWER
    return RateGroup.BASE


def row_blocks(path: str, config: ModelConfig) -> int:
    """Into how many blocks of equal rows Muon cuts the matrix called `path`, each orthogonalised for itself.

    Query weights by head; keys have one head. Elsewhere the matrices that lie in one array: groups of the output
    projection; query, key and value, and gate and up, of the vision tower.
    """
    text = config.text_config
    for rule, blocks in (
        (r".*\.indexer\.wq_b\.weight", text.index_n_heads),
        (r".*\.attn\.wq_b\.weight", text.num_attention_heads),
        (r".*\.attn\.wo_a\.weight", text.o_groups),
        (r"vision\..*\.wqkv\.weight", 3),
        (r"vision\..*\.mlp\.w1\.weight", 2),
    ):
        if re.fullmatch(rule, path):
            return blocks
    return 1


def key_path_name(path: tuple[Any, ...]) -> str:
    """A key path of `jax.tree_util` through nested dicts -> "layers.3.attn.wq_b.weight"."""
    return ".".join(str(key.key) for key in path)


def parameter_names(tree: Any) -> Any:
    """The tree with every leaf replaced by its name."""
    return jax.tree_util.tree_map_with_path(lambda path, _: key_path_name(path), tree)


def labels_of(params: Any) -> Any:
    """The tree with every leaf (anything with a shape) replaced by its label.

    Raises:
      DSV41Error: as `label_of`.
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: label_of(key_path_name(path), x.shape), params)
