"""Experts spread over devices give the bits of experts on one device, however tokens are routed."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from dsv41.config import DSV41Error
from dsv41.ops import expert_exchange, expert_transport
from dsv41.ops.expert_copies import with_copies
from dsv41.ops.expert_exchange import dequantize_by_product, exchanged_experts
from dsv41.ops.expert_layout import block_rows
from dsv41.ops.linear import QuantizedArray, WeightFormat
from dsv41.ops.moe import routed_experts
from dsv41.sharding import AXES, ExpertPlacement, ShardingRules, make_mesh, plan_copies
from pallas_kernels.quantize import ops as quantize
from tests.ragged_emulation import emulated_ragged_all_to_all

EXPERTS, WIDTH, INNER, LIMIT = 16, 64, 32, 10.0
DEVICES, TOKENS, TOP_K = 8, 6, 3
EVERY = ShardingRules(batch=("data", "sequence"), heads=("tensor",), experts=AXES)
SUBSET = ShardingRules(batch=("data", "sequence"), heads=("tensor",), experts=("sequence", "tensor"))


@functools.cache
def _mesh():
    return make_mesh({"data": 2, "sequence": 2, "tensor": 2}, jax.devices()[:DEVICES])


@functools.cache
def _stacks(format: WeightFormat) -> tuple[QuantizedArray, QuantizedArray, QuantizedArray]:
    rng = np.random.default_rng(1)

    def stored(out: int, columns: int) -> QuantizedArray:
        w = jnp.asarray(rng.normal(size=(EXPERTS, out, columns)) / 4, jnp.bfloat16)
        if format is WeightFormat.BF16:
            return QuantizedArray(w, None, format)
        return QuantizedArray(*jax.jit(quantize.quantize_mxfp4)(w), format)

    return stored(INNER, WIDTH), stored(INNER, WIDTH), stored(WIDTH, INNER)


def _tokens(seed: int = 0, tokens: int = TOKENS * DEVICES) -> tuple[np.ndarray, np.ndarray]:
    """x and routing weights."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(tokens, WIDTH)) * np.exp(rng.normal(size=(tokens, 1)) * 3), jnp.bfloat16)
    return x, jnp.asarray(rng.random((tokens, TOP_K)), jnp.float32)


def _distinct(rng: np.random.Generator, tokens: int = TOKENS * DEVICES) -> np.ndarray:
    return np.sort(rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (tokens, 1)), axis=1)[:, :TOP_K], axis=1)


@functools.cache
def _sharded(format=WeightFormat.FP4_ROW, rules=EVERY, **static):
    """(x, chosen, weights, valid, stacks) -> float32, all global."""
    tokens, experts = PartitionSpec(AXES), rules.spec("experts")

    def step(x, chosen, weights, valid, stacks):
        return exchanged_experts(x, chosen, weights, valid, stacks, LIMIT, rules=rules, **static)

    return jax.jit(
        jax.shard_map(step, mesh=_mesh(), in_specs=(*(tokens,) * 4, experts), out_specs=tokens, check_vma=False)
    )


@functools.cache
def _unsharded():
    return jax.jit(lambda *args: routed_experts(*args[:4], *args[4], LIMIT))


def _same(chosen, valid, format=WeightFormat.FP4_ROW, stacks=None, seed=0, **static) -> np.ndarray:
    x, weights = _tokens(seed, len(chosen))
    chosen, valid = jnp.asarray(chosen, jnp.int32), jnp.asarray(valid)
    expected = _unsharded()(x, chosen, weights, valid, _stacks(format))
    found = _sharded(format, **static)(x, chosen, weights, valid, stacks or _stacks(format))
    np.testing.assert_array_equal(np.asarray(found).view(np.uint32), np.asarray(expected).view(np.uint32))
    return np.asarray(found)


