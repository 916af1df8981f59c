"""The TPU kernel's tiles: more of them than its slots, the last one not full, halves for two cores."""

import functools

import jax
import pytest

from pallas_kernels.hyper_connection import tpu
from tests.pallas_kernels import hyper_connection_cases as cases


# 16 tokens a tile: 5 tiles, the last of 3 tokens; 16 tiles in two halves, the last of 13.
@pytest.mark.parametrize("tokens", [67, pytest.param(253, marks=pytest.mark.slow)])
def test_many_tiles(tokens, monkeypatch):
    monkeypatch.setattr(tpu, "_MAX_TILE", 16)
    args = cases.make("random", 13, tokens, 128)
    step = jax.jit(functools.partial(tpu.residual_step, **cases.STATIC, interpret=True))
    cases.check(step(*args), args)


def test_shapes_that_the_kernel_does_not_take():
    def problem(*shape):
        return tpu.problem(jax.ShapeDtypeStruct(shape, "bfloat16"))

    assert problem(64, 4, 5120) is None
    assert "multiple of 128" in problem(64, 4, 64)
    assert "streams" in problem(64, 3, 128)
    assert "no tokens" in problem(0, 4, 128)
    assert "VMEM" in problem(64, 8, 1 << 15)
