"""Image files to patches, and where an image's span lies in a row of tokens. Needs no JAX."""

from dsv41.images.plan import ImagePlan, plan_image
from dsv41.images.read import MAX_PIXELS, PreparedImage, decode_image, prepare_image, read_image
from dsv41.images.span import SpanType, expand_images, place_spans, span_types

__all__ = [
    "MAX_PIXELS",
    "ImagePlan",
    "PreparedImage",
    "SpanType",
    "decode_image",
    "expand_images",
    "place_spans",
    "plan_image",
    "prepare_image",
    "read_image",
    "span_types",
]
