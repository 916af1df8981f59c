"""The layers as small NNX modules; their arithmetic is in `dsv41.ops`.

A module's attribute path is the tensor's name in the checkpoint. Modules are built abstract: every parameter is a
`jax.ShapeDtypeStruct` until a checkpoint fills it.
"""

from dsv41.layers.attention import Attention
from dsv41.layers.block import Block, BlockFormats, DraftBlock
from dsv41.layers.engram import Engram
from dsv41.layers.linear import Linear, RMSNorm, abstract, logical_axes_of, parameters_of, with_parameters
from dsv41.layers.moe import MoE
from dsv41.layers.residual import Residual, Sublayer, open_streams
from dsv41.layers.shared_trace import traced_once

__all__ = [
    "Attention",
    "Block",
    "BlockFormats",
    "DraftBlock",
    "Engram",
    "Linear",
    "MoE",
    "RMSNorm",
    "Residual",
    "Sublayer",
    "abstract",
    "logical_axes_of",
    "open_streams",
    "parameters_of",
    "traced_once",
    "with_parameters",
]
