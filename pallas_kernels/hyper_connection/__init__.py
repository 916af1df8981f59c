"""Single-pass mHC: mixing coefficients, collapse of the residual streams, and their update."""
