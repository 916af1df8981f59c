"""Global KV pages on disk, for days: one file a page, each complete or absent, each checked whenever it is read.

The files are written and read through tensorstore's key-value store on a directory: it writes to a file beside the
target, waits until that is on the disk and renames it, and keeps many reads and writes in flight without Python
threads. Orbax, which is built on it, stores trees of arrays as steps of a run; a page is one small immutable value
under its own key, and there are millions of them.

A record holds one page of one prefix (`page_record`), under a name that follows from the page (`store_index`).
Whatever is torn, truncated, altered, of another version or model, or under another page's name is logged once with its
file name and treated as absent; the writer removes it, so that the page can be stored again. One process writes to a
directory, any number read. Models and checkpoints may share a directory: their pages have different keys.
"""

from __future__ import annotations

import logging
import pathlib
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorstore

from dsv41.config import DSV41Error
from dsv41.kv_store.host_pages import check_arrays
from dsv41.kv_store.page_keys import KEY_BYTES, PageId, agreement
from dsv41.kv_store.page_record import DamagedRecord, StoredPage, decode_record
from dsv41.kv_store.store_index import RecordName, group_of, list_group
from dsv41.kv_store.store_stats import StoreStats
from dsv41.kv_store.store_writer import StoreWriter

_log = logging.getLogger(__name__)

DEFAULT_LIFETIME_S = 72 * 3600.0
# Reads in flight at once: 15 MB of the released model's pages.
_READS = 64
# Tails that are compared with a row; all of them begin with the same tokens.
_TAILS = 4


