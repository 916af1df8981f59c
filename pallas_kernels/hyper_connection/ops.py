"""Entry points of the mHC step. One implementation exists so far: `ref`, on every backend."""

from pallas_kernels.hyper_connection.ref import collapse, mix_coefficients, split_mix, update

__all__ = ["collapse", "mix_coefficients", "split_mix", "update"]
