"""A second process for the tests of the store: `python -m tests.kv_store.store_process write|fork|hold DIRECTORY`.

write: opens the store to write, says so, writes prefixes, and waits to be killed.
fork: does the same in a child for every line on stdin, which is the seed of the prefixes, and prints the child's pid.
    The parent has loaded the library but has never opened a store, so that a child costs no start-up.
hold: opens the store to write, says so, and keeps it open until stdin ends.
"""

import os
import signal
import sys

from dsv41.config import DSV41Error
from dsv41.kv_store import PageStore
from tests.kv_store.rows import ROOT, page_arrays, pages_of, tokens

PAGE_SHAPES = ((40, 256), (7, 512))
ROW_PAGES = 12
PREFIXES = 40
PAGE_TOKENS = 16


def prefix(seed):
    """The pages of one prefix of the loop, the last one a tail of full length less one."""
    return pages_of(tokens(ROW_PAGES * PAGE_TOKENS + 16, seed), page_tokens=PAGE_TOKENS)


def write_until_killed(directory, seed):
    with PageStore(directory, ROOT, byte_budget=1 << 30, queue_pages=64) as store:
        print("ready", flush=True)
        for number in range(seed, seed + PREFIXES):
            for page in prefix(number):
                store.put(page, page_arrays(page, PAGE_SHAPES))
            store.flush()
        signal.pause()


def main(mode, directory):
    if mode == "write":
        write_until_killed(directory, 0)
    elif mode == "fork":
        print("loaded", flush=True)
        for line in sys.stdin:
            child = os.fork()
            if not child:
                try:
                    write_until_killed(directory, int(line))
                except BaseException as e:
                    print(f"child: {e!r}", file=sys.stderr, flush=True)
                finally:
                    os._exit(1)
            print(child, flush=True)
            os.waitpid(child, 0)
            print("ended", flush=True)
    elif mode == "hold":
        try:
            with PageStore(directory, ROOT, byte_budget=1 << 30):
                print("ready", flush=True)
                sys.stdin.read()
        except DSV41Error as e:
            print(f"refused: {e}", flush=True)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
