"""Top-k of whole rows: every implementation against the stable answer of numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.compat import gpu_problem, lowering_for
from pallas_kernels.topk import block_sizes, ops, ref
from pallas_kernels.topk.arg_specs import SPECS
from pallas_kernels.topk.gpu_plan import Plan
from pallas_kernels.topk.gpu_program import Arrays, TopK
from tests.pallas_kernels import topk_cases as cases
from tests.pallas_kernels.simt_emulator import Cluster, Emulator


@functools.cache
def _pyramid(k: int, sorted_width: int):
    """The reference, compiled with another width at which a level is sorted as it is."""

    def topk(scores, lengths=None):
        width, ref.SORTED_WIDTH = ref.SORTED_WIDTH, sorted_width
        try:
            return ref.topk(scores, k, lengths=lengths)
        finally:
            ref.SORTED_WIDTH = width

    return jax.jit(topk)


@functools.cache
def _compiled(k: int, implementation: str):
    return jax.jit(functools.partial(ops.topk, k=k, implementation=implementation))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", cases.CASES)
def test_ref_is_stable(case, dtype):
    scores = cases.make(case, 0, 4, 1003, dtype)
    ids = np.asarray(_pyramid(7, 64)(scores))
    np.testing.assert_array_equal(ids, cases.expected(scores, 7, None))
    cases.check(ids, scores, 7, None)


@pytest.mark.parametrize("lengths", ["random", "short", "full"])
@pytest.mark.parametrize(
    "rows,width,k", [(5, 1, 1), (5, 1, 4), (6, 7, 9), (4, 1001, 512), (3, 4099, 8), (2, 70001, 33)]
)
def test_ref_lengths(rows, width, k, lengths):
    scores = cases.make("few_values", 1, rows, width, jnp.float32)
    lengths = cases.make_lengths(lengths, 1, rows, width)
    ids = _compiled(k, "xla")(scores, lengths=lengths)
    np.testing.assert_array_equal(ids, cases.expected(scores, k, lengths))


@given(
    st.lists(st.sampled_from([-np.inf, np.nan, -1.0, -0.0, 0.0, 1.0, 2.0]), min_size=1, max_size=200),
    st.sampled_from([1, 2, 6]),
    st.integers(0, 220),
)
def test_ref_equals_sorting_the_whole_row(values, k, length):
    scores = np.array([values, values[::-1]], np.float32)
    lengths = np.array([length, len(values)], np.int32)
    # rows padded to one width: nothing is compiled anew for an example
    padded = np.pad(scores, ((0, 0), (0, 200 - len(values))), constant_values=-np.inf)
    ids = _pyramid(k, 4)(padded, lengths)
    np.testing.assert_array_equal(ids, cases.expected(padded, k, lengths))


def test_ref_equals_lax_top_k_at_every_tie():
    scores = cases.make("few_values", 2, 3, 40000, jnp.float32)
    wanted = jax.jit(jax.lax.top_k, static_argnums=1)(scores, 512)[1]
    np.testing.assert_array_equal(_compiled(512, "xla")(scores), wanted)


@pytest.mark.parametrize("rows,width", [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_choose_from(rows, width):
    ids = ops.topk(jnp.zeros((rows, width)), 4)
    np.testing.assert_array_equal(ids, np.full((rows, 4), -1))
    assert ids.dtype == jnp.int32


def test_bad_arguments():
    scores = jnp.zeros((2, 8))
    with pytest.raises(ValueError, match=r"\[rows, S\]"):
        ops.topk(scores[0], 4)
    with pytest.raises(ValueError, match="at least 1"):
        ops.topk(scores, 0)
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        ops.topk(scores.astype(jnp.int32), 4)
    with pytest.raises(ValueError, match="lengths must be"):
        ops.topk(scores, 4, lengths=jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="int32"):
        ops.topk(scores, 4, lengths=jnp.zeros(2, jnp.float32))
    with pytest.raises(ValueError, match="unknown implementation"):
        ops.topk(scores, 4, implementation="fast")


@pytest.mark.parametrize("spec", [s for s in SPECS if "ci" in s.tags], ids=lambda s: s.name)
def test_arg_specs(spec):
    # This generator takes a third of the default one's time to compile.
    key = jax.random.key(0, impl="unsafe_rbg")
    arrays, ids = jax.jit(lambda key: (arrays := spec.make(key), spec.bind("xla")(arrays)))(key)
    scores, lengths = (np.asarray(arrays[n]) if n in arrays else None for n in ("scores", "lengths"))
    cases.check(ids, scores, spec.static["k"], lengths)


def test_arg_spec_names_are_unique():
    assert len({s.name for s in SPECS}) == len(SPECS)
    for spec in SPECS:
        assert spec.abstract()["scores"].ndim == 2


# The GPU kernel: its program on an emulator, which also finds missing barriers; the kernel itself on a device.


def _emulate(plan: Plan, scores, lengths=None, mapping=None):
    blocks = len(scores) * plan.splits
    shape = (blocks // plan.cluster, plan.slots)
    ids = np.full(shape, 123456789, np.int32)
    values = np.full(shape, np.nan, np.float32) if plan.values else None
    arrays = Arrays(scores, lengths, mapping, ids, values)
    for first in range(0, blocks, plan.cluster):
        cluster = Cluster(plan.cluster)
        emulators = [Emulator(plan.threads, first + i, plan.shared_words, cluster) for i in range(plan.cluster)]
        cluster.run([TopK(emulator, plan, arrays, None).run for emulator in emulators])
    shape = (len(scores), -1)
    return ids.reshape(shape), values if values is None else values.reshape(shape)


def _emulate_plans(plans, scores, lengths=None):
    ids, values = _emulate(plans[0], scores, lengths)
    return ids if plans[1] is None else _emulate(plans[1], values, None, ids)[0]


def _small_plan(width: int, dtype, threads: int = 128, **changes) -> Plan:
    """Several tiles, and a list that has to be cut when many scores pass."""
    changes = {"vectors": 2, "group": 4, "buffers": 2, "bins": 512, "capacity": 5 * threads} | changes
    return block_sizes.plan(width, 50, jnp.dtype(dtype).itemsize, blocks=1, threads=threads, **changes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", cases.CASES)
def test_gpu_program(case, dtype):
    scores, lengths = cases.make(case, 3, 2, 6008, dtype), np.array([6008, 5555], np.int32)
    for changes in ({}, {"group": 0, "buffers": 1}, {"vectors": 8, "bins": 64}):
        ids, _ = _emulate(_small_plan(6008, dtype, **changes), scores, lengths)
        cases.check(ids, scores, 50, lengths)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", cases.CASES)
def test_gpu_program_on_one_tile(case, dtype):
    width = 512 if dtype == jnp.float32 else 1024
    scores, lengths = cases.make(case, 7, 2, width, dtype), np.array([width, width - 3], np.int32)
    for vectors, group in ((1, 2), (4, 4), (8, 2)):
        plan = _small_plan(width, dtype, vectors=vectors, group=group, buffers=1, capacity=5 * 128)
        ids, _ = _emulate(plan, scores, lengths)
        cases.check(ids, scores, 50, lengths)


@pytest.mark.parametrize("k", [1, 8, 511, 2048])
def test_gpu_program_in_parts(k):
    for width in (8, 4104, 40000):
        scores = cases.make("few_values", 4, 2, width, jnp.float32)
        lengths = np.array([width, width // 2 - 3], np.int32)
        cases.check(_emulate_plans(block_sizes.plans(2, width, k, 4), scores, lengths), scores, k, lengths)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", cases.CASES)
def test_gpu_program_in_clusters(case, dtype):
    scores, lengths = cases.make(case, 8, 2, 8000, dtype), np.array([8000, 3001], np.int32)
    for cluster in (2, 8):
        part = 8000 // cluster // 8 * 8 + 8
        plan = _small_plan(8000, dtype, part=part, splits=cluster, cluster=cluster, capacity=5 * 128)
        ids, _ = _emulate(plan, scores, lengths)
        cases.check(ids, scores, 50, lengths)


@pytest.mark.parametrize("length", [-5, 0, 1, 49, 50, 51, 1000000])
def test_gpu_program_lengths(length):
    scores, lengths = cases.make("random", 5, 1, 1200, jnp.bfloat16), np.array([length], np.int32)
    ids, _ = _emulate(_small_plan(1200, jnp.bfloat16), scores, lengths)
    cases.check(ids, scores, 50, lengths)


@pytest.mark.parametrize("value", [-0.0, -(2.0**-127), 0.0])
@pytest.mark.parametrize(("width", "k"), [(508, 500), (1004, 1000)])
def test_gpu_program_takes_nothing_behind_the_list(width, k, value):
    """All scores have the lowest key that a bound can tell from the padding behind the list."""
    scores = np.full((1, width), value, np.float32)
    plan, following = block_sizes.plans(1, width, k, 4)
    assert following is None
    ids, _ = _emulate(plan, scores)
    cases.check(ids, scores, k, None)


@pytest.mark.parametrize("threads", [128, 256, 512, 1024])
def test_gpu_program_threads(threads):
    scores = cases.make("random", 6, 1, 9000, jnp.float32)
    ids, _ = _emulate(_small_plan(9000, jnp.float32, threads=threads), scores)
    cases.check(ids, scores, 50, None)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("k", [1, 8, 500, 512, 513, 1024, 1025, 2048])
def test_gpu_plans_fit_the_device(k, itemsize):
    for rows in (1, 3, 8, 33, 64, 66, 132, 384, 600, 4096):
        for width in (8, 40, 4096, 4104, 16384, 16392, 33000, 131072, 1 << 20, block_sizes.MAX_WIDTH):
            for plan in block_sizes.plans(rows, width, k, itemsize):
                if plan is None:
                    continue
                assert plan.shared_words * 4 <= 227 * 1024
                assert plan.capacity >= k + plan.piece and plan.capacity % plan.threads == 0
                assert plan.capacity < 1 << 16 and plan.bins >= k and plan.share >= k and plan.slots >= k
                assert plan.splits % plan.cluster == 0 and plan.part * plan.splits >= plan.width
                assert plan.part % plan.per_vector == plan.width % plan.per_vector == 0


@pytest.mark.skipif(gpu_problem() is not None, reason=str(gpu_problem()))
@pytest.mark.parametrize("name", ["odd_width", "rows1_1m", "rows64_128k_k2048_bf16", "prefill_entries"])
def test_gpu_kernel_lowers(name):
    (spec,) = (s for s in SPECS if s.name == name)
    arrays = spec.abstract()
    with lowering_for("gpu", "NVIDIA H200", block_sizes.MULTIPROCESSORS):
        jax.jit(spec.bind("gpu")).trace(arrays).lower(lowering_platforms=("cuda",))


_no_gpu = gpu_problem() or (None if jax.default_backend() == "gpu" else "no CUDA device")


@pytest.mark.skipif(_no_gpu is not None, reason=str(_no_gpu))
@pytest.mark.parametrize(
    "rows,width,k", [(3, 40, 8), (2, 4096, 512), (2, 16384, 2048), (600, 1001, 99), (2, 70001, 512)]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gpu_kernel(rows, width, k, dtype):
    topk = jax.jit(functools.partial(ops.topk, k=k, implementation="gpu"))
    for seed, (case, kind) in enumerate((c, kind) for c in cases.CASES for kind in ("none", "random")):
        scores, lengths = cases.make(case, seed, rows, width, dtype), cases.make_lengths(kind, seed, rows, width)
        ids = topk(jnp.asarray(scores), lengths=None if lengths is None else jnp.asarray(lengths))
        cases.check(ids, scores, k, lengths)


# The TPU kernels, interpreted.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tpu_cases(dtype):
    topk = jax.jit(functools.partial(ops.topk, k=33, implementation="tpu_interpret"))
    for seed, case in enumerate(cases.CASES):
        scores, lengths = cases.make(case, seed, 5, 300, dtype), cases.make_lengths("random", seed, 5, 300)
        cases.check(topk(jnp.asarray(scores), lengths=jnp.asarray(lengths)), scores, 33, lengths)


@pytest.mark.slow
def test_tpu_pyramid(monkeypatch):
    from pallas_kernels.topk import tpu

    monkeypatch.setattr(tpu, "_DIRECT_WIDTH", 1024)
    topk = jax.jit(functools.partial(ops.topk, k=70, implementation="tpu_interpret"))
    for case in ("few_values", "infinities", "nan", "best_strided"):
        scores, lengths = cases.make(case, 7, 3, 20001, jnp.float32), np.array([20001, 12345, 77], np.int32)
        cases.check(topk(jnp.asarray(scores), lengths=jnp.asarray(lengths)), scores, 70, lengths)


@pytest.mark.parametrize("rows,width,k", [(1, 1, 4), (17, 129, 200), (2, 1030, 8)])
def test_tpu_sizes(rows, width, k):
    topk = _compiled(k, "tpu_interpret")
    scores = cases.make("few_values", 8, rows, width, jnp.float32)
    if width == 1:  # a program of its own, whatever the size
        cases.check(topk(jnp.asarray(scores)), scores, k, None)
    for lengths in (np.arange(rows, dtype=np.int32) - 1, np.full(rows, 2**31 - 1, np.int32)):
        cases.check(topk(jnp.asarray(scores), lengths=jnp.asarray(lengths)), scores, k, lengths)


def test_tpu_says_what_it_does_not_take():
    with pytest.raises(ValueError, match="k must be at most"):
        ops.topk(jnp.zeros((2, 10000)), 5000, implementation="tpu")
