"""What a store's directory holds, by name alone: no record is opened to find one.

A record's name is `GROUP-PARENT-COUNT-KEY.page` in hexadecimal, in a folder named by the first three digits of GROUP.
GROUP is made of the parent and the page's first tokens. So a key is looked up by one path, and the children of a parent
that begin like a given page by one short list, even where thousands of prompts differ from the first page on.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections import Counter
from collections.abc import Iterator

from dsv41.kv_store.leaf_order import LeafOrder
from dsv41.kv_store.page_keys import PageId

GROUP_TOKENS = 16
"""First tokens that pages of a group share: what a tail in the store must have to be worth its file."""

_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{64})-([0-9a-f]{1,8})-([0-9a-f]{64})\.page")
_FOLDER = re.compile(r"[0-9a-f]{3}")
# tensorstore's name of a file that is being written.
_PARTIAL = re.compile(_NAME.pattern + r"\.__lock")


def group_of(page: PageId) -> str:
    """What names of records begin with that have this page's parent and first tokens."""
    return page.head(GROUP_TOKENS).key[:8].hex()


@dataclasses.dataclass(frozen=True, slots=True)
class RecordName:
    """The name of a record: group in hexadecimal, key of parent and page, tokens in the page."""

    group: str
    parent: bytes
    count: int
    key: bytes

    @classmethod
    def of(cls, page: PageId) -> RecordName:
        return cls(group_of(page), page.parent, page.count, page.key)

    @classmethod
    def parse(cls, name: str) -> RecordName | None:
        """From a file's name; None if it is no record's."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        group, parent, count, key = found.groups()
        return cls(group, bytes.fromhex(parent), int(count, 16), bytes.fromhex(key))

    @property
    def path(self) -> str:
        """Relative to the store's directory."""
        return f"{self.group[:3]}/{self.group}-{self.parent.hex()}-{self.count:x}-{self.key.hex()}.page"


@dataclasses.dataclass(eq=False, slots=True)
class Record:
    """A committed record. `last_use` in seconds since 1970."""

    name: RecordName
    nbytes: int
    last_use: float


class StoreIndex:
    """The committed records of a directory, kept by its one writer: about 700 bytes of memory a record."""

    def __init__(self):
        self._records: dict[bytes, Record] = {}
        self._children: Counter[bytes] = Counter()
        self._groups: dict[str, list[Record]] = {}
        self._leaves = LeafOrder(lambda r: self._records.get(r.name.key) is r and not self._children.get(r.name.key))
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    def get(self, key: bytes) -> Record | None:
        return self._records.get(key)

    def group(self, group: str) -> list[Record]:
        return list(self._groups.get(group, ()))

    def add(self, record: Record) -> None:
        name = record.name
        self._records[name.key] = record
        self._groups.setdefault(name.group, []).append(record)
        self._children[name.parent] += 1
        self.nbytes += record.nbytes
        self._leaves.offer(record)

    def remove(self, record: Record) -> None:
        name = record.name
        del self._records[name.key]
        siblings = self._groups[name.group]
        siblings.remove(record)
        if not siblings:
            del self._groups[name.group]
        self._children[name.parent] -= 1
        if not self._children[name.parent]:
            del self._children[name.parent]
            if name.parent in self._records:
                self._leaves.offer(self._records[name.parent])
        self.nbytes -= record.nbytes

    def touch(self, record: Record, now: float) -> None:
        record.last_use = now
        if not self._children.get(record.name.key):
            self._leaves.offer(record)

    def oldest_leaf(self) -> Record | None:
        """The record used least recently of those without children."""
        return self._leaves.oldest()


def _folders(directory: pathlib.Path) -> Iterator[os.DirEntry]:
    with os.scandir(directory) as entries:
        yield from (e for e in entries if _FOLDER.fullmatch(e.name) and e.is_dir(follow_symlinks=False))


def scan_directory(directory: pathlib.Path, now: float) -> StoreIndex:
    """The index of what is committed in a directory, by its one writer: removes what a killed writer left unfinished.
    Files that are no records are left alone."""
    index = StoreIndex()
    for folder in _folders(directory):
        with os.scandir(folder.path) as entries:
            for entry in entries:
                name = RecordName.parse(entry.name)
                if name is not None and name.group.startswith(folder.name) and name.key not in index:
                    status = entry.stat(follow_symlinks=False)
                    index.add(Record(name, status.st_size, min(status.st_mtime, now)))
                elif _PARTIAL.fullmatch(entry.name):
                    os.unlink(entry.path)
    return index


def list_group(directory: pathlib.Path, group: str) -> list[RecordName]:
    """Names of a group's records, by looking into the directory; newest first."""
    found = []
    try:
        with os.scandir(directory / group[:3]) as entries:
            for entry in entries:
                name = RecordName.parse(entry.name) if entry.name.startswith(group) else None
                if name is not None:
                    found.append((entry.stat(follow_symlinks=False).st_mtime, name))
    except OSError:  # no such folder, or a record that was collected meanwhile
        pass
    return [name for _, name in sorted(found, key=lambda pair: pair[0], reverse=True)]
