"""A picture of who got the tokens: experts from top to bottom, time from left to right.

The colour of a field is an expert's load over the mean of its layer, on a scale of powers of two:

    black: none at all     blue: a quarter or less     white: the mean     red: four times or more

in 16 steps, because eyes tell no more apart, and pictures of few colours are small.

Shape letters: E experts, C columns, H, W pixels.
"""

from collections.abc import Sequence

import numpy as np

STEPS = 16
BLUE, WHITE, RED = np.array([33, 102, 172]), np.array([247, 247, 247]), np.array([178, 24, 43])

MIN_HEIGHT, MIN_WIDTH = 128, 256
"""Pixels; fields are widened by whole numbers until the picture has them"""


def levels(load_E: Sequence[int]) -> np.ndarray:
    """uint8 [E]: 0 for no token, else 1 .. STEPS + 1, with the mean in the middle."""
    load = np.asarray(load_E, dtype=np.float64)
    ratio = load / max(load.mean(), 1e-9)
    octaves = np.log2(ratio, where=ratio > 0, out=np.full_like(ratio, -2)).clip(-2, 2)
    return np.where(load > 0, 1 + np.rint((octaves + 2) / 4 * STEPS), 0).astype(np.uint8)


def picture(levels_CE: Sequence[np.ndarray]) -> np.ndarray:
    """uint8 [H, W, 3] of columns of `levels`, the first at the left."""
    field_EC = np.stack(levels_CE, axis=1)
    experts, columns = field_EC.shape
    field_EC = field_EC.repeat(-(-MIN_HEIGHT // experts), axis=0).repeat(-(-MIN_WIDTH // columns), axis=1)
    return _palette()[field_EC]


def _palette() -> np.ndarray:
    half = np.linspace(0, 1, STEPS // 2 + 1)[:, None]
    up, down = BLUE + half * (WHITE - BLUE), WHITE + half[1:] * (RED - WHITE)
    return np.concatenate([np.zeros((1, 3)), up, down]).astype(np.uint8)
