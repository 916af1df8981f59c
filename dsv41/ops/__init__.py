"""Pure array functions: the arithmetic of the layers, without state."""
