"""What launch.train is given in tests: a config cut down to some layers, a tokenizer and texts."""

import json
import pathlib
import shutil
from collections.abc import Iterable

from tests.checkpoint_files import TINY


def write_inputs(folder: pathlib.Path, layers: dict, texts: Iterable[str]) -> pathlib.Path:
    """config.json of the tiny model with other fields of its text_config, tokenizer.json and text.jsonl."""
    config = json.loads((TINY / "config.json").read_text())
    config["text_config"] |= layers
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(TINY / "tokenizer.json", folder)
    lines = (json.dumps({"name": f"d{i}", "text": text}) for i, text in enumerate(texts))
    (folder / "text.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def train_flags(inputs: pathlib.Path, out: pathlib.Path, **more) -> list[str]:
    """The flags of a run on what `write_inputs` wrote, and `more` of them."""
    given = {
        "config": inputs / "config.json", "tokenizer": inputs / "tokenizer.json", "text": inputs / "text.jsonl",
        "warmup_steps": 2, "log_every": 1, "out": out,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in (given | more).items()]
