"""The text backbone: layers in order."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import AttentionState, ForwardBatch, KVCache, local_step
from dsv41.config import ModelConfig, layer_schedule
from dsv41.layers import (
    Block,
    BlockFormats,
    Residual,
    RMSNorm,
    abstract,
    logical_axes_of,
    open_streams,
    parameters_of,
    with_parameters,
)
from dsv41.ops.token_split import TokenSplit
from dsv41.ops.vocabulary import embed, head_logits
from dsv41.sharding import LOCAL, ShardingRules
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
        self.weight = abstract(rows, dim, axes=("vocab",))


class Backbone(nnx.Module):
    """Embedding, blocks, final norm and head. Attribute paths are the checkpoint's tensor names.

    With `rules` it is one device's part of a model spread over a mesh (inside `jax.shard_map`): residuals are those of
    the device's tokens (`TokenSplit`). `formats` are those of the checkpoint unless they are given.
    """

    def __init__(self, config: ModelConfig, rules: ShardingRules = LOCAL, formats: BlockFormats | None = None):
        c = config.text_config
        self.config, self.rules = c, rules
        schedule, formats = layer_schedule(c), formats or BlockFormats.of(config)
        self.embed = _Table(c.vocab_size, c.hidden_size)
        self.layers = nnx.List([Block(c, spec, formats, rules) for spec in schedule.layers])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = _Table(c.vocab_size, c.hidden_size)

    def tokens(self, batch: ForwardBatch) -> TokenSplit:
        """How the tokens of a step are spread."""
        return TokenSplit(*batch.tokens.shape, self.rules.heads)

    def start(self, batch: ForwardBatch) -> Residual:
        """The streams and the first mix of a step's tokens or image rows."""
        split = self.tokens(batch).split
        x = embed(self.embed.weight[...], split(batch.tokens), self.rules)
        if batch.image_embeds is not None:
            x = jnp.where(split(batch.image_mask)[..., None], split(batch.image_embeds), x)
        return open_streams(x, self.config.hc_mult)

    def run(
        self,
        residual: Residual,
        batch: ForwardBatch,
        cache: KVCache,
        state: AttentionState | None,
        layers: range,
        forced: ForcedChoices,
        capture: tuple[str, ...],
    ) -> tuple[Residual, KVCache, AttentionState | None, dict[str, jax.Array]]:
        """Runs consecutive blocks; the last value holds what `capture` asks for, keyed "name.layer".

        Raises:
          ValueError: a layer is reached without the selection or the candidate pool that it depends on.
        """
        aux: dict[str, jax.Array] = {}
        join = self.tokens(batch).join
        for n in layers:
            block = self.layers[n]
            with jax.named_scope(f"layer_{n}"):
                residual = block.look_up(residual, batch)
                pre_in = residual.pre
                residual, cache, state, inside = block(
                    residual, batch, cache, state, forced.selected.get(n), forced.experts.get(n)
                )
                if "taps" in capture and block.spec.tap is not None:
                    # The plain mean, not the mix that the block collapsed with (dspark.md section 2.1).
                    aux[f"tap.{block.spec.tap}"] = join(
                        round_to_bf16(inside["block_in"].astype(jnp.float32).mean(axis=2))
                    )
            own: dict[str, jax.Array] = {}
            if "streams" in capture:
                out = residual.complete()
                own |= {"block_in": inside["block_in"], "pre_in": pre_in, "block_out": out.streams, "pre_out": out.pre}
            if "outputs" in capture:
                own |= {k: inside[k] for k in ("attn_out", "ffn_out")}
            if "choices" in capture:
                own |= {k: inside[k] for k in ("experts", "expert_weights")}
            aux |= {f"{name}.{n}": join(x) for name, x in own.items()}
            if "choices" in capture:
                if block.spec.selects:
                    aux[f"selected.{n}"] = state.selected
                if block.spec.builds_candidates:
                    aux[f"candidates.{n}"] = state.candidates
        return residual, cache, state, aux

    @jax.named_scope("head")
    def finish(self, residual: Residual, batch: ForwardBatch, logits: str) -> jax.Array:
        """The residual behind the last block -> float32 [B, 1, V] of each row's last token ("last") or [B, T, V]."""
        tokens = self.tokens(batch)
        if logits == "last":
            residual = jax.tree.map(lambda x: tokens.take(x, jnp.maximum(batch.num_new - 1, 0), 1), residual)
        residual = residual.complete()
        x = self.norm(mhc.collapse(residual.streams, residual.pre))
        return head_logits(x if logits == "last" else tokens.join(x), self.head.weight[...], self.rules)


