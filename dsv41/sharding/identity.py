"""Which process of a job this is: from flags, from JAX_* variables, from SLURM, or from what JAX detects."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from dsv41.config import DSV41Error

AUTO, OFF, SLURM, CLUSTER = "auto", "off", "slurm", "cluster"
SOURCES = (AUTO, OFF, SLURM, CLUSTER)
"""Where an identity may come from: anywhere, nowhere (one process), SLURM only, JAX's detection only."""

_LAST_PORT = 65535
# SLURM names no port. Jobs that share a host get different pairs of them, above what most services use.
_SLURM_FIRST_PORT, _SLURM_PAIRS = 61440, 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """One process among those of a job.

    Attributes:
      coordinator: host:port on which JAX's coordination service listens; None if the process is alone. The next port,
        `watch_port`, is where the processes gather and watch each other.
      count: processes of the job.
      index: of this one; 0 runs the coordinator.
      local_devices: which GPUs of the host are this process's own; None: all.
      source: what said so, for messages.
    """

    coordinator: str | None = None
    count: int = 1
    index: int = 0
    local_devices: tuple[int, ...] | None = None
    source: str = "one process"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator; an IPv6 address has lost its brackets."""
        return _address(self.coordinator)

    @property
    def watch_port(self) -> int:
        """Port of the coordinator's host on which the processes gather."""
        port = self.address[1]
        return port + 1 if port < _LAST_PORT else port - 1


def resolve_identity(
    *,
    distributed: str = AUTO,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: int = 120,
    environ: Mapping[str, str] | None = None,
) -> Identity:
    """Which process this is.

    Each of the three values is taken from its flag, else from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES or
    JAX_PROCESS_ID, else from the cluster: SLURM, then what JAX detects (TPU pods, Open MPI, Kubernetes). With all three
    given the cluster is not asked. Without any this is the only process.

    Args:
      distributed: one of `SOURCES`.
      coordinator, num_processes, process_id: the flags.
      timeout: seconds that JAX may look for the coordinator's name.
      environ: os.environ if None.

    Raises:
      DSV41Error: values are missing, out of range or contradict each other, or the named cluster is not there.
    """
    environ = os.environ if environ is None else environ
    flags = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    given = {name: value for name, value in flags.items() if value is not None}
    if distributed == OFF:
        if given:
            raise DSV41Error(f"--distributed=off contradicts {_names(given)}")
        return Identity()
    if distributed == AUTO:
        given |= _variables(flags, environ)
    cluster = _cluster(distributed, given, timeout, environ)
    if not given and cluster is None:
        return Identity()
    return _merged(given, cluster)


def _variables(flags: Mapping[str, str | int | None], environ: Mapping[str, str]) -> dict[str, str | int]:
    """What JAX_* variables say of the flags that are not given."""
    found: dict[str, str | int] = {}
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    for (flag, value), name in zip(flags.items(), names, strict=True):
        if value is None and environ.get(name):
            found[flag] = environ[name] if flag == "--coordinator" else _integer(name, environ[name])
    return found


def _cluster(
    distributed: str, given: Mapping[str, str | int], timeout: int, environ: Mapping[str, str]
) -> Identity | None:
    """What the cluster says; None if there is none, or if it need not be asked."""
    if distributed == SLURM:
        if (identity := _from_slurm(environ)) is None:
            raise DSV41Error("--distributed=slurm: this is no SLURM job step (start the processes with srun)")
        return identity
    if distributed == CLUSTER:
        if (identity := _from_jax(timeout, environ)) is None:
            raise DSV41Error("--distributed=cluster: JAX detects no TPU pod, Open MPI or Kubernetes job here")
        return identity
    if len(given) == 3:
        return None
    return _from_slurm(environ) or _from_jax(timeout, environ)


