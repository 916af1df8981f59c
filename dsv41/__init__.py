"""DeepSeek-V4.1-Flash in JAX.

import dsv41
model = dsv41.load("path/to/released/layout")
cache = model.init_cache(num_slots=1, max_tokens=4096)
batch = model.make_batch([prompt_ids])
logits, cache, aux = model.forward(batch, cache)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv41.checkpoint.load import load

__all__ = ["load"]


def __getattr__(name: str):
    # Loaded on first use, so that importing `dsv41.config` alone brings no jax.
    if name == "load":
        from dsv41.checkpoint.load import load

        return load
    raise AttributeError(f"module 'dsv41' has no attribute {name!r}")
