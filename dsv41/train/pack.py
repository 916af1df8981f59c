"""Documents packed into rows of one length (training.md section 1).

Documents in a row do not know of each other: attention, compressed groups, candidate blocks and n-grams end at their
borders. So that a group or a block never lies in two of them, a document begins at a multiple of `alignment`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from dsv41.config import DSV41Error, ModelConfig, layer_schedule
from dsv41.ops.engram_hash import BEFORE_START, EngramHashSpec, row_ids
from dsv41.ops.rope import layer_frequencies, rope_table
from dsv41.train.row_spread import RowSpread


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Rows of documents. Padding has the document -1, and counts in nothing."""

    tokens: jax.Array  # int32 [B, T]
    document: jax.Array  # int32 [B, T] number of the document in its row
    position: jax.Array  # int32 [B, T] in the document; of padding counted on
    targets: jax.Array  # int32 [B, T] the token that follows in the document; anything where `loss_mask` is false
    loss_mask: jax.Array  # bool [B, T]
    image_mask: jax.Array  # bool [B, T] tokens inside an image span
    # int32 [B, T] positions of the document below it are not in the window of a decoder layer (training.md section 7.2)
    window_floor: jax.Array
    engram_rows: jax.Array | None  # int32 [B, T, Engram layers, orders * heads]
    image_embeds: jax.Array | None = None  # bfloat16 [B, T, D] where image_mask is set; None: embedded as words
    # Not None inside of `jax.shard_map`: these rows are a part of a batch, and what is counted is the whole one's.
    spread: RowSpread | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def valid(self) -> jax.Array:
        """bool [B, T] real tokens."""
        return self.document >= 0

    @property
    def start(self) -> jax.Array:
        """int32 [B, T] where in the row the token's document begins."""
        return np.arange(self.tokens.shape[1], dtype=np.int32) - self.position


@dataclasses.dataclass(frozen=True)
class Document:
    """One training sample.

    Attributes:
      tokens: ids.
      loss: bool, whether the token is one to be predicted; None: all are.
      response: where the answer to a prompt begins, if the decoder's bounded replay is simulated: the tokens of the
        window before it have their decoder windows cut there. None: it is not.
    """

    tokens: Sequence[int]
    loss: Sequence[bool] | None = None
    response: int | None = None


def alignment(config: ModelConfig) -> int:
    """What a document's start, and a row's length, is a multiple of."""
    text = config.text_config
    sizes = [1]
    for source in layer_schedule(text).kv_sources:
        sizes.append(source.ratio * (text.candidate_block_size if source.builds_candidates else 1))
    return math.lcm(*sizes)


def pack_documents(
    rows: Sequence[Sequence[Document]],
    length: int,
    config: ModelConfig,
    *,
    hashing: EngramHashSpec | None = None,
    token_map: np.ndarray | None = None,
) -> PackedBatch:
    """Lays out documents, in their order, in rows of `length` tokens.

    Args:
      rows: documents of each row.
      length: of a row.
      config: of the model.
      hashing, token_map: of the Engram; None: the model has none.

    Raises:
      DSV41Error: the length is no multiple of the alignment, a row overflows, a document is empty or has a token
        outside the vocabulary, or its `loss` or `response` does not fit it; the message names row and document.
    """
    align, text = alignment(config), config.text_config
    if length < 1 or length % align:
        raise DSV41Error(f"pack: expected a length that is a multiple of {align}, got {length}")
    if bool(text.engram_layer_ids) != (hashing is not None and token_map is not None):
        raise DSV41Error("pack: a model with Engram needs its hash and token map, one without has none")
    shape = (len(rows), length)
    fields = {name: np.zeros(shape, np.int32) for name in ("position", "targets", "window_floor")}
    fields["tokens"] = np.full(shape, config.pad_token_id, np.int32)
    fields["document"] = np.full(shape, -1, np.int32)
    fields["loss_mask"] = np.zeros(shape, bool)
    engram = None
    if hashing is not None:
        engram = np.zeros((*shape, len(hashing.layer_ids), hashing.columns), np.int64)
    for b, documents in enumerate(rows):
        first = 0
        for d, document in enumerate(documents):
            where = f"pack row {b}, document {d}"
            ids = _checked(document, text.vocab_size, where)
            end = first + len(ids)
            if end > length:
                raise DSV41Error(f"{where}: ends at {end}, behind the row's {length} tokens")
            # Padding behind the document counts on, so that groups in it are those of the document's own grid.
            behind = min(-(-end // align) * align, length)
            fields["position"][b, first:behind] = np.arange(behind - first)
            fields["document"][b, first:end] = d
            _lay(document, ids, {name: field[b, first:end] for name, field in fields.items()}, text.sliding_window)
            if engram is not None:
                history = np.full((1, hashing.window - 1), BEFORE_START)
                engram[b, first:end] = row_ids(hashing, token_map, ids[None], history, config.image_token_id)[0]
            first = behind
        fields["position"][b, first:] = np.arange(length - first)
    if engram is not None and engram.size and engram.max() >= 1 << 31:
        raise DSV41Error("pack: an Engram table of 2^31 rows or more is not gathered on the device")
    image_mask = (fields["tokens"] == config.image_token_id) & (fields["document"] >= 0)
    rows32 = None if engram is None else engram.astype(np.int32)
    return PackedBatch(**fields, image_mask=image_mask, engram_rows=rows32)


def _lay(document: Document, ids: np.ndarray, own: dict[str, np.ndarray], window: int) -> None:
    """Writes what a document's tokens are, and are to predict, into its part of a row."""
    own["tokens"][:] = ids
    own["targets"][:-1] = ids[1:]
    own["loss_mask"][:-1] = True if document.loss is None else np.asarray(document.loss, bool)[1:]
    if document.response is not None:
        begin = max(document.response - window, 0)
        own["window_floor"][begin : document.response] = begin


def _checked(document: Document, vocab: int, where: str) -> np.ndarray:
    """int64 [n] tokens of a document."""
    ids = np.asarray(document.tokens, np.int64).reshape(-1)
    if not len(ids):
        raise DSV41Error(f"{where}: no tokens")
    bad = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(bad):
        raise DSV41Error(f"{where}: token {bad[0]} is {ids[bad[0]]}, expected an id in [0, {vocab})")
    if document.loss is not None and len(document.loss) != len(ids):
        raise DSV41Error(f"{where}: {len(ids)} tokens, loss for {len(document.loss)}; expected as many")
    if document.response is not None and not 0 < document.response <= len(ids):
        raise DSV41Error(f"{where}: the response begins at {document.response}, expected 1 to {len(ids)}")
    return ids


def rope_tables(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [length, 2, r] of sliding and of compressed layers, for rows of this length."""
    positions = np.arange(length)
    sliding, compressed = (
        rope_table(layer_frequencies(config.text_config, compressed=c), positions) for c in (False, True)
    )
    return sliding, compressed
