"""The text backbone: layers in order."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import AttentionState, ForwardBatch, KVCache, take_rows
from dsv41.config import ModelConfig, layer_schedule
from dsv41.layers import Block, RMSNorm, abstract, parameters_of, with_parameters
from dsv41.ops.linear import WeightFormat
from pallas_kernels.fixed_order import contract
from pallas_kernels.hyper_connection import ops as mhc
from pallas_kernels.rounding import round_to_bf16

Params = dict[str, Any]

# What `forward` can report beside logits; each name is a group of entries in its `aux`. "taps" is what a drafter reads:
# `main_hidden` bfloat16 [B, T, taps * D].
CAPTURES = ("streams", "outputs", "choices", "taps")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForcedChoices:
    """Discrete choices to replay instead of computing them, by layer number."""

    selected: dict[int, jax.Array] = dataclasses.field(default_factory=dict)  # int32 [B, T, index_topk], -1 unused
    experts: dict[int, jax.Array] = dataclasses.field(default_factory=dict)  # int32 [B, T, num_experts_per_tok]


class _Table(nnx.Module):
    def __init__(self, rows: int, dim: int):
        self.weight = abstract(rows, dim)


class Backbone(nnx.Module):
    """Embedding, blocks, final norm and head. Attribute paths are the checkpoint's tensor names."""

    def __init__(self, config: ModelConfig):
        c = config.text_config
        self.config = c
        schedule = layer_schedule(c)
        quantized = config.quantization_config is not None
        dense = WeightFormat.FP8_BLOCK if quantized else WeightFormat.BF16
        routed = WeightFormat.FP4_ROW if quantized else WeightFormat.BF16
        self.embed = _Table(c.vocab_size, c.hidden_size)
        self.layers = nnx.List([Block(c, schedule, spec, dense, routed) for spec in schedule.layers])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = _Table(c.vocab_size, c.hidden_size)

    def start(self, batch: ForwardBatch) -> tuple[jax.Array, jax.Array]:
        """The streams bfloat16 [B, T, R, D] and the first mix float32 [B, T, R] of a step's tokens or image rows."""
        x = self.embed.weight[...][batch.tokens]
        if batch.image_embeds is not None:
            x = jnp.where(batch.image_mask[..., None], batch.image_embeds, x)
        return open_streams(x, self.config.hc_mult)

    def run(
        self,
        streams: jax.Array,
        pre: jax.Array,
        batch: ForwardBatch,
        cache: KVCache,
        state: AttentionState | None,
        layers: range,
        forced: ForcedChoices,
        capture: tuple[str, ...],
    ) -> tuple[jax.Array, jax.Array, KVCache, AttentionState | None, dict[str, jax.Array]]:
        """Runs consecutive blocks; the last value holds what `capture` asks for, keyed "name.layer"."""
        aux: dict[str, jax.Array] = {}
        for n in layers:
            block = self.layers[n]
            with jax.named_scope(f"layer_{n}"):
                streams = block.look_up(streams, batch)
                if "taps" in capture and block.spec.tap is not None:
                    # The plain mean, not the mix that the block is about to collapse with (dspark.md section 2.1).
                    aux[f"tap.{block.spec.tap}"] = round_to_bf16(streams.astype(jnp.float32).mean(axis=2))
                if "streams" in capture:
                    aux[f"block_in.{n}"], aux[f"pre_in.{n}"] = streams, pre
                streams, pre, cache, state, inside = block(
                    streams, pre, batch, cache, state, forced.selected.get(n), forced.experts.get(n)
                )
            if "streams" in capture:
                aux[f"block_out.{n}"], aux[f"pre_out.{n}"] = streams, pre
            if "outputs" in capture:
                aux |= {f"{k}.{n}": inside[k] for k in ("attn_out", "ffn_out")}
            if "choices" in capture:
                aux |= {f"{k}.{n}": inside[k] for k in ("experts", "expert_weights")}
                if block.spec.selects:
                    aux[f"selected.{n}"] = state.selected
                if block.spec.builds_candidates:
                    aux[f"candidates.{n}"] = state.candidates
        return streams, pre, cache, state, aux

    def finish(self, streams: jax.Array, pre: jax.Array) -> jax.Array:
        """streams bfloat16 [..., R, D] after the last block, its pre float32 [..., R] -> logits float32 [..., V]."""
        return contract(self.norm(mhc.collapse(streams, pre)), self.head.weight[...])


