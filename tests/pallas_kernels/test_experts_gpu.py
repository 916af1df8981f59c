"""The GPU kernels of the routed experts' product: their programs on an emulator, lowering, and compiled where there is
such a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import gpu_problem, lowering_for
from pallas_kernels.experts import block_sizes, ops
from pallas_kernels.experts.arg_specs import SPECS
from pallas_kernels.tuning import trial
from tests.pallas_kernels import experts_cases as cases
from tests.pallas_kernels.experts_emulator import emulated_expert_blocks

_SLOW = pytest.mark.slow
# Rows, D, F; what every case runs with comes first.
SIZES = [(8, 256, 512), (16, 256, 512), (8, 1536, 256), (32, 256, 256), (64, 512, 256), (128, 256, 768)]
WIDE = (128, 256, 256)
_QUICK = [(case, SIZES[0]) for case in ("unused", "minute", "nan_row", "wide_scales", "largest_and_smallest_scales")]
_QUICK += [("clamped", SIZES[1]), ("nan_row", SIZES[1]), ("wide_scales", SIZES[1]), ("there_and_back", SIZES[3])]
_QUICK += [("unused", SIZES[4]), ("wide_scales", WIDE)]
_ALL = [(case, size) for size in SIZES[:2] for case in cases.CASES] + [("unused", size) for size in SIZES[2:]]
_ALL += [("there_and_back", size) for size in SIZES[2:]] + [("wide_scales", WIDE)]


def _args(case: str, size: tuple[int, int, int]) -> dict:
    rows, d, f = size
    return cases.make(case, rows, rows=rows, d=d, f=f)


@pytest.mark.parametrize("case,size", [pytest.param(*x, marks=() if x in _QUICK else _SLOW) for x in _ALL])
def test_programs(case, size):
    """Few thread blocks, so that each has several experts and its ring goes round."""
    args = _args(case, size)
    cases.check(emulated_expert_blocks(args, cases.LIMIT, grid=3), args)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"warpgroups": 1, "stages": 2}, {"warpgroups": 4, "stages": 3}])
def test_ways_to_divide_the_work(changes):
    args = _args("unused", (8, 1024, 256))
    cases.check(emulated_expert_blocks(args, cases.LIMIT, grid=5, **changes), args)


@pytest.mark.parametrize("stages, rows", [(3, 128), (4, 128), (4, 16), (5, 16), (6, 16)])
def test_rings_of_many_rows(stages, rows):
    """Short ones have a barrier for every chunk, long ones for every two. A block has several tiles, two or none."""
    args = _args("unused", (rows, 256, 512))
    cases.check(emulated_expert_blocks(args, cases.LIMIT, grid=3, stages=stages), args)
    plan = dataclasses.replace(block_sizes.many_plan(True, 5, rows, 3, 512, 256), stages=stages)
    assert (plan.together, plan.ahead) == {3: (1, 1), 4: (1, 2), 5: (2, 2), 6: (2, 3)}[stages]


def test_unused_blocks_are_not_touched():
    args = _args("none_used", SIZES[0])
    assert np.isnan(emulated_expert_blocks(args, cases.LIMIT, grid=2).astype(np.float32)).all()


_needs_pallas = pytest.mark.skipif(gpu_problem() is not None, reason=str(gpu_problem()))


@_needs_pallas
@pytest.mark.parametrize("name", ["decode_e48", "prefill_e48"])
def test_lowers(name):
    (spec,) = (s for s in SPECS if s.name == name)
    with lowering_for("gpu", "NVIDIA H200", block_sizes.MULTIPROCESSORS):
        lowered = jax.jit(spec.bind("gpu")).trace(spec.abstract()).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 2


@_needs_pallas
def test_what_the_kernels_do_not_take():
    args = jax.tree.map(jnp.asarray, _args("random", SIZES[0]))

    def attempt(message, **changes):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(ops.expert_blocks, limit=10.0, implementation="gpu"), **(args | changes))

    attempt("8 or 16 or 32 or 64 or 128 rows, got 24", x=jnp.tile(args["x"], (1, 3, 1)), row_weight=jnp.ones((6, 24)))
    plain = {name: (jnp.zeros(shape, jnp.bfloat16), None) for name, shape in _shapes(256, 512).items()}
    attempt("packed FP4 weights, not bfloat16", **plain)
    small = jax.tree.map(jnp.asarray, cases.make("random", 0, d=256, f=96))
    attempt("multiples of 256, got 256 and 96", **small)
    many = jax.ShapeDtypeStruct((30000, 8, 256), jnp.bfloat16)
    attempt("30000 blocks of 8 x 256 need", x=many, row_weight=many.update(shape=(30000, 8), dtype=jnp.float32),
            block_expert=many.update(shape=(30000,), dtype=jnp.int32))  # fmt: skip


def test_tuner_finds_the_sizes_it_may_vary():
    for rows, names in ((8, {"warpgroups", "stages"}), (128, {"stages"})):
        x, w1 = jax.ShapeDtypeStruct((7, rows, 512), jnp.bfloat16), jax.ShapeDtypeStruct((3, 256, 256), jnp.uint8)
        key, choices = block_sizes.knobs(x=x, w1=(w1, None), block_expert=None)
        assert key == f"7x{rows} d512 f256" and set(choices) == names
        for name, values in choices.items():
            with trial((("experts", name, values[-1]),)):
                plans = block_sizes.plans(7, rows, 3, 512, 256)
            assert all(getattr(plan, name) in (values[-1], plan.chunks) for plan in plans)


def _shapes(d: int, f: int) -> dict[str, tuple[int, int, int]]:
    return {"w1": (cases.EXPERTS, f, d), "w3": (cases.EXPERTS, f, d), "w2": (cases.EXPERTS, d, f)}


_no_gpu = gpu_problem() or (None if jax.default_backend() == "gpu" else "no CUDA device")
_compiled = functools.cache(
    lambda: jax.jit(functools.partial(ops.expert_blocks, limit=cases.LIMIT, implementation="gpu"))
)


@pytest.mark.skipif(_no_gpu is not None, reason=str(_no_gpu))
@pytest.mark.parametrize("size", SIZES)
def test_gpu(size):
    for case in cases.CASES:
        args = _args(case, size)
        arrays = jax.tree.map(jnp.asarray, args)
        used = (args["block_expert"] >= 0) & (args["block_expert"] < cases.EXPERTS)
        y, again = (np.asarray(_compiled()(**arrays).astype(jnp.float32)) for _ in range(2))
        cases.check(y, args)
        np.testing.assert_array_equal(y[used], again[used], err_msg="two runs differ")
