"""Kernels: they know arrays, never the model. One folder an op: `ref` is its meaning, `ops` its entry."""
