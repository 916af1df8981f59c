"""The vision tower and projector: patches of one image to the embeddings of its span (architecture.md section 7)."""

from __future__ import annotations

from typing import Any

from flax import nnx

from dsv41.config import ModelConfig, VisionConfig
from dsv41.layers import RMSNorm, abstract
from dsv41.layers.vision import NORM_EPS, Affine, Projector, VisionBlock

Params = dict[str, Any]


class _PatchEmbed(nnx.Module):
    def __init__(self, config: VisionConfig):
        self.proj = Affine(3 * config.patch_size**2, config.hidden_size)


class _Tower(nnx.Module):
    def __init__(self, config: VisionConfig):
        self.patch_embed = _PatchEmbed(config)
        self.blocks = nnx.List([VisionBlock(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, NORM_EPS)


class Vision(nnx.Module):
    """Tower, projector and the three vectors that frame a span. Attribute paths are the checkpoint's tensor names."""

    def __init__(self, config: ModelConfig):
        vision, width = config.vision_config, config.text_config.hidden_size
        self.config = vision
        self.vision = _Tower(vision)
        self.aligner = Projector(vision.hidden_size * vision.downsample_ratio**2, width)
        self.image_start = abstract(width)
        self.image_newline = abstract(width)
        self.image_end = abstract(width)


def abstract_vision_params(config: ModelConfig) -> Params:
    """The vision parameters as nested dicts of `jax.ShapeDtypeStruct`; `config.vision_config` must not be None."""
    return nnx.to_pure_dict(nnx.split(Vision(config))[1])
