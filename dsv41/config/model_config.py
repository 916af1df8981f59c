"""The released `config.json` as frozen dataclasses, checked on construction.

Field names, nesting and values are those of the release (checkpoint.md, "config.json").
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dsv41.config.errors import ConfigError
from dsv41.config.schedule import layer_schedule


def _require(condition: bool, field: str, expected: str, value: Any) -> None:
    if not condition:
        raise ConfigError(f"{field}: expected {expected}, got {value!r}")


def _require_multiple(config: Any, prefix: str, field: str, divisor: int) -> None:
    value = getattr(config, field)
    _require(value % divisor == 0, f"{prefix}.{field}", f"a multiple of {divisor}", value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN parameters of the compressed layers (architecture.md section 3)."""

    rope_type: str = "yarn"
    factor: float = 16
    beta_fast: float = 32
    beta_slow: float = 1
    original_max_position_embeddings: int = 65536

    def __post_init__(self):
        p = "text_config.rope_scaling"
        _require(self.rope_type == "yarn", f"{p}.rope_type", "'yarn'", self.rope_type)
        _require(self.factor > 0, f"{p}.factor", "a positive number", self.factor)
        _require(self.beta_fast > self.beta_slow > 0, f"{p}.beta_fast", "beta_fast > beta_slow > 0", self.beta_fast)
        _require(
            self.original_max_position_embeddings > 0,
            f"{p}.original_max_position_embeddings",
            "a positive integer",
            self.original_max_position_embeddings,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """How linear weights are stored. Absent from the config: every weight is BF16 and activations are not quantised."""

    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, ...] = (32, 32)
    scale_fmt: str = "ue8m0"
    expert_dtype: str = "fp4"

    def __post_init__(self):
        for field, expected in (
            ("quant_method", "fp8"),
            ("activation_scheme", "dynamic"),
            ("weight_block_size", (32, 32)),
            ("scale_fmt", "ue8m0"),
            ("expert_dtype", "fp4"),
        ):
            value = getattr(self, field)
            _require(value == expected, f"quantization_config.{field}", repr(expected), value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower and projector (architecture.md section 7)."""

    model_type: str = "deepseek_v41_vision"
    num_hidden_layers: int = 32
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None

    def __post_init__(self):
        p = "vision_config"
        for field in (
            "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "patch_size",
            "rope_theta", "downsample_ratio", "max_image_tokens", "min_pixels",
        ):  # fmt: skip
            _require(getattr(self, field) > 0, f"{p}.{field}", "a positive number", getattr(self, field))
        _require_multiple(self, p, "hidden_size", 4 * self.num_attention_heads)
        # The span of one token: start, it, newline, end.
        _require(self.max_image_tokens >= 4, f"{p}.max_image_tokens", "at least 4", self.max_image_tokens)
        ratio = self.max_wh_ratio
        _require(ratio is None or ratio > 0, f"{p}.max_wh_ratio", "a positive number or null", ratio)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Backbone, Engram and DSpark sizes: `text_config` of the released file. Defaults are the released values."""

    model_type: str = "deepseek_v41_text"
    vocab_size: int = 129280
    hidden_size: int = 5120
    moe_intermediate_size: int = 2304
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    attention_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000
    compress_rope_theta: float = 160000
    rope_scaling: RopeScaling | None = RopeScaling()
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int | None = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    # What the confidence head reads: null, as released, the residual; "normed", as some training code has it, the
    # residual after the drafter's final norm. A head must be run on what it was trained on.
    dspark_confidence_input: str | None = None

    def __post_init__(self):
        _check_text_sizes(self)
        _check_text_fixed_choices(self)
        _check_text_lists(self)


def _check_text_sizes(c: TextConfig) -> None:
    p = "text_config"
    positive = (
        "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "max_position_embeddings", "n_routed_experts",
        "num_experts_per_tok", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "hc_mult",
        "hc_sinkhorn_iters", "candidate_topk_blocks", "candidate_block_size", "rope_theta", "compress_rope_theta",
        "rms_norm_eps", "hc_eps", "swiglu_limit", "routed_scaling_factor",
    )  # fmt: skip
    for field in positive:
        _require(getattr(c, field) > 0, f"{p}.{field}", "a positive number", getattr(c, field))
    # Quantisation groups run along these dimensions (architecture.md section 6).
    for field in ("hidden_size", "moe_intermediate_size", "head_dim", "q_lora_rank", "o_lora_rank", "index_head_dim"):
        _require_multiple(c, p, field, 32)
    _require_multiple(c, p, "num_attention_heads", c.o_groups)
    _require_multiple(c, p, "qk_rope_head_dim", 2)
    for field in ("head_dim", "index_head_dim"):
        value = getattr(c, field)
        _require(value >= c.qk_rope_head_dim, f"{p}.{field}", f"at least qk_rope_head_dim={c.qk_rope_head_dim}", value)
    _require(
        c.num_experts_per_tok <= c.n_routed_experts,
        f"{p}.num_experts_per_tok",
        f"at most n_routed_experts={c.n_routed_experts}",
        c.num_experts_per_tok,
    )
    for field in ("head_dim", "index_head_dim"):  # the packed cache stores whole rows (dsv41.cache)
        value = getattr(c, field)
        _require(value & (value - 1) == 0, f"{p}.{field}", "a power of two", value)
    _require(128 % c.candidate_block_size == 0, f"{p}.candidate_block_size", "a divisor of 128", c.candidate_block_size)


def _check_text_fixed_choices(c: TextConfig) -> None:
    """Fields that the architecture leaves no choice in: another value means another model."""
    for field, expected in (
        ("model_type", "deepseek_v41_text"),
        ("num_key_value_heads", 1),
        ("n_shared_experts", 1),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("attention_dropout", 0.0),
        ("tie_word_embeddings", False),
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
        ("norm_topk_prob", True),
    ):
        _require(getattr(c, field) == expected, f"text_config.{field}", repr(expected), getattr(c, field))


def _check_text_lists(c: TextConfig) -> None:
    p = "text_config"
    n_layers = c.num_hidden_layers
    _require(
        len(c.engram_num_embeddings) == len(c.engram_layer_ids),
        f"{p}.engram_num_embeddings",
        f"one entry for each of engram_layer_ids={c.engram_layer_ids}",
        c.engram_num_embeddings,
    )
    for field in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = getattr(c, field)
        _require(list(ids) == sorted(set(ids)), f"{p}.{field}", "strictly increasing layer ids", ids)
        _require(all(0 <= i < n_layers for i in ids), f"{p}.{field}", f"layer ids in [0, {n_layers})", ids)
    if c.engram_layer_ids:
        for field in ("engram_max_ngram_size", "engram_vocab_size", "engram_n_heads", "engram_compressed_vocab_size"):
            _require(getattr(c, field) > 0, f"{p}.{field}", "a positive integer", getattr(c, field))
        _require(c.engram_max_ngram_size >= 2, f"{p}.engram_max_ngram_size", "at least 2", c.engram_max_ngram_size)
        _require(
            all(n > 0 for n in c.engram_num_embeddings),
            f"{p}.engram_num_embeddings",
            "positive row counts",
            c.engram_num_embeddings,
        )
        _require(c.engram_head_dim > 0, f"{p}.engram_head_dim", "a positive integer", c.engram_head_dim)
        _require_multiple(c, p, "engram_head_dim", 32)
        _require(
            0 <= c.engram_pad_token_id < c.vocab_size,
            f"{p}.engram_pad_token_id",
            f"a token id below vocab_size={c.vocab_size}",
            c.engram_pad_token_id,
        )
    _require(c.num_nextn_predict_layers >= 0, f"{p}.num_nextn_predict_layers", ">= 0", c.num_nextn_predict_layers)
    if c.num_nextn_predict_layers:
        _require(len(c.dspark_target_layer_ids) > 0, f"{p}.dspark_target_layer_ids", "at least one layer id", ())
        value = c.dspark_confidence_input
        _require(value in (None, "normed"), f"{p}.dspark_confidence_input", "null or 'normed'", value)
        for field in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts"):
            _require(getattr(c, field) > 0, f"{p}.{field}", "a positive integer", getattr(c, field))
        _require(
            0 < c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts,
            f"{p}.dspark_num_experts_per_tok",
            f"in 1..dspark_n_routed_experts={c.dspark_n_routed_experts}",
            c.dspark_num_experts_per_tok,
        )
        _require(
            0 <= c.dspark_noise_token_id < c.vocab_size,
            f"{p}.dspark_noise_token_id",
            f"a token id below vocab_size={c.vocab_size}",
            c.dspark_noise_token_id,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole released `config.json`."""

    architectures: tuple[str, ...] = ("DeepseekV41ForCausalLM",)
    model_type: str = "deepseek_v41"
    dtype: str = "bfloat16"
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 129264
    quantization_config: QuantizationConfig | None = QuantizationConfig()
    text_config: TextConfig = TextConfig()
    vision_config: VisionConfig | None = VisionConfig()

    def __post_init__(self):
        _require(self.model_type == "deepseek_v41", "model_type", "'deepseek_v41'", self.model_type)
        _require(self.dtype == "bfloat16", "dtype", "'bfloat16'", self.dtype)
        for field in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            value = getattr(self, field)
            _require(
                0 <= value < self.text_config.vocab_size,
                field,
                f"a token id below text_config.vocab_size={self.text_config.vocab_size}",
                value,
            )
        # A malformed schedule is a malformed config: refuse it here, not at the first forward.
        layer_schedule(self.text_config)
