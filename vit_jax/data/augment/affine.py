"""Moves images as Pillow's Image.transform(AFFINE) does, with bicubic or bilinear interpolation, by
the maps of timm's RandAugment.

A map is five numbers for each image: shears p, q, r, and a translation in pixels, with the centre
at (0, 0). Pixel (x, y) of the result is what is at (x', y') of the image:

    u = x + r y,    y' = y + q u + down,    x' = u + p y' + right.

A rotation by t is p = r = -tan(t / 2), q = sin(t) (Paeth 1986, "A fast algorithm for general raster
rotation"). Maps are a rotation of up to 30 degrees, a shear p or q of up to `SHEAR` along the first
row or column, or a translation of up to `SHIFT` of a side: shears.py relies on it.

Interpolation is in float32, Pillow's in float64: about one pixel in a hundred, where that decides a
truncation, differs by one level.
"""

import math

import jax.numpy as jnp

from vit_jax.data.augment import randaugment

TURN = math.radians(30)
SHEAR = 0.3
SHIFT = 0.45


def positions(moves, height: int, width: int):
    """(x', y') of every pixel, float32 [batch, H, W] each, from the corner of the image, where the
    first pixel's centre is (0.5, 0.5); moves: float32 [batch, 5].
    """
    p, q, r, right, down = (column[:, None, None] for column in moves.T)
    x = jnp.arange(width) + 0.5 - width / 2
    y = jnp.arange(height)[:, None] + 0.5 - height / 2
    u = x + r * y
    below = y + q * u + down
    return u + p * below + (right + width / 2), below + height / 2


def cubic(values, position):
    """Between the second and the third of four values [...]; position: [...] from 0 to 1.

    The kernel is that of Keys with a = -1, in Pillow's order of operations: if all values are equal
    the result is the same number, and no error becomes a level by truncation.
    """
    before, left, right, after = values
    first = right - before
    second = 2 * (before - left) + right - after
    third = left - before + after - right
    return left + position * (first + position * (second + position * third))


def linear(values, position):
    """Between two values [...]; position: [...] from 0 to 1."""
    left, right = values
    return left + position * (right - left)


# Whether it is bicubic -> the interpolation, and the pixels that it reads, counted from the last
# one whose centre is not beyond the position.
KERNELS = {True: (cubic, (-1, 0, 1, 2)), False: (linear, (0, 1))}


def interpolate(image, moves, bicubic: bool):
    """What is at `positions`, by gathers: uint8 [batch, H, W, 3], moves float32 [batch, 5] ->
    float32 [batch, H, W, 3]. Beyond the border the outermost pixels are repeated.
    """
    height, width = image.shape[1:3]
    kernel, taps = KERNELS[bicubic]
    x, y = positions(moves, height, width)
    left = jnp.floor(x - 0.5)
    top = jnp.floor(y - 0.5)
    packed = randaugment.pack(image).reshape(len(image), -1)

    def pixels(row: int, column: int):
        below = jnp.clip(top.astype(jnp.int32) + row, 0, height - 1)
        beside = jnp.clip(left.astype(jnp.int32) + column, 0, width - 1)
        source = (below * width + beside).reshape(len(image), -1)
        found = jnp.take_along_axis(packed, source, axis=1, mode="clip")
        return randaugment.unpack(found.reshape(below.shape)).astype(jnp.float32)

    across = (x - 0.5 - left)[..., None]
    down = (y - 0.5 - top)[..., None]
    rows = [kernel([pixels(row, column) for column in taps], across) for row in taps]
    return kernel(rows, down)
