"""The bundled model: 12 tiny layers of every kind in the released layout, so that commands work without a download."""

import pathlib

TINY_MODEL = pathlib.Path(__file__).parent / "tiny"
