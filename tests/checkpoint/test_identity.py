"""checkpoint_identity: the same for copies, another one for whatever changes what a checkpoint computes."""

import shutil

import pytest

from dsv41.checkpoint.identity import checkpoint_identity
from dsv41.config import DSV41Error
from tests.golden import DATA

TINY = DATA / "tiny_text"


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(TINY, tmp_path / "copy")


def test_a_copy_is_the_same(copy):
    assert checkpoint_identity(copy) == checkpoint_identity(TINY)
    (copy / "README.md").write_text("not part of it")
    assert checkpoint_identity(copy) == checkpoint_identity(TINY)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json", "model.safetensors"])
def test_every_file_counts(copy, name):
    data = bytearray((copy / name).read_bytes())
    data[-1] ^= 1
    (copy / name).write_bytes(data)
    assert checkpoint_identity(copy) != checkpoint_identity(TINY)


def test_names_and_sizes_count(copy):
    (copy / "model.safetensors").rename(copy / "other.safetensors")
    assert checkpoint_identity(copy) != checkpoint_identity(TINY)
    (copy / "other.safetensors").rename(copy / "model.safetensors")
    (copy / "empty.safetensors").write_bytes(b"")
    assert checkpoint_identity(copy) != checkpoint_identity(TINY)


def test_other_weights_of_the_same_size_are_another_checkpoint(copy):
    """A training step changes about every weight."""
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    half = len(data) // 2
    data[half:] = bytes(b ^ 1 for b in data[half:])
    path.write_bytes(data)
    assert checkpoint_identity(copy) != checkpoint_identity(TINY)


def test_a_file_that_cannot_be_read(copy):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").symlink_to(copy / "absent")
    with pytest.raises(DSV41Error, match="copy: cannot read the checkpoint"):
        checkpoint_identity(copy)
