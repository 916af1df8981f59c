"""How processes gather and who is blamed, with threads in place of processes."""

import concurrent.futures
import json
import socket
import threading
import time

import pytest

from dsv41.config import DSV41Error
from dsv41.sharding import hub, watch
from dsv41.sharding.hub import Hub
from dsv41.sharding.watch import Limits, Verdict, join
from tests.sharding.jobs import free_port

LIMITS = Limits(start=20, silence=20, end=20)


class Party:
    """A hub and connections to it."""

    def __init__(self, count, limits=LIMITS, agree=None):
        self.address = ("127.0.0.1", free_port())
        self.count, self.limits, self.agree = count, limits, agree or {}
        self.hub = Hub(*self.address, count, self.agree, limits)
        self.members = []

    def join(self, index, **changes):
        own = {"count": self.count, "host": f"host-{index}", "agree": self.agree, "limits": self.limits} | changes
        return join(self.address, index, **own)

    def gather(self, *arguments):
        """Joins as each of (index, changes) at the same time; members or errors."""
        with concurrent.futures.ThreadPoolExecutor(len(arguments)) as pool:
            jobs = [pool.submit(self.join, index, **changes) for index, changes in arguments]
            found = [job.exception() or job.result() for job in jobs]
        self.members += [m for m in found if isinstance(m, watch.Member)]
        return found

    def close(self):
        self.hub.close()
        for member in self.members:
            member._sock.close()


@pytest.fixture
def party():
    made = []

    def make(*args, **kwargs):
        made.append(Party(*args, **kwargs))
        return made[-1]

    yield make
    for p in made:
        p.close()


class Seen:
    """Verdicts that a member is told."""

    def __init__(self, member):
        self.event, self.verdict = threading.Event(), None
        member.watch(self)

    def __call__(self, verdict):
        self.verdict = verdict
        self.event.set()

    def wait(self):
        assert self.event.wait(10)
        return self.verdict


def test_all_learn_who_is_there_and_leave_together(party):
    p = party(3)
    members = p.gather((2, {}), (0, {}), (1, {}))
    assert all(m.hosts == ["host-0", "host-1", "host-2"] for m in members)
    seen = [Seen(m) for m in members]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        early = [pool.submit(m.finish) for m in members[:2]]
        time.sleep(0.3)
        assert not any(job.done() for job in early), "the third is still at work"
        members[2].finish()
        for job in early:
            job.result(10)
    assert all(s.verdict is None for s in seen)


@pytest.mark.parametrize(
    "index, changes, message",
    [
        (1, {"count": 3}, "host host-1 (process 1): was started as one of 3 processes, the coordinator as one of 2"),
        (2, {}, "host host-2 (process 2): there are processes 0 to 1 only"),
        (0, {"host": "other"}, "host other (process 0): there is one with this id already, on host host-0"),
        (1, {"agree": {"--mesh": "data=4"}}, "host host-1 (process 1): runs with --mesh=data=4 where process 0 has "
         "--mesh=data=2"),
        (1, {"agree": {}}, "host host-1 (process 1): runs with no --mesh where process 0 has --mesh=data=2"),
    ],
)  # fmt: skip
def test_processes_that_do_not_fit_end_the_start(party, index, changes, message):
    p = party(2, agree={"--mesh": "data=2"})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(p.join, 0)
        while 0 not in p.hub._hosts:
            time.sleep(0.01)
        with pytest.raises(DSV41Error) as other:
            p.join(index, **changes)
        assert str(other.value) == message
        assert str(first.exception(10)) == message


def test_who_does_not_come_is_named(party):
    p = party(4, Limits(start=0.5))
    errors = p.gather((0, {}), (2, {}))
    assert [str(e) for e in errors] == ["process 1: did not come within 0.5 s; nor did 3"] * 2


def test_a_coordinator_that_is_not_there():
    address = ("127.0.0.1", free_port())
    started = time.monotonic()
    with pytest.raises(DSV41Error, match=rf"process 0 cannot be reached at 127.0.0.1:{address[1]} within 0.5 s \("):
        join(address, 1, 2, "host-1", {}, Limits(start=0.5))
    assert time.monotonic() - started < 5


