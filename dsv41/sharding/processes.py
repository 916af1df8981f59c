"""Start and end of a job of several processes, one a host: JAX started in each, and no process outliving another.

    identity = resolve_identity(coordinator="10.0.0.1:1234", num_processes=2, process_id=1)
    start_processes(identity)
    ...                        # jax.devices() are those of all processes
    finish_processes()         # or fail_processes(error) where it failed

A process that fails says so and ends with a status other than 0; one that dies is missed. Every other process then
prints one line with the host's name and ends with `PEER_FAILED`, also while its main thread waits in a collective.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping

import jax

from dsv41.config import DSV41Error
from dsv41.sharding.hub import Hub
from dsv41.sharding.identity import Identity
from dsv41.sharding.watch import Limits, Member, Verdict, join

_log = logging.getLogger(__name__)

PEER_FAILED = 1
"""Exit status of a process that ends because another one did."""

_FLUSH_S = 1.0
# JAX's own heartbeats come after those here, which know names.
_JAX_SLACK_S = 60


class Processes:
    """The running job, as this process sees it."""

    def __init__(self, identity: Identity, member: Member, hub: Hub | None, limits: Limits):
        self.identity, self.hosts = identity, tuple(member.hosts)
        self._member, self._hub, self._limits = member, hub, limits

    @property
    def label(self) -> str:
        """How this process is named in what it prints."""
        return f"process {self.identity.index} on {self.hosts[self.identity.index]}"

    def fail(self, text: str, *, consequence: bool) -> Verdict:
        """See `Member.fail`."""
        return self._member.fail(text, consequence=consequence)

    def finish(self) -> None:
        """Waits until all processes are done, and stops JAX's coordination."""
        self._member.finish()
        # Everybody is here, so that this barrier takes no time; the hub goes last because closing it may lose a line.
        jax.distributed.shutdown()
        if self._hub is not None:
            self._hub.close()


_running: Processes | None = None


def running_processes() -> Processes | None:
    """The job of several processes that was started and has not ended; None: there is only this process."""
    return _running


def is_first_process() -> bool:
    """Whether this process prints results and writes files; true if it is the only one."""
    return _running is None or _running.identity.index == 0


def start_processes(
    identity: Identity, *, limits: Limits | None = None, agree: Mapping[str, str] | None = None
) -> Processes | None:
    """Gathers the processes of the job and starts JAX in them; nothing to do for a single one.

    From then on only process 0 prints to stdout, and log lines carry the process and its host. Call it before anything
    asks JAX for devices.

    Args:
      identity: which process this is.
      limits: how long to wait for what; None: `Limits()`.
      agree: what must be the same in all processes, by name, such as the flags that decide what is computed.

    Raises:
      DSV41Error: the coordinator cannot be reached, a process does not come in time, two have one id, or they do not
        agree; or JAX runs already. The message names the process and its host.
    """
    global _running
    if identity.count == 1:
        return None
    if _running is not None:
        raise DSV41Error("the processes of this job were started already")
    _check_fresh()
    limits = limits or Limits()
    agree = {"jax": jax.__version__} | dict(agree or {})
    host = socket.gethostname()
    address = (identity.address[0], identity.watch_port)
    hub = Hub(*address, identity.count, agree, limits) if identity.index == 0 else None
    try:
        member = join(address, identity.index, identity.count, host, agree, limits)
    except BaseException:
        if hub is not None:
            hub.close()
        raise
    _running = Processes(identity, member, hub, limits)
    atexit.register(_finish_at_exit)
    _hold_aborts()
    _label_logs(_running.label)
    _own_stdout(identity.index == 0)
    member.watch(_end)
    _start_jax(identity, limits)
    _log.info("%d processes on %s, as %s says", identity.count, ", ".join(_running.hosts), identity.source)
    return _running


def finish_processes() -> None:
    """Call it where the job is done: returns when all processes are there, and does nothing for a single one."""
    global _running
    if _running is not None:
        sys.stdout.flush()
        _running.finish()
        _running = None
        signal.signal(signal.SIGABRT, signal.SIG_DFL)


