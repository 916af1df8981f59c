"""Training: what is optimised, by which rule, and how fast (training.md sections 1 and 3)."""

from dsv41.train.labels import Label, RateGroup, label_of, labels_of, parameter_names, rate_group, row_blocks
from dsv41.train.muon import orthogonalize, scale_by_muon
from dsv41.train.optimizer import OptimizerConfig, make_optimizer, optimizer_state_shardings
from dsv41.train.parameters import training_params_abstract
from dsv41.train.schedule import TrainingSchedule
from dsv41.train.sinkhorn_balance import balance, scale_by_sinkhorn

__all__ = [
    "Label",
    "OptimizerConfig",
    "RateGroup",
    "TrainingSchedule",
    "balance",
    "label_of",
    "labels_of",
    "make_optimizer",
    "optimizer_state_shardings",
    "orthogonalize",
    "parameter_names",
    "rate_group",
    "row_blocks",
    "scale_by_muon",
    "scale_by_sinkhorn",
    "training_params_abstract",
]
