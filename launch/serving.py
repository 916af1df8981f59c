"""The flags of scripts that run the serving engine: its sizes, and where KV pages and window state may live."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

from absl import flags
from rich.table import Table

from dsv41.cache import CacheLayout
from dsv41.checkpoint.identity import checkpoint_identity
from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine import PREFILL_CHUNK, Engine, EngineOptions, RequestMetrics, Speculation
from dsv41.engine.engine_options import CED, FULL
from dsv41.kv_store import HostPages, PageStore, PageTiers, SnapshotPool, cache_fingerprint, default_budget
from dsv41.models import Model

PREFILL_HELP = (
    "full: every layer on every prompt token; ced: the decoder half on the last sliding_window prompt tokens only, an "
    "approximation behind longer prompts that saves nearly half of the work."
)
_GB = 1e9
_MOST_TOKENS = 4096


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Stores:
    """What lies behind the pages on the device. A context: the store is flushed and let go of at its end.

    Attributes:
      identity: of the checkpoint, for page keys.
      host: host memory for pages that had to leave the device, or None.
      snapshots: host memory for window state, or None.
      store: pages on disk, or None.
    """

    identity: str
    page_tokens: int
    host: HostPages | None
    snapshots: SnapshotPool | None
    store: PageStore | None

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.store is not None:
            self.store.close()

    def engine(self, model: Model, options: EngineOptions) -> Engine:
        """An engine on these stores, not warmed up yet."""
        tiers = None
        if self.host is not None or self.store is not None:
            tiers = PageTiers(self.page_tokens, host=self.host, store=self.store)
        return Engine(model, options, checkpoint=self.identity, tiers=tiers, snapshots=self.snapshots)

    def usage(self, engine: Engine) -> dict[str, dict[str, int]]:
        """By tier: entries, bytes, and what they were good for since the engine started.

        What has been put is on disk before it is counted.
        """
        served = engine.metrics.cached_tokens
        pages, size = engine.device_pages()
        table = {"hbm": {"pages": pages, "bytes": size, "prompt_tokens": served["hbm"]}}
        if self.host is not None:
            table["host"] = {"pages": len(self.host), "bytes": self.host.nbytes, "prompt_tokens": served["host"]}
        if self.snapshots is not None:
            held, size = len(self.snapshots), self.snapshots.nbytes
            table["windows"] = {"snapshots": held, "bytes": size, "prompts": engine.metrics.window_hits}
        if self.store is not None:
            self.store.flush()
            pages, size = self.store.num_records, self.store.nbytes
            table["ssd"] = {"pages": pages, "bytes": size, "prompt_tokens": served["ssd"]}
        return table


_LABELS = {
    "hbm": "device: pages",
    "host": "host memory: pages",
    "windows": "host memory: window snapshots",
    "ssd": "disk: pages",
}


def usage_table(usage: dict[str, dict[str, int]]) -> Table:
    """`Stores.usage` as a table."""
    table = Table(title="Tiers", title_justify="left")
    for i, column in enumerate(("tier", "entries", "bytes", "hits")):
        table.add_column(column, justify="right" if i else "left")
    for name, row in usage.items():
        entries, size, hits = row.values()
        unit = "prompt" if name == "windows" else "prompt token"
        table.add_row(_LABELS[name], f"{entries:,}", f"{size:,}", f"{hits:,} {unit}{'' if hits == 1 else 's'}")
    return table


class ServingFlags:
    """--prefill, the engine's sizes, and the flags of the tiers."""

    def __init__(self, values: flags.FlagValues, *, longest: str = str(_MOST_TOKENS)):
        """Defines the flags in `values`; `longest` describes the default of --max_tokens."""
        self._values = values
        flags.DEFINE_enum("prefill", CED, [CED, FULL], PREFILL_HELP, flag_values=values)
        flags.DEFINE_integer(
            "prefill_chunk",
            PREFILL_CHUNK,
            "Prompt tokens a step, at least sliding_window; memory grows with it.",
            flag_values=values,
        )
        flags.DEFINE_integer(
            "max_tokens",
            None,
            f"Tokens that a request may reach, prompt and answer. Default: {longest}, or what the model takes.",
            flag_values=values,
        )
        flags.DEFINE_integer(
            "device_pages",
            None,
            "KV pages on the device, of 256 tokens each in the released model. Default: enough for all requests at "
            "their longest. Fewer make pages move to host memory.",
            flag_values=values,
        )
        flags.DEFINE_bool("reuse", True, "Go on from KV of earlier prompts that began alike.", flag_values=values)
        flags.DEFINE_string(
            "store",
            None,
            "Directory that keeps KV pages on disk, for 72 hours after their last use; a later run goes on from them. "
            "One process at a time may use it.",
            flag_values=values,
        )
        flags.DEFINE_float("store_gb", 20.0, "Gigabytes that --store may take.", flag_values=values)
        flags.DEFINE_float(
            "host_gb",
            None,
            "Gigabytes of host memory, half of them for pages that had to leave the device and half for window "
            "snapshots; 0: none. Default: a tenth of the machine's.",
            flag_values=values,
        )
        flags.DEFINE_float(
            "snapshot_minutes",
            10.0,
            "Minutes after its last use that window state is kept in host memory; without it the window is replayed. "
            "0: keep none.",
            flag_values=values,
        )

    def options(
        self,
        config: ModelConfig,
        speculation: Speculation | None,
        *,
        max_requests: int = 1,
        stop_ids: int = 1,
        tokens: int = _MOST_TOKENS,
    ) -> EngineOptions:
        """The engine's options, with room for `stop_ids` stop ids a request; `tokens` is the default of --max_tokens.

        Raises:
          DSV41Error: a flag is out of range or does not fit the model.
        """
        v = self._values
        limit = config.text_config.max_position_embeddings
        tokens = min(tokens, limit) if v.max_tokens is None else v.max_tokens
        pages = v.device_pages
        if pages is None and tokens > 0:
            # One more for each request: who goes on inside a shared page holds it while it is copied.
            pages = max_requests * (CacheLayout.from_config(config.text_config).pages_for(tokens) + 1)
        options = EngineOptions(
            max_requests=max_requests,
            max_tokens=tokens,
            num_pages=pages,
            prefill=v.prefill,
            prefill_chunk=v.prefill_chunk,
            speculation=speculation,
            reuse=v.reuse,
            stop_ids=max(stop_ids, 1),
        )
        options.check(config)
        return options

    def open(self, config: ModelConfig, checkpoint: pathlib.Path | None) -> Stores:
        """The tiers that the flags ask for.

        Args:
          checkpoint: directory of the weights; None: they are nobody else's, and nothing is kept beyond this process.

        Raises:
          DSV41Error: a flag is out of range, or the store cannot be used.
        """
        v = self._values
        for name in ("store_gb", "host_gb", "snapshot_minutes"):
            if v[name].value is not None and not 0 <= v[name].value < math.inf:
                raise DSV41Error(f"--{name}: expected a number, 0 or more, got {v[name].value}")
        if v["store_gb"].present and v.store is None:
            raise DSV41Error("--store_gb: only with --store=DIR")
        if v.store is not None and checkpoint is None:
            raise DSV41Error("--store: needs --checkpoint=DIR, whose pages it keeps")
        half = default_budget() // 2 if v.host_gb is None else int(v.host_gb * _GB) // 2
        identity = "none" if checkpoint is None else checkpoint_identity(checkpoint)
        store = None
        if v.store is not None:
            fingerprint = cache_fingerprint(config, identity)
            store = PageStore(v.store, fingerprint, byte_budget=max(int(v.store_gb * _GB), 1))
        return Stores(
            identity=identity,
            page_tokens=CacheLayout.from_config(config.text_config).page_tokens,
            host=HostPages(half) if half else None,
            snapshots=SnapshotPool(half, ttl_s=v.snapshot_minutes * 60) if half and v.snapshot_minutes else None,
            store=store,
        )


def request_figures(metrics: RequestMetrics, new_tokens: int, *, speculation: bool) -> dict[str, Any]:
    """What a request reused, replayed and computed, and how fast it went, as plain JSON values."""
    decode_s = metrics.finished - metrics.first_token
    rate = (new_tokens - 1) / decode_s if new_tokens > 1 and decode_s > 0 else None
    return {
        "cached_tokens": dict(metrics.cached_tokens),
        "replayed_tokens": metrics.replayed_tokens,
        "fresh_tokens": metrics.fresh_tokens,
        "window_hit": metrics.window_hit,
        "time_to_first_token_s": metrics.time_to_first_token_s,
        "tokens_per_s": rate,
        "acceptance_length": metrics.acceptance_length if speculation else None,
    }