def _routings() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Experts and valid tokens by name."""
    rng, tokens = np.random.default_rng(2), TOKENS * DEVICES
    every, chosen = np.ones(tokens, bool), _distinct(rng)
    device = np.arange(tokens) // TOKENS
    one = np.arange(tokens) == 17
    return {
        "random": (chosen, every),
        "holes": (chosen, rng.random(tokens) < 0.5),
        "all to the same experts": (np.tile([3, 4, 5], (tokens, 1)), every),
        "all to one device": (np.tile([4, 5, 9], (tokens, 1)), every),
        "to themselves": (np.stack([device * 2, device * 2 + 1, (device * 2 + 2) % 16], 1), every),
        "one token": (chosen, one),
        "no token": (chosen, np.zeros(tokens, bool)),
        "one device has tokens": (chosen, device == 5),
        "one device is idle": (chosen, device != 5),
        "one and six tokens on two devices": (chosen, (device == 0) | (np.arange(tokens) == 18)),
        "empty experts": (np.sort(chosen % 4 + np.arange(3) * 4, axis=1), every),
    }


ROUNDS = {"one round": {}, "many rounds": {"capacity": 2}}


@pytest.fixture
def ragged(monkeypatch):
    """The ragged transport on a backend that has none."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", _routings())
def test_any_routing_gives_the_same_bits(name, rounds):
    y = _same(*_routings()[name], **ROUNDS[rounds])
    assert np.isfinite(y).all() and bool(y.any()) == (name != "no token")


# 12 divides no number of results that may come in a round.
RAGGED_ROUNDS = {
    "one round": {},
    "many rounds": {"capacity": 2, "at_once": 12},
    "one round in pieces": {"pieces": 3},
}


@pytest.mark.parametrize("rounds", RAGGED_ROUNDS)
@pytest.mark.parametrize("name", _routings())
def test_any_routing_gives_the_same_bits_ragged(name, rounds, ragged):
    _same(*_routings()[name], transport="ragged", **RAGGED_ROUNDS[rounds])


@pytest.mark.parametrize("transport", ["padded", "ragged"])
def test_a_share_has_blocks_of_the_same_size_as_the_whole(transport, ragged, monkeypatch):
    """On GPUs their size decides how products are rounded."""
    asked = []
    monkeypatch.setattr(expert_exchange, "block_rows", lambda *share: asked.append(share) or block_rows(*share))
    x, weights = _tokens()
    chosen, valid = jnp.zeros(weights.shape, jnp.int32), jnp.ones(len(x), bool)
    _sharded.__wrapped__(transport=transport).trace(x, chosen, weights, valid, _stacks(WeightFormat.FP4_ROW))
    assert set(asked) == {(TOKENS * TOP_K, EXPERTS // DEVICES)}
    assert block_rows(*asked[0]) == block_rows(DEVICES * TOKENS * TOP_K, EXPERTS)


@pytest.mark.parametrize("format, rules", [(WeightFormat.FP4_ROW, SUBSET), (WeightFormat.BF16, EVERY)])
def test_formats_and_axes(format, rules):
    """Over two of three axes, each half of the devices has all experts and exchanges for itself."""
    for name in ("random", "holes", "all to one device"):
        _same(*_routings()[name], format, rules=rules, capacity=4)


@pytest.mark.slow
@pytest.mark.parametrize("format", [WeightFormat.FP4_ROW, WeightFormat.BF16])
@pytest.mark.parametrize("transport", ["padded", "ragged"])
def test_formats_and_axes_in_full(format, transport, ragged):
    for rules in (EVERY, SUBSET):
        for name in ("random", "holes"):
            _same(*_routings()[name], format, rules=rules, transport=transport)


@pytest.mark.slow
def test_m2_many_tokens_to_the_same_experts():
    y = _same(np.tile([1, 5, 7], (512, 1)), np.ones(512, bool), capacity=16)
    assert np.abs(y).max(axis=1).all()


def test_no_tokens_at_all():
    y = _same(np.zeros((0, TOP_K)), np.zeros(0, bool))
    assert y.shape == (0, WIDTH)


@settings(max_examples=20)
@given(st.data())
def test_property_any_skew(data):
    """One compiled program with several rounds, routings from even to all alike."""
    seed = data.draw(st.integers(0, 2**16), "seed")
    rng, tokens = np.random.default_rng(seed), TOKENS * DEVICES
    skew = data.draw(st.sampled_from([0.0, 1.0, 10.0, 100.0]), "skew")
    scores = rng.gumbel(size=(tokens, EXPERTS)) + skew * rng.normal(size=EXPERTS)
    chosen = np.sort(np.argsort(-scores, axis=1)[:, :TOP_K], axis=1)
    valid = rng.random(tokens) < data.draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]), "valid")
    _same(chosen, valid, seed=seed, capacity=2)


