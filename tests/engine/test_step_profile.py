"""Putting kernels down to layers, from the scopes of a compiled step."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41
from dsv41.config import DSV41Error
from dsv41.engine.mesh_checks import on_mesh
from dsv41.engine.step_profile import (
    _INSTRUCTION,
    StepShape,
    _by_layer,
    _scopes_of_its_own,
    compile_steps,
    profile_steps,
    random_pages,
    step_at,
)
from dsv41.sharding import ShardingRules, make_mesh
from launch import profile_step as command
from launch.cli import run
from pallas_kernels.measure import KernelEvent
from tests.checkpoint_files import one_layer
from tests.models_for_tests import small_model

SCOPES = {
    "fusion.1": "jit(forward)/layer_3/attention/attend/mul",
    "fusion.2": "jit(forward)/layer_3/attention/jit(_call)/attend/dot",
    "while.7": "jit(forward)/layer_3/moe/experts/while/body/dot",
    "fusion.9": "jit(forward)/layer_10/engram/take",
    "fusion.4": "jit(forward)/head/dot",
}


needs_two = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")


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


def test_collectives_are_told_apart():
    events = [KernelEvent(name="ncclDevKernel_SendRecv", hlo_op="fusion.1", scope="", us=3.0), _event("fusion.1", 2.0)]
    (entry,) = _by_layer(events, SCOPES, 1)
    assert entry.parts == {"attention/attend/collective": (1, 3.0), "attention/attend": (1, 2.0)}


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("void stream_executor::gpu::RaggedAllToAllKernelImpl<4>(long)", "ragged"),
        ("MemcpyP2P", "ragged-all-to-all-start.3"),
        ("MultiGpuBarrierKernel", "ragged"),
    ],
)
def test_collectives_that_xla_does_itself_are_told_apart(name, op):
    scope = "jit(forward)/layer_3/moe/experts/ragged_all_to_all"
    (entry,) = _by_layer([KernelEvent(name=name, hlo_op=op, scope=scope, us=3.0)], SCOPES, 1)
    assert entry.parts == {"moe/experts/collective": (1, 3.0)}


def test_a_ragged_exchange_without_scope_is_the_experts():
    (entry,) = _by_layer([_event("ragged-all-to-all.19", 2.0)], SCOPES, 1)
    assert entry.layer is None and entry.parts == {"moe/experts/collective": (1, 2.0)}


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
def test_pages_hold_the_same_wherever_they_lie():
    model = small_model()
    mesh, rules = make_mesh({"sequence": 4}, jax.devices()[:4]), ShardingRules(batch=("sequence",), pages=("sequence",))
    spread = random_pages(dataclasses.replace(model, mesh=mesh, rules=rules).init_cache(4, 1024))
    whole, longer = random_pages(model.init_cache(4, 1024)), random_pages(model.init_cache(4, 4096))
    for k, ratio in enumerate(whole.layout.ratios):
        for kind in ("main", "index"):
            here, there, more = (
                np.asarray(getattr(c, kind)[k])[np.asarray(c.layout.physical_pages(jnp.asarray(c.page_table), ratio))]
                for c in (whole, spread, longer)
            )
            np.testing.assert_array_equal(here, there)
            np.testing.assert_array_equal(here, more[:, : here.shape[1]])
            assert len(np.unique(here[:, :, 0], axis=0)) > 1


@pytest.mark.parametrize("mesh", [None, pytest.param("data=2", marks=[needs_two, pytest.mark.slow])])
def test_steps_compiled_side_by_side_are_the_forward_pass(mesh):
    model = dsv41.load(one_layer())
    model = on_mesh(model, mesh, "decode") if mesh else model
    shapes = [StepShape(2, 40), StepShape(4 if mesh else 1, 30, tokens=3)]
    for shape, run_step in zip(shapes, compile_steps(model, shapes), strict=True):
        batch = step_at(model, *shape)
        expected, *_ = model.forward(batch, random_pages(model.init_cache(shape.rows, 48)), logits="last")
        found, *_ = run_step(model.params, batch, random_pages(model.init_cache(shape.rows, 48)), None)
        np.testing.assert_array_equal(found, expected)
        scopes = dict(_INSTRUCTION.findall(run_step.as_text()))
        layer, _ = _by_layer([_event(op, 1.0) for op in scopes], scopes, 1)
        assert {"moe/experts", "moe/experts/products", "moe/route", "attention/attend"} <= set(layer.parts)


def test_scopes_are_not_those_of_another_program_in_the_cache():
    for name in ("first", "second"):

        def step(x, name=name):
            with jax.named_scope(name):
                return jnp.sin(x) * 1.25

        with _scopes_of_its_own():
            text = jax.jit(step).lower(jnp.ones(7)).compile().as_text()
        assert f"/{name}/" in text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU's trace lists no kernels")
def test_a_cpu_is_refused():
    with pytest.raises(DSV41Error, match="lists no kernels; profile on an NVIDIA GPU"):
        profile_steps(small_model(), [StepShape(2, 40)])


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
