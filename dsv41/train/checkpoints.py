"""The state of a training run on the disk: arrays and what goes with them, whole or not at all.

    checkpoints = Checkpoints("run/checkpoints")
    checkpoints.save(100, state, {"tokens": 409600, "data": batches.state()})
    found = checkpoints.restore_latest(state)  # arrays as those of `state` are placed; None: there is no checkpoint
    checkpoints.close()

Each step is a directory that orbax writes beside its place and renames. A run that is killed while it saves finds the
step before it, and the next start removes what was left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from dsv41.checkpoint.piece_files import one_error, remove_directory, sync_tree
from dsv41.config import DSV41Error
from dsv41.config.atomic_file import cannot_write

_log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # their folder in the directory of a run
_VERSION = 1
_STATE, _RECORD = "state", "record"
_TEMPORARY = "*.orbax-checkpoint-tmp*"


class UnreadableCheckpoint(DSV41Error):
    """A step that is there and cannot be read."""


class Restored(NamedTuple):
    """A step that was read.

    Attributes:
      step: its number.
      state: the arrays.
      record: what was saved with them.
    """

    step: int
    state: Any
    record: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class SavedArray:
    """An array of a step, which is read whenever its values are asked for."""

    checkpoints: Checkpoints
    step: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.checkpoints.read(self), dtype)


class _Leaf(NamedTuple):
    """What is known of an array without its values. A PRNG key has a dtype such as `key<fry>`."""

    shape: tuple[int, ...]
    dtype: str
    impl: str | None = None  # of a PRNG key

    @property
    def text(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Checkpoints:
    """Steps of one run. In a job of several processes all of them call the same methods."""

    def __init__(
        self,
        folder: str | pathlib.Path,
        keep: int = 2,
        *,
        every: int = 1,
        asynchronous: bool = False,
        read_only: bool = False,
    ):
        """
        Args:
          folder: of the steps; made if it is missing.
          keep: how many steps stay; older ones are removed after each save.
          every: steps between those that `due` names.
          asynchronous: `save` returns when the arrays are copied; a failure shows in the next call.
          read_only: nothing is written or removed, so that a run may be saving meanwhile.

        Raises:
          DSV41Error: the folder is missing (read only) or cannot be made, or a number is not positive.
        """
        for name, value in (("keep", keep), ("every", every)):
            if value < 1:
                raise DSV41Error(f"checkpoints: expected {name} to be at least 1, got {value}")
        self.folder, self._every = pathlib.Path(folder).absolute(), every
        self._keep, self._asynchronous, self._read_only = keep, asynchronous, read_only
        if read_only and not self.folder.is_dir():
            raise DSV41Error(f"{self.folder}: no such directory of checkpoints")
        try:
            if not read_only:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise DSV41Error(f"{self.folder}: cannot make the directory of checkpoints ({e.strerror or e})") from e
        for left in self._remove_unfinished():
            _log.warning("%s: left by a save that was cut off; removed", left)
        self._open()

    def _open(self) -> None:
        import orbax.checkpoint as ocp

        self._begun: int | None = None  # step whose save may still be going on
        with one_error():
            self._orbax = ocp.CheckpointManager(
                self.folder,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=self._keep,
                    create=False,
                    read_only=self._read_only,
                    enable_async_checkpointing=self._asynchronous,
                ),
                item_names=(_STATE, _RECORD),
            )

    def _remove_unfinished(self) -> list[pathlib.Path]:
        """Removes what saves have left, and returns it."""
        found = [] if self._read_only or jax.process_index() else sorted(self.folder.glob(_TEMPORARY))
        for left in found:
            remove_directory(left)
        return found

    def due(self, step: int) -> bool:
        """Whether `step` is one to be saved."""
        return step % self._every == 0

    def steps(self) -> list[int]:
        """Steps that were written to their end, in order."""
        return sorted(self._orbax.all_steps())

    def latest(self) -> int | None:
        """The last step whose record can be read; None: there is none. Others are named in a warning."""
        for step in reversed(self.steps()):
            with _passed_over():
                self.record(step)
                return step
        return None

    def chosen(self, step: int | None) -> int:
        """`step`, or the latest one for None.

        Raises:
          DSV41Error: there is none yet.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise DSV41Error(f"{self.folder}: there is no checkpoint yet")
        return step

    def record(self, step: int) -> dict[str, Any]:
        """What was saved with the arrays of a step.

        Raises:
          UnreadableCheckpoint: it cannot be read.
          DSV41Error: there is no such step.
        """
        return self._stored(step)["record"]

    def save(self, step: int, state: Any, record: Mapping[str, Any]) -> None:
        """Saves a step, and removes all but the last `keep`.

        Steps at or after this one belong to a history that was given up, and go first.

        Args:
          step: its number.
          state: pytree of jax or numpy arrays, PRNG keys among them.
          record: JSON values.

        Raises:
          DSV41Error: the record is not JSON, a leaf is no array, or the system refuses to write; earlier steps are
            untouched then.
        """
        leaves = _named(state)
        stored = {
            "format_version": _VERSION,
            "leaves": {name: _leaf(name, x)._asdict() for name, x in leaves.items()},
            "record": dict(record),
        }
        try:
            stored = json.loads(json.dumps(stored, allow_nan=False))
        except (TypeError, ValueError) as e:
            raise DSV41Error(f"checkpoint of step {step}: the record is not made of JSON values ({e})") from e
        arrays = {name: _to_save(x) for name, x in leaves.items() if x.size}
        self.wait()
        with self._writing(step):
            for old in self.steps():
                if old >= step:
                    self._orbax.delete(old)
            self._save(step, arrays, stored)

    def _save(self, step: int, arrays: dict[str, Any], stored: dict[str, Any]) -> None:
        import orbax.checkpoint as ocp

        args = ocp.args.Composite(**{_STATE: ocp.args.StandardSave(arrays), _RECORD: ocp.args.JsonSave(stored)})
        self._orbax.save(step, args=args, force=True)
        self._begun = step
        if not self._asynchronous:
            self._finish()

    def _finish(self) -> None:
        """Waits until what was begun is on the disk, and would stay there in a power cut."""
        self._orbax.wait_until_finished()
        begun, self._begun = self._begun, None
        if begun is not None and not jax.process_index():
            sync_tree(self.folder / str(begun))

    def restore_latest(self, like: Any) -> Restored | None:
        """The last step that can be read; None: there is no step. Unreadable ones are named in a warning.

        Args:
          like: as in `restore`.

        Raises:
          UnreadableCheckpoint: there are steps, and none can be read.
          DSV41Error: the last one is of another state.
        """
        steps = self.steps()
        for step in reversed(steps):
            with _passed_over():
                return Restored(step, self.restore(step, like), self.record(step))
        if steps:
            raise UnreadableCheckpoint(f"{self.folder}: no step can be read, of {', '.join(map(str, steps))}")
        return None

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step, bit by bit what was saved.

        Args:
          step: one of `steps`.
          like: its pytree, of arrays or `jax.ShapeDtypeStruct`. A leaf is placed by the sharding of its counterpart
            here; where that has none or is not committed to a device, neither is the leaf. Numpy arrays are such again.

        Raises:
          UnreadableCheckpoint: the step cannot be read.
          DSV41Error: there is no such step, or it is of another model or optimiser; names the first leaf that differs.
        """
        stored = self._stored(step)
        wanted = _named(like)
        saved = {
            name: _Leaf(tuple(leaf["shape"]), leaf["dtype"], leaf["impl"]) for name, leaf in stored["leaves"].items()
        }
        _check_same(self.folder / str(step), saved, {name: _leaf(name, x) for name, x in wanted.items()})
        arrays = self._read(step, {name: _to_read(x) for name, x in wanted.items() if x.size})
        leaves = [
            _as_wanted(arrays[name] if x.size else np.zeros(_to_read(x).shape, _to_read(x).dtype), x, saved[name])
            for name, x in wanted.items()
        ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def arrays(self, step: int) -> dict[str, SavedArray]:
        """The arrays of a step but for PRNG keys, by names such as `masters.embed.weight`; nothing is read yet.

        Raises:
          UnreadableCheckpoint: the step cannot be read.
          DSV41Error: there is no such step.
        """
        leaves = self._stored(step)["leaves"]
        return {
            name: SavedArray(self, step, name, tuple(leaf["shape"]), np.dtype(leaf["dtype"]))
            for name, leaf in leaves.items()
            if leaf["impl"] is None
        }

    def read(self, array: SavedArray) -> np.ndarray:
        """The values of one array, on the host; as `numpy.asarray(array)`.

        Raises:
          UnreadableCheckpoint: it cannot be read.
        """
        import orbax.checkpoint as ocp

        item = {array.name: np.empty(array.shape, array.dtype)}
        if not item[array.name].size:
            return item[array.name]
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=True)
        with self._reading(array.step), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(self.folder / str(array.step) / _STATE, args=args)[array.name]

    def _read(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        import orbax.checkpoint as ocp

        args = ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(items)})
        with self._reading(step):
            return self._orbax.restore(step, args=args)[_STATE]

    def _stored(self, step: int) -> dict[str, Any]:
        """The record as it is on the disk, checked."""
        import orbax.checkpoint as ocp

        self.wait()
        steps = self.steps()
        if step not in steps:
            there = f"there are {', '.join(map(str, steps))}" if steps else "there is no step"
            raise DSV41Error(f"{self.folder}: no checkpoint of step {step}; {there}")
        with self._reading(step):
            stored = self._orbax.restore(step, args=ocp.args.Composite(**{_RECORD: ocp.args.JsonRestore()}))[_RECORD]
            if not isinstance(stored, dict) or not {"format_version", "leaves", "record"} <= stored.keys():
                raise ValueError("not the record of a training checkpoint")
        if stored["format_version"] != _VERSION:
            version = stored["format_version"]
            raise DSV41Error(f"{self.folder / str(step)}: format_version: expected {_VERSION}, got {version!r}")
        return stored

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        with one_error():
            try:
                yield
            except Exception as e:  # orbax raises whatever its layers do
                raise UnreadableCheckpoint(f"{self.folder / str(step)}: the checkpoint cannot be read ({e})") from e

    @contextlib.contextmanager
    def _writing(self, step: int | None) -> Iterator[None]:
        """Turns a failure into one error, and puts everything where the next save can begin."""
        with one_error():
            try:
                yield
            except Exception as e:  # as above; tensorstore raises ValueError if the system refuses
                with contextlib.suppress(Exception):  # it repeats the failure
                    self._orbax.close()
                self._remove_unfinished()
                self._open()
                path = self.folder if step is None else self.folder / str(step)
                if isinstance(e, OSError):
                    raise cannot_write(path, e) from e
                raise DSV41Error(f"{path}: cannot write the checkpoint ({e})") from e

    def wait(self) -> None:
        """Until a save that was begun is complete.

        Raises:
          DSV41Error: it failed.
        """
        with self._writing(self._begun):
            self._finish()

    def close(self) -> None:
        """Waits as `wait`, and lets go of orbax's threads.

        Raises:
          DSV41Error: a save failed.
        """
        self.wait()
        self._orbax.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


@contextlib.contextmanager
def _passed_over() -> Iterator[None]:
    """Goes on after a step that cannot be read."""
    try:
        yield
    except UnreadableCheckpoint as e:
        _log.warning("%s; the step before it is taken", e)


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by name, such as `optimizer.0.mu.embed.weight`, in the order of the tree."""
    named = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in named]
    leaves = dict(zip(names, (leaf for _, leaf in named), strict=True))
    if len(leaves) < len(names):
        raise DSV41Error(f"checkpoint: two leaves are called {next(n for n in names if names.count(n) > 1)}")
    return leaves


