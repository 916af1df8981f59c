"""State that comes back bit by bit, and what is left of a save that did not end."""

import logging
import resource
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsv41.config import DSV41Error
from dsv41.train.checkpoints import Checkpoints, UnreadableCheckpoint
from tests.sharding.jobs import Job


def bits(tree):
    """Every leaf as dtype, shape and bytes."""
    found = []
    for x in jax.tree.leaves(tree):
        key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        found.append((str(x.dtype), x.shape, np.asarray(jax.random.key_data(x) if key else x).tobytes()))
    return found


def make_state(seed=0, width=32):
    """Parameters, the state of an optimiser that has run, and keys."""
    params = {"layers": {"0": {"weight": jax.random.normal(jax.random.key(seed), (8, width))}}, "head": jnp.ones(width)}
    optimizer = optax.chain(optax.scale_by_adam(), optax.masked(optax.trace(0.9), {"layers": True, "head": False}))
    _, optimizer_state = optimizer.update(params, optimizer.init(params), params)
    odd = {
        "half": jnp.asarray([1.5, -0.0, jnp.nan, jnp.inf], jnp.bfloat16),
        "flags": jnp.asarray([True, False]),
        "nothing": jnp.zeros((0, 3)),
        "host": np.arange(3, dtype=np.uint8),
    }
    return {"params": params, "optimizer": optimizer_state, "odd": odd, "key": jax.random.key(seed + 1)}


