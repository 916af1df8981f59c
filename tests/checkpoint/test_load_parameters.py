"""Streamed loading: stored formats kept, experts stacked, bad values refused, little host memory."""

import itertools
import re
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41.checkpoint import CheckpointError, is_engram_table, load_parameters, open_checkpoint
from tests.checkpoint_files import TINY, dequantised_checkpoint, dequantised_weight, write_safetensors, write_sparse
from tests.golden import primitives

FILE = "model.safetensors"
W1 = "layers.0.ffn.experts.{}.w1.weight"
STACK = "layers.0.ffn.experts.w1.weight"


def abstract_of(reader):
    """Name -> ShapeDtypeStruct of every parameter, experts stacked, Engram tables left out."""
    abstract, experts = {}, {}
    for name in reader.names:
        view = reader.read(name)
        if match := re.fullmatch(r"(.*\.ffn\.experts)\.(\d+)\.(.*)", name):
            name = f"{match[1]}.{match[3]}"
            experts[name] = experts.get(name, 0) + 1
            abstract[name] = jax.ShapeDtypeStruct((experts[name], *view.shape), view.dtype)
        elif not is_engram_table(name):
            abstract[name] = jax.ShapeDtypeStruct(view.shape, view.dtype)
    return abstract


def load(directory, **abstract):
    """Loads name=(shape, dtype), dots in names written as `__`."""
    structs = {name.replace("__", "."): jax.ShapeDtypeStruct(*spec) for name, spec in abstract.items()}
    return load_parameters(open_checkpoint(directory), structs)


def test_tiny_loads_exactly():
    reader = open_checkpoint(TINY)
    abstract = abstract_of(reader)
    calls = []
    loaded = load_parameters(reader, abstract, progress=lambda *call: calls.append(call))
    assert list(loaded) == list(abstract)
    for name, array in loaded.items():
        assert isinstance(array, jax.Array)
        assert (array.shape, array.dtype) == (abstract[name].shape, abstract[name].dtype), name
        if ".ffn.experts." in name:
            stem, last = name.split(".ffn.experts.")
            expected = [reader.read(f"{stem}.ffn.experts.{j}.{last}") for j in range(array.shape[0])]
            assert np.array_equal(array, np.stack(expected)), name
        else:
            assert np.asarray(array).tobytes() == reader.read(name).tobytes(), name
    total = sum(array.nbytes for array in loaded.values())
    assert [call[2] for call in calls] == list(abstract)
    assert calls[-1][:2] == (total, total)
    assert all(a[0] < b[0] for a, b in itertools.pairwise(calls))


def test_formats_in_memory():
    reader = open_checkpoint(TINY)
    loaded = load_parameters(reader, abstract_of(reader))
    for name, dtype, shape in (
        ("layers.3.ffn.experts.w1.weight", jnp.uint8, (12, 64, 64)),
        ("layers.3.ffn.experts.w1.scale", jnp.uint8, (12, 64, 4)),
        ("mtp.2.ffn.experts.w2.weight", jnp.uint8, (8, 128, 32)),
        ("layers.3.attn.wq_a.weight", jnp.float8_e4m3fn, (64, 128)),
        ("layers.3.attn.wq_a.scale", jnp.uint8, (2, 4)),
        ("layers.3.ffn.shared_experts.w1.weight", jnp.float8_e4m3fn, (64, 128)),
        ("layers.3.ffn.gate.weight", jnp.bfloat16, (12, 128)),
        ("layers.3.ffn.gate.bias_vl", jnp.float32, (12,)),
        ("vision.norm.weight", jnp.bfloat16, (64,)),
    ):
        assert (loaded[name].dtype, loaded[name].shape) == (dtype, shape), name
    assert not any(is_engram_table(name) for name in loaded)


def test_bf16_checkpoint_loads(tmp_path):
    """Experts become BF16 stacks of the values that code times scale stands for."""
    reader = open_checkpoint(dequantised_checkpoint(TINY, tmp_path))
    loaded = load_parameters(reader, abstract_of(reader))
    stack = loaded["layers.3.ffn.experts.w1.weight"]
    assert (stack.dtype, stack.shape) == (jnp.bfloat16, (12, 64, 128))
    packed = open_checkpoint(TINY)
    byte = int(packed.read("layers.3.ffn.experts.2.w1.weight")[5, 0])
    scale = 2.0 ** (int(packed.read("layers.3.ffn.experts.2.w1.scale")[5, 0]) - 127)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert stack[2, 5, 0] == levels[byte & 15] * scale and stack[2, 5, 1] == levels[byte >> 4] * scale


@pytest.mark.parametrize("kind, dtype", [("fp8", "F8_E4M3"), ("fp4", "I8")])
def test_dequantised_values_match_the_golden_probe(tmp_path, kind, dtype):
    """The helper that makes the BF16 checkpoint decodes bytes of the release to their known values."""
    golden = primitives()
    codes, scale, value = (golden[f"real.{kind}.{key}"] for key in ("bytes", "scale_byte", "value"))
    write_safetensors(tmp_path / FILE, {"x.weight": (dtype, codes[None]), "x.scale": ("F8_E8M0", scale[None])})
    assert np.array_equal(dequantised_weight(open_checkpoint(tmp_path), "x.weight")[0], value)


# --- refusals


def test_missing_tensor():
    with pytest.raises(CheckpointError, match=r"tiny_text: no tensor 'layers\.0\.absent'"):
        load(TINY, layers__0__absent=((2,), jnp.float32))


