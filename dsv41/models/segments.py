"""A decode step as a row of programs, cut where Engram rows come in.

Rows of a large table depend on the newest token and come from the host. In one program they would have to be there
before the first layer starts. Cut before each layer with an Engram, the program in front of the cut runs while the host
hashes, reads and copies that layer's rows. The programs are made of the pieces that `forward` is made of, and give the
same values.

Axis letters: B sequences, K rows a token and layer, D row width.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dsv41.cache import AttentionState, ForwardBatch, KVCache
from dsv41.config import ModelConfig, Schedule
from dsv41.layers import Residual
from dsv41.models.backbone import ForcedChoices, Params, bind, has_pages
from pallas_kernels.fixed_order import compiler_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive layers that run as one program.

    Attributes:
      index: of the segment; names its program in traces.
      layers: their numbers. The first segment also embeds, the last one also makes logits.
      engrams: ordinals of the Engram tables whose rows must be there when the segment starts.
    """

    index: int
    layers: range
    engrams: tuple[int, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """What one segment hands to the next beside the cache."""

    residual: Residual
    state: AttentionState | None


def step_segments(schedule: Schedule) -> tuple[Segment, ...]:
    """The layers, cut before each one that has an Engram."""
    end = len(schedule.layers)
    cuts = sorted({0, end, *schedule.engram_layers})
    segments = []
    for i, (first, behind) in enumerate(itertools.pairwise(cuts)):
        engram = schedule.layers[first].engram
        engrams = () if engram is None else (engram,)
        segments.append(Segment(index=i, layers=range(first, behind), engrams=engrams))
    return tuple(segments)


def segment_params(params: Params, segment: Segment, num_layers: int) -> Params:
    """The part of the backbone's parameters that a segment reads: what it is not given, a call need not look at."""
    own: Params = {"layers": {n: params["layers"][n] for n in segment.layers}}
    if segment.layers.start == 0:
        own["embed"] = params["embed"]
    if segment.layers.stop == num_layers:
        own |= {"norm": params["norm"], "head": params["head"]}
    return own


def run_segment(
    params: Params,
    batch: ForwardBatch,
    cache: KVCache,
    carry: Carry | None,
    rows: tuple[jax.Array, jax.Array | None] | None,
    *,
    config: ModelConfig,
    layers: range,
) -> tuple[Carry | jax.Array, KVCache]:
    """A part of a decode step on one device.

    Args:
      params: `segment_params`.
      batch: one new token a row, without Engram rows; the same for all segments of a step.
      cache: as the segment before left it.
      carry: what the segment before left; None: this is the first one.
      rows: values [B, 1, K, D] and scales uint8 [B, 1, K, D / 32] or None of the Engram of the segment's first layer;
        None: it has none.
      config: static.
      layers: static.

    Returns:
      what the next segment continues from, or, of the last one, logits float32 [B, 1, V] as `forward` gives them; the
      cache.
    """
    model, text = bind(config, params), config.text_config
    if rows is not None:
        # Of all layers' places only this one's is read, so that the others cost nothing.
        places = len(text.engram_layer_ids)
        values, scales = (None if x is None else jnp.stack([x] * places, axis=2) for x in rows)
        batch = dataclasses.replace(batch, engram_values=values, engram_scales=scales)
    residual, state = (model.start(batch), None) if carry is None else (carry.residual, carry.state)
    residual, cache, state, _ = model.run(residual, batch, cache, state, layers, ForcedChoices(), ())
    if layers.stop < text.num_hidden_layers:
        return Carry(residual, state), cache
    logits = model.finish(residual, batch, "last")
    return jnp.where(has_pages(batch, cache)[:, None, None], logits, jnp.nan), cache


@functools.cache
def compiled_segment(index: int) -> Callable[..., Any]:
    """`run_segment` under a name of its own, compiled once a shape for all models; the cache is updated in place."""

    def segment(*args, **static):
        return run_segment(*args, **static)

    segment.__name__ = f"step_segment_{index}"
    return jax.jit(
        segment,
        static_argnames=("config", "layers"),
        donate_argnums=(2,),
        compiler_options=compiler_options(),
    )
