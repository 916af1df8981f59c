"""The vision tower and projector: patches of one image to the embeddings of its span (architecture.md section 7)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv41.config import DSV41Error, ModelConfig, VisionConfig
from dsv41.images import ImagePlan, PreparedImage, SpanType, place_spans, span_types
from dsv41.layers import RMSNorm, abstract, parameters_of, with_parameters
from dsv41.layers.vision import NORM_EPS, Affine, Projector, VisionBlock
from dsv41.ops.vision import KEY_BLOCK, rope_2d
from dsv41.sharding import fetch
from pallas_kernels.fixed_order import compiler_options

Params = dict[str, Any]

_SHORTEST_SPAN = 64
# From here on a bucket is a multiple of it: the largest image of the release, 1024 tokens, then fits exactly.
_LARGE_STEP = 3072


@dataclasses.dataclass(frozen=True, eq=False)
class SpanEmbeds:
    """What the text model takes instead of token embeddings in one row.

    On the host: every step picks its rows from it, and slices of a device array would be compiled for each length.
    """

    embeds: np.ndarray  # bfloat16 [N, D]
    positions: np.ndarray  # int64 [N] absolute positions of the image tokens, ascending


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
        self.vision = _Tower(vision)
        self.aligner = Projector(vision.hidden_size * vision.downsample_ratio**2, width)
        self.image_start = abstract(width)
        self.image_newline = abstract(width)
        self.image_end = abstract(width)


def abstract_vision_params(config: ModelConfig) -> Params:
    """The vision parameters as nested dicts of `jax.ShapeDtypeStruct`; `config.vision_config` must not be None."""
    return parameters_of(Vision(config))


def bind_vision(config: ModelConfig, params: Params) -> Vision:
    """The modules with `params` (nested dicts of arrays) in place."""
    return with_parameters(Vision(config), params)


def encode_patches(
    params: Params,
    patches: jax.Array,
    rope: jax.Array,
    count: jax.Array,
    *,
    config: ModelConfig,
    capture: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The tower: every patch attends to every other one of its image.

    Args:
      params: as `abstract_vision_params`.
      patches: bfloat16 [N, 3, p, p], N a bucket of `patch_bucket`.
      rope: float32 [N, 2, H / 2], `rope_2d` of the patches' rows and columns.
      count: int32 [] patches before the padding.
      config: static.
      capture: report `patch_embed` and `block_out.{n}`, each bfloat16 [N, C], beside the result.

    Returns:
      bfloat16 [N, C] after the final norm, and what was captured. Rows of padding are meaningless.
    """
    tower = bind_vision(config, params).vision
    with jax.named_scope("patch_embed"):
        x = tower.patch_embed.proj(patches.reshape(patches.shape[0], -1))
    aux = {"patch_embed": x}
    for n, block in enumerate(tower.blocks):
        with jax.named_scope(f"block_{n}"):
            x = aux[f"block_out.{n}"] = block(x, rope, count)
    return tower.norm(x), aux if capture else {}


def project_span(
    params: Params, features: jax.Array, source: jax.Array, types: jax.Array, *, config: ModelConfig
) -> jax.Array:
    """The embeddings of a span.

    Args:
      params: as `abstract_vision_params`.
      features: bfloat16 [N, C] of `encode_patches`.
      source: int32 [L, r * r] patches under each position, row by row; -1: beyond the grid, zeros.
      types: int32 [L] of `SpanType`.
      config: static.

    Returns:
      bfloat16 [L, D].
    """
    model = bind_vision(config, params)
    with jax.named_scope("projector"):
        under = jnp.where(source[..., None] >= 0, features[source], 0)
        # A projector column is channel * r * r + row * r + column.
        x = model.aligner(under.swapaxes(1, 2).reshape(source.shape[0], -1))
    for kind, vector in (
        (SpanType.START, model.image_start),
        (SpanType.NEWLINE, model.image_newline),
        (SpanType.END, model.image_end),
    ):
        x = jnp.where((types == kind)[:, None], vector[...], x)
    return x


@functools.cache
def _compiled() -> tuple[Any, Any]:
    options = compiler_options()
    return (
        jax.jit(encode_patches, static_argnames=("config", "capture"), compiler_options=options),
        jax.jit(project_span, static_argnames=("config",), compiler_options=options),
    )


