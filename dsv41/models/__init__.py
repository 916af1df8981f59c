"""Layers in order, and the loaded model."""

from dsv41.models.backbone import CAPTURES, Backbone, ForcedChoices, abstract_params, bind, forward
from dsv41.models.model import Model, batch_bucket, token_bucket

__all__ = [
    "CAPTURES",
    "Backbone",
    "ForcedChoices",
    "Model",
    "abstract_params",
    "batch_bucket",
    "bind",
    "forward",
    "token_bucket",
]
