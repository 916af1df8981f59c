"""Block sizes of kernels: the heuristic's, replaced by what `launch.tune_kernels` measured for a device kind.

A kernel asks for each of its sizes with `knob`. Tuned values lie in `pallas_kernels/data`, one JSON file a device kind:

    {"device_kind": "NVIDIA H200", "jax": "0.11.2", "ops": {"topk": {"64x16384 k512": {"splits": 2}}}}
"""

import functools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence

import jax

DATA = pathlib.Path(__file__).parent / "data"

# ((op, name, value), ...) while the tuner tries sizes out: these, and the heuristic's for all others. Part of the key
# of compiled functions.
trial = jax.make_user_context(default_value=())

# A trial of nothing but the heuristic.
HEURISTIC = (("", "", 0),)


def data_file(device_kind: str) -> pathlib.Path:
    """Where tuned values of a device kind lie."""
    return DATA / f"{re.sub('[^a-z0-9]+', '_', device_kind.lower()).strip('_')}.json"


@functools.cache
def _tuned(device_kind: str) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    path = data_file(device_kind)
    return json.loads(path.read_text())["ops"] if path.exists() else {}


def knob(op: str, key: str, name: str, default: int) -> int:
    """One size of a kernel.

    Args:
      op: its name.
      key: the shapes that it depends on, as text.
      name: of the size.
      default: the heuristic's value.
    """
    for tried_op, tried_name, value in trial.value:
        if (tried_op, tried_name) == (op, name):
            return value
    if trial.value:
        return default
    return _tuned(jax.devices()[0].device_kind).get(op, {}).get(key, {}).get(name, default)


def combinations(knobs: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Every choice of one value for each name; one empty choice if there are no names."""
    choices: list[dict[str, int]] = [{}]
    for name, values in knobs.items():
        choices = [choice | {name: value} for choice in choices for value in values]
    return choices
