"""Image files to normalised patches.

What becomes of pictures that are not plain 8-bit RGB:

* EXIF orientation: applied, the picture is used as a viewer shows it.
* Transparency (alpha channel or transparent palette entries): blended onto white.
* Palette, greyscale, black and white, YCbCr, LAB, HSV: converted to RGB.
* CMYK: Pillow's formula, without colour profiles. Other profiles are ignored too.
* 16 bits a channel: the upper 8 of them.
* Several frames (GIF, WebP, APNG, TIFF): the first.
* Damaged, truncated, empty, larger than `MAX_PIXELS`, 32-bit integer or floating-point pixels, or of another format
  than `FORMATS`: refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pathlib
import threading
import warnings

import ml_dtypes
import numpy as np
from PIL import Image, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from dsv41.config import DSV41Error, VisionConfig
from dsv41.images.plan import ImagePlan, plan_image

# Importing a decoder registers it; others, some of which start programs, stay out.
_DECODERS = (BmpImageFile, GifImageFile, JpegImageFile, PngImageFile, TiffImageFile, WebPImageFile)
FORMATS = tuple(decoder.format for decoder in _DECODERS)
# A picture of so many pixels takes a quarter GiB when it is decoded; Pillow warns from the same number on.
MAX_PIXELS = 89_478_485
# As if they were stored with 16 bits, four channels and no compression.
_MAX_FILE_BYTES = 8 * MAX_PIXELS

_GREY = (127, 127, 127)
# Filters for warnings belong to the whole process.
_OPENING = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PreparedImage:
    """An image ready for the vision tower.

    Attributes:
      source: what messages call it, such as its path.
      plan: its grid.
      patches: bfloat16 [patches, 3, p, p], row by row, values in [-1, 1].
      content_hash: sha256 of grid and patches in hexadecimal: equal if and only if the model sees the same.
    """

    source: str
    plan: ImagePlan
    patches: np.ndarray
    content_hash: str


def read_image(path: str | pathlib.Path, config: VisionConfig) -> PreparedImage:
    """Reads and prepares an image file; conversions as in this module's docstring.

    Raises:
      DSV41Error: the file cannot be used; the message names it and says why.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise DSV41Error(f"{path}: no such image file")
    try:
        size = file.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise DSV41Error(f"{path}: {size:,} bytes, an image file may have {_MAX_FILE_BYTES:,}")
        data = file.read_bytes()
    except OSError as e:
        raise DSV41Error(f"{path}: cannot be read ({e.strerror})") from e
    return decode_image(data, config, source=str(path))


def decode_image(data: bytes, config: VisionConfig, *, source: str) -> PreparedImage:
    """Prepares the image that the bytes of a file hold; arguments, conversions and errors as for `read_image`."""
    if not data:
        raise DSV41Error(f"{source}: the file is empty, expected an image")
    image = _open(data, source)
    if image.width * image.height > MAX_PIXELS:
        raise DSV41Error(f"{source}: {image.width} x {image.height} pixels, an image may have {MAX_PIXELS:,}")
    if image.mode in ("I", "F"):
        raise DSV41Error(f"{source}: pixels of 32 bits (mode {image.mode}), expected 8 or 16 bits a channel")
    try:
        rgb = _to_rgb(image)
    # Decoders of many formats stand behind this, and what they raise on damaged data is not documented.
    except Exception as e:
        raise DSV41Error(f"{source}: a damaged {image.format} file ({_reason(e)})") from e
    return prepare_image(rgb, config, source=source)


def _open(data: bytes, source: str) -> Image.Image:
    """The image with its header read, pixels still undecoded."""
    try:
        with _OPENING, warnings.catch_warnings():
            # Any size that Pillow warns of is refused, by us or by it.
            warnings.simplefilter("ignore")
            return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as e:
        raise DSV41Error(f"{source}: an image may have {MAX_PIXELS:,} pixels ({_reason(e)})") from e
    except Image.UnidentifiedImageError as e:
        raise DSV41Error(f"{source}: not an image, or of another format than {', '.join(FORMATS)}") from e
    except Exception as e:  # as for decoding
        raise DSV41Error(f"{source}: not a readable image ({_reason(e)})") from e


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _to_rgb(image: Image.Image) -> Image.Image:
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def prepare_image(image: Image.Image, config: VisionConfig, *, source: str) -> PreparedImage:
    """Resizes an RGB picture to its plan (bicubic), normalises it (mean and deviation 0.5) and cuts it into patches."""
    plan = plan_image(image.width, image.height, config)
    resized = _resize(image, plan)
    pixels = (np.asarray(resized, np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    p = config.patch_size
    grid = pixels.reshape(plan.patch_rows, p, plan.patch_cols, p, 3).transpose(0, 2, 4, 1, 3)
    patches = np.ascontiguousarray(grid.reshape(-1, 3, p, p)).astype(ml_dtypes.bfloat16)
    digest = hashlib.sha256(f"{plan.patch_rows} {plan.patch_cols} {p} ".encode())
    digest.update(patches.tobytes())
    return PreparedImage(source=source, plan=plan, patches=patches, content_hash=digest.hexdigest())


def _resize(image: Image.Image, plan: ImagePlan) -> Image.Image:
    """The picture in the planned size: centred on grey in its own proportions, or stretched."""
    box = (plan.width, plan.height)
    if plan.stretched:
        return image.resize(box, Image.Resampling.BICUBIC)
    scaled = _contain(image.size, box)
    if image.size != scaled:
        image = image.resize(scaled, Image.Resampling.BICUBIC)
    if scaled == box:
        return image
    canvas = Image.new("RGB", box, _GREY)
    canvas.paste(image, (round((box[0] - scaled[0]) * 0.5), round((box[1] - scaled[1]) * 0.5)))
    return canvas


def _contain(size: tuple[int, int], box: tuple[int, int]) -> tuple[int, int]:
    """The largest size with the proportions of `size` that fits into `box`, at least one pixel a side."""
    (width, height), (box_width, box_height) = size, box
    proportion, box_proportion = width / height, box_width / box_height
    if proportion > box_proportion:
        return box_width, max(round(height / width * box_width), 1)
    if proportion < box_proportion:
        return max(round(width / height * box_height), 1), box_height
    return box