def _collectives(hlo: str) -> dict[str, int]:
    names = re.findall(r"= .* (all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute)(?:-start)?\(", hlo)
    return {name: names.count(name) for name in set(names)}


@pytest.mark.parametrize(
    "static, expected",
    [({}, {"all-to-all": 2}), ({"capacity": 2}, {"all-to-all": 2, "all-reduce": 1})],
    ids=["decode", "rounds"],
)
def test_collectives_of_a_step(static, expected):
    x, weights = _tokens()
    chosen, valid = _routings()["random"]
    args = x, jnp.asarray(chosen), weights, jnp.asarray(valid), _stacks(WeightFormat.FP4_ROW)
    assert _collectives(_sharded(**static).lower(*args).compile().as_text()) == expected


@pytest.mark.parametrize(
    "static, agreements",
    [
        ({}, 0),
        ({"capacity": 2}, 1),
        ({"rules": SUBSET, "at_once": 8}, 1),
        ({"rules": SUBSET, "at_once": 8, "capacity": 2}, 2),
    ],
    ids=["decode", "rounds", "two axes", "two axes, rounds"],
)
def test_collectives_of_a_ragged_step(static, agreements):
    """Groups of devices that exchange apart still agree on how often."""
    x, weights = _tokens()
    chosen, valid = _routings()["random"]
    args = x, jnp.asarray(chosen), weights, jnp.asarray(valid), _stacks(WeightFormat.FP4_ROW)
    program = str(jax.make_jaxpr(_sharded(transport="ragged", **static))(*args))
    counts = {name: len(re.findall(rf" {name}\[", program)) for name in ("ragged_all_to_all", "all_gather", "pmax")}
    assert counts == {"ragged_all_to_all": 2, "all_gather": 1, "pmax": agreements}
    assert " psum" not in program and " all_to_all" not in program


