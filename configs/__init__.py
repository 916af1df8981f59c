"""Config values in the released layout. A package, so that `importlib.resources` finds them when installed."""
