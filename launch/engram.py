"""The flags that say where Engram rows come from, and what is reported of them."""

import dataclasses
import os
from typing import Any

import jax
from absl import flags

from dsv41.config import DSV41Error
from dsv41.engine import EngramFigures, EngramMode
from dsv41.engram_store import HostShard
from dsv41.models import Model

MAPPED, MEMORY, SHARDED = "mapped", "memory", "sharded"


class EngramFlags:
    """--engram and --engram_tables of a script."""

    def __init__(self, values: flags.FlagValues):
        """Defines the flags in `values`."""
        self._values = values
        flags.DEFINE_enum_class(
            "engram",
            EngramMode.AUTO,
            EngramMode,
            "Where Engram rows come from. device: tables on the device; overlap: the host fetches rows while it "
            "computes; blocking: the device waits for them; auto: device if the tables are small, else overlap "
            "(--verbose says which). The tokens are the same.",
            flag_values=values,
        )
        flags.DEFINE_enum(
            "engram_tables",
            MAPPED,
            [MAPPED, MEMORY, SHARDED],
            "mapped: the host reads rows out of the checkpoint's files as they are asked for; memory: whole tables are "
            "copied into memory first; sharded: each of several processes (--mesh) copies its run of rows.",
            flag_values=values,
        )

    @property
    def mode(self) -> EngramMode:
        """The value of --engram."""
        return self._values.engram

    def place(self, model: Model) -> Model:
        """The model with its tables where --engram_tables wants them.

        Raises:
          DSV41Error: they do not fit; or they are to be cut, and there is no mesh.
        """
        where, store = self._values.engram_tables, model.engram
        if where == MAPPED or store is None:
            return model
        if where == SHARDED and model.mesh is not None:
            shard, shards = jax.process_index(), jax.process_count()
            store = HostShard(store.tables, shard=shard, shards=shards, readers=os.cpu_count() or 1)
            return dataclasses.replace(model, engram=store)
        if where == SHARDED:
            raise DSV41Error(
                "--engram_tables=sharded: tables are cut over the processes of a --mesh, which is not given"
            )
        return dataclasses.replace(model, engram=model.engram.in_memory())


def engram_report(figures: EngramFigures | None) -> dict[str, Any] | None:
    """The figures as a JSON object; None if the model has no Engram."""
    if figures is None:
        return None
    return dataclasses.asdict(figures) | {"mode": figures.mode.value}
