"""Whether all processes of a job work on the same input."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from dsv41.config import DSV41Error
from dsv41.sharding.processes import running_processes


def check_same_input(**inputs: bytes) -> None:
    """Compares what every process has read, by its hash; all of them must call, with the same names.

    Other tokens or another config in one of them would make other programs, whose collectives would wait for those of
    the rest for ever. Flags are compared at the start already, what is in the files that they name is not.

    Raises:
      DSV41Error: in every process; names the input and the first process with another one than process 0.
    """
    if jax.process_count() == 1 or not inputs:
        return
    own = np.stack([np.frombuffer(hashlib.sha256(value).digest(), np.uint32) for value in inputs.values()])
    found = multihost_utils.process_allgather(own)
    differs = (found != found[0]).any(axis=-1)
    for name, processes in zip(inputs, differs.T, strict=True):
        if processes.any():
            first = int(np.argmax(processes))
            job = running_processes()
            where = "" if job is None else f" on {job.hosts[first]}"
            raise DSV41Error(f"{name}: process {first}{where} has read something else than process 0")
