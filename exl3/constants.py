"""Sizes that the whole engine shares."""

PAGE_SIZE = 256
"""Tokens in one page of the K/V cache."""

HADAMARD_DIM = 128
"""Side of the Hadamard blocks; quantised dims are padded up to a multiple of it."""

TILE_DIM = 16
"""Side of one trellis tile: 16 x 16 weights, 256 steps."""

TILE_NUMEL = TILE_DIM * TILE_DIM
"""Weights, and so trellis steps, in one tile."""
