"""Image files: golden preprocessing, the documented conversions, and files that cannot be used."""

import io
import struct
import warnings
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from dsv41.config import DSV41Error, VisionConfig
from dsv41.images import MAX_PIXELS, decode_image, prepare_image, read_image
from tests.golden import expected

CONFIG = VisionConfig(max_image_tokens=40, min_pixels=3136)  # of the tiny model
PIXELS = np.random.default_rng(0).integers(0, 256, (56, 70, 3), np.uint8)  # needs no resizing


def encoded(picture: Image.Image, format: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    picture.save(out, format, **options)
    return out.getvalue()


def prepared(data: bytes) -> np.ndarray:
    """Pixels uint8 [height, width, 3] that the patches hold."""
    image = decode_image(data, CONFIG, source="it")
    plan = image.plan
    grid = image.patches.reshape(plan.patch_rows, plan.patch_cols, 3, 14, 14).transpose(0, 3, 1, 4, 2)
    return np.round((grid.reshape(plan.height, plan.width, 3).astype(np.float32) + 1) * 127.5).astype(np.uint8)


def as_seen(pixels: np.ndarray) -> np.ndarray:
    """Pixels after the same rounding to bfloat16."""
    x = ((pixels.astype(np.float32) / 255 - 0.5) / 0.5).astype(ml_dtypes.bfloat16)
    return np.round((x.astype(np.float32) + 1) * 127.5).astype(np.uint8)


@pytest.mark.parametrize("case", ["image", "preproc.shrink", "preproc.wide", "preproc.exact", "preproc.enlarge"])
def test_golden_patches(case, tmp_path):
    golden = expected("tiny_vl")
    Image.fromarray(golden[f"{case}.rgb"]).save(tmp_path / "it.png")
    image = read_image(tmp_path / "it.png", CONFIG)
    np.testing.assert_array_equal(image.patches, golden[f"{case}.patches"])
    plan = image.plan
    grid = [plan.patch_rows, plan.patch_cols, plan.token_rows, plan.token_cols]
    np.testing.assert_array_equal(grid, golden[f"{case}.grid"])
    assert image.source == str(tmp_path / "it.png")


@settings(max_examples=100)
@given(st.integers(1, 300), st.integers(1, 300))
def test_resizing_keeps_proportions_on_grey(width, height):
    """As Pillow's own function for it."""
    picture = Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))
    image = prepare_image(picture, CONFIG, source="it")
    padded = ImageOps.pad(picture, (image.plan.width, image.plan.height), color=(127, 127, 127))
    np.testing.assert_array_equal(prepared(encoded(picture)), as_seen(np.asarray(padded)))


def test_limited_proportions_stretch():
    config = VisionConfig(max_image_tokens=40, min_pixels=3136, max_wh_ratio=2)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 160, 3), np.uint8))
    image = prepare_image(picture, config, source="it")
    assert image.plan.stretched
    stretched = np.asarray(picture.resize((image.plan.width, image.plan.height), Image.Resampling.BICUBIC))
    corner = ((stretched[:14, :14].astype(np.float32) / 255 - 0.5) / 0.5).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(image.patches[0], corner.transpose(2, 0, 1))


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1)])
def test_tiny_and_thin(size):
    image = decode_image(encoded(Image.new("RGB", size, (10, 20, 30))), CONFIG, source="it")
    assert image.plan.num_tokens <= 40 and np.isfinite(image.patches.astype(np.float32)).all()


def test_content_hash():
    """Of what the model sees: another file of the same picture has it too, another picture or grid has not."""
    picture = Image.fromarray(PIXELS)
    first = decode_image(encoded(picture), CONFIG, source="a")
    assert first.content_hash == decode_image(encoded(picture, "BMP"), CONFIG, source="b").content_hash
    other = PIXELS.copy()
    other[0, 0, 0] ^= 128
    assert first.content_hash != decode_image(encoded(Image.fromarray(other)), CONFIG, source="a").content_hash
    grey = [decode_image(encoded(Image.new("RGB", s)), CONFIG, source="a") for s in ((70, 56), (56, 70))]
    assert grey[0].content_hash != grey[1].content_hash


# --- conversions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["BMP", "PNG", "TIFF", "WEBP", "GIF", "JPEG"])
def test_formats(format):
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(format, {})
    picture = Image.fromarray(PIXELS)
    if format == "GIF":
        picture = picture.quantize(64)
    exact = as_seen(np.asarray(picture.convert("RGB")))
    found = prepared(encoded(picture, format, **options))
    if format == "JPEG":
        assert np.abs(found.astype(int) - exact).mean() < 3
    else:
        np.testing.assert_array_equal(found, exact)


