"""Several processes on one store, and processes that are killed while they write."""

import contextlib
import logging
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from dsv41.config import DSV41Error
from dsv41.kv_store import PageStore
from tests.kv_store.rows import ROOT, page_arrays, pages_of, tokens
from tests.kv_store.store_process import PAGE_SHAPES, PAGE_TOKENS, PREFIXES, prefix

REPOSITORY = pathlib.Path(__file__).parents[2]


@contextlib.contextmanager
def process(mode, directory):
    # JAX warns of every fork; the children do not use it.
    command = [sys.executable, "-W", "ignore", "-m", "tests.kv_store.store_process", mode, str(directory)]
    started = subprocess.Popen(
        command, cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def say(started, line):
    started.stdin.write(f"{line}\n")
    started.stdin.flush()


def test_one_writer_and_many_readers(tmp_path):
    page = pages_of(tokens(PAGE_TOKENS), page_tokens=PAGE_TOKENS)[0]
    with process("hold", tmp_path) as holder:
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(DSV41Error, match=rf"another process \(pid {holder.pid}\) writes to this page store"):
            PageStore(tmp_path, ROOT, byte_budget=1 << 20)
        with PageStore(tmp_path, ROOT, writable=False) as one, PageStore(tmp_path, ROOT, writable=False) as two:
            assert one.read([page]) == two.read([page]) == []
        holder.kill()  # leaves its lock file, but no lock
        holder.wait()
        with PageStore(tmp_path, ROOT, byte_budget=1 << 20) as store:
            store.put(page, page_arrays(page))
            store.flush()
            with pytest.raises(DSV41Error, match=rf"pid {os.getpid()}"):  # nor may one process write twice
                PageStore(tmp_path, ROOT, byte_budget=1 << 20)
            with process("hold", tmp_path) as late:
                assert late.stdout.readline().startswith("refused: ")
                assert late.wait(60) == 2
            with PageStore(tmp_path, ROOT, writable=False) as reader:
                assert len(reader.read([page])) == 1


def test_a_reader_sees_only_whole_pages_while_another_process_writes(tmp_path, caplog):
    with process("write", tmp_path) as writer, caplog.at_level(logging.WARNING):
        assert writer.stdout.readline() == "ready\n"
        with PageStore(tmp_path, ROOT, writable=False) as reader:
            deadline, seed, read = time.monotonic() + 60, 0, 0
            while seed < 20 and time.monotonic() < deadline:
                found = reader.read(prefix(seed))
                assert all(same(stored) for stored in found)
                read += len(found)
                seed += len(found) >= 12
            assert seed == 20
            assert reader.stats.damaged == reader.stats.unreadable == 0
        assert caplog.records == []
        assert read >= 240


def same(stored):
    return all((a == b).all() for a, b in zip(stored.arrays, page_arrays(stored.page, PAGE_SHAPES), strict=True))


def check_store(directory, seeds):
    """Opens the store to write and reads all that is there: pages, and how many records the directory holds."""
    with PageStore(directory, ROOT, byte_budget=1 << 30) as store:
        assert not list(directory.rglob("*.__lock"))
        good = sum(same(stored) for seed in seeds for stored in read_all(store, prefix(seed)))
        assert store.stats.damaged == store.stats.unreadable == 0
        return good, store.num_records


def read_all(store, pages):
    """Each page by itself: a killed writer may have committed a page before its parent."""
    return [stored for page in pages for stored in store.read([page])]


def kill_loop(directory, kills, caplog):
    """Kills a writing process again and again, then looks at the store."""
    delays = random.Random(0)
    committed = partial = 0
    begin = time.monotonic()
    with process("fork", directory) as parent, caplog.at_level(logging.WARNING):
        assert parent.stdout.readline() == "loaded\n"
        for kill in range(kills):
            say(parent, 1000 * kill)
            child = int(parent.stdout.readline())
            assert parent.stdout.readline() == "ready\n"
            time.sleep(delays.uniform(0, 0.06))
            os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "ended\n"
            partial += len(list(directory.rglob("*.__lock")))
            good, records = check_store(directory, [1000 * kill + i for i in range(PREFIXES)])
            assert records == committed + good, "every committed page verifies"
            committed = records
    good, records = check_store(directory, [1000 * k + i for k in range(kills) for i in range(PREFIXES)])
    assert good == records == committed > 0
    assert caplog.records == []
    return (
        f"kill loop: {kills} kills, {committed} pages committed and verified, {partial} unfinished files removed, "
        f"0 damaged, {time.monotonic() - begin:.1f} s"
    )


def test_killed_writers_leave_only_whole_pages(tmp_path, caplog, capsys):
    summary = kill_loop(tmp_path, 50, caplog)
    with capsys.disabled():
        print(f"\n{summary}")
