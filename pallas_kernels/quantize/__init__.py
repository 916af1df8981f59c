"""Block-scaled quantisation: FP8 activations and window KV, MXFP4 index keys, FP4 main KV, stored weights."""
