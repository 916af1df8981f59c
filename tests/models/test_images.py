"""Images in rows of tokens: several, adjacent, of different sizes in a batch, cut by chunks, and absent."""

import dataclasses
import functools
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import dsv41
from dsv41.config import DSV41Error
from dsv41.images import PreparedImage, expand_images, prepare_image
from dsv41.models import SpanEmbeds
from dsv41.ops.moe import route
from tests.checkpoint_files import stored_tensors, write_safetensors
from tests.golden import DATA, expected
from tests.models.test_chunks import DRAFT_TOKENS, MAX_TOKENS, feed, same_bytes, split
from tests.models_for_tests import seeing_model

IMAGE, LENGTH = 505, 53


@functools.cache
def picture(width: int, height: int) -> PreparedImage:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return prepare_image(Image.fromarray(pixels), seeing_model().config.vision_config, source=f"{width} x {height}")


A, B, C = (93, 51), (42, 84), (170, 150)  # spans of 10, 6 and 26 tokens


@functools.cache
def rows() -> tuple[np.ndarray, tuple[tuple[PreparedImage, ...], ...]]:
    """Two rows of 53 tokens: text, two adjacent images, text, the first image again; and a larger image, then text."""
    text = expected("tiny_text")["input_ids"][0]
    images = (picture(*A), picture(*B), picture(*A)), (picture(*C),)
    marks = [*text[:5], IMAGE, IMAGE, *text[5:12], IMAGE, *text[12:27]], [IMAGE, *text[30:57]]
    ids = [expand_images(m, i, image_token_id=IMAGE, bos_token_id=0) for m, i in zip(marks, images)]
    return np.array([i[:LENGTH] for i in ids]), images


def spans() -> list[SpanEmbeds]:
    ids, images = rows()
    return [seeing_model().embed_images(r, i) for r, i in zip(ids, images)]


def feed_images(sizes: list[int]):
    """As `feed` of the chunk tests, with the images."""
    model, (ids, _), images = seeing_model(), rows(), spans()
    cache, done, out = model.init_cache(2, MAX_TOKENS, draft_tokens=DRAFT_TOKENS), 0, []
    for size in sizes:
        batch = model.make_batch(ids[:, done : done + size], ids[:, :done], images=images)
        logits, cache, _ = model.forward(batch, cache, logits="all")
        out.append(np.asarray(logits)[:, : batch.num_new[0]])
        done += size
    return np.concatenate(out, axis=1), cache


@functools.cache
def whole():
    return feed_images([LENGTH])


def test_rows_of_several_images():
    first, second = spans()
    assert first.positions.tolist() == [*range(5, 21), *range(28, 38)]
    assert second.positions.tolist() == list(range(26))
    np.testing.assert_array_equal(first.embeds[:10], first.embeds[16:])  # the same image
    assert first.embeds.dtype == jnp.bfloat16 and first.embeds.shape == (26, 128)
    alone = seeing_model().embed_images([IMAGE] * 6, [picture(*B)])
    np.testing.assert_array_equal(first.embeds[10:16], alone.embeds)


def test_images_reach_the_embeddings_and_nothing_else():
    ids, _ = rows()
    batch = seeing_model().make_batch(ids, images=spans(), padded=False)
    np.testing.assert_array_equal(batch.image_mask, ids == IMAGE)
    for row, own in enumerate(spans()):
        np.testing.assert_array_equal(batch.image_embeds[row, own.positions], own.embeds)


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 1])
def test_case_m5_spans_cut_by_chunks(size):
    """7 cuts each span at several places; 1 goes through it token by token."""
    logits, cache = feed_images(split(LENGTH, size))
    np.testing.assert_array_equal(logits, whole()[0])
    assert same_bytes(cache, whole()[1])


@pytest.mark.slow
def test_a_text_row_does_not_notice_its_neighbours_image():
    """Another program, the same bits."""
    model, (ids, _) = seeing_model(), rows()
    text = expected("tiny_text")["input_ids"][1, :LENGTH]
    plain, _ = feed(np.stack([text, text]), [LENGTH])
    batch = model.make_batch([ids[0], text], images=[spans()[0], None])
    logits, _, _ = model.forward(batch, model.init_cache(2, MAX_TOKENS, draft_tokens=DRAFT_TOKENS), logits="all")
    np.testing.assert_array_equal(np.asarray(logits)[1, :LENGTH], plain[1])
    np.testing.assert_array_equal(np.asarray(logits)[0, :LENGTH], whole()[0][0])