def _finish_at_exit() -> None:
    """For programs that call neither: JAX's own exit would wait for processes that may have failed."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        fail_processes(error, 1, "")  # the interpreter has printed it
    finish_processes()


def fail_processes(error: BaseException, status: int, line: str | None = None) -> None:
    """Call it where this process fails: ends it with `status`, and with it the job; returns if it is the only one.

    If the error turns out to be the consequence of another process's end, the line printed names that one instead.

    Args:
      error: what happened; told to the other processes in one line.
      status: the exit status.
      line: what to print; None: the traceback; empty: nothing.
    """
    if _running is None:
        return
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, DSV41Error):
        text = f"{type(error).__name__}: {text}"
    # Errors of JAX's runtime include broken connections to a process that has gone.
    verdict = _running.fail(text, consequence=isinstance(error, jax.errors.JaxRuntimeError))
    if verdict.process != _running.identity.index:
        _end(verdict)
    _write("".join(traceback.format_exception(error)) if line is None else f"{line}\n" if line else "")
    _leave(status)


def _check_fresh() -> None:
    """Raises DSV41Error if JAX has devices already: it would not see those of other processes any more."""
    from jax._src import xla_bridge

    initialized = getattr(xla_bridge, "backends_are_initialized", None)
    if initialized is not None and initialized():
        raise DSV41Error("processes must be started before JAX is asked for devices")


def _start_jax(identity: Identity, limits: Limits) -> None:
    """JAX's own start; what differs between its releases about it belongs here."""
    # The service would swallow SIGTERM, by which schedulers end processes, to announce a preemption to nobody.
    jax.config.update("jax_enable_preemption_service", False)
    if (jax.config.jax_platforms or "").split(",")[0] == "cpu":
        # Of CPU processes only the first finds its programs in the compile cache. jaxlib lets a collective wait half a
        # minute for the others, which compile, and ends the job.
        jax.config.update("jax_enable_compilation_cache", False)
    try:
        jax.distributed.initialize(
            coordinator_address=identity.coordinator,
            num_processes=identity.count,
            process_id=identity.index,
            local_device_ids=identity.local_devices,
            # Everything is known: a cluster that JAX finds must not add to it.
            cluster_detection_method="deactivate",
            initialization_timeout=int(limits.start) + 1,
            heartbeat_timeout_seconds=int(limits.silence) + _JAX_SLACK_S,
            shutdown_timeout_seconds=_JAX_SLACK_S,
        )
    except (RuntimeError, ValueError) as e:
        raise DSV41Error(f"JAX did not start at {identity.coordinator}: {e}") from e


def _hold_aborts() -> None:
    """Lets a thread that calls `abort` sleep a little, so that the watch can end the process first.

    A thread of JAX aborts the process when the connection to the coordinator breaks, with a stack trace that names no
    host, at the very moment that the watch learns who has gone. The handler is C's own `sleep`, whose argument is then
    the number of the signal, 6: it needs nothing of Python, which may be what is stuck. Behind it the abort goes on.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _label_logs(label: str) -> None:
    """Puts the process into every log line."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(f"[{label}] %(levelname)s:%(name)s:%(message)s"))


def _own_stdout(first: bool) -> None:
    """Leaves stdout to process 0, and in it to Python: libraries under JAX print to it about connections."""
    sys.stdout.flush()
    kept = os.dup(1) if first else os.open(os.devnull, os.O_WRONLY)
    os.dup2(2, 1)
    sys.stdout = open(kept, "w", encoding=sys.stdout.encoding, buffering=1 if os.isatty(kept) else -1)  # noqa: SIM115


def _end(verdict: Verdict) -> None:
    """Ends this process because of another one."""
    _write(f"[{_running.label}] the job ends because of {verdict}\n")
    _leave(PEER_FAILED)


def _write(text: str) -> None:
    """To stderr past Python's buffers, whose locks the main thread may hold."""
    os.write(2, text.encode(errors="backslashreplace"))


def _leave(status: int) -> None:
    """Ends the process at once: an orderly exit would wait for the others in JAX's own barrier."""
    flush = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flush.start()
    flush.join(_FLUSH_S)
    os._exit(status)
