"""RMS normalisation."""

from pallas_kernels.norms import rms_norm

__all__ = ["rms_norm"]
