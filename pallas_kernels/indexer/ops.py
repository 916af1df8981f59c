"""Entry points of index scoring. One implementation exists so far: `ref`, on every backend."""

from pallas_kernels.indexer.ref import block_maxima, index_scores

__all__ = ["block_maxima", "index_scores"]
