"""Entry point of sparse attention. One implementation exists so far: `ref`, on every backend."""

from pallas_kernels.sparse_attention.ref import attend

__all__ = ["attend"]
