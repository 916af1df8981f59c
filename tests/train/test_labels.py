"""Which rule each parameter gets (training.md section 3.1), for all names of the released model."""

import collections
import pathlib

import jax
import jax.numpy as jnp
import pytest

from dsv41.config import DSV41Error, load_config
from dsv41.models import abstract_drafter_params, abstract_params, abstract_vision_params
from dsv41.ops.linear import QuantizedArray, WeightFormat
from dsv41.train import Label, RateGroup, label_of, labels_of, parameter_names, rate_group, row_blocks
from dsv41.train import training_params_abstract as training_params

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
FLASH = load_config(CONFIGS / "flash.json")
TINY = load_config(CONFIGS / "tiny.json")


def _named(tree):
    return dict(zip(jax.tree.leaves(parameter_names(tree)), jax.tree.leaves(tree), strict=True))


@pytest.fixture(scope="module")
def flash():
    return _named(training_params(FLASH, engram=True, drafter=True, vision=True))


def test_every_released_parameter_has_the_rule_of_the_table(flash):
    """Per label, the names behind `layers.N.` and `mtp.K.`: written out, so that no pattern decides what is right."""
    found = collections.defaultdict(set)
    for name, leaf in flash.items():
        parts = name.split(".")
        layer = parts[0] in ("layers", "mtp")
        tail = ".".join(parts[2:]) if layer else name
        if parts[:2] == ["vision", "blocks"]:
            tail = "vision.blocks." + ".".join(parts[3:])
        found[label_of(name, leaf.shape)].add(f"*.{tail}" if layer else tail)
    assert found == {
        Label.MUON_HEAD: {
            "*.attn.wq_b.weight", "*.attn.wkv.weight", "*.attn.compressor.wkv.weight", "*.attn.indexer.wq_b.weight",
            "*.attn.indexer.wk.weight",
        },
        Label.MUON: {
            "*.attn.wq_a.weight", "*.attn.wo_a.weight", "*.attn.wo_b.weight", "*.attn.compressor.wgate.weight",
            "*.attn.indexer.weights_proj.weight", "*.ffn.gate.weight", "*.ffn.experts.w1.weight",
            "*.ffn.experts.w2.weight", "*.ffn.experts.w3.weight", "*.ffn.shared_experts.w1.weight",
            "*.ffn.shared_experts.w2.weight", "*.ffn.shared_experts.w3.weight", "*.hc_attn_fn", "*.hc_ffn_fn",
            "*.engram.wkv.weight", "*.main_proj.weight", "aligner.w1.weight", "aligner.w2.weight",
            "vision.patch_embed.proj.weight", "vision.blocks.attn.wqkv.weight", "vision.blocks.attn.wo.weight",
            "vision.blocks.mlp.w1.weight", "vision.blocks.mlp.w2.weight",
        },
        Label.SINKHORN: {
            "embed.weight", "head.weight", "*.engram.embed.weight", "*.markov_head.embed.weight",
            "*.markov_head.head.weight",
        },
        Label.ADAM_DECAY: {
            "*.attn_norm.weight", "*.ffn_norm.weight", "*.attn.q_norm.weight", "*.attn.kv_norm.weight",
            "*.attn.compressor.norm.weight", "*.attn.indexer.k_norm.weight", "*.engram.q_weight", "*.engram.k_weight",
            "*.main_norm.weight", "*.norm.weight", "norm.weight", "vision.norm.weight", "vision.blocks.norm1.weight",
            "vision.blocks.norm2.weight",
        },
        Label.ADAM_NODECAY: {
            "*.attn.attn_sink", "*.hc_attn_base", "*.hc_attn_scale", "*.hc_ffn_base", "*.hc_ffn_scale",
            "*.confidence_head.proj.weight", "image_start", "image_newline", "image_end",
            "vision.patch_embed.proj.bias", "vision.blocks.attn.wqkv.bias", "vision.blocks.attn.wo.bias",
            "aligner.w1.bias", "aligner.w2.bias",
        },
        Label.FROZEN: {"*.ffn.gate.bias", "*.ffn.gate.bias_vl"},
    }  # fmt: skip