def abstract_params(config: ModelConfig) -> Params:
    """The backbone's parameters as nested dicts of `jax.ShapeDtypeStruct`."""
    return parameters_of(Backbone(config))


def backbone_axes(config: ModelConfig) -> Params:
    """The logical axes of the backbone's parameters, nested as `abstract_params` nests them."""
    return logical_axes_of(Backbone(config))


def bind(config: ModelConfig, params: Params, rules: ShardingRules = LOCAL) -> Backbone:
    """The backbone with `params` (nested dicts of arrays) in place; cheap enough to do inside every trace."""
    return with_parameters(Backbone(config, rules), params)


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
    rules: ShardingRules = LOCAL,
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
      rules: static; not `LOCAL` inside `jax.shard_map` only, where all arguments and results are one device's parts
        (`dsv41.models.sharded`).

    Returns:
      logits float32 [B, 1, V] or [B, T, V] (rows of padding tokens are meaningless; with a tail: [B, tail, V]), cache,
      aux. A sequence that lacks assigned pages gets NaN, never a plausible answer from half its context.
    """
    _check_static(config, logits, capture, tail)
    model, forced = bind(config, params, rules), forced or ForcedChoices()
    end = config.text_config.num_hidden_layers
    middle = end if tail is None else layer_schedule(config.text_config).decoder_start
    page_table = cache.page_table
    batch, cache = local_step(batch, cache, rules)
    known = has_pages(batch, cache)
    residual, cache, _, aux = model.run(model.start(batch), batch, cache, None, range(middle), forced, capture)
    if tail is not None:
        residual = residual.complete()
        cache = model.layers[middle].compress(residual, batch, cache)
        if not tail:
            return None, dataclasses.replace(cache, page_table=page_table), aux
        whole, begin, batch = model.tokens(batch), batch.num_new - batch.tail, batch.tail_batch(tail)
        residual = jax.tree.map(lambda x: model.tokens(batch).split(whole.take(x, begin, tail)), residual)
        residual, cache, _, more = model.run(residual, batch, cache, None, range(middle, end), forced, capture)
        aux |= more
    if "taps" in capture:
        taps = [aux.pop(f"tap.{i}") for i in range(len(config.text_config.dspark_target_layer_ids))]
        aux["main_hidden"] = jnp.concatenate(taps, axis=-1)
    out = jnp.where(known[:, None, None], model.finish(residual, batch, logits), jnp.nan)
    return out, dataclasses.replace(cache, page_table=page_table), aux


def _check_static(config: ModelConfig, logits: str, capture: tuple[str, ...], tail: int | None) -> None:
    if logits not in ("last", "all"):
        raise ValueError(f"logits: expected 'last' or 'all', got {logits!r}")
    if unknown := set(capture) - set(CAPTURES):
        raise ValueError(f"capture: unknown names {sorted(unknown)}, expected some of {CAPTURES}")
    if "taps" in capture and not config.text_config.num_nextn_predict_layers:
        raise ValueError("capture: 'taps' of a model without a drafter")
    if tail is not None and (problem := layer_schedule(config.text_config).tail_problem):
        raise ValueError(f"tail: {problem}")


def has_pages(batch: ForwardBatch, cache: KVCache) -> jax.Array:
    """bool [B]: whether pages are assigned for every token up to the row's last new one."""
    table = cache.page_table[batch.slot]
    needed = jnp.arange(table.shape[1]) * cache.layout.page_tokens < (batch.start + batch.num_new)[:, None]
    return (~needed | (table >= 0)).all(axis=1)
