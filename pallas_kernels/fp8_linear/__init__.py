"""Products with FP8 weights whose 32 x 32 tiles have a scale each."""
