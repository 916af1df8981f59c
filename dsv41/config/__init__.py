"""Configuration: plain frozen values, no jax."""

from dsv41.config.config_json import config_from_dict, config_to_dict, load_config, with_overrides
from dsv41.config.errors import ConfigError, DSV41Error
from dsv41.config.model_config import ModelConfig, QuantizationConfig, RopeScaling, TextConfig, VisionConfig
from dsv41.config.schedule import LayerKind, LayerMode, LayerSpec, Schedule, layer_schedule

__all__ = [
    "ConfigError",
    "DSV41Error",
    "LayerKind",
    "LayerMode",
    "LayerSpec",
    "ModelConfig",
    "QuantizationConfig",
    "RopeScaling",
    "Schedule",
    "TextConfig",
    "VisionConfig",
    "config_from_dict",
    "config_to_dict",
    "layer_schedule",
    "load_config",
    "with_overrides",
]
