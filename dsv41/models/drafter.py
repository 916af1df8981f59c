"""DSpark: the drafter that proposes a block of tokens from the backbone's features (dspark.md section 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import ForwardBatch, KVCache, read_window
from dsv41.config import ModelConfig
from dsv41.layers import (
    BlockFormats,
    DraftBlock,
    Linear,
    RMSNorm,
    abstract,
    logical_axes_of,
    open_streams,
    parameters_of,
    with_parameters,
)
from dsv41.models.backbone import Params
from dsv41.ops import collectives
from dsv41.ops.token_split import TokenSplit
from dsv41.ops.vocabulary import embed, head_logits
from dsv41.sharding import LOCAL, ShardingRules
from pallas_kernels.fixed_order import contract
from pallas_kernels.hyper_connection import ops as mhc

# Draft number k and its logits float32 [B, V] -> drawn ids int32 [B].
Draw = Callable[[int, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """A proposed block of K tokens a row."""

    tokens: jax.Array  # int32 [B, K]
    logits: jax.Array  # float32 [B, K, V] what each token was drawn from, Markov bias added
    confidence: jax.Array  # float32 [B, K] raw logits: that draft k is accepted given that those before it are


class _Weight(nnx.Module):
    def __init__(self, *shape: int):
        self.weight = abstract(*shape)


class _MarkovHead(nnx.Module):
    """A low-rank bias of the next draft's logits by the token before it."""

    def __init__(self, vocab: int, rank: int):
        self.embed = _Weight(vocab, rank)
        self.head = _Weight(vocab, rank)


class _ConfidenceHead(nnx.Module):
    def __init__(self, dim: int):
        self.proj = _Weight(1, dim)


