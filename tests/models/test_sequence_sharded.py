"""Attention over sequences whose pages lie on several devices gives the bits of one device.

The layers of each role run on given inputs, in a step somewhere in long sequences; what these hold are random bytes.
"""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from dsv41.cache import ForwardBatch, KVCache, LayerCache, PageOwners, cache_specs, init_cache, local_step
from dsv41.config import LayerMode, layer_schedule
from dsv41.layers import Attention, BlockFormats, with_parameters
from dsv41.models.sharded import param_specs
from dsv41.ops.token_split import TokenSplit
from dsv41.sharding import LOCAL, ShardingRules, make_mesh
from pallas_kernels.fixed_order import compiler_options
from pallas_kernels.indexer.ops import index_scores
from pallas_kernels.quantize import ops as quantize
from tests.collective_counts import collectives_by_scope
from tests.models.filled_cache import filled
from tests.models_for_tests import small_model

SLOTS = 8
_FULL_2, _FULL_1, _REINDEX, _REUSE_1 = LAYERS = (1, 2, 3, 4)


@functools.cache
def _mesh_and_rules(**sizes: int):
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    axes = {axis for axis, size in sizes.items() if size > 1}
    batch = tuple(axis for axis in ("data", "sequence") if axis in axes)
    pages = tuple(axis for axis in ("sequence",) if axis in axes)
    return mesh, ShardingRules(batch=batch, pages=pages, heads=("tensor",) if "tensor" in axes else ())


def _attend(rules, params, xs, batch, cache):
    """Outputs and selections of the attention of some layers, and the cache, of one device's part of a step."""
    config, table = small_model().config, cache.page_table
    schedule, dense = layer_schedule(config.text_config), BlockFormats.of(config).dense
    batch, cache = local_step(batch, cache, rules)
    tokens, state, found = TokenSplit(*batch.tokens.shape, rules.heads), None, []
    for n in LAYERS:
        spec = schedule.layers[n]
        attention = with_parameters(Attention(config.text_config, spec.kind, dense, rules), params[n])
        with jax.named_scope(f"layer_{n}"):
            y, own, state = attention(tokens.split(xs[n]), batch, LayerCache.of(cache, spec), state, None)
        cache = own.written_to(cache, spec)
        candidates = jnp.zeros((*state.selected.shape[:2], 0)) if state.candidates is None else state.candidates
        found.append((tokens.join(y), state.selected, candidates))
    return found, dataclasses.replace(cache, page_table=table)


def _step(mesh, rules):
    step = functools.partial(_attend, rules)
    if mesh is not None:
        config = small_model().config
        layer_specs, rows = param_specs(config, rules)["layers"], rules.spec("batch")
        caches = cache_specs(small_model().init_cache(1, 256), rules)
        in_specs = ({n: layer_specs[n]["attn"] for n in LAYERS}, rows, rows, caches)
        step = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(rows, caches), check_vma=False)
    return step