def _leaf(name: str, x: Any) -> _Leaf:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise DSV41Error(f"checkpoint: leaf {name}: expected an array, got {type(x).__name__}")
    impl = str(jax.random.key_impl(x)) if _is_key(x) and isinstance(x, jax.Array) else None
    return _Leaf(tuple(x.shape), str(x.dtype), impl)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _sharding(x: Any) -> jax.sharding.Sharding | None:
    """Where an array is to be; None: wherever it is needed."""
    if isinstance(x, jax.Array):
        return x.sharding if x.committed else None
    return getattr(x, "sharding", None)


def _to_save(x: Any) -> Any:
    data = jax.random.key_data(x) if _is_key(x) else x
    # What is bound to no device is the same in all processes, and the first one writes it.
    return data if _sharding(x) is not None else np.asarray(data)


def _to_read(x: Any) -> jax.ShapeDtypeStruct | np.ndarray:
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype)) if _is_key(x) else x
    sharding = _sharding(x)
    if sharding is None:
        return np.empty(data.shape, data.dtype)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _as_wanted(data: Any, like: Any, saved: _Leaf) -> Any:
    if isinstance(like, np.ndarray):
        return data
    # A copy, which a step may be given for good; a view of numpy's memory may not.
    array = data if isinstance(data, jax.Array) else jax.numpy.array(data)
    array = jax.random.wrap_key_data(array, impl=saved.impl) if _is_key(like) else array
    sharding = _sharding(like)
    return array if sharding is None else jax.device_put(array, sharding)


def _check_same(path: pathlib.Path, saved: Mapping[str, _Leaf], wanted: Mapping[str, _Leaf]) -> None:
    """Raises `DSV41Error` naming the first leaf, in the order of `wanted`, that is not the same in both."""
    for name, leaf in wanted.items():
        if name not in saved:
            raise DSV41Error(f"{path}: of another model or optimiser: {name}: expected {leaf.text}, it has none")
        if saved[name][:2] != leaf[:2]:
            found = saved[name].text
            raise DSV41Error(f"{path}: of another model or optimiser: {name}: expected {leaf.text}, it has {found}")
    extra = next((name for name in saved if name not in wanted), None)
    if extra is not None:
        raise DSV41Error(f"{path}: of another model or optimiser: it has {extra} {saved[extra].text}, expected none")
