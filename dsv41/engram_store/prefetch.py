"""Work done ahead of time by a thread of its own: rows of the next chunk, while the device computes the present one."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Result = TypeVar("_Result")

# How long a waiting caller sleeps before it looks at the device again.
_LOOK_S = 5e-4


class Prefetcher(Generic[_Result]):
    """Calls functions on one background thread, in the order they were asked for, and keeps what they return.

    What a function raises is raised by `take`, in the thread of the caller. At most `depth` results wait to be taken.
    A `with` statement ends the thread.
    """

    def __init__(self, *, depth: int = 2):
        self.depth = depth
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="engram-prefetch")
        self._asked: dict[Hashable, concurrent.futures.Future[_Result]] = {}

    def ask(self, key: Hashable, make: Callable[[], _Result]) -> bool:
        """Has `make` called soon, unless that was asked for already; False: too many wait, ask later."""
        if key in self._asked:
            return True
        if len(self._asked) >= self.depth:
            return False
        self._asked[key] = self._thread.submit(make)
        return True

    def take(self, key: Hashable, meanwhile: Callable[[], None] = lambda: None) -> _Result | None:
        """What was asked for under `key`, waiting for it; None if nothing was.

        Args:
          key: as given to `ask`.
          meanwhile: called now and then while waiting.
        """
        future = self._asked.pop(key, None)
        if future is None:
            return None
        while not future.done():
            meanwhile()
            concurrent.futures.wait([future], timeout=_LOOK_S)
        return future.result()

    def forget(self) -> None:
        """Drops what nobody will take."""
        for future in self._asked.values():
            future.cancel()
        self._asked.clear()

    def close(self) -> None:
        """Ends the thread, after the call that it is in; what waits behind is dropped."""
        self.forget()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Prefetcher[_Result]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