class PageStore:
    """Pages of one model in a directory. Calls may come from any thread.

    Args:
      directory: of the store; made if it is missing and the store is writable.
      fingerprint: root of the model's page keys, from `cache_fingerprint`.
      writable: whether this process is the directory's one writer. A reader changes nothing there.
      byte_budget: what all records together may take; a writer needs one.
      lifetime_s: seconds after its last use that a record is removed. It may go earlier if the budget is full. Use
        means being written, or read or touched by the writer.
      queue_pages: pages that may wait to be written; more are not stored.
      clock: seconds since 1970.

    Raises:
      DSV41Error: the directory cannot be used or another process writes to it, or an argument is impossible.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        fingerprint: bytes,
        *,
        writable: bool = True,
        byte_budget: int | None = None,
        lifetime_s: float = DEFAULT_LIFETIME_S,
        queue_pages: int = 256,
        clock: Callable[[], float] = time.time,
    ):
        self._directory = pathlib.Path(directory)
        if len(fingerprint) != KEY_BYTES:
            raise DSV41Error(f"page store: fingerprint: expected {KEY_BYTES} bytes, got {len(fingerprint)}")
        if writable and byte_budget is None:
            raise DSV41Error("page store: a writable store needs a byte_budget")
        for name, value in (("byte_budget", byte_budget), ("lifetime_s", lifetime_s), ("queue_pages", queue_pages)):
            if value is not None and value <= 0:
                raise DSV41Error(f"page store: {name} must be positive, got {value}")
        self._prepare_directory(writable)
        self._fingerprint = fingerprint
        self._reported: set[str] = set()
        self.stats = StoreStats()
        self._counting = threading.Lock()  # of reads; the writer counts under its own
        spec = {
            "driver": "file",
            "path": f"{self._directory.absolute()}/",
            "context": {"file_io_sync": True},
        }
        self._files = tensorstore.KvStore.open(spec).result()
        self._writer = None
        if writable:
            self._writer = StoreWriter(
                self._directory,
                self._files,
                fingerprint,
                byte_budget=byte_budget,
                lifetime_s=lifetime_s,
                queue_pages=queue_pages,
                clock=clock,
                stats=self.stats,
            )

    def _prepare_directory(self, writable: bool) -> None:
        try:
            if writable:
                self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise DSV41Error(f"{self._directory}: cannot make the page store ({e.strerror or e})") from e
        if not self._directory.is_dir():
            raise DSV41Error(f"{self._directory}: expected the directory of a page store")

    @property
    def writable(self) -> bool:
        return self._writer is not None

    def __enter__(self) -> PageStore:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __contains__(self, page: PageId) -> bool:
        """Whether a record is there under the page's name; only reading tells whether it is good."""
        if self._writer is not None:
            return self._writer.has(page.key)
        return (self._directory / RecordName.of(page).path).is_file()

    @property
    def num_records(self) -> int:
        """Committed records, of all models; the writer knows."""
        return len(self._need_writer("num_records"))

    @property
    def nbytes(self) -> int:
        """Bytes of all records, of all models; the writer knows."""
        return self._need_writer("nbytes").nbytes

    def _need_writer(self, what: str) -> StoreWriter:
        if self._writer is None:
            raise DSV41Error(f"{self._directory}: {what} needs a writable page store, this one was opened to read")
        return self._writer

    def put(self, page: PageId, arrays: tuple[np.ndarray, ...]) -> bool:
        """Queues a page to be written in the background. The caller no longer writes to the arrays.

        Args:
          page: full or a tail; the page before it was put earlier.
          arrays: uint8, one per pool.

        Returns:
          Whether it was queued: not if it is there already, the page before it is not, or the queue is full (see
          `stats`). It is stored when `flush` or `close` return, unless the disk refused.

        Raises:
          DSV41Error: the store was opened to read, or an array is not uint8.
        """
        check_arrays("page store", arrays)
        return self._need_writer("put").put(page, arrays)

    def unsaved(self, pages: Sequence[PageId]) -> list[PageId]:
        """Those of a row's pages that are neither stored nor waiting to be: what to put, in this order, to have the row
        whole. A page whose predecessor was dropped is not stored, so that a row is offered again from there.

        Raises:
          DSV41Error: the store was opened to read.
        """
        writer = self._need_writer("unsaved")
        return [page for page in pages if writer.lacks(page)]

    def touch(self, pages: Sequence[PageId]) -> None:
        """Counts as a use of records that are in use elsewhere, so that they do not grow old. Nothing for a reader."""
        if self._writer is not None:
            self._writer.touch([page.key for page in pages])

    def read(self, pages: Sequence[PageId]) -> list[StoredPage]:
        """The longest run of pages, from the first one on, that are there and good.

        Args:
          pages: of a row, in order; those before the first are the caller's.
        """
        found: list[StoredPage] = []
        for first in range(0, len(pages), _READS):
            wave = pages[first : first + _READS]
            if self._writer is not None:
                present = [self._writer.has(page.key) for page in wave]
                wave = wave[: present.index(False)] if False in present else wave
            names = [RecordName.of(page) for page in wave]
            futures = [self._files.read(name.path) for name in names]
            good = 0
            for name, future in zip(names, futures, strict=True):
                stored = self._finish(name, future)
                if stored is None:
                    break
                found.append(stored)
                good += 1
            if good < min(_READS, len(pages) - first):
                self._count(misses=1)
                break
        self._count_hits(found)
        return found

    def read_tail(self, page: PageId) -> tuple[StoredPage, int] | None:
        """A page that begins like this one, and for how many tokens it does; best of a few that begin alike.

        Args:
          page: the next one of a row, full or not. Fewer than 16 common tokens are not found.
        """
        if self._writer is not None:
            names = self._writer.group(page)
        else:
            names = list_group(self._directory, group_of(page))
        names = [name for name in names if name.parent == page.parent]
        keys = {count: page.head(count).key for count in {name.count for name in names} if count <= page.count}
        whole = [name for name in names if keys.get(name.count) == name.key]
        others = [name for name in names if name not in whole]
        wave = [*sorted(whole, key=lambda name: -name.count), *others][:_TAILS]
        futures = [self._files.read(name.path) for name in wave]
        stored = [self._finish(name, future) for name, future in zip(wave, futures, strict=True)]
        found = [(agreement(s.page, page), s) for s in stored if s is not None]
        tokens, best = max(found, key=lambda pair: pair[0], default=(0, None))
        if best is None:
            self._count(misses=1)
            return None
        self._count_hits([best])
        return best, tokens

    def _count_hits(self, found: list[StoredPage]) -> None:
        self._count(hits=len(found), hit_bytes=sum(stored.nbytes for stored in found))
        self.touch([stored.page for stored in found])

    def _count(self, **more: int) -> None:
        with self._counting:
            for name, number in more.items():
                setattr(self.stats, name, getattr(self.stats, name) + number)

    def _finish(self, name: RecordName, future) -> StoredPage | None:
        """The page of a read in flight, if its record is there and good."""
        try:
            result = future.result()
        except Exception as e:  # tensorstore raises ValueError for whatever the system refuses
            self._count(unreadable=1)
            self._report(name, f"cannot be read ({e}); skipped")
            return None
        if result.state != "value":
            if self._writer is not None:  # removed behind the writer's back
                self._writer.discard(name.key)
            return None
        try:
            stored = decode_record(result.value, fingerprint=self._fingerprint, key=name.key)
            if RecordName.of(stored.page) != name:
                raise DamagedRecord("its name has another parent, length or beginning than its content")
            return stored
        except DamagedRecord as e:
            self._count(damaged=1)
            self._report(name, f"{e}; skipped")
            if self._writer is not None:
                self._writer.discard(name.key)
            return None

    def _report(self, name: RecordName, what: str) -> None:
        if name.path not in self._reported:
            self._reported.add(name.path)
            _log.warning("%s: %s", self._directory / name.path, what)

    def collect(self) -> None:
        """Removes what is older than its lifetime or beyond the budget; the writer does so now and then by itself.

        Raises:
          DSV41Error: the store was opened to read.
        """
        self._need_writer("collect").collect()

    def flush(self) -> None:
        """Waits until all that was put is on disk or given up."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flushes and lets go of the directory. Further pages are not stored."""
        if self._writer is not None:
            self._writer.close()
