"""The bundled models, in the released layout, so that commands work without a download.

`TINY_MODEL`: 12 tiny layers of every kind, with vision tower and drafter; its weights are random. `NANO_MODEL`: 8
layers, trained on Python code; its README.md is the model card.
"""

import pathlib

TINY_MODEL = pathlib.Path(__file__).parent / "tiny"
NANO_MODEL = pathlib.Path(__file__).parent / "nano"
