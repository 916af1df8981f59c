"""Tables of the rotary position embedding, with YaRN (architecture.md section 3).

Angles reach 10^6 radians, so the tables are built on the host: float32 products as the release rounds them, then
cosine and sine of exactly that angle.
"""

import math

import jax
import numpy as np

from dsv41.config import LayerKind, RopeScaling, TextConfig


def rope_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """float32 [rope_dim / 2] angular frequencies; YaRN blends pair i from f to f / factor along a ramp."""
    # The power is rounded to float32 once, then inverted in float32: one ulp here is 0.02 radian at position 10^6.
    power = np.power(float(theta), np.arange(0, rope_dim, 2) / rope_dim)
    freq = np.float32(1.0) / power.astype(np.float32)
    if scaling is None:
        return freq

    def dim_of(rotations: float) -> float:
        return (
            rope_dim
            * math.log(scaling.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), rope_dim - 1)
    index = np.arange(rope_dim // 2, dtype=np.float32)
    ramp = np.clip((index - np.float32(low)) / np.float32(max(high - low, 1e-3)), 0, 1)
    return (freq * (np.float32(1) - ramp) + freq / np.float32(scaling.factor) * ramp).astype(np.float32)


def rope_table(frequencies: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float32 [len(positions), 2, rope_dim / 2]: cosine, then sine, of position * frequency."""
    angle = positions.astype(np.float32)[:, None] * frequencies[None, :]
    exact = angle.astype(np.float64)
    return np.stack([np.cos(exact), np.sin(exact)], axis=1).astype(np.float32)


def layer_frequencies(config: TextConfig, *, compressed: bool) -> np.ndarray:
    """Frequencies of everything a layer rotates: by layer kind, `compressed` layers with their own theta and YaRN."""
    if compressed:
        return rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
    return rope_frequencies(config.qk_rope_head_dim, config.rope_theta, None)


def table_of(kind: LayerKind, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The table a layer rotates with, of (sliding, compressed)."""
    return tables[1] if kind.is_compressed else tables[0]
