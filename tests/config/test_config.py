"""`config.json`: read, written, overridden, and refused with the field's name."""

import dataclasses
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.config import (
    ConfigError,
    DSV41Error,
    ModelConfig,
    TextConfig,
    config_from_dict,
    config_to_dict,
    load_config,
    with_overrides,
)
from tests.golden import DATA

ROOT = pathlib.Path(__file__).parents[2]
FLASH_JSON = json.loads((ROOT / "configs" / "flash.json").read_text())
TINY_JSON = json.loads((DATA / "tiny_text" / "config.json").read_text())


def edited(path, value, base=TINY_JSON):
    """A copy of a config's JSON with one dotted key replaced, added, or removed if `value` is `...`."""
    data = json.loads(json.dumps(base))
    *parents, leaf = path.split(".")
    node = data
    for part in parents:
        node = node[part]
    if value is ...:
        del node[leaf]
    else:
        node[leaf] = value
    return data


def test_released_file_is_the_defaults():
    assert config_from_dict(FLASH_JSON) == ModelConfig()


@pytest.mark.parametrize("data", [FLASH_JSON, TINY_JSON, edited("quantization_config", ...)])
def test_round_trip(data):
    config = config_from_dict(data)
    written = json.loads(json.dumps(config_to_dict(config)))
    assert config_from_dict(written) == config
    assert written == data


def test_absent_parts_mean_the_model_has_none():
    config = config_from_dict(edited("vision_config", ..., edited("quantization_config", ...)))
    assert config.vision_config is None and config.quantization_config is None
    assert set(config_to_dict(config)) == set(TINY_JSON) - {"vision_config", "quantization_config"}


def test_directory_or_file():
    assert load_config(DATA / "tiny_text") == load_config(DATA / "tiny_text" / "config.json")


def test_configs_are_frozen_values():
    config = ModelConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.text_config.hidden_size = 1
    assert hash(config) == hash(config_from_dict(FLASH_JSON))


def test_bookkeeping_keys_are_ignored():
    assert config_from_dict(edited("transformers_version", "5.0")) == config_from_dict(TINY_JSON)


# --- refusals


