"""Which packed arrays a model's cache consists of and how positions map to them.

The bytes inside a page are `pallas_kernels.page_layout`'s; this module says how many pages, rings and rows there are.
A logical page covers `page_tokens` tokens; in the pool of a source with ratio m it is `page_tokens / (128 m)` physical
pages of 128 entries. Physical pages of one logical page are adjacent, so one page table serves every source.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from dsv41.config import TextConfig, layer_schedule
from pallas_kernels.page_layout import PAGE_ENTRIES, IndexPageLayout, MainPageLayout, WindowLayout

# Part of the key of anything persisted; raised whenever a stored byte changes its meaning.
FORMAT_VERSION = 1
_PENDING_ROWS = 8
_RING_MULTIPLE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Geometry of a model's cache.

    Attributes:
      main, index, window: byte layouts of a page of main KV, a page of index keys and a ring of window KV.
      ratios: compression ratio of each KV source, in layer order.
      num_layers: layers that keep a window ring.
      num_draft_stages: drafter stages that keep one as well; 0 if nothing is drafted.
      pending_rows: raw rows kept for groups that are not complete yet, a ring by position.
    """

    main: MainPageLayout
    index: IndexPageLayout
    window: WindowLayout
    ratios: tuple[int, ...]
    num_layers: int
    num_draft_stages: int
    pending_rows: int

    @classmethod
    def from_config(cls, config: TextConfig, *, draft_tokens: int = 0) -> CacheLayout:
        """Geometry for `config`.

        With `draft_tokens` > 0 the rings keep that many positions more than the window, so that rows of a rejected
        draft never displace a row that is still needed (dspark.md section 8).
        """
        schedule = layer_schedule(config)
        ratios = tuple(s.ratio for s in schedule.kv_sources)
        length = config.sliding_window
        if draft_tokens:
            length = -(-(length + draft_tokens) // _RING_MULTIPLE) * _RING_MULTIPLE
        need = max(ratios, default=1) + draft_tokens
        return cls(
            main=MainPageLayout(config.head_dim),
            index=IndexPageLayout(config.index_head_dim),
            window=WindowLayout(config.head_dim, length),
            ratios=ratios,
            num_layers=config.num_hidden_layers,
            num_draft_stages=config.num_nextn_predict_layers if draft_tokens else 0,
            pending_rows=max(_PENDING_ROWS, 1 << (need - 1).bit_length()),
        )

    @property
    def page_tokens(self) -> int:
        """Tokens a logical page covers: 256 for ratios 1 and 2."""
        return PAGE_ENTRIES * math.lcm(*self.ratios)

    def pages_per_logical(self, ratio: int) -> int:
        return self.page_tokens // (PAGE_ENTRIES * ratio)

    def pages_for(self, tokens: int) -> int:
        """Logical pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of one logical page over all sources."""
        one = (self.main.page_rows + self.index.page_rows) * 512
        return sum(self.pages_per_logical(r) * one for r in self.ratios)

    @property
    def global_bytes_per_token(self) -> float:
        """Bytes of the page pools a token takes, row padding included."""
        return self.page_bytes / self.page_tokens

    @property
    def payload_bytes_per_token(self) -> float:
        """The same without padding: 890 for the released model, and then equal to `global_bytes_per_token`."""
        entry = self.main.value_bytes + self.main.scale_bytes + self.index.value_bytes + self.index.scale_bytes
        return sum(entry / r for r in self.ratios)

    def record_bytes(self, tokens: int) -> int:
        """Payload bytes of a sequence of `tokens` tokens: only complete groups have a record."""
        entry = self.main.value_bytes + self.main.scale_bytes + self.index.value_bytes + self.index.scale_bytes
        return sum(entry * (tokens // r) for r in self.ratios)

    @property
    def window_bytes_per_sequence(self) -> int:
        """Bytes of the window rings of one sequence, all layers and drafter stages."""
        return (self.num_layers + self.num_draft_stages) * self.window.slot_bytes

    def address(self, page_table: jax.Array, entry: jax.Array, ratio: int) -> tuple[jax.Array, jax.Array]:
        """Where entries lie in the pool of a ratio-m source.

        Args:
          page_table: int32 [B, max_pages] logical pages, -1 where none is assigned.
          entry: int32 [B, ...] entry numbers (position // ratio of their group).
          ratio: m.

        Returns:
          physical page and entry inside it, int32 [B, ...]. An entry that is negative, beyond the table or on an
          unassigned page gets page -1.
        """
        per_logical = self.page_tokens // ratio
        logical = entry // per_logical
        inside = (entry >= 0) & (logical < page_table.shape[1])
        flat = jnp.clip(logical, 0, page_table.shape[1] - 1).reshape(entry.shape[0], -1)
        page = jnp.take_along_axis(page_table, flat, axis=1).reshape(entry.shape)
        physical = page * self.pages_per_logical(ratio) + entry % per_logical // PAGE_ENTRIES
        return jnp.where(inside & (page >= 0), physical, -1), entry % PAGE_ENTRIES

    def physical_entry(self, page_table: jax.Array, entry: jax.Array, ratio: int) -> jax.Array:
        """Where entries lie in the pool as one number, page * 128 + entry; -1 where `address` gives no page."""
        page, inside = self.address(page_table, entry, ratio)
        return jnp.where(page >= 0, page * PAGE_ENTRIES + inside, -1)

    def physical_pages(self, page_table: jax.Array, ratio: int) -> jax.Array:
        """Pages of a ratio-m source that hold entries 0.., 128.., and so on: int32 [B, pages], -1 unassigned."""
        count = page_table.shape[1] * self.pages_per_logical(ratio)
        first = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32) * PAGE_ENTRIES, (page_table.shape[0], count))
        return self.address(page_table, first, ratio)[0]
