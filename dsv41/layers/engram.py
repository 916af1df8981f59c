"""Engram: a gated residual from looked-up n-gram rows."""

import jax
from flax import nnx

from dsv41.config import TextConfig
from dsv41.layers.linear import Linear, abstract
from dsv41.ops.engram import engram_gate
from dsv41.ops.linear import WeightFormat
from pallas_kernels.quantize.ops import dequantize_fp8


class Engram(nnx.Module):
    """Projects a token's table rows to one key per stream and one value, and adds the value through a gate.

    The table itself is not a parameter: rows come with the batch.
    """

    def __init__(self, config: TextConfig, dense: WeightFormat):
        streams, dim = config.hc_mult, config.hidden_size
        rows = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.wkv = Linear(rows * config.engram_head_dim, (streams + 1) * dim, dense)
        self.q_weight = abstract(streams, dim)
        self.k_weight = abstract(streams, dim)
        self.eps = config.rms_norm_eps

    def __call__(
        self, streams: jax.Array, values: jax.Array, scales: jax.Array | None, image_mask: jax.Array
    ) -> jax.Array:
        """streams bfloat16 [B, T, R, D]; values [B, T, rows, dim], scales uint8 [B, T, rows, dim/32] or None."""
        rows = values if scales is None else dequantize_fp8(values, scales)
        kv = self.wkv(rows.reshape(*rows.shape[:2], -1))
        r, d = streams.shape[-2:]
        keys, value = kv[..., : r * d].reshape(*kv.shape[:2], r, d), kv[..., r * d :]
        return engram_gate(streams, keys, value, self.q_weight[...], self.k_weight[...], image_mask, self.eps)
