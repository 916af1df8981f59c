"""The tiny model, loaded once a process.

Compiling takes most of the tests' time. Tests that share the model should also share (batch, length) buckets: rows and
lengths are rounded up to powers of two, and a cache of another size is another program.
"""

import functools

import dsv41
from dsv41.models import Model
from tests.golden import DATA

# More context than the file allows, so that tests may go beyond its 128 positions.
OVERRIDES = {"text_config.max_position_embeddings": "4096"}


@functools.cache
def tiny_model() -> Model:
    """`tests/data/tiny_text` with room for 4,096 positions."""
    return dsv41.load(DATA / "tiny_text", overrides=OVERRIDES)
