"""What a page store counts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class StoreStats:
    """Counts since a store was opened. Bytes are those of whole records when written, of pages when read."""

    hits: int = 0  # pages read
    hit_bytes: int = 0
    misses: int = 0  # look-ups that ended at a page that is not there
    damaged: int = 0  # records that were found unusable
    unreadable: int = 0  # reads that the system refused
    written: int = 0
    written_bytes: int = 0
    duplicates: int = 0  # not queued: already there
    orphans: int = 0  # not kept: the page before it is not there
    dropped: int = 0  # not kept: queue or budget full, tail too short, or closed
    failed: int = 0  # the system refused the write
    collected_by_age: int = 0
    collected_for_room: int = 0  # before the end of their lifetime