def patch_bucket(patches: int) -> int:
    """Patches that an image is padded to, so that few shapes are compiled: 256, 512, 1024, 2048, then steps of 3072."""
    if patches > 2 * _LARGE_STEP // 3:
        return -(-patches // _LARGE_STEP) * _LARGE_STEP
    return max(1 << (patches - 1).bit_length(), KEY_BLOCK)


def unshuffle_sources(plan: ImagePlan, group: int) -> np.ndarray:
    """int32 [num_tokens, group * group]: patches under each position of a span, -1 for none (see `project_span`)."""
    rows, cols = plan.token_rows * group, plan.token_cols * group
    grid = np.full((rows, cols), -1, np.int32)
    grid[: plan.patch_rows, : plan.patch_cols] = np.arange(plan.num_patches).reshape(plan.patch_rows, plan.patch_cols)
    blocks = grid.reshape(plan.token_rows, group, plan.token_cols, group).swapaxes(1, 2)
    out = np.full((plan.num_tokens, group * group), -1, np.int32)
    out[span_types(plan) == SpanType.PATCH] = blocks.reshape(-1, group * group)
    return out


def _pad(x: np.ndarray, rows: int, value: int = 0) -> np.ndarray:
    return np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1), constant_values=value)


def image_buckets(plan: ImagePlan) -> tuple[int, int]:
    """Patches and span positions that an image is padded to: images that share them share their programs."""
    return patch_bucket(plan.num_patches), max(1 << (plan.num_tokens - 1).bit_length(), _SHORTEST_SPAN)


def encode_image(params: Params, image: PreparedImage, config: ModelConfig) -> jax.Array:
    """bfloat16 [L, D]: the embeddings of an image's span in its first `image.plan.num_tokens` rows."""
    vision, plan = config.vision_config, image.plan
    n, length = image_buckets(plan)
    row, col = np.divmod(np.arange(n), plan.patch_cols)
    tower, projector = _compiled()
    features, _ = tower(
        params,
        _pad(image.patches, n),
        rope_2d(row, col, vision.hidden_size // vision.num_attention_heads, vision.rope_theta),
        np.int32(plan.num_patches),
        config=config,
    )
    source = _pad(unshuffle_sources(plan, vision.downsample_ratio), length, -1)
    return projector(params, features, source, _pad(span_types(plan), length), config=config)


def check_images(
    config: ModelConfig,
    ids: Sequence[int] | np.ndarray,
    images: Sequence[PreparedImage],
    *,
    loaded: bool = True,
    what: str = "tokens",
) -> np.ndarray:
    """Positions int64 [N], ascending, of the image tokens of a row whose spans are laid out.

    Raises:
      DSV41Error: there are images, but the model has no vision or it is not `loaded`; there are image tokens, but no
        images; or the spans do not fit (`place_spans`). The message begins with `what`.
    """
    if images and (config.vision_config is None or not loaded):
        missing = "the config has no vision_config" if config.vision_config is None else "vision is not loaded"
        raise DSV41Error(f"{what}: {len(images)} images, but {missing}")
    if not images:
        found = np.flatnonzero(np.asarray(ids) == config.image_token_id)
        if len(found):
            raise DSV41Error(
                f"{what}: position {found[0]} is the image token (id {config.image_token_id}), but no image is given"
            )
    return place_spans(ids, images, image_token_id=config.image_token_id, what=what)


def embed_images(
    params: Params, config: ModelConfig, positions: np.ndarray, images: Sequence[PreparedImage]
) -> SpanEmbeds | None:
    """Encodes the images of one row; None if there are none.

    Args:
      params: as `abstract_vision_params`.
      config: the model's.
      positions: of the image tokens, as `check_images` returns them.
      images: in the order of their spans.
    """
    if not images:
        return None
    # One image after the other: temporary memory is that of the largest, and equal images are encoded once.
    rows: dict[str, np.ndarray] = {}
    for image in images:
        if image.content_hash not in rows:
            rows[image.content_hash] = fetch(encode_image(params, image, config))[: image.plan.num_tokens]
    return SpanEmbeds(np.concatenate([rows[image.content_hash] for image in images]), positions)