def test_missing_expert():
    with pytest.raises(CheckpointError, match=r"no tensor 'layers\.0\.ffn\.experts\.12\.w1\.weight'"):
        load(TINY, layers__0__ffn__experts__w1__weight=((13, 64, 64), jnp.uint8))


@pytest.mark.parametrize(
    "spec, message",
    [
        (((128,), jnp.float32), r"expected float32 \[128\], got bfloat16 \[128\]"),
        (((64,), jnp.bfloat16), r"expected bfloat16 \[64\], got bfloat16 \[128\]"),
    ],
)
def test_other_shape_or_dtype(spec, message):
    """Nothing is widened or reshaped on the way."""
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor 'norm\.weight': {message}"):
        load(TINY, norm__weight=spec)


@pytest.mark.parametrize("last", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype, name", [(np.float32, "F32"), (ml_dtypes.bfloat16, "BF16")])
def test_non_finite_values(tmp_path, dtype, name, last):
    """Also at the very end of a tensor that is checked in several pieces."""
    values = np.ones((1 << 20) + 3, dtype)
    write_safetensors(tmp_path / FILE, {"x": (name, values)})
    load(tmp_path, x=(values.shape, dtype))
    values[-1] = last
    write_safetensors(tmp_path / FILE, {"x": (name, values)})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'x' holds NaN or infinite values"):
        load(tmp_path, x=(values.shape, dtype))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan(tmp_path, code):
    codes = np.full((2, 32), 0x7E, np.uint8).view(ml_dtypes.float8_e4m3fn)
    write_safetensors(tmp_path / FILE, {"x.weight": ("F8_E4M3", codes)})
    load(tmp_path, x__weight=((2, 32), jnp.float8_e4m3fn))
    codes.view(np.uint8)[1, 31] = code
    write_safetensors(tmp_path / FILE, {"x.weight": ("F8_E4M3", codes)})
    with pytest.raises(CheckpointError, match=r"'x\.weight' holds NaN"):
        load(tmp_path, x__weight=((2, 32), jnp.float8_e4m3fn))


def test_e8m0_nan_in_scales_only(tmp_path):
    """Byte 255 is a NaN scale, but two ordinary FP4 codes; 0 and 254 are ordinary scales."""
    tensors = {
        W1.format(0): ("I8", np.full((2, 16), 255, np.uint8)),
        W1.format(0).replace("weight", "scale"): ("F8_E8M0", np.array([[0], [254]], np.uint8)),
    }
    write_safetensors(tmp_path / FILE, tensors)
    shapes = {
        "layers__0__ffn__experts__w1__weight": ((1, 2, 16), jnp.uint8),
        "layers__0__ffn__experts__w1__scale": ((1, 2, 1), jnp.uint8),
    }
    assert np.all(load(tmp_path, **shapes)[STACK] == 255)
    tensors[W1.format(0).replace("weight", "scale")][1][1, 0] = 255
    write_safetensors(tmp_path / FILE, tensors)
    with pytest.raises(CheckpointError, match=r"tensor 'layers\.0\.ffn\.experts\.0\.w1\.scale' holds NaN"):
        load(tmp_path, **shapes)


# --- placement and memory


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("x"), PartitionSpec(None, "x")])
def test_sharded_parameters(spec):
    """A sharding in `abstract` is honoured; the values do not depend on it."""
    devices = jax.devices()[:2]
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), spec)
    reader = open_checkpoint(TINY)
    name = "layers.3.ffn.experts.w1.weight"
    abstract = {
        name: jax.ShapeDtypeStruct((12, 64, 64), jnp.uint8, sharding=sharding),
        "embed.weight": jax.ShapeDtypeStruct((512, 128), jnp.bfloat16, sharding=sharding),
    }
    loaded = load_parameters(reader, abstract)
    assert all(array.sharding == sharding for array in loaded.values())
    plain = load_parameters(reader, {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in abstract.items()})
    for name in abstract:
        assert np.array_equal(loaded[name], plain[name])


def test_arrays_do_not_depend_on_the_file(tmp_path):
    """No array aliases the mapping: the file may be overwritten afterwards."""
    values = np.ones((1 << 16,), np.float32)
    write_safetensors(tmp_path / FILE, {"x": ("F32", values)})
    array = load(tmp_path, x=(values.shape, jnp.float32))["x"]
    with open(tmp_path / FILE, "r+b") as f:
        f.seek(-values.nbytes, 2)
        f.write(bytes(values.nbytes))
    assert np.all(np.asarray(array) == 1)


def test_peak_host_memory(tmp_path):
    """L5: never more than the final state and one parameter, although one expert stack is a quarter of it all."""
    experts, rows, columns = 8, 1024, 4096
    shapes = {
        f"layers.{n}.ffn.experts.{j}.w1.weight": ("I8", (rows, columns)) for n in range(3) for j in range(experts)
    }
    shapes |= {f"layers.{n}.attn.wq_b.weight": ("F8_E4M3", (4096, 4096)) for n in range(4)}
    shapes["embed.weight"] = ("BF16", (8192, 2048))
    write_sparse(tmp_path / FILE, shapes)
    reader = open_checkpoint(tmp_path)
    abstract = abstract_of(reader)
    sizes = [int(np.prod(s.shape)) * s.dtype.itemsize for s in abstract.values()]
    tracemalloc.start()
    try:
        loaded = load_parameters(reader, abstract)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(array.nbytes for array in loaded.values()) == sum(sizes) >= 190 << 20
    assert peak <= sum(sizes) + max(sizes) + (8 << 20)