def _inputs(tokens: int, max_tokens: int):
    """Parameters, inputs of each layer, and rows that start anywhere: at page ends, at odd positions, some empty."""
    model, rng = small_model(), np.random.default_rng(tokens)
    config = model.config.text_config
    params = {n: model.params["layers"][n]["attn"] for n in LAYERS}
    xs = {n: jnp.asarray(rng.normal(size=(SLOTS, tokens, config.hidden_size)), jnp.bfloat16) for n in LAYERS}
    last = max_tokens - tokens
    start = np.array([0, 255, 256 - tokens // 2, 511, last, last - 3, 7, 300]).clip(0, last)
    num_new = np.array([tokens, tokens, tokens, tokens, tokens, max(tokens - 1, 0), 0, 1])
    zeros = np.zeros((SLOTS, tokens))
    batch = ForwardBatch(
        tokens=zeros.astype(np.int32), num_new=num_new.astype(np.int32), start=start.astype(np.int32),
        slot=np.arange(SLOTS, dtype=np.int32), image_mask=zeros.astype(bool), engram_values=None, engram_scales=None,
        write_from=(start + 2 * (start == 511)).astype(np.int32),
    )  # fmt: skip
    return params, xs, batch


def _pages_of_slots(cache: KVCache) -> list[np.ndarray]:
    """The contents of the pools in the order of slots and positions."""
    pages = [np.asarray(cache.layout.physical_pages(jnp.asarray(cache.page_table), r)) for r in cache.layout.ratios]
    return [np.asarray(pool)[p] for pools in (cache.main, cache.index) for pool, p in zip(pools, pages, strict=True)]


def _run(tokens: int, max_tokens: int, **sizes: int):
    params, xs, batch = _inputs(tokens, max_tokens)
    mesh, rules = _mesh_and_rules(**sizes) if sizes else (None, LOCAL)
    config = small_model().config.text_config
    cache = filled(init_cache(config, num_slots=SLOTS, max_tokens=max_tokens, mesh=mesh, rules=rules), seed=3)
    if mesh is not None:
        PageOwners.of(rules, mesh.shape).check(np.asarray(cache.page_table), cache.main[0].shape[0])
        spread = jax.tree.map(lambda s: NamedSharding(mesh, s), cache_specs(cache, rules))
        cache = jax.device_put(jax.tree.map(np.asarray, cache), spread)
    found, after = jax.jit(_step(mesh, rules), compiler_options=compiler_options())(params, xs, batch, cache)
    return jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, after)


_alone = functools.cache(_run)


def _assert_equal(tokens: int, max_tokens: int, sizes: dict[str, int]) -> None:
    expected, cache = _alone(tokens, max_tokens)
    found, spread_cache = _run(tokens, max_tokens, **sizes)
    num_new = _inputs(tokens, max_tokens)[2].num_new
    real = np.arange(tokens) < num_new[:, None]
    for n, got, wanted in zip(LAYERS, found, expected, strict=True):
        np.testing.assert_array_equal(got[1], wanted[1], err_msg=f"selected by layer {n}")
        np.testing.assert_array_equal(got[2], wanted[2], err_msg=f"candidates of layer {n}")
        y, wanted_y = (x[0].astype(np.float32)[real] for x in (got, wanted))
        if "tensor" in sizes:
            # The output projection is summed over devices, in float32 and before one rounding to bfloat16.
            np.testing.assert_allclose(y, wanted_y, rtol=2**-7, atol=2**-7 * np.abs(wanted_y).max())
        else:
            np.testing.assert_array_equal(y, wanted_y, err_msg=f"output of layer {n}")
        assert np.isfinite(wanted_y).all() and (wanted_y != 0).any()
    for got, wanted in zip(_pages_of_slots(spread_cache), _pages_of_slots(cache), strict=True):
        np.testing.assert_array_equal(got, wanted)
    for kind in ("window", "pending"):
        for got, wanted in zip(getattr(spread_cache, kind), getattr(cache, kind), strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    "sizes", [{"sequence": 4}, pytest.param({"data": 2, "sequence": 2, "tensor": 2}, marks=pytest.mark.slow)], ids=str
)
def test_a_step_of_few_tokens(sizes):
    """Selected entries are fetched."""
    _assert_equal(4, 2048, sizes)


def _scores(n: int, tokens: int, max_tokens: int) -> np.ndarray:
    """float32 [B, T, S]: what layer `n` scores every entry with, on one device."""
    params, xs, batch = _inputs(tokens, max_tokens)
    cache, config = _alone(tokens, max_tokens)[1], small_model().config
    schedule = layer_schedule(config.text_config)
    spec = schedule.layers[n]
    attention = Attention(config.text_config, spec.kind, BlockFormats.of(config).dense)
    attention = with_parameters(attention, params[n])
    rope = cache.rope[1][np.clip(batch.positions(), 0, max_tokens - 1)]
    query = attention.indexer.query(xs[n], attention.queries(xs[n], rope)[0], rope)
    pages = cache.layout.physical_pages(jnp.asarray(cache.page_table), spec.ratio)
    keys = quantize.dequantize_mxfp4(*cache.layout.index.read_pages(cache.index[spec.kv], pages))
    q = quantize.dequantize_mxfp4(query.values, query.scales)
    return np.asarray(index_scores(q, query.weights, keys.reshape(SLOTS, -1, keys.shape[-1])))


@pytest.mark.slow
def test_selection_by_blocks(monkeypatch):
    """The form that kernels take; it may choose any of equal scores."""
    tokens, max_tokens = 4, 2048
    text = small_model().config.text_config
    source, size = text.candidate_source_layer_id, text.candidate_block_size
    monkeypatch.setattr("dsv41.layers.indexer.indexer.runs_kernel", lambda *args, **sizes: True)
    found, _ = _run(tokens, max_tokens, sequence=4)
    expected, _ = _alone(tokens, max_tokens)
    for n, got, wanted in zip(LAYERS, found, expected, strict=True):
        if n == _REUSE_1:
            continue
        scores = _scores(n, tokens, max_tokens)
        if n == source:
            blocks = scores.reshape(*scores.shape[:2], -1, size).max(axis=-1)
            pools = (np.where(p < 0, -np.inf, np.take_along_axis(blocks, p, axis=-1)) for p in (got[2], wanted[2]))
            np.testing.assert_array_equal(*map(np.sort, pools), err_msg=f"candidates of layer {n}")
            equal = (got[2] == wanted[2]).all(axis=-1)
            assert equal.mean() > 0.9  # the others have blocks of equal scores
        for row in np.ndindex(*got[1].shape[:2]):
            if n > source and not equal[row]:
                continue
            ids, wanted_ids = got[1][row], wanted[1][row]
            used = ids[ids >= 0]
            assert len(set(used)) == len(used) == (wanted_ids >= 0).sum()
            wanted_scores = scores[row][wanted_ids[wanted_ids >= 0]]
            np.testing.assert_array_equal(np.sort(scores[row][used])[::-1], wanted_scores, err_msg=f"layer {n}, {row}")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"sequence": 4}, {"data": 2, "sequence": 2, "tensor": 2}], ids=str)
