"""The one writer of a store's directory: a queue, a thread, and what is collected."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from dsv41.config import DSV41Error
from dsv41.kv_store.page_keys import PageId
from dsv41.kv_store.page_record import encode_record
from dsv41.kv_store.store_index import GROUP_TOKENS, Record, RecordName, group_of, scan_directory
from dsv41.kv_store.store_stats import StoreStats

_log = logging.getLogger(__name__)

LOCK_NAME = "writer.lock"
# Each write waits for the disk: several at once wait together.
_BATCH = 16
_IDLE_S = 60.0


class _Waiting(NamedTuple):
    page: PageId
    arrays: tuple[np.ndarray, ...]


def _take_lock(directory: pathlib.Path) -> int:
    """The open lock file. The system lets go of it when the process ends, however it ends."""
    path = directory / LOCK_NAME
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as e:
        raise DSV41Error(f"{path}: cannot open the page store to write ({e.strerror or e})") from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        holder = os.read(file, 32).decode(errors="replace").strip()
        os.close(file)
        raise DSV41Error(
            f"{directory}: another process (pid {holder or 'unknown'}) writes to this page store, expected none; "
            f"open it with writable=False to read"
        ) from e
    except OSError as e:
        os.close(file)
        raise DSV41Error(f"{path}: cannot lock the page store ({e.strerror or e})") from e
    with contextlib.suppress(OSError):  # who holds it is only for the message above; a disk may be full
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()}\n".encode())
    return file


class StoreWriter:
    """Writes pages in the background and removes old ones. `PageStore` has one if it is writable."""

    def __init__(
        self,
        directory: pathlib.Path,
        files: Any,
        fingerprint: bytes,
        *,
        byte_budget: int,
        lifetime_s: float,
        queue_pages: int,
        clock: Callable[[], float],
        stats: StoreStats,
    ):
        self._directory, self._files, self._fingerprint = directory, files, fingerprint
        self._budget, self._lifetime, self._clock, self._stats = byte_budget, lifetime_s, clock, stats
        self._lock_file = _take_lock(directory)
        try:
            self._index = scan_directory(directory, clock())
        except OSError as e:
            os.close(self._lock_file)
            raise DSV41Error(f"{directory}: cannot read the page store ({e.strerror or e})") from e
        self._queue_pages = queue_pages
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._waiting: set[bytes] = set()  # keys in the queue or being written
        self._used: set[bytes] = set()  # keys whose last use is not on disk yet
        self._closing = self._failing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="page-store", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes

    def has(self, key: bytes) -> bool:
        with self._changed:
            return key in self._index

    def group(self, page: PageId) -> list[RecordName]:
        """Records with the page's parent and first tokens, the latest used first."""
        with self._changed:
            records = self._index.group(group_of(page))
            return [r.name for r in sorted(records, key=lambda r: r.last_use, reverse=True)]

    def put(self, page: PageId, arrays: tuple[np.ndarray, ...]) -> bool:
        """Queues a page; False if it is not wanted or there is no room in the queue. Never waits for the disk."""
        stats = self._stats
        with self._changed:
            if page.key in self._index or page.key in self._waiting:
                stats.duplicates += 1
                self._touch([page.key])
                return False
            if not self._has_parent(page, self._waiting):
                stats.orphans += 1
                return False
            if self._closing or page.count < GROUP_TOKENS or len(self._queue) >= self._queue_pages:
                stats.dropped += 1
                return False
            self._queue.append(_Waiting(page, arrays))
            self._waiting.add(page.key)
            self._changed.notify_all()
        return True

    def _has_parent(self, page: PageId, others: Iterable[bytes]) -> bool:
        return page.parent == self._fingerprint or page.parent in self._index or page.parent in others

    def lacks(self, page: PageId) -> bool:
        """Whether a page is neither committed nor waiting to be."""
        with self._changed:
            return page.key not in self._index and page.key not in self._waiting

    def touch(self, keys: Iterable[bytes]) -> None:
        """Marks records as just used."""
        with self._changed:
            self._touch(keys)

    def _touch(self, keys: Iterable[bytes]) -> None:
        now = self._clock()
        for key in keys:
            record = self._index.get(key)
            if record is not None:
                self._index.touch(record, now)
                self._used.add(key)

    def discard(self, key: bytes) -> None:
        """Removes a record that turned out to be unusable."""
        with self._changed:
            record = self._index.get(key)
            if record is not None:
                self._remove(record)

    def _remove(self, record: Record) -> None:
        self._index.remove(record)
        self._used.discard(record.name.key)
        # What cannot be deleted is found again by the next writer.
        with contextlib.suppress(OSError):
            os.unlink(self._directory / record.name.path)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing, timeout=_IDLE_S)
                batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
                if not batch and self._closing:
                    return
            try:
                if batch:
                    self._write(batch)
                else:
                    self._collect(0)
                    self._keep_last_uses()
            except Exception:  # the store is a cache: it may lose pages, never the process
                self._stats.failed += len(batch)
                _log.exception("%s: the page store lost %d pages", self._directory, len(batch))
            finally:
                with self._changed:
                    self._waiting.difference_update(item.page.key for item in batch)
                    self._changed.notify_all()

    def _write(self, batch: list[_Waiting]) -> None:
        now = self._clock()
        records = {
            item.page.key: encode_record(item.page, item.arrays, fingerprint=self._fingerprint, written=now)
            for item in batch
        }
        self._collect(sum(map(len, records.values())))
        pending = []
        for page, _ in batch:
            size = len(records[page.key])
            with self._changed:
                follows = self._has_parent(page, {p.key for p, *_ in pending})
                fits = self._index.nbytes + sum(size for *_, size in pending) + size <= self._budget
                self._stats.orphans += not follows
                self._stats.dropped += follows and not fits
            if follows and fits:
                pending.append((page, self._files.write(RecordName.of(page).path, records[page.key]), size))
        for page, written, size in pending:
            try:
                written.result()
            except Exception as e:  # tensorstore raises ValueError for whatever the system refuses
                self._failed(page, e)
            else:
                self._committed(page, Record(RecordName.of(page), size, now))

    def _failed(self, page: PageId, error: Exception) -> None:
        self._stats.failed += 1
        if not self._failing:  # a full disk is reported once, not for each page
            _log.warning("%s: cannot write (%s); serving goes on without", RecordName.of(page).path, error)
        self._failing = True

    def _committed(self, page: PageId, record: Record) -> None:
        self._failing = False
        path = self._directory / record.name.path
        with contextlib.suppress(OSError):
            os.utime(path, (record.last_use, record.last_use))
        with self._changed:
            if not self._has_parent(page, ()):  # its parent failed
                self._stats.orphans += 1
                with contextlib.suppress(OSError):
                    os.unlink(path)
                return
            self._index.add(record)
            self._stats.written += 1
            self._stats.written_bytes += record.nbytes
            self._remove_beginnings(page, record.name)

    def _remove_beginnings(self, page: PageId, name: RecordName) -> None:
        """Removes tails that the page goes on from: it serves whoever asks for them."""
        tails = [r for r in self._index.group(name.group) if r.name.count < page.count and r.name.parent == page.parent]
        keys = {count: page.head(count).key for count in {tail.name.count for tail in tails}}
        for tail in tails:
            if keys[tail.name.count] == tail.name.key:
                self._remove(tail)

    def collect(self) -> None:
        """Removes what is older than its lifetime or beyond the budget, now."""
        self._collect(0)

    def _collect(self, needed: int) -> None:
        while True:
            with self._changed:  # taken for each record, so that nobody waits for long
                record = self._index.oldest_leaf()
                if record is None:
                    return
                if self._clock() - record.last_use > self._lifetime:
                    self._stats.collected_by_age += 1
                elif self._index.nbytes + needed > self._budget:
                    self._stats.collected_for_room += 1
                else:
                    return
                self._remove(record)

    def _keep_last_uses(self) -> None:
        with self._changed:
            used = [self._index.get(key) for key in self._used]
            self._used.clear()
        for record in used:
            with contextlib.suppress(OSError):
                os.utime(self._directory / record.name.path, (record.last_use, record.last_use))

    def flush(self) -> None:
        """Waits until all that was queued is on disk or given up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
        self._keep_last_uses()

    def close(self) -> None:
        """Writes what is queued, ends the thread and lets go of the directory."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._keep_last_uses()
        os.close(self._lock_file)
