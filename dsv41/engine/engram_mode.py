"""How Engram rows reach the steps of a run, and what that cost."""

from __future__ import annotations

import dataclasses
import enum
import logging
import time

import jax

from dsv41.engram_store import DEVICE_BYTES, EngramStore, StoreStats
from dsv41.models import Model

_LOG = logging.getLogger(__name__)


class EngramMode(enum.Enum):
    """Where rows come from, and who waits for them. All give the same values.

    DEVICE: tables on the device, where tokens are hashed too; nothing goes through the host. On a mesh every device has
    some of their rows.
    OVERLAP: tables on the host. Rows of the next prompt chunk are fetched while the device computes the present one. A
    decode step is cut before each layer with an Engram, so that its rows are fetched while the layers in front of it
    run; not so on a mesh, where it waits for its rows.
    BLOCKING: tables on the host; a step starts when all its rows are there.
    AUTO: DEVICE for tables of up to `DEVICE_BYTES` on a single device, else OVERLAP.

    Rounds of speculation take rows from the device or, if the tables are large and the mode is not DEVICE, through a
    call back to the host.
    """

    AUTO = "auto"
    BLOCKING = "blocking"
    OVERLAP = "overlap"
    DEVICE = "device"


def chosen_mode(model: Model, asked: EngramMode) -> EngramMode | None:
    """The mode that a run of `model` will have, logged; None if the model has no Engram."""
    if model.engram is None:
        return None
    mode = asked
    if mode is EngramMode.AUTO:
        small = model.engram.nbytes <= DEVICE_BYTES and model.mesh is None
        mode = EngramMode.DEVICE if small else EngramMode.OVERLAP
    where = "mapped files" if model.engram.mapped else "host memory"
    _LOG.info(
        "engram=%s%s: tables of %s bytes in %s",
        mode.value,
        " (auto)" if asked is EngramMode.AUTO else "",
        f"{model.engram.nbytes:,}",
        f"{where}, copied to the device" if mode is EngramMode.DEVICE else where,
    )
    return mode


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramFigures:
    """What Engram rows took in a run; with tables on the device nothing is counted.

    Attributes:
      mode: of the run.
      rows, unique_rows, physical_reads, read_bytes, read_s: of its look-ups, as in `StoreStats`.
      stall_s: seconds that the device was seen to have nothing to do because rows were not there yet. The host looks
        now and then, so that the truth is somewhat more; a trace has the exact figure (`launch.bench_engram`).
      prefetched, prefetch_hits: prompt chunks fetched ahead, and those of them that the step did not have to wait for.
    """

    mode: EngramMode
    rows: int
    unique_rows: int
    physical_reads: int
    read_bytes: int
    read_s: float
    stall_s: float
    prefetched: int
    prefetch_hits: int


class EngramMeter:
    """Counts for `EngramFigures`, from its making on."""

    def __init__(self, mode: EngramMode, store: EngramStore):
        self._mode, self._store = mode, store
        self.restart()

    def restart(self) -> None:
        """Forgets what was counted so far, such as steps that only compiled."""
        self.stall_s, self.prefetched, self.prefetch_hits = 0.0, 0, 0
        self._before: StoreStats = self._store.stats

    def figures(self) -> EngramFigures:
        """What happened so far."""
        done = dataclasses.asdict(self._store.stats - self._before)
        del done["lookups"]
        return EngramFigures(
            mode=self._mode,
            stall_s=self.stall_s,
            prefetched=self.prefetched,
            prefetch_hits=self.prefetch_hits,
            **done,
        )


class StallClock:
    """How long the device has had nothing to do, as far as the host sees without waiting for it."""

    def __init__(self, work: jax.Array | None):
        """`work` is an output of what was started last; None: nothing was."""
        self._work, self._idle_since = work, None
        self.look()

    def look(self) -> None:
        """Asks whether the device is done."""
        if self._idle_since is None and (self._work is None or self._work.is_ready()):
            self._idle_since = time.perf_counter()

    def stop(self) -> float:
        """Seconds since the device was first seen to be done; 0 if it still works."""
        self.look()
        return 0.0 if self._idle_since is None else time.perf_counter() - self._idle_since
