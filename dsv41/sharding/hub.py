"""What process 0 of a job runs beside its work: it gathers the processes, watches them, and says who ended the job."""

from __future__ import annotations

import dataclasses
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from dsv41.config import DSV41Error
from dsv41.sharding.watch import PING_S, TICK_S, Limits, Verdict, send, split

# A process that dies takes down others, through broken connections; reports within this time are weighed together.
_SETTLE_S = 0.7
_LONGEST_TEXT = 2000

# How likely a report is the cause, best first.
_DEAD, _FAILED, _CONSEQUENCE = range(3)


@dataclasses.dataclass(eq=False)
class _Peer:
    """A connection that process 0 holds."""

    sock: socket.socket
    seen: float
    index: int | None = None
    host: str | None = None
    rest: bytes = b""
    failed: bool = False
    done: bool = False


class Hub:
    """What process 0 runs, in a thread of its own."""

    def __init__(self, host: str, port: int, count: int, agree: Mapping[str, str], limits: Limits):
        """Listens and starts.

        Raises:
          DSV41Error: the port cannot be listened on.
        """
        self._count, self._agree, self._limits = count, dict(agree), limits
        self._server = _listen(host, port)
        self._server.setblocking(False)  # one that knocks and leaves at once must not hold up the rest
        self._peers: dict[socket.socket, _Peer] = {}
        self._hosts: dict[int, _Peer] = {}
        self._reports: list[tuple[int, int, Verdict]] = []
        self._judge_at: float | None = None
        self._started = self._over = self._closed = False
        self._gather_until = time.monotonic() + limits.start
        self._end_until: float | None = None
        self._ping_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread and closes all connections."""
        self._closed = True
        self._thread.join()
        self._selector.close()
        for sock in [self._server, *self._peers]:
            sock.close()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(TICK_S):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._receive(self._peers[key.fileobj])
            if not self._over:
                self._look_at_the_clock(time.monotonic())

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:
            return
        # What is sent are short lines: a receiver that takes none of them for that long is lost anyway.
        sock.settimeout(PING_S)
        self._peers[sock] = _Peer(sock, time.monotonic())
        self._selector.register(sock, selectors.EVENT_READ)

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(1 << 16)
        except OSError:
            data = b""
        messages, peer.rest = split(peer.rest + data)
        if not data or messages is None:
            self._drop(peer)
            return
        peer.seen = time.monotonic()
        for message in messages:
            self._take(peer, message)

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.sock)
        del self._peers[peer.sock]
        peer.sock.close()
        if peer.index is None or peer.failed or self._over:
            return
        self._report(_DEAD, peer, "ended without a word (killed, crashed or shut down)")

    def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.index is None:
            # Anything else on this port is no process of the job.
            if isinstance(message.get("hello"), int):
                self._join(peer, message)
        elif "failed" in message and not peer.failed:
            peer.failed = True
            rank = _CONSEQUENCE if message.get("consequence") else _FAILED
            self._report(rank, peer, str(message["failed"])[:_LONGEST_TEXT])
        elif "done" in message:
            peer.done = True
            self._end_until = self._end_until or time.monotonic() + self._limits.end
            if sum(p.done for p in self._hosts.values()) == self._count and not self._over:
                self._over = True
                self._tell({"bye": True})

    def _join(self, peer: _Peer, message: dict[str, Any]) -> None:
        index, count, host = message["hello"], message.get("count"), str(message.get("host"))
        first = self._hosts.get(index)
        problem = None
        if count != self._count:
            problem = f"was started as one of {count} processes, the coordinator as one of {self._count}"
        elif not 0 <= index < self._count:
            problem = f"there are processes 0 to {self._count - 1} only"
        elif first is not None:
            problem = f"there is one with this id already, on host {first.host}"
        elif self._started:
            problem = "came after the start"
        elif name := _difference(self._agree, message.get("agree")):
            problem = f"runs with {name}"
        if problem is None:
            peer.index, peer.host = index, host
            self._hosts[index] = peer
            if len(self._hosts) == self._count:
                self._started = True
                self._tell({"go": [self._hosts[i].host for i in range(self._count)]})
            return
        verdict = Verdict(process=index, host=host, text=problem)
        if self._started:
            # A running job does not end because a stranger knocks.
            send(peer.sock, {"verdict": dataclasses.asdict(verdict)})
        else:
            self._judge(verdict, besides=peer)

    def _report(self, rank: int, peer: _Peer, text: str) -> None:
        self._reports.append((rank, len(self._reports), Verdict(process=peer.index, host=peer.host, text=text)))
        self._judge_at = self._judge_at or time.monotonic() + _SETTLE_S

    def _look_at_the_clock(self, now: float) -> None:
        if not self._started and now > self._gather_until and not self._reports:
            missing = [i for i in range(self._count) if i not in self._hosts]
            text = f"did not come within {self._limits.start:g} s"
            if len(missing) > 1:
                text += f"; nor did {', '.join(map(str, missing[1:9]))}{' and more' if len(missing) > 9 else ''}"
            self._judge(Verdict(process=missing[0], host=None, text=text))
            return
        if now >= self._ping_at:
            self._ping_at = now + PING_S
            self._tell({"ping": True})
        for peer in list(self._hosts.values()):
            if now - peer.seen > self._limits.silence and not peer.failed:
                peer.failed = True
                self._report(_DEAD, peer, f"no sign of life for {self._limits.silence:g} s")
        if self._end_until is not None and now > self._end_until:
            late = next(p for p in self._hosts.values() if not p.done)
            self._report(_DEAD, late, f"still busy {self._limits.end:g} s after another process was done")
            self._end_until = None
        if self._judge_at is not None and now > self._judge_at and not self._undecided(now):
            self._judge(min(self._reports, key=lambda r: r[:2])[2])

    def _undecided(self, now: float) -> bool:
        """All that is reported may be the consequence of a host that has just fallen silent."""
        silent = any(not p.failed and now - p.seen > 3 * PING_S for p in self._hosts.values())
        return silent and all(rank == _CONSEQUENCE for rank, _, _ in self._reports)

    def _judge(self, verdict: Verdict, besides: _Peer | None = None) -> None:
        self._over = True
        self._tell({"verdict": dataclasses.asdict(verdict)}, besides)

    def _tell(self, message: dict[str, Any], besides: _Peer | None = None) -> None:
        """To every process; process 0 last, whose end would be the end of this thread."""
        peers = sorted((p for p in self._peers.values() if p.index is not None), key=lambda p: -p.index)
        for peer in [*([besides] if besides else []), *peers]:
            send(peer.sock, message)


def _difference(own: Mapping[str, str], other: Any) -> str | None:
    """What is not the same: "--mesh=a where process 0 has --mesh=b"."""
    other = other if isinstance(other, dict) else {}
    for name in sorted({*own, *other}):
        if own.get(name) != other.get(name):
            return f"{_shown(name, other.get(name))} where process 0 has {_shown(name, own.get(name))}"
    return None


def _shown(name: str, value: str | None) -> str:
    if value is None:
        return f"no {name}"
    return f"{name}={value if len(value) <= 80 else value[:77] + '...'}"


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, on the loopback only if that is how the coordinator is addressed."""
    try:
        if host in ("127.0.0.1", "localhost", "::1"):
            family = socket.AF_INET6 if host == "::1" else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=1024)
    except OSError as e:
        raise DSV41Error(
            f"process 0 cannot listen on port {port} ({e.strerror or e}): choose another coordinator port"
        ) from e
