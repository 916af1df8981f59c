"""Loops over the model's steps."""

from dsv41.engine.confidence_calibration import (
    ConfidenceTemperatures,
    fit_temperatures,
    load_temperatures,
    save_temperatures,
)
from dsv41.engine.engine import Engine
from dsv41.engine.engine_options import EngineOptions
from dsv41.engine.engine_request import EngineResult, Event
from dsv41.engine.engram_mode import EngramFigures, EngramMode
from dsv41.engine.generate import PREFILL_CHUNK, check_prompts, generate
from dsv41.engine.metrics import EngineMetrics, RequestMetrics
from dsv41.engine.request import GenerationResult, Timings
from dsv41.engine.speculation import Speculation, SpeculationRecord
from dsv41.engine.speculative_step import VerifySchedule
from dsv41.engine.step_batch import idle_batch, init_run_cache, step_batch
from dsv41.engine.text_stream import TextStream
from dsv41.engine.throughput_table import ThroughputTable, load_throughput_table, save_throughput_table

__all__ = [
    "PREFILL_CHUNK",
    "ConfidenceTemperatures",
    "Engine",
    "EngineMetrics",
    "EngineOptions",
    "EngineResult",
    "EngramFigures",
    "EngramMode",
    "Event",
    "GenerationResult",
    "RequestMetrics",
    "Speculation",
    "SpeculationRecord",
    "TextStream",
    "ThroughputTable",
    "Timings",
    "VerifySchedule",
    "check_prompts",
    "fit_temperatures",
    "generate",
    "idle_batch",
    "init_run_cache",
    "load_temperatures",
    "load_throughput_table",
    "save_temperatures",
    "save_throughput_table",
    "step_batch",
]