def test_cmyk():
    picture = Image.merge("CMYK", [Image.fromarray(np.full((56, 70), v, np.uint8)) for v in (10, 100, 200, 50)])
    found = prepared(encoded(picture, "TIFF"))
    ink, black = np.array([10, 100, 200]), 50
    assert np.abs(found[0, 0] - (255 - ink) * (255 - black) / 255).max() <= 1


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bits_keep_the_upper_8(format):
    wide = np.random.default_rng(1).integers(0, 1 << 16, (56, 70), np.uint16)
    found = prepared(encoded(Image.fromarray(wide), format))
    np.testing.assert_array_equal(found, as_seen(np.repeat((wide >> 8).astype(np.uint8)[..., None], 3, axis=2)))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_16_bit_colour():
    wide = np.random.default_rng(1).integers(0, 1 << 16, (56, 70, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in wide)
    np.testing.assert_array_equal(prepared(png(70, 56, 16, 2, rows)), as_seen((wide >> 8).astype(np.uint8)))


def test_greyscale_and_black_and_white():
    grey = PIXELS[..., 0]
    np.testing.assert_array_equal(prepared(encoded(Image.fromarray(grey))), as_seen(np.stack([grey] * 3, axis=-1)))
    bits = Image.fromarray(grey).convert("1", dither=Image.Dither.NONE)
    assert set(np.unique(prepared(encoded(bits)))) == {0, 255}


def test_transparency_becomes_white():
    alpha = np.zeros((56, 70), np.uint8)
    alpha[:, 35:] = 255
    found = prepared(encoded(Image.fromarray(np.dstack([PIXELS, alpha]))))
    assert (found[:, :35] == 255).all()
    np.testing.assert_array_equal(found[:, 35:], as_seen(PIXELS)[:, 35:])
    half = prepared(encoded(Image.new("RGBA", (70, 56), (0, 0, 0, 128))))
    assert np.abs(half.astype(int) - 127).max() <= 1
    assert (prepared(encoded(Image.new("LA", (70, 56), (0, 0)))) == 255).all()


def test_palette_and_its_transparent_entry():
    picture = Image.fromarray(PIXELS).quantize(16)
    np.testing.assert_array_equal(prepared(encoded(picture)), as_seen(np.asarray(picture.convert("RGB"))))
    found = prepared(encoded(picture, transparency=3))
    clear = np.asarray(picture) == 3
    assert clear.any() and (found[clear] == 255).all()
    np.testing.assert_array_equal(found[~clear], as_seen(np.asarray(picture.convert("RGB")))[~clear])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    shown = Image.fromarray(PIXELS)
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # how a camera held so stores what is shown
    stored = shown if orientation == 1 else shown.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(prepared(encoded(stored, exif=exif)), as_seen(PIXELS))


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_several_frames_the_first(format):
    frames = [Image.new("RGB", (70, 56), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if format == "WEBP" else {}
    found = prepared(encoded(frames[0], format, save_all=True, append_images=frames[1:], **options))
    assert (found == [255, 0, 0]).all()


# --- files that cannot be used ----------------------------------------------------------------------------------------


def refused(data: bytes, message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DSV41Error, match=message):
            decode_image(data, CONFIG, source="it.png")


@pytest.mark.parametrize("format", ["BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP"])
def test_truncated(format):
    data = encoded(Image.fromarray(PIXELS), format)
    for end in (len(data) // 2, len(data) // 4, 60, 20):
        refused(data[:end], "^it.png: (a damaged|not a readable|not an image)")


@settings(max_examples=300)
@given(st.data())
def test_damaged_files_give_an_error_or_a_picture(data):
    """Never another exception, whatever the bytes."""
    format = data.draw(st.sampled_from(["BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP"]))
    content = bytearray(encoded(Image.fromarray(PIXELS[:20, :30]), format))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's remarks on metadata
        try:
            image = decode_image(bytes(content), CONFIG, source="it")
        except DSV41Error as e:
            assert str(e).startswith("it: ")  # noqa: PT017  either outcome is right
        else:
            assert np.isfinite(image.patches.astype(np.float32)).all()


def test_empty_and_foreign():
    refused(b"", "^it.png: the file is empty, expected an image")
    refused(b"hello", "^it.png: not an image, or of another format than BMP, GIF, JPEG, PNG, TIFF, WEBP")
    refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "^it.png: not an image")


@pytest.mark.parametrize("side", [9_460, 14_000, 60_000])
def test_decompression_bomb(side):
    """Refused from the header, before anything is unpacked and without a warning; Pillow itself only warns at first."""
    assert side * side > MAX_PIXELS
    refused(png(side, side, 8, 0, b"\0" * 1000), "^it.png: .*an image may have 89,478,485")


@pytest.mark.parametrize("mode", ["I", "F"])
def test_32_bit_pixels(mode):
    refused(encoded(Image.new(mode, (70, 56), 1), "TIFF"), rf"^it.png: pixels of 32 bits \(mode {mode}\)")


def test_paths(tmp_path):
    for path in (tmp_path / "absent.png", tmp_path):
        with pytest.raises(DSV41Error, match=f"{path}: no such image file"):
            read_image(path, CONFIG)
    (tmp_path / "empty.png").touch()
    with pytest.raises(DSV41Error, match=r"empty\.png: the file is empty"):
        read_image(tmp_path / "empty.png", CONFIG)
    with open(tmp_path / "huge.png", "wb") as f:
        f.truncate(8 * MAX_PIXELS + 1)
    with pytest.raises(DSV41Error, match=r"huge\.png: 715,827,881 bytes, an image file may have 715,827,880"):
        read_image(tmp_path / "huge.png", CONFIG)
