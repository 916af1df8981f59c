"""The training forward: packed rows to losses (training.md)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv41.config import ModelConfig
from dsv41.layers import Block, Residual, Sublayer, open_streams, traced_once, with_parameters
from dsv41.models import Backbone, Params
from dsv41.ops.straight_through import product_of_master, rows_fp8
from dsv41.train.attention import SELECTED, AttentionOptions, SelectionMetrics, Shared, attend_packed
from dsv41.train.experts import moe_sublayer
from dsv41.train.indexer_loss import IndexerLoss
from dsv41.train.master_weights import engram_tables, forward_params
from dsv41.train.pack import PackedBatch, alignment
from dsv41.train.router_balance import Loads, count_loads, sequence_balance
from dsv41.train.row_parts import cut
from dsv41.train.row_spread import total
from pallas_kernels.dispatch import kernels
from pallas_kernels.hyper_connection import ops as mhc
from pallas_kernels.rounding import round_to_bf16

# Bytes of logits that exist at a time.
_LOGIT_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
    """What is trained, and how.

    Attributes:
      attention: rounding, and exploration of the indexers.
      indexer_weight, balance_weight: of the two losses beside that of the language model.
      rematerialize: blocks, but for their selections, are computed again in the backward pass.
      taps: also return what a drafter reads.
    """

    attention: AttentionOptions = dataclasses.field(default_factory=AttentionOptions)
    indexer_weight: float = 1.0
    balance_weight: float = 1e-4
    rematerialize: bool = True
    taps: bool = False


class Hidden(NamedTuple):
    """What the last block leaves, and what happened before."""

    x: jax.Array  # bfloat16 [B, T, D], behind the final norm
    loads: Loads
    indexer: IndexerLoss
    balance: jax.Array  # float32 [], mean over layers
    recall: jax.Array | None  # float32 [selecting layers], with `AttentionOptions.recall`
    taps: jax.Array | None  # bfloat16 [B, T, taps * D]


def train_forward(
    masters: Params,
    pack: PackedBatch,
    rope: tuple[jax.Array, jax.Array],
    key: jax.Array,
    *,
    config: ModelConfig,
    options: ForwardOptions,
) -> tuple[jax.Array, dict[str, Any]]:
    """The loss of a batch, differentiable in the masters, on one device.

    With `pack.spread` these are a device's rows of it: the losses and their gradients are then this device's share,
    which add up to those of the batch; tokens and recall are the batch's.

    Args:
      masters: float32, as `training_params_abstract` describes.
      pack: rows of documents.
      rope: as `rope_tables` makes them.
      key: of what indexers explore.
      config, options: static.

    Returns:
      loss float32 []: the mean cross-entropy of the tokens in `loss_mask`, the weighted mean divergence of indexers and
      the weighted balance losses of all layers. And what it is made of: lm_loss, indexer_loss, balance_loss (mean over
      layers) float32 [], tokens int32 [], loads (`Loads`), hidden bfloat16 [B, T, D], with `options.taps` also
      main_hidden bfloat16 [B, T, taps * D], with `AttentionOptions.recall` also recall float32 [selecting layers].
    """
    hidden = run_layers(masters, pack, rope, key, config=config, options=options)
    entropy = cross_entropy(hidden.x, masters["head"]["weight"], pack.targets, pack.loss_mask)
    tokens = total(pack.loss_mask.sum(), pack.spread)
    lm_loss = entropy / jnp.maximum(tokens, 1)
    indexer_loss = hidden.indexer.total / jnp.maximum(total(hidden.indexer.queries, pack.spread), 1)
    balance = hidden.balance if pack.spread is None else hidden.balance * _share_of_documents(pack)
    loss = lm_loss + options.indexer_weight * indexer_loss
    loss = loss + options.balance_weight * balance * config.text_config.num_hidden_layers
    aux = {"lm_loss": lm_loss, "indexer_loss": indexer_loss, "balance_loss": balance, "tokens": tokens}
    aux |= {"loads": hidden.loads, "hidden": hidden.x}
    aux |= {} if hidden.recall is None else {"recall": hidden.recall}
    return loss, aux if hidden.taps is None else aux | {"main_hidden": hidden.taps}


def _share_of_documents(pack: PackedBatch) -> jax.Array:
    """float32 []: which part of the batch's documents is on this device."""
    documents = (pack.valid & (pack.position == 0)).sum()
    return documents / jnp.maximum(total(documents, pack.spread), 1)


