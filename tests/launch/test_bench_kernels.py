"""The kernels' benchmark as a command; on a CPU it times plain XLA."""

import fcntl
import json
import threading
import time

import pytest

from launch import bench_kernels
from launch.cli import run


def _run(*argv: str) -> int:
    return run(bench_kernels.main, bench_kernels.FLAGS, ["bench_kernels", *argv])


def test_table_and_json(tmp_path, capsys):
    target = tmp_path / "kernels.json"
    assert _run("--op=topk", "--tag=ci", "--spec=tiny", "--calls=2", f"--json={target}") == 0
    out = capsys.readouterr().out
    result = json.loads(target.read_text())
    command = result["command"].split()
    assert command[:3] == ["python", "-m", "launch.bench_kernels"]
    assert set(command[3:]) == {"--op=topk", "--tag=ci", "--spec=tiny", "--calls=2", f"--json={target}"}
    assert result["rows"]
    for row in result["rows"]:
        assert row["spec"] in out
        assert row["time"]["us"] > 0 and row["bytes"] > 0 and row["limit_us"] > 0
        assert row["share_of_limit"] == pytest.approx(row["limit_us"] / row["time"]["us"])


def test_the_lock_is_held_while_the_device_is_used(tmp_path):
    """Another holder of the lock makes the run wait."""
    lock, released = tmp_path / "device.lock", []

    def release(file):
        time.sleep(0.3)
        released.append(True)
        fcntl.flock(file, fcntl.LOCK_UN)

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = threading.Thread(target=release, args=(file,))
        thread.start()
        assert _run("--op=topk", "--tag=ci", "--spec=tiny_pool", "--calls=1", f"--lock={lock}") == 0
        assert released
        thread.join()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--spec=nothing"], "--spec='nothing': no shape of"),
        (["--op=softmax"], "softmax"),
        (["--json=/nowhere/x.json"], "no such directory /nowhere"),
        (["--lock=/nowhere/x.lock"], "no such directory /nowhere"),
    ],
)
def test_bad_input(argv, message, capsys):
    assert _run(*argv) == 2
    assert message in capsys.readouterr().err