def test_an_image_token_without_image_does_not_depend_on_the_neighbours():
    model, (ids, _) = seeing_model(), rows()
    bare = expected("tiny_text")["input_ids"][1, :LENGTH].copy()
    bare[4] = IMAGE
    alone, _ = feed(np.stack([bare, bare]), [LENGTH])
    batch = model.make_batch([ids[0], bare], images=[spans()[0], None])
    logits, _, _ = model.forward(batch, model.init_cache(2, MAX_TOKENS, draft_tokens=DRAFT_TOKENS), logits="all")
    np.testing.assert_array_equal(np.asarray(logits)[1, :LENGTH], alone[1])


def test_what_an_image_shows_matters():
    model, (ids, images) = seeing_model(), rows()
    pixels = np.full((51, 93, 3), 200, np.uint8)
    other = prepare_image(Image.fromarray(pixels), model.config.vision_config, source="other")
    changed = [model.embed_images(ids[0], [other, *images[0][1:]]), spans()[1]]
    cache = model.init_cache(2, MAX_TOKENS, draft_tokens=DRAFT_TOKENS)
    logits = np.asarray(model.forward(model.make_batch(ids, images=changed), cache, logits="all")[0])
    np.testing.assert_array_equal(logits[0, :6], whole()[0][0, :6])  # the start vector is no pixel's
    assert np.abs(logits[0, 6:LENGTH] - whole()[0][0, 6:]).max() > 0.1
    np.testing.assert_array_equal(logits[1, :LENGTH], whole()[0][1])


def test_case_m1_image_tokens_are_routed_with_their_own_bias():
    """Equal logits, different biases: the text row gets experts 0 and 1, the image row 2 and 3, weights unbiased.

    That the model passes the right mask is in test_golden_vision: experts of image tokens.
    """
    x, weight = jnp.ones((2, 32), jnp.bfloat16), jnp.full((4, 32), 1 / 32, jnp.bfloat16)
    bias, bias_vl = jnp.array([9.0, 9, 0, 0]), jnp.array([0.0, 0, 9, 9])
    experts, weights = route(x, weight, bias, bias_vl, jnp.array([False, True]), top_k=2, scale=1.5)
    np.testing.assert_array_equal(experts, [[0, 1], [2, 3]])
    np.testing.assert_allclose(weights, 0.75, rtol=1e-6)


@pytest.fixture(scope="module")
def blind():
    return dsv41.load(DATA / "tiny_text", vision=False, drafter=False)


def test_vision_can_be_left_out(blind):
    assert blind.vision is None and seeing_model().vision is not None
    ids, images = rows()
    with pytest.raises(DSV41Error, match="tokens: 3 images, but vision is not loaded"):
        blind.embed_images(ids[0], images[0])
    assert blind.embed_images([1, 2], []) is None


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: [s[0]], "2 rows of tokens, 1 of images"),
        (lambda s: [SpanEmbeds(s[0].embeds, s[0].positions + 1), s[1]], "row 0: an image covers position 21"),
    ],
)
def test_bad_images_of_a_batch(change, message):
    with pytest.raises(DSV41Error, match=message):
        seeing_model().make_batch(rows()[0], images=change(spans()))


def test_refusals():
    model, (ids, images) = seeing_model(), rows()
    with pytest.raises(DSV41Error, match=r"tokens: position 5 is the image token \(id 505\), but no image is given"):
        model.embed_images(ids[0], [])
    with pytest.raises(DSV41Error, match="no image tokens are left for 93 x 51"):
        model.embed_images(ids[0][:21], images[0])
    config = dataclasses.replace(model.config, vision_config=None)
    with pytest.raises(DSV41Error, match="prompt: 1 images, but the config has no vision_config"):
        dataclasses.replace(model, config=config).check_images(ids[1], images[1], what="prompt")


def test_a_checkpoint_may_lack_vision(tmp_path):
    """Then it loads without; asked for vision, it says what is missing before it reads anything."""
    tensors = stored_tensors()
    own = [name for name in tensors if name.startswith(("vision.", "aligner.", "image_"))]
    write_safetensors(tmp_path / "model.safetensors", {n: t for n, t in tensors.items() if n not in own})
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DATA / "tiny_text" / name, tmp_path)
    assert dsv41.load(tmp_path, vision=False, drafter=False).vision is None
    with pytest.raises(DSV41Error, match=f"{len(own)} missing tensors: image_start, "):
        dsv41.load(tmp_path, drafter=False)