class Drafter(nnx.Module):
    """All stages. Attribute paths are the checkpoint's tensor names; embedding and head are the backbone's.

    `formats` are those of the checkpoint unless they are given.
    """

    def __init__(self, config: ModelConfig, rules: ShardingRules = LOCAL, formats: BlockFormats | None = None):
        c = config.text_config
        self.config, self.rules = c, rules
        formats = formats or BlockFormats.of(config)
        stages = [DraftBlock(c, formats, rules) for _ in range(c.num_nextn_predict_layers)]
        first, last = stages[0], stages[-1]
        first.main_proj = Linear(len(c.dspark_target_layer_ids) * c.hidden_size, c.hidden_size, formats.dense)
        first.main_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        last.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        last.markov_head = _MarkovHead(c.vocab_size, c.dspark_markov_rank)
        last.confidence_head = _ConfidenceHead(c.hidden_size + c.dspark_markov_rank)
        self.mtp = nnx.List(stages)

    def _slots(self, slot: jax.Array, cache: KVCache) -> jax.Array:
        """int32 [B] slots as this device counts them."""
        return collectives.local_index(slot, cache.num_slots, self.rules.batch)

    def remember(self, main_hidden: jax.Array, batch: ForwardBatch, cache: KVCache) -> KVCache:
        """Writes each stage's KV of the step's tokens, which must be committed, into its ring.

        main_hidden bfloat16 [B, T, taps * D], as `forward` reports with the capture "taps". Tokens beyond
        `batch.num_new` leave nothing.
        """
        first = self.mtp[0]
        batch = dataclasses.replace(batch, slot=self._slots(batch.slot, cache))
        rope = _rope(cache, batch.positions())
        with jax.named_scope("draft_context"):
            main = first.main_norm(first.main_proj(main_hidden))
            layout = cache.layout.window
            slot, index = batch.ring_address(layout.length, cache.num_slots)
            rings = [
                stage.attn.write_window(main, rope, ring, slot, index, layout)
                for stage, ring in zip(self.mtp, cache.draft_window, strict=True)
            ]
        return dataclasses.replace(cache, draft_window=tuple(rings))

    def stages(
        self, table: jax.Array, anchor: jax.Array, start: jax.Array, slot: jax.Array, active: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The block's hidden states bfloat16 [B, K, D] before the final norm, and "block_out.k", "experts.k" of stages.

        Slot 0 is the anchor token at position `start`, the others hold the noise token; slot k predicts the token at
        start + k + 1. `table` is the backbone's embedding. Context is what the rings hold of the `sliding_window`
        positions before the anchor.
        """
        c, b = self.config, anchor.shape[0]
        k, window = c.dspark_block_size, c.sliding_window
        split = TokenSplit(b, k, self.rules.heads)
        slot = self._slots(slot, cache)
        tokens = jnp.full((b, k), c.dspark_noise_token_id, jnp.int32).at[:, 0].set(anchor)
        residual = open_streams(embed(table, split.split(tokens), self.rules), c.hc_mult)
        rope = _rope(cache, start[:, None] + jnp.arange(k))
        position = start[:, None] - window + jnp.arange(window)
        rows, index = jnp.arange(b)[:, None], position % cache.layout.window.length
        aux: dict[str, jax.Array] = {}
        for i, stage in enumerate(self.mtp):
            with jax.named_scope(f"draft_stage_{i}"):
                values, scales = read_window(cache.layout, cache.draft_window[i], slot)
                context = values[rows, index], scales[rows, index]
                residual, inside = stage(residual, rope, context, position >= 0, active)
            own = {"block_out": residual.complete().streams, "experts": inside["experts"]}
            aux |= {f"{name}.{i}": split.join(x) for name, x in own.items()}
        residual = residual.complete()
        return split.join(mhc.collapse(residual.streams, residual.pre)), aux

    def decide(self, head: jax.Array, x: jax.Array, anchor: jax.Array, draw: Draw) -> Draft:
        """Draws the block left to right; each draft's logits depend on the one before through the Markov head.

        The Markov head is whole on every device: a mesh costs the block its logits' collective, the drafts nothing.

        head bfloat16 [V, D]; x bfloat16 [B, K, D] from `stages`. A confidence depends on the drafts before its own,
        never on its own (dspark.md section 6.4).
        """
        last = self.mtp[-1]
        markov_embed, markov = last.markov_head.embed.weight[...], last.markov_head.head.weight[...]
        proj = last.confidence_head.proj.weight[...].astype(jnp.float32)
        normed = last.norm(x)
        with jax.named_scope("draft_head"):
            base = head_logits(normed, head, self.rules)
        seen = (normed if self.config.dspark_confidence_input == "normed" else x).astype(jnp.float32)
        before, tokens, logits, confidence = anchor, [], [], []
        for k in range(x.shape[1]):
            with jax.named_scope(f"draft_{k}"):
                e = markov_embed[before]
                confidence.append(contract(jnp.concatenate([seen[:, k], e.astype(jnp.float32)], axis=-1), proj)[:, 0])
                logits.append(base[:, k] + contract(e, markov))
                before = draw(k, logits[-1])
                tokens.append(before)
        return Draft(*(jnp.stack(x, axis=1) for x in (tokens, logits, confidence)))


def _rope(cache: KVCache, positions: jax.Array) -> jax.Array:
    """float32 [B, T, 2, r]: stages rotate like sliding layers. A block may reach past what a sequence can hold."""
    return cache.rope[0][jnp.clip(positions, 0, cache.max_tokens - 1)]


def greedy(_: int, logits: jax.Array) -> jax.Array:
    """A `Draw` that takes the best token, the lower id at a tie."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def abstract_drafter_params(config: ModelConfig) -> Params:
    """The drafter's parameters as nested dicts of `jax.ShapeDtypeStruct`."""
    return parameters_of(Drafter(config))


def drafter_axes(config: ModelConfig) -> Params:
    """The logical axes of the drafter's parameters, nested as `abstract_drafter_params` nests them."""
    return logical_axes_of(Drafter(config))


def bind_drafter(config: ModelConfig, params: Params, rules: ShardingRules = LOCAL) -> Drafter:
    """The drafter with `params` in place."""
    return with_parameters(Drafter(config, rules), params)


def draft(
    params: Params,
    drafter_params: Params,
    anchor: jax.Array,
    start: jax.Array,
    slot: jax.Array,
    active: jax.Array,
    cache: KVCache,
    draw: Draw = greedy,
    *,
    config: ModelConfig,
    rules: ShardingRules = LOCAL,
) -> tuple[Draft, dict[str, jax.Array]]:
    """Proposes a block for every row.

    Args:
      params, drafter_params: of the backbone and of the drafter.
      anchor: int32 [B], the newest token of each row: known, but not in the cache.
      start: int32 [B] its position, which is the row's committed length.
      slot: int32 [B] cache slot of each row.
      active: bool [B]; other rows are computed without experts and mean nothing.
      cache: with the drafter's rings filled up to position start - 1 by `Drafter.remember`.
      draw: how a draft is drawn.
      config, rules: static; as in `dsv41.models.forward`.

    Returns:
      the draft, and what the stages did: "block_out.k" bfloat16 [B, K, R, D], "experts.k" int32 [B, K, experts].
    """
    drafter = bind_drafter(config, drafter_params, rules)
    x, aux = drafter.stages(params["embed"]["weight"], anchor, start, slot, active, cache)
    return drafter.decide(params["head"]["weight"], x, anchor, draw), aux
