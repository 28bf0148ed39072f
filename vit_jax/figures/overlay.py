"""A map of numbers by patch, laid over its image in colour."""

import numpy as np
from PIL import Image

COLORS = "inferno"
OPACITY = 0.6
SMALLEST = 96  # pixels of the shorter side; smaller pictures are magnified


def magnified(pictures: np.ndarray) -> np.ndarray:
    """[..., H, W, 3] with each pixel repeated until the pictures are large enough to be seen."""
    times = -(-SMALLEST // min(pictures.shape[-3:-1]))
    return pictures.repeat(times, axis=-3).repeat(times, axis=-2)


def enlarged(patches: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """[h, w] -> float32 [height, width], bilinear."""
    image = Image.fromarray(np.asarray(patches, np.float32))
    return np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR))


def overlay(image: np.ndarray, patches: np.ndarray) -> np.ndarray:
    """The image in grey under a map in colour, from black for 0 to yellow for its largest number.

    Args:
      image: uint8 [height, width, 3].
      patches: [h, w]; numbers that are negative or not finite count as 0.

    Returns:
      uint8 [height, width, 3].
    """
    import matplotlib  # takes a tenth of the start of `vit_jax.train`

    patches = np.maximum(np.nan_to_num(patches, posinf=0.0), 0)
    share = enlarged(patches / max(patches.max(), 1e-12), image.shape[:2])
    color = matplotlib.colormaps[COLORS](np.clip(share, 0, 1))[..., :3]
    grey = np.repeat(image.mean(axis=-1, keepdims=True) / 255, 3, axis=-1)
    return np.round(255 * ((1 - OPACITY) * grey + OPACITY * color)).astype(np.uint8)
