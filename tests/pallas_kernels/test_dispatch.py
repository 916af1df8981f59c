"""Choosing an implementation is loud, and part of what a compiled function is known by."""

import logging
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import compat, dispatch
from pallas_kernels.dispatch import choose, kernels

FITS = {"gpu": lambda: None, "tpu": lambda: None}
TOO_WIDE = {"gpu": lambda: "the width 100 is no multiple of 64", "tpu": lambda: "the width 100 is no multiple of 64"}

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="what 'auto' means on the CPU")


def test_a_named_kernel_is_taken_whatever_the_backend():
    assert choose("op", "gpu", FITS) == "gpu"
    assert choose("op", "tpu", FITS) == "tpu"
    assert choose("op", "tpu_interpret", FITS) == "tpu_interpret"
    assert choose("op", "xla", TOO_WIDE) == "xla"


@pytest.mark.parametrize("name", ["gpu", "tpu", "tpu_interpret"])
def test_a_named_kernel_that_cannot_run_raises(name):
    with pytest.raises(ValueError, match=r"op: implementation '.*' cannot run: the width 100 is no multiple of 64"):
        choose("op", name, TOO_WIDE)


_LATER = """
import importlib, pkgutil
import jax
from pallas_kernels import dispatch
traces = []
compiled = jax.jit(lambda x: traces.append(1) or x + 1)
compiled(1.0)
for module in pkgutil.walk_packages(importlib.import_module("pallas_kernels").__path__, "pallas_kernels."):
    importlib.import_module(module.name)
compiled(1.0)
print(len(traces))
"""


def test_what_is_imported_later_leaves_compiled_functions_as_they_are():
    """Ops import their kernels when they are first traced. Nothing in there may be part of what programs are known by:
    the first program of a process would be compiled again when it is next called."""
    done = subprocess.run([sys.executable, "-c", _LATER], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


def test_unknown_name():
    with pytest.raises(ValueError, match="op: unknown implementation 'cuda'"):
        choose("op", "cuda", FITS)


@on_cpu
def test_the_cpu_has_no_kernels():
    assert choose("op", "auto", FITS) == "xla"
    with pytest.raises(ValueError, match="no kernel for the cpu backend"):
        choose("op", "pallas", FITS)


@pytest.mark.parametrize("backend,kernel", [("gpu", "gpu"), ("cuda", "gpu"), ("tpu", "tpu")])
def test_auto_takes_the_kernel_that_fits_and_says_so_once(backend, kernel, monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    dispatch._say.cache_clear()
    with caplog.at_level(logging.INFO, "pallas_kernels.dispatch"):
        assert [choose("op", None, FITS), choose("op", "pallas", FITS)] == [kernel, kernel]
        assert choose("other", "auto", TOO_WIDE) == "xla"
    assert caplog.messages == [f"op: {kernel} kernel", "other: plain XLA (the width 100 is no multiple of 64)"]
    with pytest.raises(ValueError, match="cannot run"):
        choose("other", "pallas", TOO_WIDE)


def test_the_context_is_the_default_and_compiles_anew():
    seen = []

    @jax.jit
    def fn(x):
        seen.append(choose("op", None, FITS))
        return x

    with kernels("xla"):
        fn(jnp.zeros(3))
        fn(jnp.ones(3))
    with kernels("tpu"):
        fn(jnp.zeros(3))
    with kernels("xla"):
        fn(jnp.zeros(3))
    assert seen == ["xla", "tpu"]


@pytest.mark.skipif(compat.JAX_VERSION < (0, 11), reason="about JAX that can build the kernels")
@pytest.mark.parametrize(("capability", "fits"), [("9.0", True), ("8.0", False), ("10.0", False)])
def test_gpu_kernels_are_for_hopper(capability, fits, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    problem = compat.gpu_problem()
    assert problem is None if fits else f"this device has {capability}" in problem
