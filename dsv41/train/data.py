"""Batches of packed documents for training: the same from the same seed, on any number of processes, from any step on.

Grain reads and packs ahead in threads. It is imported when a pipeline starts, so that nothing else needs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dsv41.config import DSV41Error, ModelConfig
from dsv41.ops.engram_hash import engram_hash_spec
from dsv41.train.corpus import Document as TextDocument
from dsv41.train.pack import Document, PackedBatch, alignment, pack_documents
from dsv41.train.row_plan import Piece, plan_rows
from dsv41.train.tokenizer import encode_texts

_ENDLESS = 1 << 40
_KEPT_EPOCHS = 2


def tokenize(documents: Sequence[TextDocument], tokenizer: Tokenizer) -> list[np.ndarray]:
    """int32 [n] token ids of each document that has any, special tokens of no meaning in it."""
    encoded = (np.asarray(ids, np.int32) for ids in encode_texts(tokenizer, [d.text for d in documents]))
    return [ids for ids in encoded if len(ids)]


class RowSource:
    """Rows of documents, epoch after epoch without end: row i is the same whenever it is asked for.

    Each epoch shuffles the documents, packs them anew and shuffles the rows, by the seed and its own number.
    """

    def __init__(
        self,
        documents: Sequence[np.ndarray],
        config: ModelConfig,
        *,
        length: int,
        seed: int | None = 0,
        changing: Sequence[Sequence[np.ndarray]] = (),
    ):
        """
        Args:
          documents: int32 [n] token ids of each, without begin and end.
          config: of the model.
          length: tokens of a row.
          seed: of the shuffles, not negative; None: documents and rows stay in order, as for an evaluation.
          changing: more documents, of which each epoch has the next group; the first group follows on the last.

        Raises:
          DSV41Error: there are no documents, or the length or the seed cannot be.
        """
        if not documents:
            raise DSV41Error("rows: there are no documents")
        if seed is not None and seed < 0:
            raise DSV41Error(f"seed: expected 0 or more, got {seed}")
        self.length, self.config = length, config
        self._documents, self._changing, self._seed = documents, changing, seed
        self._alignment = alignment(config)
        self._plans: dict[int, list[list[Piece]]] = {}
        self._ends = [0]  # rows before each epoch that has been planned
        self._lock = threading.Lock()
        self.fingerprint = self._fingerprint()
        self.epoch(0)

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> list[Document]:
        epoch, row = self.locate(int(index))
        return self._documents_of(self.epoch(epoch)[row], self._of_epoch(epoch))

    def locate(self, index: int) -> tuple[int, int]:
        """Epoch of a row, and its number there."""
        if index < 0:
            raise IndexError(index)
        while index >= self._ends[-1]:
            self.epoch(len(self._ends) - 1)
        epoch = int(np.searchsorted(self._ends, index, side="right")) - 1
        return epoch, index - self._ends[epoch]

    def epoch(self, number: int) -> list[list[Piece]]:
        """The rows of an epoch."""
        with self._lock:
            for n in [*range(len(self._ends) - 1, number), number]:
                if n not in self._plans:
                    rng = None if self._seed is None else np.random.default_rng([self._seed, n])
                    sizes = [len(ids) for ids in self._of_epoch(n)]
                    self._plans[n] = plan_rows(sizes, self.length, self._alignment, rng)
                    if n == len(self._ends) - 1:
                        self._ends.append(self._ends[-1] + len(self._plans[n]))
                    for old in sorted(self._plans.keys() - {n})[: max(len(self._plans) - _KEPT_EPOCHS, 0)]:
                        del self._plans[old]
            return self._plans[number]

    def padding(self, epoch: int = 0) -> float:
        """Share of an epoch's positions that hold no token."""
        rows = self.epoch(epoch)
        return 1 - sum(piece.tokens for row in rows for piece in row) / (len(rows) * self.length)

    def _of_epoch(self, number: int) -> Sequence[np.ndarray]:
        if not self._changing:
            return self._documents
        return [*self._documents, *self._changing[number % len(self._changing)]]

    def _documents_of(self, row: Sequence[Piece], documents: Sequence[np.ndarray]) -> list[Document]:
        begin, end = [self.config.bos_token_id], [self.config.eos_token_id]
        return [
            Document(np.concatenate([begin, documents[p.document][p.begin : p.end], end * p.last]).astype(np.int32))
            for p in row
        ]

    def _fingerprint(self) -> str:
        config = self.config
        numbers = (self.length, self._alignment, self._seed, config.bos_token_id, config.eos_token_id)
        numbers += tuple(map(len, self._changing))
        digest = hashlib.sha256(repr(numbers).encode())
        for ids in itertools.chain(self._documents, *self._changing):
            digest.update(len(ids).to_bytes(8, "little") + np.ascontiguousarray(ids, "<i4").tobytes())
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How rows become batches.

    Attributes:
      rows: of a global batch, a multiple of `processes`.
      process, processes: which part of it is made here. Step s has rows s * rows to (s + 1) * rows of the source; this
        process those whose number is `process` modulo `processes`.
      threads: that pack ahead.
      ahead: batches that may be ready before they are asked for.
    """

    rows: int
    process: int = 0
    processes: int = 1
    threads: int = 2
    ahead: int = 4

    def __post_init__(self):
        if self.processes < 1 or not 0 <= self.process < self.processes:
            raise DSV41Error(f"batches: process {self.process} of {self.processes} cannot be")
        if self.rows < 1 or self.rows % self.processes:
            raise DSV41Error(f"batches: expected a multiple of {self.processes} processes as rows, got {self.rows}")
        if self.threads < 1 or self.ahead < 1:
            raise DSV41Error(f"batches: expected threads and ahead to be positive, got {self.threads}, {self.ahead}")


class TrainingBatches(Iterator[PackedBatch]):
    """The batches of one process, without end, as numpy arrays. `state` and `restore` continue exactly."""

    def __init__(self, source: RowSource, options: BatchOptions, *, token_map: np.ndarray | None = None):
        """
        Args:
          source: of the rows.
          options: of the batches.
          token_map: int32 [V] Engram classes, if the model has Engram.

        Raises:
          DSV41Error: Grain is not installed, or the token map does not fit the model.
        """
        grain = _grain()
        config, text = source.config, source.config.text_config
        hashing = None
        if token_map is not None and text.engram_layer_ids:
            hashing = engram_hash_spec(text, int(token_map[text.engram_pad_token_id]))

        def pack(rows: Sequence[Sequence[Document]]) -> PackedBatch:
            return pack_documents(rows, source.length, config, hashing=hashing, token_map=token_map)

        here = grain.MapDataset.source(source)[options.process :: options.processes]
        batches = here.batch(options.rows // options.processes, drop_remainder=True, batch_fn=list).map(pack)
        reading = grain.ReadOptions(num_threads=options.threads, prefetch_buffer_size=options.ahead)
        self._iterator = iter(batches.to_iter_dataset(reading))
        # A job may go on with other numbers of processes: together they read the same rows.
        self._identity = {"rows": source.fingerprint, "batch": options.rows}

    def __next__(self) -> PackedBatch:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """Where the next batch begins, as JSON values."""
        return self._identity | {"position": self._iterator.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken, of the same rows and global batch size, on any number of processes.

        Raises:
          DSV41Error: the state is of other data or batches, or not one of these.
        """
        if not isinstance(state, dict) or "position" not in state:
            raise DSV41Error("data: not the state of training batches")
        for key, what in (("rows", "other documents, row length or seed"), ("batch", "another batch size")):
            if state.get(key) != self._identity[key]:
                raise DSV41Error(f"data: the state is of {what}: {state.get(key)}, not {self._identity[key]}")
        try:
            self._iterator.set_state(state["position"])
        except (KeyError, TypeError, ValueError) as e:
            raise DSV41Error(f"data: not a position of the data pipeline: {state['position']!r} ({e})") from e


def _grain() -> ModuleType:
    try:
        import grain
    except ImportError as e:
        raise DSV41Error(f"training needs the package 'grain', which cannot be imported ({e}); install it") from e
    return grain
