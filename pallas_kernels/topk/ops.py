"""Entry points of top-k. One implementation exists so far: `ref`, on every backend."""

from pallas_kernels.topk.ref import empty_topk, merge_topk

__all__ = ["empty_topk", "merge_topk"]
