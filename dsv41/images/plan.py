"""How large an image is made and how many tokens it takes (architecture.md section 7)."""

from __future__ import annotations

import dataclasses
import math

from dsv41.config import DSV41Error, VisionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """Grid of one image.

    Attributes:
      height, width: pixels after resizing, whole patches.
      patch_rows, patch_cols: patches of the vision tower.
      token_rows, token_cols: what is left of them after the unshuffle, the last row and column padded.
      stretched: fill height x width whatever the proportions, instead of keeping them and padding with grey.
    """

    height: int
    width: int
    patch_rows: int
    patch_cols: int
    token_rows: int
    token_cols: int
    stretched: bool = False

    @property
    def num_patches(self) -> int:
        return self.patch_rows * self.patch_cols

    @property
    def num_tokens(self) -> int:
        """Length of the span: start, the rows with a newline behind each, end."""
        return self.token_rows * (self.token_cols + 1) + 2


def plan_image(width: int, height: int, config: VisionConfig) -> ImagePlan:
    """The grid of an image of width x height pixels.

    An image of fewer than `min_pixels` is enlarged to about that area, sides cut to whole pixels; then each side is
    rounded up to whole patches. If the span would be longer than `max_image_tokens`, the grid becomes the largest that
    keeps the proportions and fits: sides rounded down to patches. `max_wh_ratio` limits how wide an image counts.

    Arithmetic is double precision in the order of the released code, so that sizes on a border fall on the same side.

    Raises:
      DSV41Error: a side is not positive.
    """
    if width < 1 or height < 1:
        raise DSV41Error(f"image: expected at least 1 x 1 pixels, got {width} x {height}")
    limit = config.max_wh_ratio
    stretched = limit is not None and width >= height * limit
    w, h = (height * limit if limit is not None and width > height * limit else width), height
    if w * h < config.min_pixels:
        scale = (config.min_pixels / (w * h)) ** 0.5
        w, h = int(w * scale), int(h * scale)
    patch = config.patch_size
    plan = _plan(math.ceil(h / patch), math.ceil(w / patch), config, stretched)
    if plan.num_tokens > config.max_image_tokens:
        plan = _plan(*_largest_grid(w, h, config), config, stretched)
    return plan


def _plan(rows: int, cols: int, config: VisionConfig, stretched: bool) -> ImagePlan:
    patch, group = config.patch_size, config.downsample_ratio
    return ImagePlan(
        height=rows * patch,
        width=cols * patch,
        patch_rows=rows,
        patch_cols=cols,
        token_rows=-(-rows // group),
        token_cols=-(-cols // group),
        stretched=stretched,
    )


def _largest_grid(width: float, height: float, config: VisionConfig) -> tuple[int, int]:
    """Rows and columns of patches of the largest grid that keeps the proportions within `max_image_tokens`."""
    group, room = config.downsample_ratio, config.max_image_tokens - 2
    slope = height / width
    # rows * (cols + 1) = room with rows = slope * cols, solved for cols.
    cols = math.sqrt(room / slope + 0.25) - 0.5
    rows = cols * slope
    if cols < 1:
        return room // 2 * group, group
    if rows < 1:
        return group, (room - 1) * group
    side = config.patch_size * group
    scale = min(math.floor(cols) * side / width, math.floor(rows) * side / height)
    return math.floor(height * scale / config.patch_size), math.floor(width * scale / config.patch_size)
