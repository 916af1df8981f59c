"""The store on disk: round trips, damage, lifetime, budget, refusals."""

import logging
import os
import threading

import numpy as np
import pytest

from dsv41.config import DSV41Error
from dsv41.kv_store import PageStore
from dsv41.kv_store.page_record import encode_record
from dsv41.kv_store.store_index import RecordName
from tests.kv_store.rows import PAGE, ROOT, Clock, page_arrays, pages_of, span, tokens

BIG = 1 << 30


def open_store(path, **options):
    return PageStore(path, ROOT, **({"byte_budget": BIG} | options))


def fill(store, pages):
    for page in pages:
        assert store.put(page, page_arrays(page))
    store.flush()


def file_of(path, page):
    return path / RecordName.of(page).path


def same(stored, page):
    return stored.page.key == page.key and all((a == b).all() for a, b in zip(stored.arrays, page_arrays(page)))


def files(path):
    return sorted(p.name for p in path.rglob("*.page*"))


def test_pages_come_back_after_a_restart(tmp_path):
    pages = pages_of([9] * (3 * PAGE + 20), [span(10, 50)])
    with open_store(tmp_path / "made" / "here") as store:
        fill(store, pages)
        assert all(same(*pair) for pair in zip(store.read(pages[:3]), pages))
    with open_store(tmp_path / "made" / "here") as store:
        assert store.num_records == 4
        assert store.nbytes == sum(p.stat().st_size for p in (tmp_path / "made" / "here").rglob("*.page"))
        assert [same(*pair) for pair in zip(store.read(pages), pages)] == [True] * 4
        assert (store.stats.hits, store.stats.misses) == (4, 0)
        assert store.stats.hit_bytes == 4 * sum(a.nbytes for a in page_arrays(pages[0]))


def test_reading_stops_at_the_first_page_that_is_not_there(tmp_path):
    ids = tokens(6 * PAGE)
    with open_store(tmp_path) as store:
        fill(store, pages_of(ids)[:3])
        assert len(store.read(pages_of(ids))) == 3
        assert len(store.read(pages_of(ids)[1:])) == 2
        assert store.read(pages_of(ids)[4:]) == []
        assert store.stats.misses == 3
        assert store.read([]) == []
        assert pages_of(ids)[2] in store
        assert pages_of(ids)[3] not in store


def test_more_pages_than_are_read_at_once(tmp_path):
    pages = pages_of(tokens(150 * 16), page_tokens=16)
    with open_store(tmp_path) as store:
        fill(store, pages)
        assert len(store.read(pages)) == 150
        assert store.stats.misses == 0


def test_tails_are_found_by_their_tokens(tmp_path):
    ids = tokens(PAGE + 25)
    with open_store(tmp_path) as store:
        fill(store, pages_of(ids))
        reader = PageStore(tmp_path, ROOT, writable=False)
        for opened in (store, reader):
            wanted = pages_of([*ids, 1, 2, 3])[1]
            stored, agreed = opened.read_tail(wanted)
            assert (agreed, same(stored, pages_of(ids)[1])) == (25, True)
            # Parting after 20 tokens; after too few; after another parent.
            assert opened.read_tail(pages_of([*ids[: PAGE + 20], 5000, 5000])[1])[1] == 20
            assert opened.read_tail(pages_of([*ids[: PAGE + 5], 5000, 5000])[1]) is None
            assert opened.read_tail(pages_of(ids[PAGE:])[0]) is None
            assert opened.read_tail(pages_of(ids)[0].head(20))[1] == 20


def test_a_tail_gives_way_to_what_goes_on_from_it(tmp_path):
    page = pages_of(tokens(PAGE))[0]
    with open_store(tmp_path) as store:
        fill(store, [page.head(18), page.head(25)])
        assert store.num_records == 1
        other = pages_of([*tokens(18), 5000, 5001])[0]
        fill(store, [other, page])
        assert store.num_records == 2
        assert store.read_tail(page)[1] == PAGE
        assert not store.put(page.head(9), page_arrays(page))  # not worth a file
        assert store.stats.dropped == 1


def test_a_page_is_written_once(tmp_path):
    page = pages_of(tokens(PAGE))[0]
    with open_store(tmp_path) as store:
        fill(store, [page])
        assert not store.put(page, tuple(a + 1 for a in page_arrays(page)))
        assert same(store.read([page])[0], page)
        assert (store.stats.written, store.stats.duplicates) == (1, 1)


def test_only_complete_prefixes_are_kept(tmp_path):
    pages = pages_of(tokens(2 * PAGE))
    with open_store(tmp_path) as store:
        assert not store.put(pages[1], page_arrays(pages[1]))
        assert store.stats.orphans == 1
        assert store.unsaved(pages) == pages
        fill(store, pages[:1])
        assert store.unsaved(pages) == pages[1:]
        fill(store, pages[1:])
        assert store.unsaved(pages) == []


