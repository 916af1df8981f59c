"""Jobs of two processes on this machine, for tests."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]


def free_port() -> int:
    """A port that is free and so is the next one, for the coordinator and the watch."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


class Job:
    """Two processes of one command; `command(port, index)` is what runs as process `index`."""

    def __init__(self, directory: pathlib.Path, command, *, count: int = 2):
        self.port = free_port()
        # A script that a test starts sees the devices that it asks for, and computes as one started by hand.
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        self._files = [[directory / f"{i}.{name}" for name in ("out", "err")] for i in range(count)]
        self.processes = []
        for i, files in enumerate(self._files):
            with files[0].open("wb") as out, files[1].open("wb") as err:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *command(self.port, i)], stdout=out, stderr=err, cwd=ROOT, env=environ
                    )
                )

    def out(self, index: int) -> str:
        return self._files[index][0].read_text()

    def err(self, index: int) -> str:
        return self._files[index][1].read_text()

    def wait_for(self, index: int, text: str, timeout: float = 60.0) -> None:
        """Until the process has written the text to stderr."""
        until = time.monotonic() + timeout
        while text not in self.err(index):
            assert time.monotonic() < until and self.processes[index].poll() is None, self.err(index)
            time.sleep(0.02)

    def end(self, timeout: float) -> list[int]:
        """Exit statuses of all; fails, and ends them, if one still runs after that many seconds."""
        until = time.monotonic() + timeout
        try:
            return [p.wait(max(0.0, until - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired as e:
            raise AssertionError(f"still running: {e.cmd}\n{[self.err(i) for i in range(len(self.processes))]}") from e
        finally:
            for p in self.processes:
                if p.poll() is None:
                    p.kill()
                    p.wait()
