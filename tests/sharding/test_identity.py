"""Which process this is, by flags and environments."""

import sys

import pytest

from dsv41.config import DSV41Error
from dsv41.sharding.identity import Identity, first_host, resolve_identity

FLAGS = {"coordinator": "10.0.0.1:1234", "num_processes": 4, "process_id": 3}
VARIABLES = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
}
# This machine is none of a pod.
NO_TPU = {"JAX_PLATFORMS": "cpu"}


def resolve(environ=None, **flags):
    return resolve_identity(environ=NO_TPU | (environ or {}), **flags)


def test_alone():
    assert resolve() == Identity()
    assert resolve(num_processes=1).count == 1
    assert resolve({"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}).coordinator is None
    assert resolve(VARIABLES | SLURM, distributed="off") == Identity()


@pytest.mark.parametrize(
    "environ, flags", [({}, FLAGS), (VARIABLES, {}), (VARIABLES, {"process_id": 3}), (SLURM | VARIABLES, {})]
)
def test_flags_and_variables(environ, flags):
    found = resolve(environ, **flags)
    assert (found.coordinator, found.count, found.index, found.local_devices) == ("10.0.0.1:1234", 4, 3, None)
    assert found.address == ("10.0.0.1", 1234) and found.watch_port == 1235


def test_flags_win_over_variables():
    assert resolve(VARIABLES, process_id=1).index == 1
    assert resolve(SLURM, coordinator="10.0.0.1:65535", num_processes=2, process_id=0).watch_port == 65534


@pytest.mark.parametrize("distributed", ["auto", "slurm"])
def test_slurm_one_process_a_host(distributed):
    found = resolve(SLURM, distributed=distributed)
    assert found == Identity(coordinator="gpu07:62862", count=4, index=3, source="SLURM")


def test_slurm_one_process_a_gpu():
    found = resolve(SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "3", "JAX_COORDINATOR_PORT": "99"})
    assert found.local_devices == (3,) and found.coordinator == "gpu07:99"
    own = {"JAX_LOCAL_DEVICE_IDS": "3", "SLURM_STEP_NUM_NODES": "1"}
    assert resolve(SLURM | own).local_devices is None, "JAX reads the variable itself"


def test_slurm_names_the_rest():
    assert resolve(SLURM, coordinator="head:1234") == Identity(
        coordinator="head:1234", count=4, index=3, source="SLURM"
    )
    assert resolve(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}).count == 1


@pytest.mark.parametrize(
    "nodes, host",
    [
        ("gpu07", "gpu07"),
        ("gpu07,login", "gpu07"),
        ("gpu-a-[003-007,9],x", "gpu-a-003"),
        ("gpu[9,11]", "gpu9"),
        ("rack[1-2]node[03-04].example,y", "rack1node03.example"),
    ],
)
def test_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_a_pod_that_jax_detects(monkeypatch):
    from jax._src import clusters

    def detect(*args):
        assert args[:5] == (None,) * 5
        return "10.0.0.1:8476", 2, 1, None

    monkeypatch.setattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", detect)
    for distributed in ("auto", "cluster"):
        found = resolve_identity(environ={}, distributed=distributed)
        assert found == Identity(coordinator="10.0.0.1:8476", count=2, index=1, source="the cluster")
    # A backend that is not the pod's is a matter of this host alone.
    assert resolve() == Identity()


def test_jax_may_have_lost_its_detection(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.clusters", None)
    assert resolve_identity(environ={}, **FLAGS).index == 3
    with pytest.raises(DSV41Error, match="--coordinator, --num_processes and --process_id, or --distributed=off"):
        resolve_identity(environ={})


@pytest.mark.parametrize(
    "environ, flags, message",
    [
        ({}, {"coordinator": "a:1"}, "--num_processes and --process_id missing beside --coordinator=a:1"),
        ({}, {"num_processes": 2}, "--coordinator and --process_id missing beside --num_processes=2"),
        ({}, {"num_processes": 2, "process_id": 0}, "--coordinator missing beside"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, {}, "--num_processes and --process_id missing"),
        ({}, FLAGS | {"process_id": 4}, "--process_id=4: expected 0 to 3, as --num_processes=4"),
        ({}, FLAGS | {"process_id": -1}, "--process_id=-1: expected 0 to 3"),
        ({}, FLAGS | {"num_processes": 0}, "--num_processes=0: expected 1 or more"),
        ({}, {"num_processes": 1, "process_id": 1}, "--coordinator missing"),
        ({}, FLAGS | {"coordinator": "10.0.0.1"}, "coordinator '10.0.0.1': expected HOST:PORT, as 10.0.0.1:1234"),
        ({}, FLAGS | {"coordinator": "a:70000"}, "coordinator 'a:70000': expected HOST:PORT"),
        ({}, FLAGS | {"coordinator": "::1:80"}, "coordinator '::1:80': expected HOST:PORT"),
        (VARIABLES | {"JAX_PROCESS_ID": "x"}, {}, "JAX_PROCESS_ID='x': expected a whole number"),
        ({}, FLAGS | {"distributed": "off"}, "--distributed=off contradicts --coordinator=10.0.0.1:1234, --num_proc"),
        ({}, {"distributed": "slurm"}, "--distributed=slurm: this is no SLURM job step"),
        ({}, {"distributed": "cluster"}, "--distributed=cluster: JAX detects no"),
        (SLURM, {"num_processes": 2}, "--num_processes=2 contradicts SLURM, which says 4"),
        (SLURM, FLAGS | {"process_id": 0, "distributed": "slurm"}, "--process_id=0 contradicts SLURM, which says 3"),
    ],
)
def test_bad_values(environ, flags, message):
    with pytest.raises(DSV41Error) as e:
        resolve(environ, **flags)
    assert message in str(e.value)
