"""Exact top-k of scores that arrive piece by piece."""
