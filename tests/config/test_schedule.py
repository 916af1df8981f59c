"""The layer table: the released one, the tiny one, and lists that contradict each other."""

import dataclasses

import pytest

from dsv41.config import ConfigError, LayerMode, ModelConfig, TextConfig, layer_schedule, load_config
from tests.golden import DATA

FLASH = layer_schedule(TextConfig())
TINY = load_config(DATA / "tiny_text").text_config


def changed(**fields):
    """The tiny text config with fields replaced."""
    return dataclasses.replace(TINY, **fields)


def test_flash_is_the_table_of_the_architecture():
    """architecture.md section 1: mode, ratio and sources of all 40 layers."""
    expected = dict.fromkeys((0, 1), (LayerMode.SLIDING, 0, None, None))
    expected |= {n: (LayerMode.FULL, 2, n, n) for n in (2, 8, 14)}
    for source in (2, 8, 14):
        expected |= dict.fromkeys(range(source + 1, source + 6), (LayerMode.REUSE, 2, source, source))
    expected |= {20: (LayerMode.FULL, 1, 20, 20)}
    expected |= {n: (LayerMode.REINDEX, 1, 20, n) for n in (24, 28, 32, 36)}
    for selection in (20, 24, 28, 32, 36):
        expected |= dict.fromkeys(range(selection + 1, selection + 4), (LayerMode.REUSE, 1, 20, selection))
    table = {s.index: (s.mode, s.ratio, s.kv_source, s.index_source) for s in FLASH.layers}
    assert table == expected
    assert [s.index for s in FLASH.layers] == list(range(40))


def test_flash_candidates_engram_and_halves():
    assert [s.index for s in FLASH.layers if s.builds_candidates] == [20]
    assert [s.index for s in FLASH.layers if s.reads_candidates] == [24, 28, 32, 36]
    assert {s.index: s.engram for s in FLASH.layers if s.engram is not None} == {1: 0, 14: 1}
    assert FLASH.engram_layers == (1, 14)
    assert FLASH.decoder_start == 20
    assert [s.index for s in FLASH.layers if s.in_decoder] == list(range(20, 40))
    assert [s.index for s in FLASH.kv_sources] == [2, 8, 14, 20]
    assert FLASH.ratios == (1, 2)


def test_properties_follow_from_the_mode():
    for s in FLASH.layers:
        assert s.owns_kv == (s.kv_source == s.index)
        assert s.selects == (s.index_source == s.index)
        assert s.is_compressed == (s.ratio > 0) == (s.kv_source is not None)


def test_tiny_table():
    """The roles that the golden data was made with."""
    modes = [s.mode.value for s in layer_schedule(TINY).layers]
    assert modes == ["sliding"] * 2 + ["full", "reuse"] * 2 + ["full", "reuse"] + ["reindex", "reuse"] * 2
    schedule = layer_schedule(TINY)
    assert schedule.decoder_start == 6
    assert [s.reads_candidates for s in schedule.layers] == [n in (8, 10) for n in range(12)]
    assert [s.kv_source for s in schedule.layers] == [None, None, 2, 2, 4, 4, 6, 6, 6, 6, 6, 6]
    assert [s.index_source for s in schedule.layers] == [None, None, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]


def test_without_a_candidate_source_reindex_layers_see_everything():
    schedule = layer_schedule(changed(candidate_source_layer_id=None))
    assert not any(s.builds_candidates or s.reads_candidates for s in schedule.layers)


def test_window_only_model_has_no_decoder_half():
    schedule = layer_schedule(
        changed(
            compress_ratios=(0,) * 15,
            kv_source_layer_ids=(),
            index_source_layer_ids=(),
            candidate_source_layer_id=None,
        )
    )
    assert {s.mode for s in schedule.layers} == {LayerMode.SLIDING}
    assert schedule.decoder_start == 12 and schedule.kv_sources == () and schedule.ratios == ()


