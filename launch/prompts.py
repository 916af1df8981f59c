"""The flags of a script that runs many prompts, and reading the files that they name."""

import json
import pathlib
from typing import Any

from absl import flags

from dsv41.config import DSV41Error, ModelConfig
from dsv41.evals import read_tokens
from launch.load_model import ModelFlags
from launch.text import encode

_KEYS = ("prompt", "prompt_ids")


class PromptFlags:
    """--prompts and --tokens of a script."""

    def __init__(self, values: flags.FlagValues):
        """Defines the flags in `values`."""
        self._values = values
        flags.DEFINE_string(
            "prompts",
            None,
            'File with a JSON object a line: {"prompt": "text"}, which gets a BOS in front, or '
            '{"prompt_ids": [0, 17]}, used as they are. Other keys are ignored.',
            flag_values=values,
        )
        flags.DEFINE_string(
            "tokens", None, "Instead: safetensors file with `tokens` [B, T]; each row is a prompt.", flag_values=values
        )

    def read(self, model: ModelFlags, config: ModelConfig) -> list[list[int]]:
        """Token ids of each prompt, at least one; ids are not checked yet.

        Raises:
          DSV41Error: both flags or neither, or a file that cannot be used; the message names file and line.
        """
        if (self._values.prompts is None) == (self._values.tokens is None):
            raise DSV41Error("give either --prompts=FILE or --tokens=FILE.safetensors")
        if self._values.tokens is not None:
            return read_tokens(self._values.tokens).tolist()
        entries = _read_lines(self._values.prompts)
        tokenizer = model.tokenizer() if any("prompt" in entry for _, entry in entries) else None
        return [_ids(where, entry, tokenizer, config.bos_token_id) for where, entry in entries]


def _read_lines(path: str) -> list[tuple[str, dict[str, Any]]]:
    """(place for messages, object) of every line that is not blank."""
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as e:
        raise DSV41Error(f"{path}: no such file of prompts") from e
    except (OSError, ValueError) as e:
        raise DSV41Error(f"{path}: not a readable text file ({e})") from e
    entries = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as e:
            raise DSV41Error(f"{where}: not JSON ({e})") from e
        if not isinstance(entry, dict) or sum(key in entry for key in _KEYS) != 1:
            raise DSV41Error(f"{where}: expected an object with either prompt or prompt_ids")
        entries.append((where, entry))
    if not entries:
        raise DSV41Error(f"{path}: holds no prompts")
    return entries


def _ids(where: str, entry: dict[str, Any], tokenizer: Any, bos_token_id: int) -> list[int]:
    if "prompt" in entry:
        text = entry["prompt"]
        if not isinstance(text, str):
            raise DSV41Error(f"{where}: prompt: expected text, got {text!r}")
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise DSV41Error(f"{where}: prompt: holds half a surrogate pair, which is no text")
        return encode(tokenizer, text, bos_token_id)
    ids = entry["prompt_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and abs(i) < 2**63 for i in ids):
        raise DSV41Error(f"{where}: prompt_ids: expected a list of token ids, got {ids!r}")
    return ids