def test_a_step_of_many_tokens(sizes):
    """Queries select more entries than a device has of a row: pages are fetched."""
    _assert_equal(160, 1024, sizes)


_MERGE = {"all_to_all": 1}  # of the best that every device found
_ENTRIES = {"all_gather": 1, "all_to_all": 1}  # asked for, and given
_BY_PAGES = {
    LayerMode.FULL: Counter(all_gather=2, all_to_all=1) + Counter(_MERGE),
    LayerMode.REINDEX: Counter(all_gather=1) + Counter(_MERGE),
    LayerMode.REUSE: Counter(),
}
_ROLES = {
    # Few tokens fetch entries, for each selection; many fetch pages, once for each KV source. A layer that owns KV
    # gathers its new latents, and one that selects gathers its queries.
    (4, 2048): {
        LayerMode.FULL: Counter(all_gather=2) + Counter(_MERGE) + Counter(_ENTRIES),
        LayerMode.REINDEX: Counter(all_gather=1) + Counter(_MERGE) + Counter(_ENTRIES),
        LayerMode.REUSE: Counter(),
    },
    (160, 1024): _BY_PAGES,
    # What a row asks for would fit into its pages, but every device answers for the rows of all.
    (40, 1024): _BY_PAGES,
}


@pytest.mark.parametrize(("tokens", "max_tokens"), _ROLES)
def test_collectives_of_each_role(tokens, max_tokens):
    mesh, rules = _mesh_and_rules(sequence=4)
    args = (*_inputs(tokens, max_tokens), small_model().init_cache(SLOTS, max_tokens))
    counts = collectives_by_scope(_step(mesh, rules), *args)
    assert counts.pop("") == {"all_to_all": 1}  # page tables, once a step
    schedule = layer_schedule(small_model().config.text_config)
    for n in LAYERS:
        mode = schedule.layers[n].mode
        assert counts.pop(f"layer_{n}", Counter()) == _ROLES[tokens, max_tokens][mode], f"layer {n}"
    assert counts == {}


@pytest.mark.slow
def test_a_prompt_with_a_tail_and_tokens_behind_it():
    """The whole model: chunks through the encoder, a tail through the decoder, then decoding."""
    mesh, rules = _mesh_and_rules(sequence=4)
    results = []
    for model in (small_model(), dataclasses.replace(small_model(), mesh=mesh, rules=rules)):
        rng = np.random.default_rng(0)
        rows = [rng.integers(3, 500, 300 + 130 * i) for i in range(4)]
        cache, outputs = model.init_cache(4, 1024), []
        for first in range(0, 690, 128):
            new = [r[first : first + 128] for r in rows]
            live = [i for i, part in enumerate(new) if len(part)]
            batch = model.make_batch([new[i] if i in live else [3] for i in range(4)], [r[:first] for r in rows])
            num_new = np.array([len(part) for part in new], np.int32)
            last = np.array([first + 128 >= len(r) > first for r in rows])
            tail = np.where(last, np.minimum(num_new, 16), 0).astype(np.int32)
            batch = dataclasses.replace(batch, num_new=num_new, tail=tail)
            logits, cache, _ = model.forward(batch, cache, tail=16)
            outputs.append(np.asarray(logits)[last])
        for i in range(2):
            batch = model.make_batch([[7 + i]] * 4, [np.concatenate([r, [7] * i]) for r in rows])
            logits, cache, _ = model.forward(batch, cache)
            outputs.append(np.asarray(logits))
        results.append(outputs)
    for got, wanted in zip(*results, strict=True):
        assert np.isfinite(wanted).all()
        np.testing.assert_array_equal(got, wanted)
