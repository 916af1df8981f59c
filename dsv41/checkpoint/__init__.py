"""Bytes on disk to model state and back."""

from dsv41.checkpoint.imported import (
    ImportedCheckpoint,
    check_import,
    is_imported,
    load_imported,
    open_either,
    open_imported,
)
from dsv41.checkpoint.inventory import (
    PARTS,
    ParameterCounts,
    SubsystemTotal,
    TensorSpec,
    bytes_by_dtype,
    is_engram_table,
    parameter_counts,
    tensor_inventory,
    totals_by_subsystem,
)
from dsv41.checkpoint.load_parameters import load_parameters
from dsv41.checkpoint.safetensors_reader import (
    CheckpointError,
    CheckpointReader,
    TensorInfo,
    check_inventory,
    open_checkpoint,
)

__all__ = [
    "PARTS",
    "CheckpointError",
    "CheckpointReader",
    "ImportedCheckpoint",
    "ParameterCounts",
    "SubsystemTotal",
    "TensorInfo",
    "TensorSpec",
    "bytes_by_dtype",
    "check_import",
    "check_inventory",
    "is_engram_table",
    "is_imported",
    "load_imported",
    "load_parameters",
    "open_checkpoint",
    "open_either",
    "open_imported",
    "parameter_counts",
    "tensor_inventory",
    "totals_by_subsystem",
]
