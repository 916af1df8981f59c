"""Loops over the model's steps."""

from dsv41.engine.generate import PREFILL_CHUNK, GenerationResult, Timings, check_prompts, generate
from dsv41.engine.step_batch import idle_batch, init_run_cache, step_batch
from dsv41.engine.text_stream import TextStream

__all__ = [
    "PREFILL_CHUNK",
    "GenerationResult",
    "TextStream",
    "Timings",
    "check_prompts",
    "generate",
    "idle_batch",
    "init_run_cache",
    "step_batch",
]