def refused(data, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(data)


@pytest.mark.parametrize(
    "path", ["colour", "text_config.n_layers", "vision_config.x", "text_config.rope_scaling.mscale"]
)
def test_unknown_fields(path):
    refused(edited(path, 1), f"^unknown field {path}$")


def test_missing_fields():
    for field in dataclasses.fields(TextConfig):
        if field.name == "dspark_confidence_input":  # no field of the released file; null unless it is there
            continue
        refused(edited(f"text_config.{field.name}", ...), rf"^missing field text_config\.{field.name}$")
    refused(edited("text_config", ...), "^missing field text_config$")
    refused(edited("vision_config.patch_size", ...), r"^missing field vision_config\.patch_size$")
    refused(edited("text_config.rope_scaling.factor", ...), r"^missing field text_config\.rope_scaling\.factor$")


@pytest.mark.parametrize(
    "path, value, expected",
    [
        ("text_config.hidden_size", "128", "int"),
        ("text_config.hidden_size", 128.0, "int"),
        ("text_config.hidden_size", True, "int"),
        ("text_config.hidden_size", None, "int"),
        ("text_config.rope_theta", "big", "float"),
        ("text_config.rope_theta", float("nan"), "float"),
        ("text_config.rope_theta", float("inf"), "float"),
        ("text_config.rope_theta", 10**400, "float"),
        ("text_config.norm_topk_prob", 1, "bool"),
        ("text_config.hidden_act", 1, "str"),
        ("text_config.compress_ratios", 2, "a list of int"),
        ("text_config.rope_scaling", 4, "a JSON object"),
        ("text_config", [], "a JSON object"),
        ("vision_config", "yes", "a JSON object"),
    ],
)
def test_wrong_types(path, value, expected):
    refused(edited(path, value), rf"^{path}: expected {expected}, got ")


def test_wrong_type_inside_a_list():
    refused(
        edited("text_config.compress_ratios", [0, "x"]), r"^text_config\.compress_ratios\[1\]: expected int, got 'x'"
    )


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_not_an_object(data):
    refused(data, "^config: expected a JSON object")


@pytest.mark.parametrize(
    "path, value",
    [
        ("hidden_size", 0),
        ("hidden_size", 130),
        ("moe_intermediate_size", 48),
        ("head_dim", 80),
        ("q_lora_rank", -64),
        ("o_lora_rank", 20),
        ("index_head_dim", 8),
        ("num_attention_heads", 3),
        ("qk_rope_head_dim", 15),
        ("head_dim", 0),
        ("num_key_value_heads", 2),
        ("n_shared_experts", 2),
        ("hidden_act", "gelu"),
        ("scoring_func", "sigmoid"),
        ("tie_word_embeddings", True),
        ("num_experts_per_tok", 13),
        ("num_experts_per_tok", 0),
        ("sliding_window", 0),
        ("index_topk", 0),
        ("candidate_block_size", 3),
        ("hc_sinkhorn_iters", 0),
        ("rms_norm_eps", 0),
        ("swiglu_limit", -1.0),
        ("engram_num_embeddings", [834]),
        ("engram_num_embeddings", [834, 0]),
        ("engram_max_ngram_size", 1),
        ("engram_head_dim", 16),
        ("engram_head_dim", 0),
        ("engram_pad_token_id", 512),
        ("num_nextn_predict_layers", -1),
        ("dspark_target_layer_ids", []),
        ("dspark_num_experts_per_tok", 9),
        ("dspark_noise_token_id", -1),
        ("dspark_markov_rank", 0),
        ("model_type", "other"),
    ],
)
def test_impossible_text_values(path, value):
    refused(edited(f"text_config.{path}", value), rf"^text_config\.{path}: expected ")


@pytest.mark.parametrize(
    "path, value",
    [
        ("model_type", "deepseek_v4"),
        ("dtype", "float32"),
        ("image_token_id", 512),
        ("bos_token_id", -1),
        ("quantization_config.quant_method", "int8"),
        ("quantization_config.weight_block_size", [128, 128]),
        ("quantization_config.expert_dtype", "fp8"),
        ("text_config.rope_scaling.rope_type", "linear"),
        ("text_config.rope_scaling.factor", 0),
        ("text_config.rope_scaling.beta_fast", 1),
        ("text_config.rope_scaling.original_max_position_embeddings", 0),
        ("vision_config.hidden_size", 66),
        ("vision_config.patch_size", 0),
        ("vision_config.rope_theta", -1),
        ("vision_config.max_wh_ratio", 0),
    ],
)
def test_impossible_values_elsewhere(path, value):
    refused(edited(path, value), rf"^{path}: expected ")


def test_index_head_dim_must_hold_the_rotated_part():
    data = edited("text_config.qk_rope_head_dim", 96)
    refused(data, r"^text_config\.head_dim: expected at least qk_rope_head_dim=96, got 64$")


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config\.json: no such config file"):
        load_config(tmp_path)
    for content in (b"{", b"\xff\xfe", b"1" * 10_000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"config\.json: not a readable JSON file"):
            load_config(path)
    path.write_text(json.dumps(edited("text_config.hc_mult", 0)))
    with pytest.raises(ConfigError, match=r"config\.json: text_config\.hc_mult: expected"):
        load_config(path)
    assert issubclass(ConfigError, DSV41Error)


# --- overrides


def test_overrides():
    config = with_overrides(
        ModelConfig(),
        {
            "text_config.max_position_embeddings": "4096",
            "text_config.rope_scaling.factor": "2.5",
            "text_config.engram_num_embeddings": "[5, 7]",
            "text_config.hidden_act": "silu",
            "quantization_config": "null",
            "eos_token_id": "7",
        },
    )
    assert config.text_config.max_position_embeddings == 4096
    assert config.text_config.rope_scaling.factor == 2.5
    assert config.text_config.engram_num_embeddings == (5, 7)
    assert config.quantization_config is None and config.eos_token_id == 7
    assert ModelConfig().text_config.max_position_embeddings == 1048576
    assert with_overrides(ModelConfig(), {}) == ModelConfig()


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("hidden_size", "1", "unknown field hidden_size"),
        ("text_config.n_layers", "1", r"unknown field text_config\.n_layers"),
        ("text_config.hidden_size.x", "1", r"unknown field text_config\.hidden_size\.x"),
        ("text_config.", "1", r"unknown field text_config\."),
        ("", "1", "unknown field "),
        ("text_config.hidden_size", "big", r"text_config\.hidden_size: expected int, got 'big'"),
        ("text_config.hidden_size", "100", r"text_config\.hidden_size: expected a multiple of 32, got 100"),
        ("text_config.num_hidden_layers", "41", r"text_config\.compress_ratios: expected 44 entries"),
        ("text_config", "{}", r"missing field text_config\.model_type"),
    ],
)
def test_bad_overrides(key, value, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        with_overrides(ModelConfig(), {key: value})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([f.name for f in dataclasses.fields(TextConfig)]), _JSON)
def test_any_value_is_either_valid_or_refused_by_name(field, value):
    """No value of a text field raises anything but a `ConfigError`, which says where the fault is."""
    message = "text_config"
    try:
        config_from_dict(edited(f"text_config.{field}", value))
    except ConfigError as error:
        message = str(error)
    assert "text_config" in message
