"""The processes of a job gather before any work, and all of them end when one does, knowing which.

Each holds a connection to process 0. The operating system closes it when its process ends, however that happens, so a
death is known at once and needs no cooperation of the dead; a host that falls silent is missed after a while. JAX's
coordination service finds out too, but only by missed heartbeats, knows no host names, ends processes by `abort` with a
stack trace in place of a message, and does so also when the start fails.

What goes over a connection are lines of JSON:

| from a process | meaning |
|---|---|
| hello, count, host, agree | its index, how many it expects, its host, what must be the same everywhere |
| pong | alive |
| failed, consequence | why it ends; whether that may only be the consequence of another's end |
| done | it has nothing left to do |

| from process 0 | meaning |
|---|---|
| go | host names of all: everybody is there |
| ping | to be answered |
| verdict | which process ends the job, its host, and why |
| bye | everybody is done |
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dsv41.config import DSV41Error

TICK_S = 0.2
PING_S = 1.0
_LONGEST_LINE = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds, all positive.

    Attributes:
      start: until every process must have come.
      silence: without a sign of life, after which a process counts as lost.
      end: from the first process that is done to the last.
    """

    start: float = 120.0
    silence: float = 60.0
    end: float = 600.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise DSV41Error(f"{field.name} timeout {getattr(self, field.name)}: expected more than 0 seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why the job ends."""

    process: int
    host: str | None
    text: str

    def __str__(self) -> str:
        name = f"process {self.process}" if self.host is None else f"host {self.host} (process {self.process})"
        return f"{name}: {self.text}"


def send(sock: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends a line; a receiver that has gone is noticed where lines are received."""
    with contextlib.suppress(OSError):
        sock.sendall(json.dumps(message).encode() + b"\n")


def split(data: bytes) -> tuple[list[dict[str, Any]] | None, bytes]:
    """Whole lines and what is left; None in place of lines that are not of this protocol."""
    *lines, rest = data.split(b"\n")
    try:
        messages = [json.loads(line) for line in lines]
    except ValueError:
        return None, b""
    known = len(rest) <= _LONGEST_LINE and all(isinstance(m, dict) for m in messages)
    return (messages if known else None), rest


class Member:
    """A process's connection to process 0, served by a thread; process 0 has one too."""

    def __init__(self, sock: socket.socket, index: int, hosts: list[str], limits: Limits):
        self.index, self.hosts = index, hosts
        self._sock, self._limits = sock, limits
        self._sending = threading.Lock()
        self._failing = False
        self._settled = threading.Event()
        self._over = threading.Event()
        self._verdict: Verdict | None = None
        self._on_verdict: Callable[[Verdict], None] | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def watch(self, on_verdict: Callable[[Verdict], None]) -> None:
        """Starts the thread, which calls `on_verdict` when the job ends, unless this process waits in `fail`."""
        self._on_verdict = on_verdict
        self._thread.start()

    def fail(self, text: str, *, consequence: bool) -> Verdict:
        """Says that this process ends and waits for what process 0 makes of it: the verdict may name another."""
        self._failing = True
        self._say({"failed": text, "consequence": consequence})
        own = Verdict(process=self.index, host=self.hosts[self.index], text=text)
        return self._verdict if self._settled.wait(self._limits.silence + 10) and self._verdict else own

    def finish(self) -> None:
        """Returns when every process is done; if one fails meanwhile, the thread ends this one."""
        self._say({"done": True})
        self._over.wait()
        self._thread.join()
        self._sock.close()

    def _say(self, message: dict[str, Any]) -> None:
        with self._sending:
            send(self._sock, message)

    def _run(self) -> None:
        seen, rest = time.monotonic(), b""
        while not self._over.is_set():
            try:
                data = self._sock.recv(1 << 16)
            except TimeoutError:
                if time.monotonic() - seen > self._limits.silence:
                    self._settle(self._first(f"no sign of life for {self._limits.silence:g} s"))
                continue
            except OSError:
                data = b""
            if not data:
                self._settle(self._first("ended without a word (killed, crashed or shut down)"))
                return
            seen = time.monotonic()
            messages, rest = split(rest + data)
            for message in messages or []:
                if "ping" in message:
                    self._say({"pong": True})
                elif "verdict" in message:
                    self._settle(Verdict(**message["verdict"]))
                    return
                elif "bye" in message:
                    self._over.set()

    def _first(self, text: str) -> Verdict:
        return Verdict(process=0, host=self.hosts[0], text=text)

    def _settle(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._settled.set()
        if not self._failing:
            self._on_verdict(verdict)


def join(
    address: tuple[str, int], index: int, count: int, host: str, agree: Mapping[str, str], limits: Limits
) -> Member:
    """Says hello to process 0 and waits until everybody has.

    Raises:
      DSV41Error: process 0 cannot be reached, somebody does not come, or the processes do not fit together.
    """
    until = time.monotonic() + limits.start
    sock = _connect(address, until, limits)
    try:
        send(sock, {"hello": index, "count": count, "host": host, "agree": dict(agree)})
        rest = b""
        # Process 0 has the same limit and names who is missing; it may have started later than this one.
        while time.monotonic() < until + limits.start:
            try:
                data = sock.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            messages, rest = split(rest + data)
            if not data or messages is None:
                raise DSV41Error(f"process 0 at {_at(address)} ended before the start, or is no process of this job")
            for message in messages:
                if "ping" in message:
                    send(sock, {"pong": True})
                elif "verdict" in message:
                    raise DSV41Error(str(Verdict(**message["verdict"])))
                elif "go" in message:
                    return Member(sock, index, message["go"], limits)
        raise DSV41Error(f"process 0 at {_at(address)} did not start the job within {2 * limits.start:g} s")
    except BaseException:
        sock.close()
        raise


def _connect(address: tuple[str, int], until: float, limits: Limits) -> socket.socket:
    while True:
        try:
            sock = socket.create_connection(address, timeout=max(0.1, min(5.0, until - time.monotonic())))
            sock.settimeout(PING_S)
            return sock
        except OSError as e:
            if time.monotonic() + TICK_S > until:
                raise DSV41Error(
                    f"process 0 cannot be reached at {_at(address)} within {limits.start:g} s ({e.strerror or e})"
                ) from e
        time.sleep(TICK_S)


def _at(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