RECORD = {"tokens": 45 * 10**12, "data": {"rows": "3f", "position": {"next_index": 7}}, "rate": 0.1}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with steps 10 and 20, whose states have the seeds 10 and 20."""
    folder = tmp_path_factory.mktemp("two_steps") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, make_state(step), RECORD | {"tokens": step})
    return folder


@pytest.fixture
def folder(two_steps, tmp_path):
    return shutil.copytree(two_steps, tmp_path / "copy")


def test_comes_back_bit_by_bit(two_steps):
    state = make_state(20)
    with Checkpoints(two_steps, read_only=True) as checkpoints:
        found = checkpoints.restore_latest(make_state(1))
        assert checkpoints.steps() == [10, 20] and checkpoints.latest() == 20
        assert checkpoints.record(10) == RECORD | {"tokens": 10}
        assert bits(checkpoints.restore(10, state)) == bits(make_state(10))
    assert (found.step, found.record) == (20, RECORD | {"tokens": 20})
    assert bits(found.state) == bits(state)
    assert jax.tree.structure(found.state) == jax.tree.structure(state)
    assert jnp.array_equal(jax.random.bits(found.state["key"], 4), jax.random.bits(state["key"], 4))
    assert isinstance(found.state["odd"]["host"], np.ndarray)


def test_single_arrays(two_steps):
    """Without a tree to compare with, each read when it is asked for; keys are not among them."""
    state = make_state(20)
    with Checkpoints(two_steps, read_only=True) as checkpoints:
        arrays = checkpoints.arrays(20)
        assert {"params.head", "optimizer.0.mu.head", "odd.half", "odd.host"} < arrays.keys() and "key" not in arrays
        for name, x in (("params.head", state["params"]["head"]), *((f"odd.{n}", x) for n, x in state["odd"].items())):
            assert (arrays[name].shape, arrays[name].dtype) == (x.shape, x.dtype)
            assert bits(np.asarray(arrays[name])) == bits(x)


def test_other_kinds_of_keys(tmp_path):
    state = {"rbg": jax.random.key(3, impl="rbg"), "many": jax.random.split(jax.random.key(4), 5)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state, {})
        found = checkpoints.restore(0, state)
        assert bits(found) == bits(state) and found["rbg"].dtype == state["rbg"].dtype
        with pytest.raises(
            DSV41Error, match=r"0: of another model .*: rbg: expected key<fry> \[\], it has key<rbg> \[\]"
        ):
            checkpoints.restore(0, state | {"rbg": jax.random.key(3)})


def test_leaves_lie_where_those_of_the_other_tree_do(tmp_path):
    """Saved from a mesh; read on to another one, on one device and on none in particular."""
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    on = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731
    values = {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "count": np.int32(3)}
    state = jax.device_put(values, {"w": on("a", "b"), "count": on()}) | {
        "key": jax.device_put(jax.random.key(1), on())
    }
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    likes = [
        state,
        jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state,
                     {"w": on(None, ("b", "a")), "count": one, "key": on()}),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state),
    ]  # fmt: skip
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        for like in likes:
            found = checkpoints.restore(1, like)
            assert bits(found) == bits(state)
            for name, x in like.items():
                assert found[name].committed == (x.sharding is not None)
                assert x.sharding is None or found[name].sharding == x.sharding
        # And the other way.
        checkpoints.save(2, found, {})
        again = checkpoints.restore(2, state)
        assert bits(again) == bits(state) and jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(
            lambda x: x.sharding, state
        )


def test_a_free_key_goes_with_arrays_of_a_mesh(tmp_path):
    """A key that was bound to no device is not bound to one by coming back: it would not go with a mesh."""
    sharded = NamedSharding(jax.make_mesh((8,), ("a",)), PartitionSpec("a"))
    state = {"w": jax.device_put(jnp.zeros(8), sharded), "key": jax.random.key(0)}
    step = jax.jit(lambda s: s["w"] + jax.random.normal(s["key"], 8))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        assert jnp.array_equal(step(checkpoints.restore(1, state)), step(state))


def test_only_the_last_ones_stay(tmp_path):
    state = {"x": jnp.ones(3)}
    with Checkpoints(tmp_path / "new" / "folder", keep=3, every=5) as checkpoints:
        assert [step for step in range(20) if checkpoints.due(step)] == [0, 5, 10, 15]
        for step in (1, 2, 7, 9, 11):
            checkpoints.save(step, state, {"at": step})
        assert checkpoints.steps() == [7, 9, 11]
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["11", "7", "9"]


def test_saving_an_earlier_step_gives_up_later_ones(folder):
    with Checkpoints(folder, keep=3) as checkpoints:
        checkpoints.save(15, make_state(15), {})
        assert checkpoints.steps() == [10, 15]
        checkpoints.save(15, make_state(16), {"again": True})
        assert checkpoints.steps() == [10, 15] and checkpoints.record(15) == {"again": True}
        assert bits(checkpoints.restore(15, make_state())) == bits(make_state(16))


def test_saving_while_the_state_goes_on(tmp_path):
    """Donated arrays are free for the next step as soon as `save` returns."""
    grow = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = {name: jnp.zeros((512, 256)) for name in "abcd"}
    with Checkpoints(tmp_path, keep=6, asynchronous=True) as checkpoints:
        for step in range(1, 7):
            state = grow(state)
            checkpoints.save(step, state, {"step": step})
        for step in range(1, 7):
            assert checkpoints.record(step) == {"step": step}
            found = checkpoints.restore(step, state)
            assert all((np.asarray(x) == step).all() for x in found.values())


# --- what is refused


def test_no_checkpoint(tmp_path, folder):
    with Checkpoints(tmp_path / "empty") as checkpoints:
        assert checkpoints.latest() is None and checkpoints.restore_latest({"x": jnp.ones(3)}) is None
        with pytest.raises(DSV41Error, match="empty: no checkpoint of step 3; there is no step"):
            checkpoints.record(3)
    with Checkpoints(folder) as checkpoints, pytest.raises(DSV41Error, match="of step 3; there are 10, 20"):
        checkpoints.restore(3, make_state())
    with pytest.raises(DSV41Error, match="nowhere: no such directory of checkpoints"):
        Checkpoints(tmp_path / "nowhere", read_only=True)
    with pytest.raises(DSV41Error, match="expected keep to be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)


def _wider(_):
    return make_state(width=48)


def _other_dtype(state):
    state["odd"]["half"] = state["odd"]["half"].astype(jnp.float16)
    return state


def _one_more(state):
    state["params"]["layers"]["1"] = {"weight": jnp.ones((2, 3))}
    return state


def _one_less(state):
    del state["params"]["head"]
    return state


@pytest.mark.parametrize(
    "change,message",
    [
        (_wider, r"optimizer\.0\.mu\.head: expected float32 \[48\], it has float32 \[32\]"),
        (_other_dtype, r"odd\.half: expected float16 \[4\], it has bfloat16 \[4\]"),
        (_one_more, r"params\.layers\.1\.weight: expected float32 \[2, 3\], it has none"),
        (_one_less, r"it has params\.head float32 \[32\], expected none"),
    ],
)
def test_another_model_or_optimiser(two_steps, change, message):
    """It is named, and no earlier step is taken instead."""
    expected = r"20: of another model or optimiser: " + message
    with Checkpoints(two_steps, read_only=True) as checkpoints, pytest.raises(DSV41Error, match=expected) as refused:
        checkpoints.restore_latest(change(make_state()))
    assert not isinstance(refused.value, UnreadableCheckpoint)


def test_what_cannot_be_saved(folder):
    with Checkpoints(folder) as checkpoints:
        for record in ({"loss": float("nan")}, {"x": np.float32(1)}, {"x": {1, 2}}):
            with pytest.raises(DSV41Error, match="checkpoint of step 30: the record is not made of JSON values"):
                checkpoints.save(30, {"x": jnp.ones(3)}, record)
        with pytest.raises(DSV41Error, match=r"leaf x\.1: expected an array, got float"):
            checkpoints.save(30, {"x": [jnp.ones(3), 1.0]}, {})
        with pytest.raises(DSV41Error, match=r"two leaves are called a\.b"):
            checkpoints.save(30, {"a": {"b": jnp.ones(3)}, "a.b": jnp.ones(3)}, {})
        assert checkpoints.steps() == [10, 20]


# --- what is broken


def _damage(path, how):
    if how == "missing":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])


def warnings_of(caplog):
    """Those of the checkpoints. Reads of orbax that nobody waited for are reported whenever they are collected."""
    return [record.getMessage() for record in caplog.records if record.name == "dsv41.train.checkpoints"]


@pytest.mark.parametrize("how", ["missing", "cut"])
@pytest.mark.parametrize("what", ["arrays", "record", "manifest"])
def test_an_unreadable_step_is_passed_over(folder, caplog, how, what):
    step = folder / "20"
    (arrays,) = (step / "state" / "d").iterdir()
    _damage(
        {"arrays": arrays, "record": step / "record/metadata", "manifest": step / "state/manifest.ocdbt"}[what], how
    )
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore_latest(make_state())
        assert found.step == 10 and found.record["tokens"] == 10 and bits(found.state) == bits(make_state(10))
        (warning,) = warnings_of(caplog)
        assert f"{step}: the checkpoint cannot be read" in warning and "the step before it is taken" in warning
        with pytest.raises(UnreadableCheckpoint, match=f"{step}: the checkpoint cannot be read"):
            checkpoints.restore(20, make_state())
        assert checkpoints.latest() == (10 if what == "record" else 20)
        # The run comes by there again.
        checkpoints.save(20, make_state(21), {})
        assert bits(checkpoints.restore_latest(make_state()).state) == bits(make_state(21))


def test_no_step_is_readable(folder):
    for step in ("10", "20"):
        _damage(folder / step / "record" / "metadata", "cut")
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(UnreadableCheckpoint, match="copy: no step can be read, of 10, 20"):
            checkpoints.restore_latest(make_state())


def test_another_version(folder):
    record = folder / "20" / "record" / "metadata"
    record.write_text(record.read_text().replace('"format_version": 1', '"format_version": 2'))
    with Checkpoints(folder) as checkpoints, pytest.raises(DSV41Error, match="20: format_version: expected 1, got 2"):
        checkpoints.restore_latest(make_state())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_system_refuses_to_write(folder, asynchronous):
    """As a full disk does, in the middle of the arrays; nothing is lost, and the next save succeeds."""
    big = {"x": jax.random.normal(jax.random.key(0), (300, 400))}

    def save(checkpoints):
        checkpoints.save(30, big, {})
        checkpoints.wait()

    with Checkpoints(folder, asynchronous=asynchronous) as checkpoints:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(DSV41Error, match=r"cannot write the checkpoint \(.*File too large"):
                save(checkpoints)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert checkpoints.steps() == [10, 20] and {path.name for path in folder.iterdir()} == {"10", "20"}
        assert bits(checkpoints.restore_latest(make_state()).state) == bits(make_state(20))
        save(checkpoints)
        assert bits(checkpoints.restore(30, big)) == bits(big)


_KILLED = """
import os, pathlib, signal, sys, threading, time
import jax
from dsv41.train.checkpoints import Checkpoints