def open_streams(x: jax.Array, num_streams: int) -> tuple[jax.Array, jax.Array]:
    """Embeddings bfloat16 [B, T, D] -> equal streams bfloat16 [B, T, R, D], one-hot first mix float32 [B, T, R]."""
    streams = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], num_streams, x.shape[2]))
    return streams, jnp.zeros(streams.shape[:3], jnp.float32).at[..., 0].set(1.0)


def abstract_params(config: ModelConfig) -> Params:
    """The backbone's parameters as nested dicts of `jax.ShapeDtypeStruct`."""
    return parameters_of(Backbone(config))


def bind(config: ModelConfig, params: Params) -> Backbone:
    """The backbone with `params` (nested dicts of arrays) in place; cheap enough to do inside every trace."""
    return with_parameters(Backbone(config), params)


def forward(
    params: Params,
    batch: ForwardBatch,
    cache: KVCache,
    forced: ForcedChoices | None = None,
    *,
    config: ModelConfig,
    logits: str = "last",
    capture: tuple[str, ...] = (),
    tail: int | None = None,
) -> tuple[jax.Array | None, KVCache, dict[str, jax.Array]]:
    """One step of the whole model: prefill chunk, decode or verify.

    With `tail`, a chunk of a prompt goes through the encoder, and of the decoder only the first layer's KV and index
    keys are computed; the last `batch.tail` tokens of each row go through the rest, with windows that begin there (CED
    prefill, serving.md section 3.1). All that follows a step without a tail is what the encoder needs.

    Args:
      params: as `abstract_params`.
      batch: the new tokens, any number a sequence, at any position.
      cache: what is remembered; the step's entries are written into it.
      forced: choices to replay.
      config: static.
      logits: "last": of each row's last real token; "all": of every token.
      capture: names out of `CAPTURES`. What decoder layers report has the rows of the tail.
      tail: None: every layer on every token. Else rows of the tail's step, at least the largest `batch.tail`; 0: no
        decoder, no logits.

    Returns:
      logits float32 [B, 1, V] or [B, T, V] (rows of padding tokens are meaningless; with a tail: [B, tail, V]), cache,
      aux. A sequence that lacks assigned pages gets NaN, never a plausible answer from half its context.
    """
    _check_static(config, logits, capture, tail)
    model, forced = bind(config, params), forced or ForcedChoices()
    end = config.text_config.num_hidden_layers
    middle = end if tail is None else layer_schedule(config.text_config).decoder_start
    streams, pre = model.start(batch)
    streams, pre, cache, _, aux = model.run(streams, pre, batch, cache, None, range(middle), forced, capture)
    has_pages = _has_pages(batch, cache)
    if tail is not None:
        first = model.layers[middle]
        cache = first.attn.compress(first.attention_input(streams, pre), batch, cache)
        if not tail:
            return None, cache, aux
        begin, batch = batch.num_new - batch.tail, batch.tail_batch(tail)
        streams, pre = take_rows(streams, begin, tail), take_rows(pre, begin, tail)
        streams, pre, cache, _, more = model.run(streams, pre, batch, cache, None, range(middle, end), forced, capture)
        aux |= more
    if "taps" in capture:
        taps = [aux.pop(f"tap.{i}") for i in range(len(config.text_config.dspark_target_layer_ids))]
        aux["main_hidden"] = jnp.concatenate(taps, axis=-1)
    if logits == "last":
        last = jnp.maximum(batch.num_new - 1, 0)[:, None]
        streams = jnp.take_along_axis(streams, last[..., None, None], axis=1)
        pre = jnp.take_along_axis(pre, last[..., None], axis=1)
    with jax.named_scope("head"):
        out = model.finish(streams, pre)
    return jnp.where(has_pages[:, None, None], out, jnp.nan), cache, aux


def _check_static(config: ModelConfig, logits: str, capture: tuple[str, ...], tail: int | None) -> None:
    if logits not in ("last", "all"):
        raise ValueError(f"logits: expected 'last' or 'all', got {logits!r}")
    if unknown := set(capture) - set(CAPTURES):
        raise ValueError(f"capture: unknown names {sorted(unknown)}, expected some of {CAPTURES}")
    if "taps" in capture and not config.text_config.num_nextn_predict_layers:
        raise ValueError("capture: 'taps' of a model without a drafter")
    if tail is not None and (problem := layer_schedule(config.text_config).tail_problem):
        raise ValueError(f"tail: {problem}")


def _has_pages(batch: ForwardBatch, cache: KVCache) -> jax.Array:
    """bool [B]: whether pages are assigned for every token up to the row's last new one."""
    table = cache.page_table[batch.slot]
    needed = jnp.arange(table.shape[1]) * cache.layout.page_tokens < (batch.start + batch.num_new)[:, None]
    return (~needed | (table >= 0)).all(axis=1)
