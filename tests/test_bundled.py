"""The bundled model is the golden one, byte for byte."""

import filecmp
import pathlib

import pytest

from dsv41.data import TINY_MODEL
from tests.golden import DATA

ROOT = pathlib.Path(__file__).parents[1]
FILES = ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]


@pytest.mark.parametrize("name", FILES)
def test_bundled_file_is_the_golden_one(name):
    assert filecmp.cmp(TINY_MODEL / name, DATA / "tiny_text" / name, shallow=False)


def test_nothing_else_is_bundled():
    assert sorted(p.name for p in TINY_MODEL.iterdir()) == sorted(FILES)


def test_tiny_config_is_the_bundled_one():
    assert filecmp.cmp(ROOT / "configs" / "tiny.json", TINY_MODEL / "config.json", shallow=False)
