"""Reading and writing `config.json`, and dotted overrides.

Unknown keys are refused, so that a misspelt or newer field is never silently ignored; so are absent sizes, because a
file that omits one is more likely truncated than meant to have the released value.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import types
import typing
from typing import Any

from dsv41.config.errors import ConfigError
from dsv41.config.model_config import ModelConfig, RopeScaling, TextConfig, VisionConfig

# Bookkeeping keys that tools add to config.json and that say nothing about the computation.
_IGNORED_TOP_LEVEL_KEYS = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "auto_map"})
# Objects whose fields must all be spelt out (those whose default is null may be left out).
_COMPLETE = (TextConfig, VisionConfig, RopeScaling)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _coerce(name: str, hint: Any, value: Any) -> Any:
    """Checks a JSON value against a field's annotation; lists become tuples, objects become dataclasses."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        (hint,) = [o for o in options if o is not type(None)]
    if dataclasses.is_dataclass(hint):
        return _from_dict(hint, value, name)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name}: expected a list of {item.__name__}, got {value!r}")
        return tuple(_coerce(f"{name}[{i}]", item, v) for i, v in enumerate(value))
    if hint is float:
        ok = _is_number(value) and abs(value) <= sys.float_info.max  # false for NaN and for integers beyond float range
    elif hint is int:
        ok = isinstance(value, int) and not isinstance(value, bool)
    else:
        ok = isinstance(value, hint)
    if not ok:
        raise ConfigError(f"{name}: expected {hint.__name__}, got {value!r}")
    return value


def _from_dict(cls: type, data: Any, prefix: str) -> Any:
    if not isinstance(data, dict):
        raise ConfigError(f"{prefix or 'config'}: expected a JSON object, got {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    dot = f"{prefix}." if prefix else ""
    unknown = sorted(set(data) - set(hints) - (set() if prefix else _IGNORED_TOP_LEVEL_KEYS))
    if unknown:
        raise ConfigError(f"unknown field {', '.join(dot + k for k in unknown)}")
    if cls in _COMPLETE:
        missing = [f.name for f in dataclasses.fields(cls) if f.name not in data and f.default is not None]
        if missing:
            raise ConfigError(f"missing field {', '.join(dot + k for k in missing)}")
    return cls(**{k: _coerce(dot + k, hints[k], v) for k, v in data.items() if k in hints})


def config_from_dict(data: dict[str, Any]) -> ModelConfig:
    """Builds a `ModelConfig` from parsed JSON.

    A missing `quantization_config` or `vision_config` means the model has none.

    Raises:
      ConfigError: a field is unknown, missing, of the wrong type or impossible; the message names it.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"config: expected a JSON object, got {type(data).__name__}")
    if "text_config" not in data:
        raise ConfigError("missing field text_config")
    return _from_dict(ModelConfig, {"quantization_config": None, "vision_config": None, **data}, "")


def load_config(path: str | pathlib.Path) -> ModelConfig:
    """Reads a `config.json`, or the one inside a directory in the released layout.

    Raises:
      ConfigError: the file is missing, is not JSON, or describes an impossible model; the message names file and field.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ConfigError(f"{path}: no such config file") from e
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: not a readable JSON file ({e})") from e
    try:
        return config_from_dict(data)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """The JSON form of a config; `config_from_dict` reads it back to an equal object."""
    data = dataclasses.asdict(config)
    if data["text_config"]["dspark_confidence_input"] is None:  # not a field of the released file
        del data["text_config"]["dspark_confidence_input"]
    return {k: v for k, v in data.items() if not (v is None and k in ("quantization_config", "vision_config"))}


def with_overrides(config: ModelConfig, overrides: dict[str, str]) -> ModelConfig:
    """Applies dotted overrides such as `{"text_config.max_position_embeddings": "4096"}`; values are JSON.

    Raises:
      ConfigError: the key names no field, or the value is not JSON of the field's type.
    """
    data = json.loads(json.dumps(dataclasses.asdict(config)))
    for key, text in overrides.items():
        *parents, leaf = key.split(".")
        node = data
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict) or leaf not in node:
            raise ConfigError(f"unknown field {key}")
        try:
            node[leaf] = json.loads(text)
        except ValueError:
            node[leaf] = text
    return config_from_dict(data)