# --- damage ---


def flipped(data):
    return data[:300] + bytes([data[300] ^ 4]) + data[301:]


DAMAGE = {
    "empty": lambda data, page: b"",
    "torn": lambda data, page: data[: len(data) // 2],
    "zeros behind": lambda data, page: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "too long": lambda data, page: data + b"\0",
    "flipped bit": lambda data, page: flipped(data),
    "foreign version": lambda data, page: data[:8] + b"\x07" + data[9:],
    "foreign file": lambda data, page: b"#!/bin/sh\n" * 50,
    "another model": lambda data, page: encode_record(page, page_arrays(page), fingerprint=bytes(32), written=0),
    "another page": lambda data, page: encode_record(
        pages_of(tokens(PAGE, seed=9))[0], page_arrays(page), fingerprint=ROOT, written=0
    ),
}


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_reported_once_and_skipped(tmp_path, caplog, kind, writable):
    pages = pages_of(tokens(3 * PAGE))
    with open_store(tmp_path) as store:
        fill(store, pages)
    path = file_of(tmp_path, pages[1])
    path.write_bytes(DAMAGE[kind](path.read_bytes(), pages[1]))
    with open_store(tmp_path, writable=writable) as store, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(store.read(pages)) == 1
            assert store.read_tail(pages[1]) is None
        assert [path.name in r.getMessage() for r in caplog.records] == [True]
        assert store.stats.damaged == (1 if writable else 4)
        assert path.exists() != writable
        if writable:  # it can be stored again, and what followed it is there
            fill(store, [pages[1]])
            assert all(same(*pair) for pair in zip(store.read(pages), pages))
            assert store.num_records == 3


def test_a_renamed_record_is_not_taken_for_another(tmp_path, caplog):
    """Its content is good and has the key, but the name says it comes after another page."""
    pages, other = pages_of(tokens(PAGE + 20)), pages_of(tokens(PAGE, seed=1))[0]
    with open_store(tmp_path) as store:
        fill(store, pages)
    wrong = pages_of([*tokens(PAGE, seed=1), *tokens(PAGE + 20)[PAGE:]])[1]
    assert wrong.parent == other.key
    name = RecordName.of(wrong)
    path = tmp_path / RecordName(name.group, name.parent, name.count, pages[1].key).path
    path.parent.mkdir(exist_ok=True)
    file_of(tmp_path, pages[1]).rename(path)
    with open_store(tmp_path) as store:
        assert store.read_tail(wrong) is None
        assert store.read(pages[1:]) == []
    assert path.name in caplog.text
    assert "its name has another parent" in caplog.text


def test_what_is_no_record_is_left_alone(tmp_path):
    (tmp_path / "abc").mkdir()
    for name in ("notes.txt", "abc/notes.page", "abc/x.__lock"):
        (tmp_path / name).write_text("mine")
    with open_store(tmp_path) as store:
        assert store.num_records == 0
    assert (tmp_path / "abc" / "notes.page").read_text() == "mine"
    assert (tmp_path / "abc" / "x.__lock").exists()


def test_what_a_killed_writer_left_is_removed(tmp_path):
    page = pages_of(tokens(PAGE))[0]
    path = file_of(tmp_path, page)
    path.parent.mkdir()
    path.with_name(path.name + ".__lock").write_bytes(b"torn")
    with open_store(tmp_path) as store:
        assert files(tmp_path) == []
        fill(store, [page])
    assert files(tmp_path) == [path.name]


def test_a_file_removed_by_hand_is_absent(tmp_path):
    page = pages_of(tokens(PAGE))[0]
    with open_store(tmp_path) as store:
        fill(store, [page])
        file_of(tmp_path, page).unlink()
        assert store.read([page]) == []
        fill(store, [page])
        assert len(store.read([page])) == 1


def test_a_record_that_cannot_be_read_is_absent(tmp_path, caplog):
    page = pages_of(tokens(PAGE))[0]
    with open_store(tmp_path) as store:
        fill(store, [page])
        path = file_of(tmp_path, page)
        path.unlink()
        path.mkdir()
        assert store.read([page]) == []
        assert store.read([page]) == []
    assert caplog.text.count("cannot be read") <= 1


# --- lifetime and budget ---


def test_records_live_for_their_time_after_the_last_use(tmp_path):
    clock = Clock()
    used, unused = pages_of(tokens(2 * PAGE)), pages_of(tokens(PAGE, seed=1))
    with open_store(tmp_path, lifetime_s=100, clock=clock) as store:
        fill(store, [*used, *unused])
        clock.now += 60
        store.read(used)
        clock.now += 40
        store.collect()
        assert store.num_records == 3
        clock.now += 1
        store.collect()
        assert (store.num_records, store.stats.collected_by_age) == (2, 1)
    # Last uses are on disk as well.
    with open_store(tmp_path, lifetime_s=100, clock=clock) as store:
        clock.now += 59
        store.collect()
        assert len(store.read(used)) == 2
        clock.now += 101
        store.collect()
        assert (store.num_records, files(tmp_path)) == (0, [])


def test_three_days_are_the_default(tmp_path):
    clock = Clock()
    page = pages_of(tokens(PAGE))[0]
    with open_store(tmp_path, clock=clock) as store:
        fill(store, [page])
        clock.now += 72 * 3600
        store.collect()
        assert store.num_records == 1
        clock.now += 1
        store.collect()
        assert store.num_records == 0


def test_a_parent_stays_as_long_as_its_children(tmp_path):
    clock = Clock()
    pages = pages_of(tokens(3 * PAGE))
    with open_store(tmp_path, lifetime_s=100, clock=clock) as store:
        fill(store, pages)
        clock.now += 90
        store.read(pages[2:])
        clock.now += 90
        store.collect()
        assert len(store.read(pages)) == 3
        clock.now += 101
        store.collect()
        assert store.num_records == 0


def test_touched_records_stay(tmp_path):
    clock = Clock()
    pages = pages_of(tokens(2 * PAGE))
    with open_store(tmp_path, lifetime_s=100, clock=clock) as store:
        fill(store, pages)
        clock.now += 90
        store.touch(pages)
        clock.now += 90
        store.collect()
        assert store.num_records == 2


def test_the_least_recently_used_end_makes_room(tmp_path):
    clock = Clock()
    old, new = pages_of(tokens(3 * PAGE)), pages_of(tokens(3 * PAGE, seed=1))
    with open_store(tmp_path / "size") as store:
        fill(store, old[:1])
        size = store.nbytes
    with open_store(tmp_path / "a", byte_budget=4 * size, clock=clock) as store:
        for page in (*old, *new):
            clock.now += 1
            fill(store, [page])
            assert store.nbytes <= 4 * size
        assert [page in store for page in (*old, *new)] == [True, False, False, True, True, True]
        assert store.stats.collected_for_room == 2
    with open_store(tmp_path / "a", byte_budget=2 * size, clock=clock) as store:
        store.collect()
        assert [page in store for page in (*old, *new)] == [False, False, False, True, True, False]
    with open_store(tmp_path / "b", byte_budget=size - 1) as store:
        store.put(old[0], page_arrays(old[0]))
        store.flush()
        assert (store.num_records, store.stats.dropped) == (0, 1)


# --- the queue ---


class Stuck:
    """A disk that takes its time: writes begin only when told to."""

    def __init__(self, files):
        self.files, self.go, self.begun = files, threading.Event(), threading.Event()

    def write(self, *args):
        self.begun.set()
        assert self.go.wait(30)
        return self.files.write(*args)

    def read(self, *args):
        return self.files.read(*args)


def test_a_full_queue_drops_and_never_waits(tmp_path):
    pages = [pages_of(tokens(PAGE, seed=i))[0] for i in range(6)]
    store = open_store(tmp_path, queue_pages=3)
    stuck = store._writer._files = Stuck(store._files)
    assert store.put(pages[0], page_arrays(pages[0]))
    assert stuck.begun.wait(30)
    assert [store.put(page, page_arrays(page)) for page in pages[1:]] == [True, True, True, False, False]
    assert not store.put(pages[1], page_arrays(pages[1]))  # waiting already
    assert (store.stats.dropped, store.stats.duplicates, store.num_records) == (2, 1, 0)
    stuck.go.set()
    store.close()
    assert not store.put(pages[5], page_arrays(pages[5]))
    store.close()
    with open_store(tmp_path) as store:
        assert [page in store for page in pages] == [True] * 4 + [False] * 2


class Broken:
    """A disk that is full until it is mended."""

    def __init__(self, files):
        self.files, self.full = files, True

    def write(self, *args):
        return self if self.full else self.files.write(*args)

    def result(self):
        raise ValueError("No space left on device")


def test_a_full_disk_is_reported_once_and_serving_goes_on(tmp_path, caplog):
    pages = pages_of(tokens(4 * PAGE))
    with open_store(tmp_path) as store:
        disk = store._writer._files = Broken(store._files)
        for page in pages:
            store.put(page, page_arrays(page))
        store.flush()
        assert store.stats.failed + store.stats.orphans == 4
        assert store.stats.failed >= 1
        assert caplog.text.count("No space left on device") == 1
        disk.full = False
        fill(store, pages)
        assert len(store.read(pages)) == 4


def test_an_unforeseen_failure_does_not_end_the_thread(tmp_path, caplog):
    pages = pages_of(tokens(2 * PAGE))
    with open_store(tmp_path) as store:
        files, store._writer._files = store._writer._files, None
        store.put(pages[0], page_arrays(pages[0]))
        store.flush()
        assert "lost 1 pages" in caplog.text
        store._writer._files = files
        fill(store, pages)
        assert store.stats.failed == 1


def test_a_directory_that_refuses(tmp_path, caplog):
    """A real refusal: where the record's folder should be, there is a file."""
    page = pages_of(tokens(PAGE))[0]
    file_of(tmp_path, page).parent.write_text("in the way")
    with open_store(tmp_path) as store:
        assert store.put(page, page_arrays(page))
        store.flush()
        assert (store.stats.failed, store.num_records) == (1, 0)
    assert RecordName.of(page).path in caplog.text


def test_threads_read_and_write_at_once(tmp_path):
    """With a budget that makes the writer collect what the others read: a page is whole or absent."""
    rows = [pages_of(tokens(4 * PAGE, seed=i)) for i in range(12)]
    failures = []

    def work(number):
        random = np.random.default_rng(number)
        try:
            for _ in range(60):
                pages = rows[random.integers(len(rows))]
                for page in store.unsaved(pages):
                    store.put(page, page_arrays(page))
                found = store.read(pages)
                assert all(same(*pair) for pair in zip(found, pages))
                tail = store.read_tail(pages[0].head(20))
                assert tail is None or tail[1] == 20
        except BaseException as e:
            failures.append(e)

    with open_store(tmp_path, byte_budget=20_000) as store:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.flush()
        assert failures == []
        assert store.stats.damaged == store.stats.unreadable == store.stats.failed == 0
        assert store.stats.collected_for_room > 0
        assert store.nbytes == sum(p.stat().st_size for p in tmp_path.rglob("*.page")) <= 20_000
        assert store.num_records == len(files(tmp_path))


# --- arguments ---


def test_bad_arguments_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    bad = [
        (lambda: PageStore(tmp_path, b"x", byte_budget=1), "fingerprint: expected 32 bytes, got 1"),
        (lambda: PageStore(tmp_path, ROOT), "needs a byte_budget"),
        (lambda: open_store(tmp_path, byte_budget=0), "byte_budget must be positive, got 0"),
        (lambda: open_store(tmp_path, lifetime_s=0), "lifetime_s must be positive"),
        (lambda: open_store(tmp_path, queue_pages=-1), "queue_pages must be positive"),
        (lambda: open_store(tmp_path / "file"), "file: cannot make the page store"),
        (lambda: open_store(tmp_path / "none", writable=False), "none: expected the directory of a page store"),
    ]
    for call, message in bad:
        with pytest.raises(DSV41Error, match=message):
            call()
    page = pages_of(tokens(PAGE))[0]
    (tmp_path / "no" / "writer.lock").mkdir(parents=True)
    with pytest.raises(DSV41Error, match=r"writer\.lock: cannot open the page store to write"):
        open_store(tmp_path / "no")
    with open_store(tmp_path) as store, pytest.raises(DSV41Error, match="array 0: expected uint8, got float32"):
        store.put(page, (np.zeros(1, np.float32),))


def test_a_reader_changes_nothing(tmp_path):
    pages = pages_of(tokens(2 * PAGE))
    with open_store(tmp_path) as store:
        fill(store, pages)
    file_of(tmp_path, pages[1]).write_bytes(b"torn")
    left = file_of(tmp_path, pages[0])
    left.with_name(left.name + ".__lock").write_bytes(b"")
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}
    with PageStore(tmp_path, ROOT, writable=False) as reader:
        assert not reader.writable
        assert len(reader.read(pages)) == 1
        reader.touch(pages)
        reader.flush()
        for call in (lambda: reader.put(pages[0], page_arrays(pages[0])), reader.collect, lambda: reader.nbytes):
            with pytest.raises(DSV41Error, match="needs a writable page store"):
                call()
        assert pages[0] in reader
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")} == before


def test_models_share_a_directory(tmp_path):
    ids = tokens(PAGE)
    theirs = pages_of(ids, root=bytes(32))
    with open_store(tmp_path) as store:
        fill(store, pages_of(ids))
    with PageStore(tmp_path, bytes(32), byte_budget=BIG) as store:
        assert store.num_records == 1
        assert store.read(theirs) == []
        fill(store, theirs)
        assert store.num_records == 2
    assert os.path.getsize(tmp_path / "writer.lock") < 20