def test_scales_spread_by_a_product_are_exact():
    """The form for TPUs, with magnitudes from 2^-20 to 2^100 side by side and groups of zeros."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(16, 8, 32)) * np.exp2(rng.integers(-20, 100, size=(16, 8, 1))) * (rng.random((16, 8, 1)) < 0.8)
    values, scales = jax.jit(quantize.quantize_fp8)(x.reshape(16, 256).astype(ml_dtypes.bfloat16))
    found, expected = (jax.jit(f)(values, scales) for f in (dequantize_by_product, quantize.dequantize_fp8))
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), np.asarray(expected).view(np.uint16))


def test_the_transport_is_said_once(caplog):
    expert_transport._say.cache_clear()
    with caplog.at_level(logging.INFO, expert_transport.__name__):
        assert [expert_transport.choose_transport(8) for _ in range(3)] == ["padded"] * 3
    assert caplog.messages == ["expert exchange: padded all_to_all (devices are cpu)"]
    with pytest.raises(DSV41Error, match="no transport 'pigeon'"):
        expert_transport.choose_transport(8, "pigeon")


@pytest.mark.parametrize(
    ("platform", "devices", "processes", "transport", "pieces"),
    [
        ("cpu", 2, 1, "padded", 1),
        ("tpu", 256, 64, "ragged", 1),
        ("gpu", 2, 1, "ragged", 256),
        ("gpu", 8, 1, "ragged", 96),
        ("gpu", 8, 2, "padded", 96),  # the kernel reaches the GPUs of one process
        ("gpu", 16, 1, "padded", 48),
    ],
)
def test_the_transport_follows_the_devices(monkeypatch, platform, devices, processes, transport, pieces):
    monkeypatch.setattr(expert_transport, "_platform", lambda: platform)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    assert expert_transport.choose_transport(devices) == transport
    assert expert_transport.update_pieces(devices, 256 * 6) == pieces
    assert expert_transport.update_pieces(devices, 1 << 20) == (256 if platform == "gpu" else 1)


def _placement() -> ExpertPlacement:
    """Experts 3 and 4 have three copies, 5 has two, others one or two."""
    return ExpertPlacement(experts=EXPERTS, extra=((3, 4), (4, 5), (3, 9), (4, 3), (0, 15), (0, 1), (2, 7), (6, 8)))


@pytest.mark.parametrize(
    "static",
    [
        {"transport": "padded"},
        pytest.param({"transport": "ragged", "capacity": 4, "at_once": 8}, marks=pytest.mark.slow),
    ],
)
def test_copies_change_no_bit(static, ragged):
    placement = _placement()
    stacks = with_copies(_stacks(WeightFormat.FP4_ROW), placement, _mesh(), EVERY)
    held = np.array([placement.held(d) for d in range(DEVICES)]).reshape(-1)
    for have, whole in zip(jax.tree.leaves(stacks), jax.tree.leaves(_stacks(WeightFormat.FP4_ROW)), strict=True):
        np.testing.assert_array_equal(have, np.asarray(whole)[held])
        assert have.sharding.spec == EVERY.spec("experts")
    for name in ("random", "all to the same experts", "one device has tokens"):
        _same(*_routings()[name], stacks=stacks, placement=placement, **static)


def test_copies_share_the_rows():
    """Of an expert's copies, tokens of a device take one after the other, and devices begin at different ones."""
    device, slot, count = _placement().copies
    assert count.sum() == EXPERTS + 16 and count[4] == 4
    assert [(int(d), int(s)) for d, s in zip(device[4], slot[4], strict=True)] == [(2, 0), (0, 3), (1, 2), (3, 2)]
    loads = np.zeros(EXPERTS)
    loads[4] = 100
    np.testing.assert_array_equal(_placement().device_loads(loads), [25, 25, 25, 25, 0, 0, 0, 0])


def test_planned_copies_spread_the_load():
    """64 experts whose loads fall with rank^-1.2: 2.8 times the mean on the fullest device, with copies less."""
    loads = np.random.default_rng(0).permutation(1000 / np.arange(1, 65) ** 1.2)
    worst = []
    for extra in (0, 1, 2, 4):
        placement = plan_copies(loads, devices=8, extra=extra)
        assert placement.slots == 8 + extra and placement == plan_copies(loads, devices=8, extra=extra)
        rows = placement.device_loads(loads)
        np.testing.assert_allclose(rows.sum(), loads.sum())
        worst.append(rows.max() / rows.mean())
    assert worst[0] > 2.7 and worst[1] < 1.5 and worst[2] < 1.2 and worst[3] < 1.1


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ExpertPlacement(experts=10, extra=((),) * 4), "4 devices do not divide 10 experts"),
        (lambda: ExpertPlacement(experts=4, extra=((3,), ())), "device 1 has 0 extra slots, device 0 1"),
        (lambda: ExpertPlacement(experts=4, extra=((1,), (0,))), "device 0 cannot hold copies"),
        (lambda: ExpertPlacement(experts=4, extra=((4,), (0,))), "device 0 cannot hold copies"),
        (lambda: plan_copies(np.array([1.0, -1]), devices=2, extra=0), "not negative"),
        (lambda: plan_copies(np.ones(4), devices=2, extra=3), "2 \\+ 3 slots a device for 4 experts"),
        (
            lambda: with_copies(jnp.ones((16, 2)), plan_copies(np.ones(16), devices=4, extra=1), _mesh(), EVERY),
            "made for 16 experts on 4 devices, used for \\[16\\] on 8",
        ),
        (
            lambda: _same(*_routings()["random"], placement=_placement()),
            "made for 4 slots on 8 devices, used for 2 on 8",
        ),
    ],
)
def test_wrong_placements_are_named(make, message):
    with pytest.raises(DSV41Error, match=message):
        make()
