"""Engram rows of tokens that the host knows: hashing in 64-bit integers, then the store.

Axis letters: B sequences, T tokens, N look-back slots, L Engram layers, K rows a token and layer, D row width.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from dsv41.engram_store.store import EngramRows, EngramStore
from dsv41.ops.engram_hash import EngramHashSpec, class_windows, hash_rows


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class HostLookup:
    """From token ids to rows, of all layers at once or of one.

    Attributes:
      store: the tables.
      spec: the hash.
      token_map: int32 [V] Engram class of each token id.
      image_token_id: the id that marks an image span and blocks the look-back.
    """

    store: EngramStore
    spec: EngramHashSpec
    token_map: np.ndarray
    image_token_id: int

    @functools.cached_property
    def _layers(self) -> tuple[EngramHashSpec, ...]:
        return tuple(self.spec.of_layer(i) for i in range(len(self.spec.layer_ids)))

    def windows(self, tokens: np.ndarray, history: np.ndarray) -> np.ndarray:
        """Integers [B, T, N]: what the rows of each token depend on; `dsv41.ops.engram_hash.class_windows`."""
        return class_windows(self.spec, self.token_map, tokens, history, self.image_token_id)

    def rows(self, tokens: np.ndarray, history: np.ndarray, valid: np.ndarray | None = None) -> EngramRows:
        """Rows [B, T, L, K, D] of new tokens.

        Args:
          tokens: integers [B, T].
          history: integers [B, N - 1] tokens before them, newest last, -1 before the sequence start.
          valid: bool [B, T]; rows of other tokens are zeros and are not read. None: all are valid.

        Raises:
          DSV41Error: an id is outside the vocabulary, or as `EngramStore.lookup`.
        """
        return self.store.lookup(hash_rows(self.spec, self.windows(tokens, history)), valid=valid)

    def layer_rows(self, ordinal: int, windows: np.ndarray, valid: np.ndarray | None = None) -> EngramRows:
        """Rows [B, T, K, D] of one layer's table, counted from 0; errors as of `rows`."""
        ids = hash_rows(self._layers[ordinal], windows)
        return self.store.lookup_layer(ordinal, ids[:, :, 0], valid=valid)
