"""Putting kernels down to layers, from the scopes of a compiled step."""

import re

import jax
import pytest

from dsv41.config import DSV41Error
from dsv41.engine.step_profile import _by_layer, profile_step
from launch import profile_step as command
from launch.cli import run
from pallas_kernels.measure import KernelEvent
from tests.models_for_tests import small_model

SCOPES = {
    "fusion.1": "jit(forward)/layer_3/attention/attend/mul",
    "fusion.2": "jit(forward)/layer_3/attention/attend/dot",
    "while.7": "jit(forward)/layer_3/moe/experts/while/body/dot",
    "fusion.9": "jit(forward)/layer_10/engram/take",
    "fusion.4": "jit(forward)/head/dot",
}


def _event(op: str, us: float, scope: str = "") -> KernelEvent:
    return KernelEvent(name="kernel", hlo_op=op, scope=scope, us=us)


def test_kernels_by_layer_and_part():
    events = [_event("fusion.1", 2.0), _event("fusion.2", 4.0), _event("while.7", 1.0), _event("while.7", 3.0)]
    events += [_event("fusion.9", 5.0), _event("fusion.4", 6.0), _event("copy.1", 1.0)]
    found = {entry.layer: entry for entry in _by_layer(events * 2, SCOPES, 2)}
    assert list(found) == [3, 10, None]
    assert found[3].launches == 4 and found[3].us == 10
    assert found[3].parts == {"attention/attend": (2, 6.0), "moe/experts": (2, 4.0)}
    assert found[10].parts == {"engram/take": (1, 5.0)}
    assert found[None].parts == {"other": (2, 7.0)}


def test_the_scope_of_the_trace_stands_in_for_an_unknown_instruction():
    (entry,) = _by_layer([_event("", 1.0, "jit(forward)/layer_2/moe/route/topk")], SCOPES, 1)
    assert entry.layer == 2 and entry.parts == {"moe/route": (1, 1.0)}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU's trace lists no kernels")
def test_a_cpu_is_refused():
    with pytest.raises(DSV41Error, match="lists no kernels; profile on an NVIDIA GPU"):
        profile_step(small_model(), rows=2, context=40)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--context=4096"], "max_tokens=4097 exceeds max_position_embeddings"),
        (["--config=nothing.json"], "nothing.json"),
        (["--rows=0"], "rows"),
    ],
)
def test_bad_input(argv, message, capsys):
    assert run(command.main, command.FLAGS, ["profile_step", *argv]) == 2
    assert re.search(message, capsys.readouterr().err)
