"""The inventory against checkpoint.md's totals and against the golden checkpoint's own header."""

import dataclasses
import json
import pathlib

import pytest

from dsv41.checkpoint import (
    PARTS,
    bytes_by_dtype,
    is_engram_table,
    open_checkpoint,
    parameter_counts,
    tensor_inventory,
    totals_by_subsystem,
)
from dsv41.config import ModelConfig, load_config
from tests.checkpoint_files import DATA, TINY

FLASH = ModelConfig()
INVENTORY = tensor_inventory(FLASH)

# checkpoint.md, "Totals": tensors, bytes.
TOTALS = {
    "routed experts, backbone": (92_160, 288_777_830_400),
    "engram": (12, 203_073_076_240),
    "routed experts, mtp": (2_304, 7_219_445_760),
    "attention": (520, 5_069_721_600),
    "shared experts, backbone": (240, 1_416_960_000),
    "head": (1, 1_323_827_200),
    "embed + 3 image vectors": (4, 1_323_857_920),
    "vision + aligner": (263, 970_506_240),
    "mtp other": (52, 591_424_512),
    "hc_*": (258, 169_092_168),
    "router, backbone": (120, 157_409_280),
    "shared experts, mtp": (18, 106_272_000),
    "compressor + indexer": (43, 81_835_008),
    "router, mtp": (9, 3_935_232),
    "norms, backbone": (81, 829_440),
}


def test_defaults_are_the_released_config():
    assert load_config(pathlib.Path(__file__).parents[2] / "configs" / "flash.json") == FLASH


@pytest.mark.parametrize("subsystem", TOTALS)
def test_subsystem_totals(subsystem):
    assert totals_by_subsystem(INVENTORY)[subsystem] == TOTALS[subsystem]


def test_whole_totals():
    assert set(totals_by_subsystem(INVENTORY)) == set(TOTALS)
    assert len(INVENTORY) == 96_085
    assert sum(spec.nbytes for spec in INVENTORY.values()) == 510_286_023_000
    assert sum(bytes_by_dtype(INVENTORY).values()) == 510_286_023_000
    assert all(name == spec.name and spec.part in PARTS for name, spec in INVENTORY.items())


def test_parameter_counts():
    counts = parameter_counts(FLASH, INVENTORY)
    assert dataclasses.asdict(counts) == {
        "backbone": 551_566_180_464,
        "engram_tables": 196_613_849_600,
        "engram_projections": 314_654_720,
        "drafter": 14_225_362_530,
        "vision": 485_268_480,
        "active_prefill": 7_892_875_448,
        "active_decode": 16_130_588_784,
    }
    assert counts.total == 763_205_315_794


def test_released_shapes():
    """L2: packed and logical shapes are not mixed up."""
    for name, shape, dtype, parameters in (
        ("layers.3.ffn.experts.7.w1.weight", (2304, 2560), "I8", 2304 * 5120),
        ("layers.3.ffn.experts.7.w1.scale", (2304, 160), "F8_E8M0", 0),
        ("mtp.1.ffn.experts.127.w2.weight", (5120, 1152), "I8", 5120 * 2304),
        ("mtp.1.ffn.experts.127.w2.scale", (5120, 72), "F8_E8M0", 0),
        ("layers.0.attn.wq_a.weight", (1280, 5120), "F8_E4M3", 1280 * 5120),
        ("layers.0.attn.wq_a.scale", (40, 160), "F8_E8M0", 0),
        ("layers.0.attn.wo_a.weight", (8192, 4096), "F8_E4M3", 8192 * 4096),
        ("layers.14.engram.embed.weight", (384_016_682, 256), "F8_E4M3", 384_016_682 * 256),
        ("layers.14.engram.embed.scale", (384_016_682, 8), "F8_E8M0", 0),
        ("layers.1.engram.wkv.scale", (800, 192), "F8_E8M0", 0),
        ("mtp.0.main_proj.scale", (160, 480), "F8_E8M0", 0),
        ("layers.39.hc_ffn_fn", (24, 20480), "F32", 24 * 20480),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16", 5376),
    ):
        assert INVENTORY[name][1:3] == (shape, dtype), name
        assert INVENTORY[name].logical_parameters == parameters, name


def test_payloads():
    """L4: anything else would mean a missing or doubled shard."""
    experts = sum(s.nbytes for s in INVENTORY.values() if s.dtype == "I8")
    tables = sum(s.nbytes for s in INVENTORY.values() if is_engram_table(s.name) and s.logical_parameters)
    assert experts == (40 * 384 + 3 * 128) * 17_694_720
    assert experts / 2**30 == pytest.approx(259.46, abs=0.01)
    assert tables / 2**30 == pytest.approx(183.1, abs=0.05)


def test_compressor_and_indexer_layers():
    def layers(suffix):
        return [n for n in range(40) if f"layers.{n}.attn.{suffix}" in INVENTORY]

    assert layers("compressor.wkv.weight") == layers("indexer.wk.weight") == [2, 8, 14, 20]
    assert layers("compressor.wgate.weight") == [2, 8, 14]
    assert layers("indexer.wq_b.scale") == layers("indexer.weights_proj.weight") == [2, 8, 14, 20, 24, 28, 32, 36]
    assert not any(name.startswith("mtp.") and ("indexer" in name or ".compressor." in name) for name in INVENTORY)


def test_tiny_matches_its_file():
    """Every name, shape and dtype of the golden checkpoint, vision and mtp included."""
    reader = open_checkpoint(TINY)
    inventory = tensor_inventory(load_config(TINY))
    stored = {name: reader.info(name)[:2] for name in reader.names}
    assert stored == {name: (spec.dtype, spec.shape) for name, spec in inventory.items()}
    total = json.loads((TINY / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert sum(spec.nbytes for spec in inventory.values()) == total
    assert {spec.part for spec in inventory.values()} == set(PARTS)


def test_unquantised_model_is_bf16_without_scales():
    quantised = tensor_inventory(load_config(TINY))
    plain = tensor_inventory(load_config(DATA / "tiny_bf16"))
    assert set(plain) == {name for name, spec in quantised.items() if spec.dtype != "F8_E8M0"}
    for name, spec in plain.items():
        assert spec.dtype == ("F32" if quantised[name].dtype == "F32" else "BF16")
        assert spec.logical_parameters == quantised[name].logical_parameters
    assert plain["layers.0.ffn.experts.0.w1.weight"].shape == (64, 128)
    assert plain["layers.1.engram.embed.weight"].shape == (834, 32)


def test_optional_parts_can_be_absent():
    text = dataclasses.replace(
        load_config(TINY).text_config,
        num_nextn_predict_layers=0,
        compress_ratios=load_config(TINY).text_config.compress_ratios[:12],
        engram_layer_ids=(),
        engram_num_embeddings=(),
    )
    config = dataclasses.replace(load_config(TINY), text_config=text, vision_config=None)
    inventory = tensor_inventory(config)
    assert {spec.part for spec in inventory.values()} == {"backbone"}
    counts = parameter_counts(config)
    assert counts.total == counts.backbone
    assert counts.active_decode < counts.backbone