RATIOS = TINY.compress_ratios


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"compress_ratios": RATIOS[:-1]}, r"compress_ratios: expected 15 entries .* got 14"),
        ({"compress_ratios": (*RATIOS, 0)}, r"compress_ratios: expected 15 entries .* got 16"),
        ({"compress_ratios": (0, 0, 3, 3, 3, 3, *RATIOS[6:])}, r"compress_ratios: expected 0 or divisors of 128"),
        ({"compress_ratios": (0, 0, -2, *RATIOS[3:])}, r"compress_ratios: expected 0 or divisors of 128"),
        ({"compress_ratios": (0, 0, 256, *RATIOS[3:])}, r"compress_ratios: expected 0 or divisors of 128"),
        ({"compress_ratios": (*RATIOS[:12], 0, 1, 0)}, r"compress_ratios: drafter entries must be 0"),
        ({"compress_ratios": (0, 0, 2, 1, *RATIOS[4:])}, r"compress_ratios: layer 3 has ratio 1 .* layer 2, has 2"),
        (
            {"compress_ratios": (0, 2, *RATIOS[2:])},
            r"kv_source_layer_ids: layer 1 has compress ratio 2 but no KV source",
        ),
        ({"kv_source_layer_ids": (1, 2, 4, 6)}, r"kv_source_layer_ids: layer 1 has compress ratio 0"),
        ({"kv_source_layer_ids": (2, 3, 4, 6)}, r"kv_source_layer_ids: layer 3 must also be in index_source_layer_ids"),
        ({"index_source_layer_ids": (0, 2, 4, 6)}, r"index_source_layer_ids: layer 0 has compress ratio 0"),
        ({"candidate_source_layer_id": 8}, r"candidate_source_layer_id: expected one of .* got 8"),
        ({"candidate_source_layer_id": 99}, r"candidate_source_layer_id: expected one of .* got 99"),
    ],
)
def test_contradictions_name_the_field(fields, message):
    with pytest.raises(ConfigError, match=rf"^text_config\.{message}"):
        layer_schedule(changed(**fields))
    # A whole config refuses them on construction.
    whole = dataclasses.replace(load_config(DATA / "tiny_text"), text_config=TINY)
    with pytest.raises(ConfigError, match=rf"^text_config\.{message}"):
        dataclasses.replace(whole, text_config=changed(**fields))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"kv_source_layer_ids": (2, 6, 4)}, r"kv_source_layer_ids: expected strictly increasing layer ids"),
        ({"index_source_layer_ids": (2, 2, 4, 6)}, r"index_source_layer_ids: expected strictly increasing layer ids"),
        ({"kv_source_layer_ids": (2, 4, 12)}, r"kv_source_layer_ids: expected layer ids in \[0, 12\)"),
        ({"index_source_layer_ids": (-1, 2, 4, 6)}, r"index_source_layer_ids: expected layer ids in \[0, 12\)"),
        ({"engram_layer_ids": (1, 12)}, r"engram_layer_ids: expected layer ids in \[0, 12\)"),
        ({"dspark_target_layer_ids": (9, 10, 12)}, r"dspark_target_layer_ids: expected layer ids in \[0, 12\)"),
    ],
)
def test_impossible_layer_ids(fields, message):
    with pytest.raises(ConfigError, match=rf"^text_config\.{message}"):
        changed(**fields)


def test_default_config_is_valid():
    assert layer_schedule(ModelConfig().text_config) == FLASH


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({}, None),
        ({"engram_layer_ids": (1, 7)}, "layer 7 of the decoder has an Engram"),
        ({"candidate_source_layer_id": 4}, "layer 4 of the encoder builds the candidate pool"),
        ({"dspark_target_layer_ids": (5, 9)}, "the drafter reads layer 5 of the encoder"),
        (
            {"compress_ratios": (0, 0, *(2,) * 10, 0, 0, 0)},
            "layer 6, the first of the decoder, has compress ratio 2, not 1",
        ),
    ],
)
def test_what_a_decoder_on_a_tail_needs(fields, problem):
    assert layer_schedule(changed(**fields)).tail_problem == problem
    assert FLASH.tail_problem is None
