"""The routed experts' product: the reference against float64 and golden values, the TPU kernels against the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ahead_of_time import compile_specs, libtpu_problem
from pallas_kernels.experts import ops, tpu, tpu_tiles
from pallas_kernels.experts.arg_specs import SPECS
from pallas_kernels.quantize import ref as quantize
from tests.golden import primitives
from tests.pallas_kernels import experts_cases as cases


@functools.cache
def _jitted(implementation: str):
    return jax.jit(functools.partial(ops.expert_blocks, limit=cases.LIMIT, implementation=implementation))


def _run(implementation: str, args: dict) -> jax.Array:
    return _jitted(implementation)(**jax.tree.map(jnp.asarray, args))


@pytest.mark.parametrize("case", cases.CASES)
def test_ref(case):
    args = cases.make(case, 0, d=64, f=96)
    y = _run("xla", args)
    cases.check(y, args)
    unused = (args["block_expert"] < 0) | (args["block_expert"] >= cases.EXPERTS)
    assert not np.asarray(y, np.float32)[unused].any()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_ref_other_weights(kind):
    for case in ("random", "unused", "clamped"):
        args = cases.make(case, 1, rows=5, d=64, f=80 if kind == "bf16" else 96, kind=kind)
        cases.check(_run("xla", args), args)


def test_ref_golden():
    g = primitives()
    w1, w3, w2 = ((jnp.asarray(g[f"expert_bf16.{name}"])[None], None) for name in ("w1", "w3", "w2"))
    x, weight = jnp.asarray(g["expert.x"])[None], jnp.asarray(g["expert.route_weight"])[None, :, 0]
    y = _jitted("xla")(x, weight, jnp.zeros(1, jnp.int32), w1, w3, w2)
    np.testing.assert_array_equal(np.asarray(y[0], np.float32), g["expert_bf16.y"].astype(np.float32))


def test_a_stack_of_layers():
    """Experts of a layer in a flattened stack are reached by an offset."""
    args = cases.make("there_and_back", 2, d=64, f=96)
    stacked = {n: jax.tree.map(lambda w: np.concatenate([w[::-1], w]), args[n]) for n in ("w1", "w3", "w2")}
    moved = args | stacked | {"block_expert": args["block_expert"] + cases.EXPERTS}
    np.testing.assert_array_equal(_run("xla", args), _run("xla", moved))


@pytest.mark.parametrize("spec", [s for s in SPECS if "ci" in s.tags], ids=lambda s: s.name)
def test_arg_specs(spec):
    # This generator takes a third of the default one's time to compile.
    key = jax.random.key(0, impl="unsafe_rbg")
    arrays, y = jax.jit(lambda key: (arrays := spec.make(key), spec.bind("xla")(arrays)))(key)
    y = np.asarray(y, np.float32)
    used = np.asarray(arrays["block_expert"]) < arrays["w1"][0].shape[0]
    assert np.isfinite(y).all() and y[used].any(axis=(1, 2)).all() and 0.05 < y[used].std() < 5


def test_arg_spec_names_are_unique():
    assert len({s.name for s in SPECS}) == len(SPECS)
    for spec in SPECS:
        assert spec.abstract()["x"].ndim == 3


def test_no_blocks():
    args = cases.make("random", 3, d=64, f=96)
    args |= {name: args[name][:0] for name in ("x", "row_weight", "block_expert")}
    assert _run("xla", args).shape == (0, 8, 64)


def test_bad_arguments():
    args = jax.tree.map(jnp.asarray, cases.make("random", 4, d=64, f=96))

    def attempt(**changes):
        ops.expert_blocks(**(args | changes), limit=10.0)

    with pytest.raises(ValueError, match="x must be bfloat16"):
        attempt(x=args["x"].astype(jnp.float32))
    with pytest.raises(ValueError, match="row_weight must be"):
        attempt(row_weight=args["row_weight"][:, 1:])
    with pytest.raises(ValueError, match="block_expert must be int32"):
        attempt(block_expert=args["block_expert"].astype(jnp.float32))
    with pytest.raises(ValueError, match="w1 must be uint8, float8"):
        attempt(w1=(args["w1"][0].astype(jnp.int32), args["w1"][1]))
    with pytest.raises(ValueError, match="have no scales"):
        attempt(w1=(args["w1"][0], None))
    with pytest.raises(ValueError, match="w2 and w1 must both have scales"):
        attempt(w2=(args["w2"][0], None))
    with pytest.raises(ValueError, match="w3 must be uint8"):
        attempt(w3=(args["w3"][0][:, :, 1:], args["w3"][1]))
    with pytest.raises(ValueError, match="scales of w2 must be"):
        attempt(w2=(args["w2"][0], args["w2"][1][:, 1:]))
    with pytest.raises(ValueError, match="at least one expert"):
        attempt(**{name: jax.tree.map(lambda w: w[:0], args[name]) for name in ("w1", "w3", "w2")})


# The TPU kernels, interpreted.


@pytest.fixture(params=tpu_tiles.FORMS)
def form(request, monkeypatch):
    """Both ways to decode, each on tiles that are smaller than the matrices."""
    kind = {"float32": "TPU v5 lite", "pairs": "TPU v6 lite"}[request.param]
    monkeypatch.setattr(tpu, "tpu_device_kind", lambda: kind)
    monkeypatch.setattr(tpu, "_MOST_ROWS", 512)
    _jitted.cache_clear()
    yield request.param
    _jitted.cache_clear()


def test_tpu_cases(form):
    for seed, case in enumerate(cases.CASES):
        args = cases.make(case, seed)
        cases.check(_run("tpu_interpret", args), args)


@pytest.mark.slow
@pytest.mark.parametrize("rows,d,f", [(24, 512, 256), (128, 256, 768)])
def test_tpu_sizes(form, rows, d, f):
    for case in ("unused", "there_and_back"):
        args = cases.make(case, 5, rows=rows, d=d, f=f)
        cases.check(_run("tpu_interpret", args), args)


@pytest.mark.parametrize("form", tpu_tiles.FORMS)
def test_tpu_dequantises_exactly(form):
    out, width = 256, 1024
    rng = np.random.default_rng(6)
    values = rng.integers(0, 256, (out, width // 2)).astype(np.uint8)
    scales = rng.integers(65, tpu_tiles._LARGEST_SCALE + 1, (out, width // 32)).astype(np.uint8)
    scales[5, 2] = 255

    def kernel(values_ref, codes_ref, join_ref, out_ref, weights, scratch):
        tpu_tiles.dequantize(values_ref, codes_ref, join_ref, weights, scratch, form=form)
        out_ref[...] = pltpu.bitcast(weights[...], jnp.bfloat16)

    got = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((out, width), jnp.bfloat16),
        scratch_shapes=[
            pltpu.VMEM((out // 2, width), jnp.int32),
            pltpu.VMEM(tpu_tiles.scales_shape(out, width // 2), jnp.int32),
        ],
        interpret=True,
    )(values, scales.T, tpu_tiles.split_matrix().T)
    got = np.asarray(got, np.float32).astype(np.float64) * tpu_tiles.UNIT
    order = np.concatenate([np.arange(0, 256, 2), np.arange(1, 256, 2)])
    columns = (np.arange(0, width, 256)[:, None] + order).reshape(-1)
    wanted = cases.decoded((values, scales))
    wanted[5, 64:96] = np.nan
    np.testing.assert_array_equal(got, wanted[order][:, columns])


def test_tpu_fp8_is_that_of_the_reference():
    rng = np.random.default_rng(7)
    x = rng.normal(size=(16, 512)) * np.exp2(rng.integers(-40, 40, (16, 16))).repeat(32, axis=1)
    x[0] = np.exp2(rng.integers(-20, 1, 512)) * 1.0625  # ties and subnormals
    x[1, ::7], x[2, 40], x[3, 300], x[4] = 0, np.inf, np.nan, -0.0
    x = x.astype(jnp.bfloat16)

    def in_split_order(x):
        return np.asarray(x).reshape(16, 2, 128, 2).swapaxes(2, 3).reshape(16, 512)

    def kernel(x_ref, out_ref):
        out_ref[...] = tpu_tiles.through_fp8(x_ref[...])

    got = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32), interpret=True)(
        in_split_order(x).astype(np.float32)
    )
    wanted = jax.jit(lambda x: quantize.dequantize_fp8(*quantize.quantize_fp8(x)))(x)
    np.testing.assert_array_equal(got, in_split_order(wanted).astype(np.float32))

    finite = x[[0, 1, 4, 5]]
    reordered, order = jax.jit(tpu_tiles.reordered), tpu_tiles.split_matrix()
    moved = reordered(finite, order)
    np.testing.assert_array_equal(moved, in_split_order(x)[[0, 1, 4, 5]])
    np.testing.assert_array_equal(reordered(moved, order.T), finite)


def test_tpu_schedule():
    """Weights are read for used blocks whose expert is not there yet, and nothing behind the last used block runs."""
    rng = np.random.default_rng(8)
    schedule = jax.jit(functools.partial(tpu._schedule, num_experts=3))
    for _ in range(50):
        experts = rng.integers(-1, 5, 7) if rng.random() < 0.9 else np.full(7, 3)
        owner, state, count = (np.asarray(a) for a in schedule(jnp.asarray(experts, jnp.int32)))
        used = (experts >= 0) & (experts < 3)
        last = np.flatnonzero(used)[-1] if used.any() else 0
        assert count == last + 1
        there, loads = None, []
        for b in range(7):
            assert (state[b] != tpu._NOT) == used[b]
            if used[b]:
                assert owner[b] == experts[b] and (state[b] == tpu._FRESH) == (experts[b] != there)
                loads += [] if there == experts[b] else [experts[b]]
                there = experts[b]
        fetched = [int(e) for i, e in enumerate(owner[:count]) if i == 0 or e != owner[i - 1]]
        assert owner.min() >= 0 and owner.max() < 3 and (fetched == loads or not used.any())


@pytest.mark.parametrize("kind,inner,outer", [("TPU v6 lite", 768, 1280), ("TPU v5", 256, 1280), (None, 768, 1280)])
def test_tpu_tiles_of_released_sizes(kind, inner, outer, monkeypatch):
    """Five of nine tiles are less for a core than two of three."""
    monkeypatch.setattr(tpu, "tpu_device_kind", lambda: kind)
    assert (tpu._plan(8, 2, 2304, 5120).tile, tpu._plan(8, 1, 5120, 2304).tile) == (inner, outer)


def test_shapes_that_the_tpu_kernels_do_not_take():
    def problem(rows=8, d=5120, f=2304, dtype=jnp.uint8):
        width = 2 if dtype == jnp.uint8 else 1
        x = jax.ShapeDtypeStruct((2, rows, d), jnp.bfloat16)
        w1, w2 = ((jax.ShapeDtypeStruct((3, out, inner // width), dtype), None) for out, inner in ((f, d), (d, f)))
        return tpu.problem(x, w1, w2)

    assert problem() is None and problem(rows=256) is None
    assert "packed FP4" in problem(dtype=jnp.bfloat16)
    assert "multiples of 256" in problem(f=128)
    assert "multiple of 8 rows" in problem(rows=12)
    assert "VMEM" in problem(rows=4096)


def test_tpu_says_what_it_does_not_take():
    args = jax.tree.map(jnp.asarray, cases.make("random", 9, d=64, f=96))
    with pytest.raises(ValueError, match="multiples of 256"):
        ops.expert_blocks(**args, limit=10.0, implementation="tpu")


@pytest.mark.slow
@pytest.mark.skipif(libtpu_problem() is not None, reason=str(libtpu_problem()))
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_tpu_copies_no_stack(topology):
    """Weights and scales of 48 experts are taken where and as they lie: no padding, no other layout, no staging."""
    (found,) = compile_specs("experts", ["decode_e48"], topology)
    (spec,) = (s for s in SPECS if s.name == "decode_e48")
    stored = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(spec.abstract()))
    assert found.error is None and len(found.kernels) == 2
    assert found.argument_bytes < stored + (1 << 16) and found.temp_bytes < 4 << 20
