"""The vision path against the golden set `tiny_vl`, stage by stage and through the whole model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from dsv41.images import PreparedImage, SpanType, prepare_image, span_types
from dsv41.models import ForcedChoices
from dsv41.models.backbone import CAPTURES
from dsv41.models.vision import encode_image, encode_patches, patch_bucket
from dsv41.ops.vision import rope_2d
from pallas_kernels.fixed_order import compiler_options
from tests.golden import expected
from tests.models.parity import CAPACITY, error_figures, same_sets
from tests.models_for_tests import tiny_model

PROMPT, STEPS, PAD = 45, 6, 64
GOLDEN = expected("tiny_vl")
IDS = GOLDEN["input_ids"]
SPAN = slice(int(GOLDEN["image.start"][0]), int(GOLDEN["image.start"][0]) + len(GOLDEN["image.types"]))


def golden_image() -> PreparedImage:
    picture = Image.fromarray(GOLDEN["image.rgb"])
    return prepare_image(picture, tiny_model().config.vision_config, source="golden")


def pad_rows(x: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))


def tower(bucket: int) -> dict[str, np.ndarray]:
    """Every stage of the tower with the image padded to `bucket` patches, padding cut off again."""
    model, image = tiny_model(), golden_image()
    row, col = np.divmod(np.arange(bucket), image.plan.patch_cols)
    count = image.plan.num_patches
    run = jax.jit(encode_patches, static_argnames=("config", "capture"), compiler_options=compiler_options())
    out, aux = run(
        model.vision,
        pad_rows(image.patches, bucket),
        rope_2d(row, col, 16, 10000),
        np.int32(count),
        config=model.config,
        capture=True,
    )
    return {name: np.asarray(x)[:count] for name, x in (aux | {"out": out}).items()}


def test_rope_tables():
    """The last bit of a cosine is the library's."""
    row, col = np.divmod(np.arange(28), 7)
    table = rope_2d(row, col, 16, 10000)
    np.testing.assert_allclose(table[:, 0], GOLDEN["vit.rope_cos"][:, 0], rtol=0, atol=6e-8)
    np.testing.assert_allclose(table[:, 1], GOLDEN["vit.rope_sin"][:, 0], rtol=0, atol=6e-8)


def test_every_stage_of_the_tower():
    assert patch_bucket(28) == 256
    stages = tower(256)
    for name in ("patch_embed", "block_out.0", "block_out.1", "out"):
        np.testing.assert_array_equal(stages[name], GOLDEN[f"vit.{name}"])


def test_padding_changes_no_bit():
    small, large = tower(256), tower(1024)
    for name, x in small.items():
        np.testing.assert_array_equal(large[name], x)


def test_patch_buckets():
    sizes = (1, 256, 257, 1521, 2048, 2049, 3073, 8649, 9216, 9217)
    assert [patch_bucket(n) for n in sizes] == [256, 256, 512, 2048, 2048, 3072, 6144, 9216, 9216, 12288]


def test_span_embeddings():
    """Projector rows in reading order, and the three vectors around them."""
    model, image = tiny_model(), golden_image()
    embeds = np.asarray(encode_image(model.vision, image, model.config))[: image.plan.num_tokens]
    types = span_types(image.plan)
    np.testing.assert_array_equal(types, GOLDEN["image.types"])
    np.testing.assert_array_equal(embeds[types == SpanType.PATCH], GOLDEN["aligner.out"])
    np.testing.assert_array_equal(embeds, GOLDEN["merged_embeds"][0, SPAN])


def spans():
    return [tiny_model().embed_images(IDS[0], [golden_image()]), None]


def forced(kind: str, step: int | None) -> ForcedChoices:
    def read(name: str, layer: int, fill: int) -> jnp.ndarray:
        x = GOLDEN[f"{kind}.{name}.{layer}"].astype(np.int32)
        x, rows = (x, PAD) if step is None else (x[step][:, None], 1)
        return jnp.asarray(np.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0)), constant_values=fill))

    layers = tiny_model().schedule.layers
    return ForcedChoices(
        selected={s.index: read("topk", s.index, -1) for s in layers if s.selects},
        experts={s.index: read("moe_indices", s.index, 0) for s in layers},
    )


@functools.cache
def run(mode: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Prefill logits [2, 45, V], decode logits [6, 2, V] and what the prefill captured; `mode`: free or forced."""
    model = tiny_model()
    cache, images = model.init_cache(2, CAPACITY), spans()

    def choices(kind: str, step: int | None = None) -> ForcedChoices | None:
        return None if mode == "free" else forced(kind, step)

    batch = model.make_batch(IDS[:, :PROMPT], images=images)
    logits, cache, aux = model.forward(batch, cache, logits="all", capture=CAPTURES, forced=choices("prefill"))
    decoded = []
    for step in range(STEPS):
        end = PROMPT + step
        batch = model.make_batch(IDS[:, end : end + 1], IDS[:, :end], images=images)
        assert batch.image_embeds is None
        out, cache, _ = model.forward(batch, cache, logits="all", capture=CAPTURES, forced=choices("decode", step))
        decoded.append(np.asarray(out)[:, 0])
    cut = {name: np.asarray(x)[:, :PROMPT] for name, x in aux.items()}
    return np.asarray(logits)[:, :PROMPT], np.stack(decoded), cut


def test_merged_embeddings():
    _, _, aux = run("forced")
    for stream in range(4):
        np.testing.assert_array_equal(aux["block_in.0"][:, :, stream], GOLDEN["merged_embeds"])


# The golden README's figures. Forcing selections alone gave prefill 0.23 / 0.008 and decode 0.29 / 0.016.
@pytest.mark.parametrize(
    "mode, largest, mean", [("forced", 0.25, 0.03), pytest.param("free", 1.0, 0.06, marks=pytest.mark.slow)]
)
def test_logits(mode, largest, mean):
    prefill, decode, _ = run(mode)
    for name, actual in (("prefill", prefill), ("decode", decode)):
        worst, average = error_figures(actual, GOLDEN[f"{name}.logits"])
        assert worst < largest and average < mean, name


def test_streams_of_the_forced_run():
    _, _, aux = run("forced")
    for n in (0, 6, 11):
        actual, golden = aux[f"block_out.{n}"].astype(np.float64), GOLDEN[f"prefill.block_out.{n}"].astype(np.float64)
        assert np.sqrt(((actual - golden) ** 2).mean() / (golden**2).mean()) < 0.04


@pytest.mark.slow
def test_experts_of_image_tokens():
    """Chosen with `bias_vl`: nearly all as in the golden free run, and far from what `bias` would choose."""
    _, _, aux = run("free")
    same = [same_sets(aux[f"experts.{n}"], GOLDEN[f"prefill.moe_indices.{n}"])[0, SPAN] for n in range(12)]
    assert np.mean(same[:2]) == 1 and np.mean(same) > 0.8


def test_hashes_are_exact():
    """Image tokens block the look-back and get the padding's rows."""
    model = tiny_model()
    batch = model.make_batch(IDS[:, :PROMPT], images=spans(), padded=False)
    golden = model.engram.lookup(GOLDEN["prefill.engram_hash"].astype(np.int64))
    np.testing.assert_array_equal(np.asarray(batch.engram_values).view(np.uint8), golden.values.view(np.uint8))
