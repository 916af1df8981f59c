"""Measurements of a model."""

from dsv41.config.atomic_file import check_target
from dsv41.evals.array_file import ArrayFileWriter
from dsv41.evals.score import CHUNK, Piece, check_tokens, read_tokens, score_tokens

__all__ = ["CHUNK", "ArrayFileWriter", "Piece", "check_target", "check_tokens", "read_tokens", "score_tokens"]