def test_heads_of_the_released_model(flash):
    """64 blocks of 512 x 1280, 32 of 128 x 1280, 8 of 1024 x 4096; single-headed keys are one block."""
    found = {}
    for name, leaf in flash.items():
        blocks = row_blocks(name, FLASH)
        assert leaf.shape[-2 if leaf.ndim > 1 else -1] % blocks == 0, name
        if blocks > 1 and name.startswith(("layers.", "mtp.")):
            found[name.split(".", 2)[2]] = (blocks, leaf.shape[0] // blocks, leaf.shape[1])
    assert found == {
        "attn.wq_b.weight": (64, 512, 1280),
        "attn.indexer.wq_b.weight": (32, 128, 1280),
        "attn.wo_a.weight": (8, 1024, 4096),
    }
    assert row_blocks("vision.blocks.3.attn.wqkv.weight", FLASH) == 3
    assert row_blocks("vision.blocks.3.mlp.w1.weight", FLASH) == 2


def test_which_rate_a_parameter_gets(flash):
    groups = collections.defaultdict(set)
    for name in flash:
        groups[rate_group(name)].add(name)
    assert groups[RateGroup.ENGRAM_TABLE] == {"layers.1.engram.embed.weight", "layers.14.engram.embed.weight"}
    tower = {name for name in flash if name.startswith("vision.")} - {"vision.norm.weight"}
    assert groups[RateGroup.VISION_TOWER] == tower
    assert "aligner.w1.weight" in groups[RateGroup.BASE]


def test_masters_have_the_shapes_of_the_dequantised_weights(flash):
    tables = {f"layers.{n}.engram.embed.weight" for n in (1, 14)}
    stored = {}
    for tree in (abstract_params(FLASH), abstract_drafter_params(FLASH), abstract_vision_params(FLASH)):
        stored |= _named(tree)
    assert flash.keys() - tables == {name for name in stored if not name.endswith(".scale")}
    formats = {jnp.dtype(jnp.uint8): WeightFormat.FP4_ROW, jnp.dtype(jnp.float8_e4m3fn): WeightFormat.FP8_BLOCK}
    for name in flash.keys() - tables:
        scale = stored.get(f"{name.removesuffix('weight')}scale")
        shape = stored[name].shape
        if scale is not None:
            weight = QuantizedArray(stored[name], scale, formats[stored[name].dtype])
            shape = jax.eval_shape(QuantizedArray.dequantize, weight).shape
        assert flash[name].shape == shape, name
    assert {leaf.dtype for leaf in flash.values()} == {jnp.dtype(jnp.float32)}
    assert flash["layers.14.engram.embed.weight"].shape == (384016682, 256)


def test_parts_are_left_out_on_request():
    backbone = _named(training_params(TINY, engram=False))
    assert backbone.keys() == {name for name in _named(abstract_params(TINY)) if not name.endswith(".scale")}


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("layers.0.attn.wq_c.weight", (4, 4), "layers.0.attn.wq_c.weight: no optimiser rule"),
        ("layers.0.embed.weight", (4, 4), "no optimiser rule"),
        ("layers.0.attn.wq_b.weight.scale", (4, 4), "no optimiser rule"),
        ("layers.0.attn.wq_b.weight", (4,), r"wq_b.weight: expected a matrix, got shape \[4\]"),
        ("embed.weight", (2, 4, 4), r"embed.weight: expected a matrix, got shape \[2, 4, 4\]"),
    ],
)
def test_a_parameter_that_no_rule_fits_is_refused(name, shape, message):
    with pytest.raises(DSV41Error, match=message):
        label_of(name, shape)


def test_a_stored_tree_is_not_a_training_tree():
    with pytest.raises(DSV41Error, match=r"\.scale: no optimiser rule"):
        labels_of(abstract_params(TINY))
