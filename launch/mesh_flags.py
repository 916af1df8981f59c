"""The flags that say which devices of which processes a script runs on, and how the model is spread over them.

One process, all of its devices:

    python -m launch.generate --mesh=data=2,tensor=4 --prompt=…

One process a host; the same command everywhere but for the last flag:

    python -m launch.generate --mesh=data=16 --coordinator=10.0.0.1:1234 --num_processes=2 --process_id=0 --prompt=…

TPU pods and SLURM steps say themselves who is who. docs/pods.md has more.
"""

import hashlib

import jax
from absl import flags
from jax.sharding import Mesh

from dsv41.config import DSV41Error, ModelConfig
from dsv41.sharding import PRESETS, ShardingRules, make_mesh, parse_mesh, preset_rules
from dsv41.sharding.identity import AUTO, SOURCES, resolve_identity
from dsv41.sharding.processes import start_processes
from dsv41.sharding.watch import Limits

# Flags that may differ between the processes of a job: what a process is, where things are on its host, what it tells.
_OWN = frozenset(
    {"coordinator", "process_id", "distributed", "checkpoint", "compile_cache_dir", "out", "verbose", "help"}
    | {"start_timeout", "heartbeat_timeout"}
)
_LONGEST_SHOWN = 50


class MeshFlags:
    """--mesh, --sharding and those that start several processes."""

    def __init__(self, values: flags.FlagValues, *, preset: str | None = None):
        """Defines the flags in `values`; with `preset`, what the script uses a mesh for, no --sharding."""
        self._values, self._preset = values, preset
        flags.DEFINE_string(
            "mesh",
            None,
            "Devices to spread the model over, as data=4,sequence=1,tensor=2: all that there are, those of all "
            "processes. Without it: one device.",
            flag_values=values,
        )
        if preset is None:
            flags.DEFINE_enum(
                "sharding", None, PRESETS, "What the mesh is used for; decode if not given.", flag_values=values
            )
        flags.DEFINE_integer(
            "cpu_devices",
            None,
            "On the CPU: as many devices in this process, to try a mesh on.",
            lower_bound=1,
            flag_values=values,
        )
        self._define_processes()

    def _define_processes(self) -> None:
        values = self._values
        flags.DEFINE_enum(
            "distributed",
            AUTO,
            SOURCES,
            "Whether this is one of several processes. auto: as the next three flags say, or JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or SLURM, or a TPU pod or another cluster that JAX detects; slurm, "
            "cluster: an error if this is none; off: it is not.",
            flag_values=values,
        )
        flags.DEFINE_string(
            "coordinator",
            None,
            "HOST:PORT of process 0; the next port is used too.",
            flag_values=values,
        )
        flags.DEFINE_integer("num_processes", None, "Processes of the job, one a host.", flag_values=values)
        flags.DEFINE_integer("process_id", None, "This one, from 0.", flag_values=values)
        flags.DEFINE_float(
            "start_timeout", Limits.start, "Seconds to wait for the other processes at the start.", flag_values=values
        )
        flags.DEFINE_float(
            "heartbeat_timeout",
            Limits.silence,
            "Seconds without a sign of life after which a process counts as lost; one that dies is noticed at once.",
            flag_values=values,
        )

    def start(self) -> None:
        """Starts this process as one of several, if it is; call it first in `main`.

        Bad flags are refused before anything is waited for.

        Raises:
          DSV41Error: a flag is malformed or lacks another one, or the processes do not come together.
        """
        v = self._values
        if v.mesh is not None:
            parse_mesh(v.mesh)
        elif self._preset is None and v.sharding is not None:
            raise DSV41Error(f"--sharding={v.sharding} needs --mesh")
        limits = Limits(start=v.start_timeout, silence=v.heartbeat_timeout)
        identity = resolve_identity(
            distributed=v.distributed,
            coordinator=v.coordinator,
            num_processes=v.num_processes,
            process_id=v.process_id,
            timeout=int(v.start_timeout),
        )
        if identity.count > 1 and v.mesh is None:
            raise DSV41Error(f"{identity.count} processes ({identity.source}) need --mesh, or --distributed=off")
        if v.cpu_devices is not None:
            self._make_cpu_devices(v.cpu_devices)
        start_processes(identity, limits=limits, agree=self._agreed())

    def mesh(self) -> Mesh | None:
        """The mesh, of the devices of all processes; None: without --mesh. JAX starts its devices here.

        Raises:
          DSV41Error: --mesh has more or fewer devices than there are.
        """
        return None if self._values.mesh is None else make_mesh(parse_mesh(self._values.mesh))

    def rules(self, config: ModelConfig) -> ShardingRules | None:
        """How the model is spread over the mesh; None: without --mesh.

        Raises:
          DSV41Error: the mesh does not divide the model.
        """
        if self._values.mesh is None:
            return None
        preset = self._preset or self._values.sharding or PRESETS[0]
        return preset_rules(preset, parse_mesh(self._values.mesh), config.text_config)

    def _make_cpu_devices(self, number: int) -> None:
        try:
            jax.config.update("jax_num_cpu_devices", number)
        except RuntimeError as e:  # a program that runs scripts one after the other has its devices already
            if jax.local_device_count("cpu") != number:
                raise DSV41Error(
                    f"--cpu_devices={number}: JAX has started with {jax.local_device_count('cpu')} devices already"
                ) from e

    def _agreed(self) -> dict[str, str]:
        """The given flags that must be the same in all processes: they decide which programs run in what order."""
        given = {}
        for name in self._values:
            flag = self._values[name]
            if name in _OWN or flag.value == flag.default:
                continue
            text = str(flag.value)
            if len(text) > _LONGEST_SHOWN:
                text = f"{text[:_LONGEST_SHOWN]}… (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"
            given[f"--{name}"] = text
        return given