folder = pathlib.Path(sys.argv[1])

def kill():
    while not any(f.is_file() and f.stat().st_size > 1_000_000 for f in folder.glob("30.*/**/*")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

big = {name: jax.random.normal(jax.random.key(i), (2000, 2000)) for i, name in enumerate("abcd")}
threading.Thread(target=kill, daemon=True).start()
Checkpoints(folder).save(30, big, {})
"""


def test_killed_while_it_saves(folder, caplog):
    done = subprocess.run([sys.executable, "-c", _KILLED, folder], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = (path for path in folder.iterdir() if path.name not in ("10", "20"))
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert checkpoints.steps() == [10, 20] and left.exists()
    with caplog.at_level(logging.WARNING), Checkpoints(folder) as checkpoints:
        assert warnings_of(caplog) == [f"{left}: left by a save that was cut off; removed"] and not left.exists()
        assert bits(checkpoints.restore_latest(make_state()).state) == bits(make_state(20))
        checkpoints.save(30, make_state(30), {})
        assert checkpoints.steps() == [20, 30]


# --- two processes

_JOB = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from dsv41.sharding.identity import resolve_identity
from dsv41.sharding.processes import finish_processes, start_processes
from dsv41.train.checkpoints import Checkpoints

port, index, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
start_processes(resolve_identity(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=index))
sharded = NamedSharding(jax.make_mesh((4,), ("a",)), PartitionSpec("a"))
values = np.arange(32.0, dtype=np.float32).reshape(8, 4)
state = {"w": jax.device_put(values, sharded), "key": jax.random.key(7)}
with Checkpoints(folder) as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(step, state, {"step": step})
    found = checkpoints.restore_latest(state)
    parts = [np.array_equal(part.data, values[part.index]) for part in found.state["w"].addressable_shards]
    print(found.step, found.record, checkpoints.steps(), parts, jax.random.bits(found.state["key"]), file=sys.stderr)
finish_processes()
"""


@pytest.mark.slow
def test_two_processes_save_together(tmp_path):
    """Each writes its part, and one process reads all of it."""
    folder = tmp_path / "checkpoints"
    job = Job(tmp_path, lambda port, index: ["-c", _JOB, str(port), str(index), str(folder)])
    assert job.end(120) == [0, 0], job.err(0) + job.err(1)
    key = jax.random.key(7)
    line = f"3 {{'step': 3}} [2, 3] [True, True] {jax.random.bits(key)}\n"
    assert line in job.err(0) and line in job.err(1)
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(3, {"w": np.zeros((8, 4), np.float32), "key": key})
    assert np.array_equal(found["w"], np.arange(32.0).reshape(8, 4))
