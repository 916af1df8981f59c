"""Jobs of two real processes on the CPU: they compute together, and none outlives another."""

import pathlib
import signal
import socket

import jax
import pytest

from dsv41.config import DSV41Error
from dsv41.sharding.identity import Identity
from dsv41.sharding.processes import finish_processes, is_first_process, running_processes, start_processes
from tests.sharding.jobs import Job

SCRIPT = pathlib.Path(__file__).with_name("process_job.py")
HOST = socket.gethostname()
# From the death of a process to the end of the other, on a machine that is busy; the watch itself takes 1 s.
SOON_S = 15


def start(tmp_path, mode):
    return Job(tmp_path, lambda port, index: [str(SCRIPT), mode, str(port), "2", str(index)])


def last_line(text):
    return text.rstrip("\n").rsplit("\n", 1)[-1]


def test_they_compute_together_and_the_first_one_prints(tmp_path):
    job = start(tmp_path, "plain")
    assert job.end(90) == [0, 0], job.err(0) + job.err(1)
    # Four devices with ones. Libraries that print to stdout must not reach it.
    assert job.out(0) == "sum (4.0, 4.0), first True\n"
    assert job.out(1) == ""
    for i in range(2):
        assert f"[process {i} on {HOST}] WARNING:root:started\n" in job.err(i)
        assert "the job ends" not in job.err(i)


def test_no_process_has_its_programs_before_the_others(tmp_path, monkeypatch):
    """One that finds them in the compile cache waits in a collective for those that compile, and not for long."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    job = start(tmp_path, "plain")
    assert job.end(90) == [0, 0], job.err(0) + job.err(1)
    assert not list((tmp_path / "cache").glob("*"))


def test_one_that_raises_ends_the_other_with_its_name(tmp_path):
    job = start(tmp_path, "raise1")
    assert job.end(90) == [1, 1]
    reason = f"[process 0 on {HOST}] the job ends because of host {HOST} (process 1): ValueError: the disk is full"
    assert last_line(job.err(0)) == reason
    assert "raise ValueError" in job.err(1) and "the job ends" not in job.err(1)


@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_is_killed_is_named(tmp_path, victim):
    """Also the coordinator, whose end JAX alone turns into an abort without a name."""
    job = start(tmp_path, f"kill{victim}")
    job.wait_for(victim, "ready")
    job.processes[victim].send_signal(signal.SIGKILL)
    statuses = job.end(SOON_S)
    assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] == 1
    reason = f"host {HOST} (process {victim}): ended without a word (killed, crashed or shut down)"
    assert f"[process {1 - victim} on {HOST}] the job ends because of {reason}\n" in job.err(1 - victim)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["raise0", "abort0", "abort1", "stop0", "stop1"])
def test_other_ways_to_end(tmp_path, mode):
    """An error in the coordinator, a crash in native code, and a process that answers no more."""
    job, victim = start(tmp_path, mode), int(mode[-1])
    if mode.startswith("stop"):
        job.wait_for(victim, "ready")
        job.processes[victim].send_signal(signal.SIGSTOP)
        # 5 s of silence, then a second to weigh reports.
        assert job.processes[1 - victim].wait(SOON_S + 6) == 1
        job.processes[victim].send_signal(signal.SIGCONT)
        job.processes[victim].kill()
    statuses = job.end(90)
    assert statuses[1 - victim] == 1 and statuses[victim] not in (0, None)
    text = {"raise": "ValueError: the disk is full", "abort": "ended without", "stop": "no sign of life for 5 s"}[
        mode[:-1]
    ]
    assert f"the job ends because of host {HOST} (process {victim}): {text}" in job.err(1 - victim)


@pytest.mark.slow
def test_bad_input_of_one_has_its_own_status(tmp_path):
    job = start(tmp_path, "refuse1")
    assert job.end(90) == [1, 2]
    assert last_line(job.err(0)).endswith("(process 1): a.json: no such file")
    assert last_line(job.err(1)) == "job: a.json: no such file"


def test_other_input_in_one_of_them_is_named(tmp_path):
    """Else their programs would differ, and wait for each other."""
    job = start(tmp_path, "input")
    assert sorted(job.end(90)) in ([1, 2], [2, 2])
    assert f"tokens: process 1 on {HOST} has read something else than process 0" in job.err(0) + job.err(1)
    assert job.out(0) == ""


def test_a_single_process_starts_nothing():
    assert start_processes(Identity()) is None and running_processes() is None and is_first_process()
    finish_processes()


def test_too_late_once_jax_has_devices():
    jax.devices()
    with pytest.raises(DSV41Error, match="before JAX is asked for devices"):
        start_processes(Identity(coordinator="127.0.0.1:1", count=2, index=1))
