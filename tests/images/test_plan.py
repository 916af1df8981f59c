"""Grid planning: the golden table, a second implementation, and what holds for every size."""

import json

import deepseek_recipe
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv41.config import ConfigError, DSV41Error, VisionConfig
from dsv41.images import ImagePlan, plan_image
from tests.golden import DATA

RELEASED = VisionConfig()
TABLE = json.loads((DATA / "tiny_vl" / "grid_plan.json").read_text())
SIDES = st.one_of(st.integers(1, 3000), st.integers(1, 100_000))


def table_config(ratio: float) -> VisionConfig:
    names = ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels")
    return VisionConfig(max_wh_ratio=None if ratio < 0 else ratio, **{name: TABLE[name] for name in names})


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: f"{row[0]}x{row[1]}" + ("" if row[2] < 0 else "limited"))
def test_golden_table(row):
    assert TABLE["columns"] == [
        "image_w", "image_h", "max_wh_ratio(-1 none)", "resized_h", "resized_w", "n_vit_h", "n_vit_w", "n_llm_h",
        "n_llm_w", "tokens",
    ]  # fmt: skip
    width, height, ratio, *expected = row
    plan = plan_image(width, height, table_config(ratio))
    found = [plan.height, plan.width, plan.patch_rows, plan.patch_cols, plan.token_rows, plan.token_cols]
    assert [*found, plan.num_tokens] == expected


def recipe_tokens(width: int, height: int) -> int:
    """Span length by the vendor's request library, which knows the released sizes only."""
    image = deepseek_recipe.ImageInfo(b"", width, height)
    return deepseek_recipe.MultiModalData([image]).image_token_adjustment() + 1


def pixels(plan: ImagePlan) -> int:
    return plan.width * plan.height


@settings(max_examples=2000)
@given(SIDES, SIDES)
@example(2982, 2352)  # columns come out whole, up to rounding
@example(81280, 2880)
@example(1806, 3192)
@example(543, 544)
def test_agrees_with_the_request_library(width, height):
    """It repeats the enlargement until the grid itself has `min_pixels`; the inference code enlarges once."""
    plan = plan_image(width, height, RELEASED)
    if pixels(plan) >= RELEASED.min_pixels:
        assert plan.num_tokens == recipe_tokens(width, height)


@settings(max_examples=2000)
@given(SIDES, SIDES, st.sampled_from([None, 1.0, 2.5, 4]))
def test_what_holds_for_every_plan(width, height, ratio):
    config = VisionConfig(max_wh_ratio=ratio)
    plan = plan_image(width, height, config)
    assert plan.num_tokens <= config.max_image_tokens
    assert plan.height == plan.patch_rows * 14 > 0 and plan.width == plan.patch_cols * 14 > 0
    assert (plan.token_rows, plan.token_cols) == (-(-plan.patch_rows // 3), -(-plan.patch_cols // 3))
    assert plan.num_patches <= 9216
    assert plan.stretched == (ratio is not None and width >= ratio * height)


@given(SIDES, SIDES)
def test_ordinary_sizes_are_rounded_up(width, height):
    """What is neither enlarged nor over the limit keeps its pixels and gets less than a patch of grey a side."""
    plan = plan_image(width, height, RELEASED)
    up = -(-width // 14), -(-height // 14)
    tokens = -(-up[1] // 3) * (-(-up[0] // 3) + 1) + 2
    if width * height >= RELEASED.min_pixels and tokens <= RELEASED.max_image_tokens:
        assert (plan.patch_cols, plan.patch_rows) == up


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_no_pixels(size):
    with pytest.raises(DSV41Error, match="expected at least 1 x 1 pixels, got"):
        plan_image(*size, RELEASED)


def test_a_span_needs_four_tokens():
    with pytest.raises(ConfigError, match="max_image_tokens: expected at least 4, got 3"):
        VisionConfig(max_image_tokens=3)
    assert plan_image(1000, 10, VisionConfig(max_image_tokens=4)).num_tokens == 4
