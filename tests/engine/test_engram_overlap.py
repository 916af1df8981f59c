"""Where Engram rows come from changes nothing but time: modes agree, errors are named, threads end."""

import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from dsv41.config import DSV41Error, with_overrides
from dsv41.engine import EngramMode, GenerationResult, generate
from dsv41.engine.prompt_rows import prompt_chunks
from dsv41.engine.request import Request
from dsv41.engram_store import EngramStore, EngramTable
from dsv41.models import Model, compiled_segment, segment_params, step_segments
from dsv41.ops.engram_hash import row_ids
from dsv41.ops.sampling import SamplingParams
from tests.models_for_tests import tiny_model

CHUNK = 8
MODES = [EngramMode.BLOCKING, EngramMode.OVERLAP, EngramMode.DEVICE]
WARM = SamplingParams(temperature=1.0, seed=3)
# A prompt of one token, one that ends with a chunk of one, one longer than a chunk and one of a chunk.
PROMPTS = [[0], [0, *range(40, 56)], [0, *range(200, 211)], [0, 5, 9, 100, 101, 102, 33, 7]]


@functools.cache
def model() -> Model:
    """Five layers out of the tiny model, the second and the fourth with an Engram."""
    tiny, layers = tiny_model(), (0, 1, 2, 4, 6)
    overrides = {
        "text_config.num_hidden_layers": "5",
        "text_config.compress_ratios": "[0, 0, 2, 2, 1]",
        "text_config.kv_source_layer_ids": "[2, 3, 4]",
        "text_config.index_source_layer_ids": "[2, 3, 4]",
        "text_config.candidate_source_layer_id": "4",
        "text_config.engram_layer_ids": "[1, 3]",
        "text_config.num_nextn_predict_layers": "0",
        "text_config.dspark_target_layer_ids": "[]",
    }
    params = tiny.params | {"layers": {i: tiny.params["layers"][n] for i, n in enumerate(layers)}}
    config = with_overrides(tiny.config, overrides)
    return dataclasses.replace(tiny, config=config, params=params, drafter=None, vision=None)


def run(mode: EngramMode, prompts=PROMPTS, on=None, **options) -> list[GenerationResult]:
    options = {"max_new_tokens": 5, "stop_ids": (), "prefill_chunk": CHUNK} | options
    return generate(on or model(), prompts, engram=mode, **options)


def ids(results):
    return [r.token_ids for r in results]


def with_table(table: EngramTable, place: int) -> Model:
    tables = list(model().engram.tables)
    tables[place] = table
    return dataclasses.replace(model(), engram=EngramStore(tables))


def broken(place: int, rows=slice(None)) -> Model:
    """Some rows of a table have a NaN scale."""
    table = model().engram.tables[place]
    scales = np.array(table.scales)
    scales[rows] = 255
    return with_table(EngramTable(layer=table.layer, values=table.values, scales=scales), place)


def prompt_row_ids(prompt: list[int]) -> np.ndarray:
    """int64 [T, L, K]: the rows that a sequence's tokens ask for."""
    m = model()
    return row_ids(m._hash_spec, m.token_map, np.array([prompt]), m.look_back([()], 1), m.config.image_token_id)[0]


def engram_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("engram-prefetch")]


def test_segments_follow_from_the_schedule():
    segments = step_segments(model().schedule)
    assert [s.layers for s in segments] == [range(1), range(1, 3), range(3, 5)]
    assert [s.engrams for s in segments] == [(), (0,), (1,)]
    first = dataclasses.replace(model().schedule.layers[0], engram=0)
    schedule = dataclasses.replace(model().schedule, layers=(first, *model().schedule.layers[1:]), engram_layers=(0,))
    assert [(s.layers, s.engrams) for s in step_segments(schedule)] == [(range(5), (0,))]