def run_layers(
    masters: Params,
    pack: PackedBatch,
    rope: tuple[jax.Array, jax.Array],
    key: jax.Array,
    *,
    config: ModelConfig,
    options: ForwardOptions,
) -> Hidden:
    """All blocks and the final norm; arguments as of `train_forward`."""
    qat = options.attention.qat
    model = with_parameters(Backbone(config, formats=qat.formats(config)), forward_params(masters, config, qat))
    tables = engram_tables(masters, config)
    quantized = qat.weights and config.quantization_config is not None
    streams = open_streams(_embed(masters["embed"]["weight"], pack), config.text_config.hc_mult)
    rope = jax.tree.map(jnp.asarray, rope)
    state = (streams, Shared())
    unreplayed = dataclasses.replace(pack, window_floor=jnp.zeros_like(pack.window_floor))
    layers, taps = [], []
    options = dataclasses.replace(options, attention=dataclasses.replace(options.attention, kernels=kernels.value))
    # Kernels have no derivatives.
    with kernels("xla"):
        for block in model.layers:
            spec, rows = block.spec, None
            if spec.engram is not None:
                table, ids = tables[spec.engram], pack.engram_rows[:, :, spec.engram]
                split = table.shape[1] < config.text_config.engram_head_dim
                rows = pack.spread.look_up(table, ids) if split else table[ids]
                rows = rows_fp8(rows) if quantized else round_to_bf16(rows)

            seen, own = pack if spec.in_decoder else unreplayed, jax.random.fold_in(key, spec.index)

            def layer(state, rows, block=block, pack=seen, key=own):
                return _layer(block, *state, rows, pack, rope, key, config, options)

            with jax.named_scope(f"layer_{spec.index}"):
                state, made = (_rematerialized(layer) if options.rematerialize else layer)(state, rows)
            layers.append(made)
            if made.tap is not None:
                taps.append(made.tap)
        residual = state[0].complete()
        x = model.norm(mhc.collapse(residual.streams, residual.pre))
    loads = Loads(*(jnp.stack(part) for part in zip(*(made.loads for made in layers), strict=True)))
    selections = [made.selection for made in layers if made.selection is not None]
    losses = [made.loss for made in selections]
    recalls = jnp.stack([made.recall for made in selections]) if options.attention.recall and selections else None
    zero = jnp.zeros((), jnp.float32)
    indexer = IndexerLoss(sum((x.total for x in losses), zero), sum((x.queries for x in losses), zero))
    balance = sum(made.balance for made in layers) / len(layers)
    return Hidden(x, loads, indexer, balance, recalls, jnp.concatenate(taps, axis=-1) if taps else None)


def _rematerialized(layer):
    """The layer, computed again in the backward pass but for its selection."""
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(SELECTED))


class _Made(NamedTuple):
    """What a layer leaves besides the residual."""

    loads: Loads
    selection: SelectionMetrics | None
    balance: jax.Array
    tap: jax.Array | None  # bfloat16 [B, T, D], the mean of the streams that the block began with


def _layer(
    block: Block, residual: Residual, shared: Shared, rows, pack: PackedBatch, rope, key, config: ModelConfig, options
) -> tuple[tuple[Residual, Shared], _Made]:
    """One block; rows bfloat16 [B, T, K, D] of its Engram, or None."""
    if rows is not None:
        residual = residual.complete()
        residual = Residual(block.engram(residual.streams, rows, None, pack.image_mask), residual.pre)
    with jax.named_scope("attention"):
        residual, streams, shared, selection = traced_once(
            _attend, block.sublayer("attn"), residual, pack, shared, rope, key, options=options.attention
        )
    with jax.named_scope("moe"):
        residual, loads, balance = traced_once(_feed_forward, block.sublayer("ffn"), residual, pack, config=config)
    tapped = options.taps and block.spec.tap is not None
    tap = round_to_bf16(streams.astype(jnp.float32).mean(axis=2)) if tapped else None
    return (residual, shared), _Made(loads, selection, balance, tap)


def _attend(sublayer: Sublayer, residual: Residual, pack: PackedBatch, shared: Shared, rope, key, *, options):
    """The attention sublayer; also the complete streams that it began with."""
    entered = sublayer.enter(residual)
    y, shared, selection = attend_packed(sublayer.inner, entered.x, pack, shared, rope, key, options)
    return entered.leave(y), entered.streams, shared, selection


def _feed_forward(sublayer: Sublayer, residual: Residual, pack: PackedBatch, *, config: ModelConfig):
    """The MoE sublayer; also the loads of its experts and the balance loss."""
    entered = sublayer.enter(residual)
    y, experts, scores = moe_sublayer(sublayer.inner, entered.x, pack.valid, pack.image_mask)
    text = config.text_config
    balance = sequence_balance(scores, pack, top_k=text.num_experts_per_tok, align=alignment(config))
    return entered.leave(y), count_loads(experts, pack, text.n_routed_experts), balance


def _embed(table: jax.Array, pack: PackedBatch) -> jax.Array:
    """bfloat16 [B, T, D]; the gradient of a token's row is summed in float32."""
    x = round_to_bf16(table[pack.tokens])
    if pack.image_embeds is None:
        return x
    return jnp.where(pack.image_mask[..., None], pack.image_embeds, x)


@jax.named_scope("head")
def cross_entropy(x: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum of -log p(target) over the tokens of `mask`, a part of the tokens at a time.

    Args:
      x: bfloat16 [B, T, D].
      head: float32 [V, D], rounded to bfloat16.
      targets: int32 [B, T].
      mask: bool [B, T].

    Returns:
      float32 [].
    """

    @jax.checkpoint
    def add(total, args):
        x, target, counts = args
        logits = product_of_master(x, head)
        losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return total + jnp.where(counts, losses, 0.0).sum(), None

    tokens = max(_LOGIT_BYTES // (4 * head.shape[0]), 1)
    parts = cut((x.reshape(-1, x.shape[-1]), targets.reshape(-1), mask.reshape(-1)), tokens)
    return jax.lax.scan(add, jnp.zeros((), jnp.float32), parts)[0]
