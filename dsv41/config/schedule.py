"""Which layer does what: derived once from the config's source-layer ids and read everywhere else."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from dsv41.config.errors import ConfigError

if TYPE_CHECKING:  # model_config calls layer_schedule to check itself, so the import may only go that way
    from dsv41.config.model_config import TextConfig


class LayerMode(enum.Enum):
    """The attention role of a layer (architecture.md section 1)."""

    SLIDING = "sliding"  # window only
    FULL = "full"  # owns main KV and index keys, selects afresh
    REINDEX = "reindex"  # reads a source's main KV and index keys, selects afresh with its own index queries
    REUSE = "reuse"  # reads a source's main KV with an earlier layer's selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What attention a layer has: the same function of other weights and caches for all layers of a kind.

    Attributes:
      mode: attention role.
      ratio: tokens per compressed entry; 0 for SLIDING.
      builds_candidates: publishes the candidate pool.
      reads_candidates: selects inside the candidate pool only.
    """

    mode: LayerMode
    ratio: int
    builds_candidates: bool
    reads_candidates: bool

    @property
    def owns_kv(self) -> bool:
        return self.mode is LayerMode.FULL

    @property
    def selects(self) -> bool:
        return self.mode in (LayerMode.FULL, LayerMode.REINDEX)

    @property
    def is_compressed(self) -> bool:
        """Attends to compressed entries, and so rotates with `compress_rope_theta` and YaRN."""
        return self.mode is not LayerMode.SLIDING


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec(LayerKind):
    """One layer: everything that depends on its position.

    Attributes:
      index: layer number, from 0.
      kv_source: layer whose main KV (and index keys) this one reads; itself if FULL, None if SLIDING.
      kv: ordinal of that layer among the KV sources, or None.
      index_source: layer whose selection this one attends with; itself if FULL or REINDEX, None if SLIDING.
      engram: ordinal of its Engram table, or None.
      tap: ordinal among the layers whose input streams the drafter reads, or None.
      in_decoder: belongs to the decoder half of the causal encoder-decoder.
    """

    index: int
    kv_source: int | None
    kv: int | None
    index_source: int | None
    engram: int | None
    tap: int | None
    in_decoder: bool

    @property
    def kind(self) -> LayerKind:
        """What its attention computes, without where it stands."""
        return LayerKind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(LayerKind)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The layer table and the lists that follow from it.

    `decoder_start` is the first decoder layer: the last layer that owns KV (20 in the release), or the number of layers
    if none does.
    """

    layers: tuple[LayerSpec, ...]
    kv_sources: tuple[LayerSpec, ...]
    engram_layers: tuple[int, ...]
    decoder_start: int

    @property
    def tail_problem(self) -> str | None:
        """Why prompts cannot be prefilled with a tail in the decoder (serving.md section 3.1); None if they can."""
        if not self.kv_sources:
            return "no layer owns compressed KV"
        first = self.layers[self.decoder_start]
        if first.ratio != 1:
            return f"layer {first.index}, the first of the decoder, has compress ratio {first.ratio}, not 1"
        for layer in self.layers[self.decoder_start :]:
            if layer.engram is not None:
                return f"layer {layer.index} of the decoder has an Engram"
        for layer in self.layers[: self.decoder_start]:
            if layer.builds_candidates:
                return f"layer {layer.index} of the encoder builds the candidate pool"
            if layer.tap is not None:
                return f"the drafter reads layer {layer.index} of the encoder"
        return None

    @property
    def ratios(self) -> tuple[int, ...]:
        """Distinct compression ratios of the KV sources, ascending."""
        return tuple(sorted({s.ratio for s in self.kv_sources}))


def _fail(field: str, message: str) -> None:
    raise ConfigError(f"text_config.{field}: {message}")


def _check_sources(c: TextConfig) -> None:
    n = c.num_hidden_layers
    want = n + c.num_nextn_predict_layers
    if len(c.compress_ratios) != want:
        _fail(
            "compress_ratios",
            f"expected {want} entries (num_hidden_layers + num_nextn_predict_layers), got {len(c.compress_ratios)}",
        )
    if any(r < 0 or r > 128 or 128 % max(r, 1) for r in c.compress_ratios):
        _fail("compress_ratios", f"expected 0 or divisors of 128, got {c.compress_ratios}")
    if any(c.compress_ratios[n:]):
        _fail("compress_ratios", f"drafter entries must be 0 (window only), got {c.compress_ratios[n:]}")
    for i in c.kv_source_layer_ids:
        if c.compress_ratios[i] == 0:
            _fail("kv_source_layer_ids", f"layer {i} has compress ratio 0 and cannot own compressed KV")
        if i not in c.index_source_layer_ids:
            _fail("kv_source_layer_ids", f"layer {i} must also be in index_source_layer_ids")
    for i in c.index_source_layer_ids:
        if c.compress_ratios[i] == 0:
            _fail("index_source_layer_ids", f"layer {i} has compress ratio 0 and cannot select")
    cand = c.candidate_source_layer_id
    if cand is not None and cand not in c.kv_source_layer_ids:
        _fail("candidate_source_layer_id", f"expected one of kv_source_layer_ids={c.kv_source_layer_ids}, got {cand}")


def layer_schedule(c: TextConfig) -> Schedule:
    """Derives the layer table.

    A layer with ratio 0 is SLIDING. Otherwise it is FULL if it is a KV source, REINDEX if it is only an index source,
    else REUSE. It reads the nearest KV source at or before it, whose ratio must equal its own. A REINDEX layer
    selects inside the candidate pool when its KV source built one.

    Raises:
      ConfigError: the lists contradict each other; the message names the field.
    """
    _check_sources(c)
    layers = []
    taps = c.dspark_target_layer_ids if c.num_nextn_predict_layers else ()
    kv_source = index_source = None
    decoder_start = max(c.kv_source_layer_ids, default=c.num_hidden_layers)
    for i in range(c.num_hidden_layers):
        ratio = c.compress_ratios[i]
        if i in c.kv_source_layer_ids:
            mode, kv_source, index_source = LayerMode.FULL, i, i
        elif i in c.index_source_layer_ids:
            mode, index_source = LayerMode.REINDEX, i
        else:
            mode = LayerMode.REUSE if ratio else LayerMode.SLIDING
        if ratio:
            if kv_source is None:
                _fail("kv_source_layer_ids", f"layer {i} has compress ratio {ratio} but no KV source at or before it")
            if c.compress_ratios[kv_source] != ratio:
                _fail(
                    "compress_ratios",
                    f"layer {i} has ratio {ratio} but its KV source, layer {kv_source}, has "
                    f"{c.compress_ratios[kv_source]}",
                )
        candidate = c.candidate_source_layer_id
        layers.append(
            LayerSpec(
                index=i,
                mode=mode,
                ratio=ratio,
                kv_source=kv_source if ratio else None,
                kv=c.kv_source_layer_ids.index(kv_source) if ratio else None,
                index_source=index_source if ratio else None,
                builds_candidates=i == candidate,
                reads_candidates=mode is LayerMode.REINDEX and candidate is not None and kv_source == candidate,
                engram=c.engram_layer_ids.index(i) if i in c.engram_layer_ids else None,
                tap=taps.index(i) if i in taps else None,
                in_decoder=i >= decoder_start,
            )
        )
    return Schedule(
        layers=tuple(layers),
        kv_sources=tuple(s for s in layers if s.owns_kv),
        engram_layers=c.engram_layer_ids,
        decoder_start=decoder_start,
    )