def test_a_step_in_segments_gives_the_bits_of_one_program():
    m, prompts = model(), [[3, 4, 5], [9, 8], [1], [0, 6]]  # shapes that the runs below have too
    caches, logits = [], []
    for cut in (False, True):
        _, cache, _ = m.forward(m.make_batch(prompts), m.init_cache(4, 256))
        batch = m.make_batch([[17], [23], [5], [0]], prompts)
        if not cut:
            out, cache, _ = m.forward(batch, cache)
        else:
            rows = batch.engram_values, batch.engram_scales
            batch = jax.tree.map(jax.numpy.asarray, dataclasses.replace(batch, engram_values=None, engram_scales=None))
            out = None
            for s in step_segments(m.schedule):
                given = tuple(x[:, :, s.engrams[0]] for x in rows) if s.engrams else None
                params = segment_params(m.params, s, len(m.schedule.layers))
                out, cache = compiled_segment(s.index)(
                    params, batch, cache, out, given, config=m.config, layers=s.layers
                )
        caches.append(cache)
        logits.append(np.asarray(out))
    np.testing.assert_array_equal(*(x.view(np.uint32) for x in logits))
    for a, b in zip(jax.tree.leaves(caches[0]), jax.tree.leaves(caches[1]), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_modes_agree_and_report_what_they_read():
    expected = None
    for mode in MODES:
        for sampling in (SamplingParams(temperature=0), WARM):
            results = run(mode, sampling=sampling)
            if sampling is WARM:
                expected = expected or ids(results)
                assert ids(results) == expected
        figures = results[0].engram
        assert figures.mode is mode and figures.stall_s >= 0
        assert figures.prefetched == (3 if mode is EngramMode.OVERLAP else 0)
        tokens = sum(len(p) + 4 for p in PROMPTS)  # the last token drawn is not forwarded
        assert figures.rows == (0 if mode is EngramMode.DEVICE else tokens * 2 * 6)
        assert figures.unique_rows <= figures.rows
        # The bundled tables lie on a mapped file: 68 KB.
        assert figures.read_bytes == figures.physical_reads * 4096
        assert (figures.physical_reads > 0) == (mode is not EngramMode.DEVICE)
    assert not engram_threads()


def test_auto_takes_small_tables_to_the_device_and_says_so(caplog, monkeypatch):
    with caplog.at_level("INFO", logger="dsv41.engine.engram_mode"):
        assert run(EngramMode.AUTO)[0].engram.mode is EngramMode.DEVICE
        monkeypatch.setattr("dsv41.engine.engram_mode.DEVICE_BYTES", 0)
        assert run(EngramMode.AUTO)[0].engram.mode is EngramMode.OVERLAP
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["engram=device (auto)", "engram=overlap (auto)"]


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_token_ends_a_step_that_was_begun(mode):
    """The token after it was forwarded for nothing; the other rows go on as if it had not been."""
    free = ids(run(EngramMode.BLOCKING))
    stop = free[1][1]
    results = run(mode, stop_ids=[stop])
    for a, b in zip(ids(results), free, strict=True):
        assert a == (b[: b.index(stop) + 1] if stop in b else b)
    # Every request at its first token: nothing is left to do.
    assert [r.finish_reason for r in run(mode, stop_ids=[f[0] for f in free])] == ["stop"] * 4


@pytest.mark.slow
def test_ced_prompts_of_several_lengths():
    prompts = [[0, *range(40, 80)], [0, 1, 2], [0, *range(100, 118)]]
    options = {"prefill": "ced", "prefill_chunk": 16, "max_new_tokens": 3}
    assert ids(run(EngramMode.OVERLAP, prompts, **options)) == ids(run(EngramMode.BLOCKING, prompts, **options))


def test_the_plan_of_chunks_is_what_requests_take():
    requests = [Request(np.arange(n), 4) for n in (1, 17, 12, 8)]
    plan = list(prompt_chunks(requests, CHUNK, [0, 5, 0, 0]))
    assert plan == [{0: (0, 1), 1: (0, 8), 2: (0, 8), 3: (0, 8)}, {1: (8, 12), 2: (8, 12)}, {1: (12, 17)}]


@pytest.mark.parametrize("mode", [EngramMode.BLOCKING, EngramMode.OVERLAP])
@pytest.mark.parametrize("place, layer", [(0, 1), (1, 4)])
def test_a_broken_row_names_prompt_layer_and_row(mode, place, layer):
    with pytest.raises(DSV41Error, match=rf"(prompt|batch row) \d: engram table of layer {layer}: row \d+ has a NaN"):
        run(mode, on=broken(place))
    assert not engram_threads()


def test_the_prompt_that_asks_for_a_broken_row_is_named():
    # A row that only the second chunk of the third prompt asks for.
    asked = [{int(r) for r in prompt_row_ids(p)[:, 0].flat} for p in (*PROMPTS[:2], PROMPTS[3], PROMPTS[2][:8])]
    bad = min({int(r) for r in prompt_row_ids(PROMPTS[2])[:, 0].flat} - set.union(*asked))
    with pytest.raises(DSV41Error, match=f"^prompt 2: engram table of layer 1: row {bad} has"):
        run(EngramMode.OVERLAP, on=broken(0, bad))
    assert not engram_threads()


def test_a_broken_row_of_a_drawn_token_ends_the_run_before_its_layer():
    """Decoding meets it, while earlier layers of the step have begun."""
    free = ids(run(EngramMode.BLOCKING))[3]
    bad = int(prompt_row_ids([*PROMPTS[3], *free[:2]])[-1, 1, -1])
    for mode in (EngramMode.BLOCKING, EngramMode.OVERLAP):
        seen = []
        with pytest.raises(DSV41Error, match=f"batch row 3: engram table of layer 4: row {bad} has a NaN scale"):
            run(mode, on=broken(1, bad), on_token=lambda i, t, seen=seen: seen.append(t) if i == 3 else None)
        assert tuple(seen) == free[:2]


def test_a_table_cut_short_is_refused():
    table = model().engram.tables[0]
    short = EngramTable(layer=1, values=table.values[:400], scales=table.scales[:400])
    for mode in (EngramMode.BLOCKING, EngramMode.OVERLAP):
        with pytest.raises(DSV41Error, match=r"layer 1: row \d+ is outside \[0, 400\)"):
            run(mode, on=with_table(short, 0))


def test_an_early_end_leaves_no_thread():
    class Stopped(Exception):
        pass

    def stop(*_):
        raise Stopped

    with pytest.raises(Stopped):
        run(EngramMode.OVERLAP, on_token=stop)
    with pytest.raises(Stopped):
        run(EngramMode.OVERLAP, [*PROMPTS[:3], [0, *range(2, 90)]], on_prefill=stop)
    assert not engram_threads()


def test_device_mode_refuses_a_broken_table():
    with pytest.raises(DSV41Error, match="engram table of layer 1: a row has a NaN scale"):
        run(EngramMode.DEVICE, on=broken(0, 5))


@pytest.mark.slow
def test_modes_agree_on_a_mesh():
    """Tables lie on the devices by rows, or come from the host without cutting decode steps."""
    from tests.models.test_sharded import on_mesh

    expected = ids(run(EngramMode.BLOCKING))
    spread = on_mesh(model(), "data=2,tensor=2", "decode")
    for mode in MODES:
        results = run(mode, on=spread)
        assert ids(results) == expected and results[0].engram.mode is mode
    assert run(EngramMode.AUTO, on=spread)[0].engram.mode is EngramMode.OVERLAP
    assert spread.device_lookup.axes == ("data", "tensor")


@pytest.mark.slow
def test_the_engine_fetches_the_next_chunks_of_its_prompts(monkeypatch):
    """Two prompts of several chunks side by side; a third one that joins makes it look up again."""
    from tests.engine.engines import engine, serve, tokens
    from tests.engine.engines import ids as prompt

    prompts = [prompt(150, 1), prompt(200, 2), prompt(90, 3)]
    expected = tokens(serve(engine(), *prompts))
    monkeypatch.setattr("dsv41.engine.engine_runner.DEVICE_BYTES", 0)
    ahead, found = engine(), []
    prefetcher = ahead._run._ahead
    take = prefetcher.take
    monkeypatch.setattr(prefetcher, "take", lambda key: found.append(take(key)) or found[-1])
    assert tokens(serve(ahead, *prompts)) == expected
    hits = [x is not None for x in found]
    assert hits[0] is False and sum(hits) >= 2 and len(hits) > sum(hits)
