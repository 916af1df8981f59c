"""Every tensor of the drafter is used and none is made up; a directory that lacks one is refused (case D3)."""

import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

import dsv41
from dsv41.checkpoint import tensor_inventory
from dsv41.config import DSV41Error, ModelConfig
from dsv41.models import abstract_drafter_params
from tests.checkpoint_files import TINY, dequantised_checkpoint, stored_tensors, write_safetensors

_DTYPES = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "uint8", "I8": "uint8", "BF16": "bfloat16", "F32": "float32"}


def names(params) -> dict[str, jax.ShapeDtypeStruct]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(k.key) for k in path): leaf for path, leaf in leaves}


def test_parameters_are_exactly_the_drafter_of_the_release():
    """Names, shapes and stored dtypes; experts are stacked."""
    config = ModelConfig()
    inventory = {n: s for n, s in tensor_inventory(config).items() if s.part == "drafter"}
    expected = {}
    for name, spec in inventory.items():
        head, _, tail = name.partition(".experts.")
        if tail:
            name, shape = f"{head}.experts.{tail.partition('.')[2]}", (128, *spec.shape)
        else:
            shape = spec.shape
        expected[name] = (tuple(shape), _DTYPES[spec.dtype])
    found = {n: (tuple(s.shape), s.dtype.name) for n, s in names(abstract_drafter_params(config)).items()}
    assert found == expected
    per_stage = [sum(n.startswith(f"mtp.{k}.") for n in inventory) for k in range(3)]
    # Beside what all stages have: three for the taps in the first; norm, two Markov tables, confidence in the last.
    assert per_stage[0] - per_stage[1] == 3 and per_stage[2] - per_stage[1] == 4


def checkpoint_without(directory, *removed: str, **added):
    tensors = {n: t for n, t in stored_tensors().items() if not n.startswith(removed)} | added
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(TINY / name, directory)
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


@pytest.mark.parametrize(
    "tensor",
    [
        "mtp.1.ffn.shared_experts.w2.weight",
        "mtp.0.main_proj.scale",
        "mtp.2.markov_head.head.weight",
        "mtp.2.norm.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path, tensor):
    with pytest.raises(DSV41Error, match=f"missing tensors.*{tensor}"):
        dsv41.load(checkpoint_without(tmp_path, tensor))


def test_an_unknown_tensor_is_named(tmp_path):
    extra = {"mtp.0.markov_head.embed.weight": ("BF16", np.zeros((512, 32), ml_dtypes.bfloat16))}
    with pytest.raises(DSV41Error, match=r"unexpected tensors.*mtp\.0\.markov_head"):
        dsv41.load(checkpoint_without(tmp_path, "nothing", **extra))


def test_the_drafter_may_be_left_out(tmp_path):
    directory = checkpoint_without(tmp_path, "mtp.")
    assert dsv41.load(directory, drafter=False).drafter is None
    with pytest.raises(DSV41Error, match="missing tensors"):
        dsv41.load(directory)


def test_a_bf16_checkpoint_has_a_bf16_drafter(tmp_path):
    model = dsv41.load(dequantised_checkpoint(TINY, tmp_path), vision=False)
    dtypes = {n: x.dtype.name for n, x in names(model.drafter).items()}
    assert set(dtypes.values()) == {"bfloat16", "float32"}
    quantised = names(dsv41.load(TINY, vision=False).drafter)
    assert set(dtypes) == {n for n in quantised if not n.endswith(".scale")}
