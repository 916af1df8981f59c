"""The ops that have kernels, and their named argument shapes."""

import importlib

from pallas_kernels.arg_spec import ArgSpec

OPS = ("quantize", "indexer", "topk", "sparse_attention", "hyper_connection", "experts", "fp8_linear")


def arg_specs(op: str, tag: str) -> list[ArgSpec]:
    """The op's argument shapes that carry a tag, in the order in which they are defined."""
    specs = importlib.import_module(f"pallas_kernels.{op}.arg_specs").SPECS
    return [spec for spec in specs if tag in spec.tags]
