"""Routed experts: SwiGLU products of rows that lie in blocks of one expert each, on stored weights."""
