"""Layers in order, and the loaded model."""

from dsv41.models.backbone import CAPTURES, Backbone, ForcedChoices, Params, abstract_params, bind, forward
from dsv41.models.drafter import Draft, abstract_drafter_params, bind_drafter, draft, greedy
from dsv41.models.model import Model, batch_bucket, token_bucket
from dsv41.models.segments import Segment, compiled_segment, segment_params, step_segments
from dsv41.models.vision import SpanEmbeds, abstract_vision_params, check_images, image_buckets

__all__ = [
    "CAPTURES",
    "Backbone",
    "Draft",
    "ForcedChoices",
    "Model",
    "Params",
    "Segment",
    "SpanEmbeds",
    "abstract_drafter_params",
    "abstract_params",
    "abstract_vision_params",
    "batch_bucket",
    "bind",
    "bind_drafter",
    "check_images",
    "compiled_segment",
    "draft",
    "forward",
    "greedy",
    "image_buckets",
    "segment_params",
    "step_segments",
    "token_bucket",
]
