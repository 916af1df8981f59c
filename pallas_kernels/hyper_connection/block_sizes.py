"""Tile sizes of the GPU kernels of the mHC step."""

TOKENS = 16  # of a tile: the rows of a matrix instruction
COLUMNS = 128  # of a tile, in every stream
STREAMS = 4
UNITS = 2  # of a thread block: each works on tiles of its own

_BLOCKS = 132  # one a multiprocessor


def groups(num_tokens: int, dim: int) -> int:
    """Thread blocks that share a chunk of columns; their units take turns with its tiles."""
    tiles = -(-num_tokens // TOKENS)
    most = max(1, _BLOCKS // (dim // COLUMNS))
    return min(most, -(-tiles // UNITS))


def finish_tokens(num_tokens: int) -> int:
    """Tokens a block of the second kernel: one while that fills the device, then enough to amortise its start."""
    for tokens in (1, 4):
        if num_tokens <= 4 * _BLOCKS * tokens:
            return tokens
    return TOKENS