def _merged(given: Mapping[str, str | int], cluster: Identity | None) -> Identity:
    """The given values, the cluster's for those that are missing.

    Raises:
      DSV41Error: something is missing, wrong, or said differently by the two.
    """
    known: dict[str, str | int | None] = {}
    if cluster is not None:
        known = {"--coordinator": cluster.coordinator}
        known |= {"--num_processes": cluster.count, "--process_id": cluster.index}
        for name in ("--num_processes", "--process_id"):
            if name in given and given[name] != known[name]:
                raise DSV41Error(f"{name}={given[name]} contradicts {cluster.source}, which says {known[name]}")
    values = {k: v for k, v in known.items() if v is not None} | dict(given)
    if values.get("--num_processes") == 1 and values.get("--process_id", 0) == 0:
        return Identity(source=cluster.source if cluster else _names(given))
    if missing := [name for name in ("--coordinator", "--num_processes", "--process_id") if name not in values]:
        raise DSV41Error(
            f"{' and '.join(missing)} missing beside {_names(values)}: a job of several processes needs all"
        )
    count, index, coordinator = values["--num_processes"], values["--process_id"], values["--coordinator"]
    if count < 1:
        raise DSV41Error(f"--num_processes={count}: expected 1 or more")
    if not 0 <= index < count:
        raise DSV41Error(f"--process_id={index}: expected 0 to {count - 1}, as --num_processes={count}")
    _address(coordinator)
    devices = None if cluster is None else cluster.local_devices
    source = _names(given) if cluster is None else cluster.source
    return Identity(coordinator=coordinator, count=count, index=index, local_devices=devices, source=source)


def _from_slurm(environ: Mapping[str, str]) -> Identity | None:
    """This task of a SLURM job step; several tasks on a host take one GPU each, a single one takes all."""
    nodes, count = environ.get("SLURM_STEP_NODELIST"), environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS"))
    index, job = environ.get("SLURM_PROCID"), environ.get("SLURM_JOB_ID")
    if None in (nodes, count, index, job):
        return None
    count, index = _integer("SLURM_STEP_NUM_TASKS", count), _integer("SLURM_PROCID", index)
    step = environ.get("SLURM_STEP_ID", "0")
    place = (_integer("SLURM_JOB_ID", job) + (int(step) if step.isdigit() else 0)) % _SLURM_PAIRS
    port = environ.get("JAX_COORDINATOR_PORT") or _SLURM_FIRST_PORT + 2 * place
    local = environ.get("SLURM_LOCALID")
    hosts = _integer("SLURM_STEP_NUM_NODES", environ.get("SLURM_STEP_NUM_NODES", "0"))
    one_a_gpu = local is not None and count > hosts > 0 and "JAX_LOCAL_DEVICE_IDS" not in environ
    return Identity(
        coordinator=f"{first_host(nodes)}:{port}",
        count=count,
        index=index,
        local_devices=(_integer("SLURM_LOCALID", local),) if one_a_gpu else None,
        source="SLURM",
    )


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list such as "node[003-007,9],login"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)[0]
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first)


def _from_jax(timeout: int, environ: Mapping[str, str]) -> Identity | None:
    """What JAX's own detection finds: the place for what changes there, as it has no public name."""
    platforms = [name for name in environ.get("JAX_PLATFORMS", "").split(",") if name]
    by_mpi = any(name.startswith("OMPI_") for name in environ)
    if platforms and "tpu" not in platforms and not by_mpi:
        # Another backend on a host of a TPU pod is a process of its own.
        return None
    try:
        from jax._src.clusters import ClusterEnv

        detect = ClusterEnv.auto_detect_unset_distributed_params
    except (ImportError, AttributeError) as e:
        raise DSV41Error(
            "this JAX has no detection of clusters that is known here: give --coordinator, --num_processes and "
            "--process_id, or --distributed=off"
        ) from e
    try:
        coordinator, count, index, devices = detect(None, None, None, None, None, timeout)
    except (RuntimeError, OSError, ValueError, KeyError) as e:
        raise DSV41Error(f"the cluster that JAX detected does not say which process this is: {e}") from e
    if coordinator is None or count is None or index is None:
        return None
    devices = None if devices is None else tuple(devices)
    return Identity(coordinator=coordinator, count=count, index=index, local_devices=devices, source="the cluster")


def _address(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\[\]/\s]+)):(\d+)", text)
    if match is None or not 0 < int(match[3]) <= _LAST_PORT:
        raise DSV41Error(f"coordinator {text!r}: expected HOST:PORT, as 10.0.0.1:1234")
    return match[1] or match[2], int(match[3])


def _integer(name: str, text: str) -> int:
    if not re.fullmatch(r"-?\d+", text.strip()):
        raise DSV41Error(f"{name}={text!r}: expected a whole number")
    return int(text)


def _names(values: Mapping[str, str | int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
