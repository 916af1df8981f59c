"""Where Pallas differs between the supported releases of JAX, and what lowering for an absent device needs."""

import contextlib
from typing import Any

import jax
from jax.sharding import AbstractMesh

# wgmma and setmaxnreg exist there only.
_HOPPER = "9.0"
JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])


def gpu_problem() -> str | None:
    """Why no Mosaic GPU kernel can be built with the installed JAX, or run on the GPU at hand; None if they can."""
    if JAX_VERSION < (0, 11):
        return f"the GPU kernels need jax 0.11 or newer, this is {jax.__version__}"
    if jax.default_backend() in ("gpu", "cuda"):
        capability = getattr(jax.devices()[0], "compute_capability", "unknown")
        if capability != _HOPPER:
            return f"the GPU kernels are for compute capability {_HOPPER} (Hopper), this device has {capability}"
    return None


def tpu_interpret_params() -> Any:
    """`interpret=` of a `pl.pallas_call` with TPU semantics on any backend."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams()


@contextlib.contextmanager
def lowering_for(platform: str, device_kind: str, num_cores: int = 1):
    """Traces and lowers kernels for a device that is not there, such as ("gpu", "NVIDIA H200", 132)."""
    from jax.sharding import AbstractDevice

    device = AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform=platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        yield


def tpu_device_kind() -> str | None:
    """The TPU that is traced for: that of the mesh in use, or of this process; None if neither is one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.device_kind if device.platform == "tpu" else None
    return jax.devices()[0].device_kind if jax.default_backend() == "tpu" else None
