"""Attention of each query over its own gathered entries, with a sink."""