def test_a_port_in_use(party):
    p = party(2)
    with pytest.raises(DSV41Error, match=f"cannot listen on port {p.address[1]} .*: choose another coordinator port"):
        Hub(*p.address, 2, {}, LIMITS)


def test_something_else_listens_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        with pytest.raises(DSV41Error, match="ended before the start, or is no process of this job"):
            join(server.getsockname(), 1, 2, "host-1", {}, LIMITS)


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"hello": "x"}\n', b"[1]\n", b"x" * (1 << 21)])
def test_strangers_do_no_harm(party, noise):
    p = party(2)
    with socket.create_connection(p.address) as stranger:
        try:
            stranger.sendall(noise)
        except OSError:
            assert len(noise) > 1 << 20, "only what never ends is cut off"
    seen = [Seen(m) for m in p.gather((0, {}), (1, {}))]
    # Nor does one that comes later with an id of the job.
    with pytest.raises(DSV41Error, match="there is one with this id already"):
        p.join(1)
    assert all(s.verdict is None for s in seen)


def test_one_that_fails_is_named_to_all(party):
    p = party(3)
    members = p.gather((0, {}), (1, {}), (2, {}))
    seen = [Seen(m) for m in members]
    expected = Verdict(process=1, host="host-1", text="ValueError: bad")
    assert members[1].fail("ValueError: bad", consequence=False) == expected
    assert seen[0].wait() == seen[2].wait() == expected
    assert seen[1].verdict is None, "the one that fails ends itself"
    assert str(expected) == "host host-1 (process 1): ValueError: bad"


def test_the_dead_are_blamed_before_those_they_take_along(party):
    """A broken collective fails in a process that is well, before or after the death is noticed."""
    p = party(3)
    members = p.gather((0, {}), (1, {}), (2, {}))
    seen = [Seen(m) for m in members[:2]]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        failing = pool.submit(members[1].fail, "connection closed by peer", consequence=True)
        time.sleep(0.1)
        members[2]._sock.close()
        expected = Verdict(process=2, host="host-2", text="ended without a word (killed, crashed or shut down)")
        assert seen[0].wait() == failing.result(10) == expected


def test_the_first_of_two_errors_is_blamed(party):
    p = party(3)
    members = p.gather((0, {}), (1, {}), (2, {}))
    Seen(members[0]), Seen(members[1]), Seen(members[2])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        second = pool.submit(members[1].fail, "broken", consequence=True)
        time.sleep(0.1)
        first = pool.submit(members[2].fail, "KeyError: 'x'", consequence=False)
        assert first.result(10) == second.result(10) == Verdict(process=2, host="host-2", text="KeyError: 'x'")


def test_silence_is_noticed_on_both_sides(party, monkeypatch):
    for module in (hub, watch):
        monkeypatch.setattr(module, "PING_S", 0.1)
    p = party(2, Limits(silence=0.6))
    members = p.gather((0, {}), (1, {}))
    # Process 1 never answers: nothing reads its connection.
    verdict = Seen(members[0]).wait()
    assert str(verdict) == "host host-1 (process 1): no sign of life for 0.6 s"
    p = party(2, Limits(silence=0.6))
    members = p.gather((0, {}), (1, {}))
    monkeypatch.setattr(Hub, "_tell", lambda self, message, besides=None: None)
    assert str(Seen(members[1]).wait()) == "host host-0 (process 0): no sign of life for 0.6 s"


def test_one_that_is_never_done_ends_the_job(party):
    p = party(2, Limits(end=0.5))
    members = p.gather((0, {}), (1, {}))
    seen = [Seen(m) for m in members]
    threading.Thread(target=members[0].finish, daemon=True).start()
    assert str(seen[1].wait()) == "host host-1 (process 1): still busy 0.5 s after another process was done"


def test_limits_are_positive():
    with pytest.raises(DSV41Error, match="silence timeout 0: expected more than 0 seconds"):
        Limits(silence=0)


def test_what_is_compared_is_shown_short():
    assert hub._difference({"--prompt": "a" * 500}, {"--prompt": "b"}) == (
        f"--prompt=b where process 0 has --prompt={'a' * 77}..."
    )
    assert hub._difference({"a": "1"}, json.loads('{"a": "1"}')) is None
