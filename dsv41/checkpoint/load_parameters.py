"""Tensors of the files to arrays on the device: one parameter at a time, in the stored formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import jax
import ml_dtypes
import numpy as np

from dsv41.checkpoint.safetensors_reader import CheckpointError, CheckpointReader

# A stacked parameter `...ffn.experts.w1.weight` gathers the tensors `...ffn.experts.{j}.w1.weight`, which `EXPERT`
# matches.
EXPERT_STACK = re.compile(r"(.*\.ffn\.experts)\.(w[123]\.(?:weight|scale))")
EXPERT = re.compile(r"(?P<experts>.*\.ffn\.experts)\.(?P<number>\d+)\.(?P<leaf>w[123]\.(?:weight|scale))")

# dtype -> (unsigned integer of its size, mask that drops the sign, smallest masked code that is not a finite number)
_NOT_FINITE = {
    np.dtype(np.float32): (np.uint32, 0x7FFFFFFF, 0x7F800000),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7FFF, 0x7F80),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, 0x7F, 0x7F),
}
_E8M0_NAN = (np.uint8, 0xFF, 0xFF)
_CHECK_ELEMENTS = 1 << 20  # how much is checked at a time, so that temporaries stay small

Progress = Callable[[int, int, str], None]
Slices = tuple[slice, ...]


class HostParameter:
    """Host side of one parameter: checks its tensors and hands out slices.

    Attributes:
      names: the tensors it is made of: E experts in order if stacked, else one.
      stacked: whether axis 0 counts experts.
    """

    def __init__(self, reader: CheckpointReader, name: str, struct: jax.ShapeDtypeStruct):
        match = EXPERT_STACK.fullmatch(name)
        self.stacked = match is not None
        self.names = [f"{match[1]}.{j}.{match[2]}" for j in range(struct.shape[0])] if match else [name]
        self._reader = reader
        self._shape = struct.shape[1:] if self.stacked else struct.shape
        self._dtype = np.dtype(struct.dtype)
        self._checked: dict[str, np.ndarray] = {}

    def _view(self, name: str) -> np.ndarray:
        """The mapped tensor, checked on first use."""
        if name not in self._checked:
            view = self._reader.read(name)
            file = self._reader.info(name).file
            if view.shape != self._shape or view.dtype != self._dtype:
                raise CheckpointError(
                    f"{file}: tensor {name!r}: expected {self._dtype.name} {list(self._shape)}, "
                    f"got {view.dtype.name} {list(view.shape)}"
                )
            if has_non_finite(view, is_scale=name.endswith(".scale")):
                raise CheckpointError(f"{file}: tensor {name!r} holds NaN or infinite values")
            self._checked[name] = view
        return self._checked[name]

    def read(self, index: Slices, *, copy: bool) -> np.ndarray:
        """The slice `index` of the parameter; a view of the file unless stacked or `copy`."""
        if not self.stacked:
            view = self._view(self.names[0])[index]
            return np.array(view) if copy else view
        views = [self._view(name)[index[1:]] for name in self.names[index[0]]]
        stack = np.empty((len(views), *views[0].shape), self._dtype)
        for j, view in enumerate(views):
            stack[j] = view
        return stack


def has_non_finite(view: np.ndarray, *, is_scale: bool) -> bool:
    """Whether `view` (C-contiguous) holds NaN or infinity; bytes are E8M0 if `is_scale`, else always fine."""
    limits = _E8M0_NAN if is_scale and view.dtype == np.uint8 else _NOT_FINITE.get(view.dtype)
    if limits is None:
        return False
    unsigned, mask, limit = limits
    codes = view.reshape(-1).view(unsigned)
    chunks = (codes[i : i + _CHECK_ELEMENTS] for i in range(0, codes.size, _CHECK_ELEMENTS))
    return any(np.max(chunk & unsigned(mask)) >= limit for chunk in chunks)


def _aliases_host(sharding: jax.sharding.Sharding | None) -> bool:
    """Whether arrays on the target may share memory with the numpy array they came from, as on the CPU backend."""
    if sharding is None:
        return jax.default_backend() == "cpu"
    return any(device.platform == "cpu" for device in sharding.device_set)


def _place(parameter: HostParameter, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Puts a parameter on the default device, or each shard on its own device if `struct` has a sharding."""
    # An array that aliased the mapping would change, or fault, with the file.
    copy = _aliases_host(struct.sharding)
    whole = tuple(slice(0, n) for n in struct.shape)
    if struct.sharding is None:
        return jax.device_put(parameter.read(whole, copy=copy))
    shards, slices = [], {}
    for device, index in struct.sharding.addressable_devices_indices_map(struct.shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, struct.shape, strict=True))
        if bounds not in slices:  # replicas share one host slice
            slices[bounds] = parameter.read(tuple(slice(*b) for b in bounds), copy=copy)
        target = jax.sharding.SingleDeviceSharding(device, memory_kind=struct.sharding.memory_kind)
        shards.append(jax.device_put(slices[bounds], target))
    return jax.make_array_from_single_device_arrays(struct.shape, struct.sharding, shards)


def load_parameters(
    reader: CheckpointReader,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    *,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Loads the parameters that `abstract` lists, in its order.

    A parameter has the name of its tensor, except that routed experts are stacked: `layers.3.ffn.experts.w1.weight`,
    with a leading axis E, is made of `layers.3.ffn.experts.{j}.w1.weight` for j = 0..E-1 (likewise `mtp.K.` and
    `.scale`). Nothing is converted: F8_E4M3 is `float8_e4m3fn`, packed FP4 and E8M0 scales are uint8, BF16 and F32
    are themselves. Host memory holds one parameter at a time beside what has been placed.

    Args:
      reader: the open checkpoint.
      abstract: in-memory shape and dtype by name, and optionally a sharding; a process reads only the slices its own
        devices hold. Engram tables are not parameters and stay on the mapped file.
      progress: called after each parameter with (bytes done, bytes in all, its name).

    Returns:
      Name -> array, on the default device or as sharded in `abstract`.

    Raises:
      CheckpointError: a tensor is missing, has another shape or dtype, or holds NaN or infinity (E8M0 byte 255 in a
      scale);
        names file and tensor.
    """
    sizes = {name: int(np.prod(s.shape, dtype=np.int64)) * np.dtype(s.dtype).itemsize for name, s in abstract.items()}
    total, done = sum(sizes.values()), 0
    loaded: dict[str, jax.Array] = {}
    for name, struct in abstract.items():
        # Waiting bounds host memory: an unfinished transfer would still hold the last parameter's buffer.
        loaded[name] = jax.block_until_ready(_place(HostParameter(reader, name, struct), struct))
        done += sizes[name]
        if progress is not None:
            progress(done, total, name)
    return loaded
