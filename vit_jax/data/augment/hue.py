"""Turns the hue of images on the device as torchvision does with PIL images: in Pillow's HSV, whose
hue, saturation and value are whole numbers up to 255.
"""

import jax.numpy as jnp


def floor_ratio(numerator, denominator):
    """floor(numerator / denominator) of whole numbers from 0 to 2^20 and from 1 to 2^11, float32;
    exact, even if a division is not.
    """
    return jnp.floor((numerator + 0.5) / denominator)


def to_hsv(image):
    """uint8 [..., 3] -> hue, saturation and value, whole numbers 0 to 255, float32 [...] each."""
    red, green, blue = jnp.moveaxis(image.astype(jnp.float32), -1, 0)
    value = jnp.maximum(jnp.maximum(red, green), blue)
    spread = value - jnp.minimum(jnp.minimum(red, green), blue)
    from_green = 2 * spread + blue - red
    from_blue = 4 * spread + red - green
    sixths = jnp.where(green == value, from_green, from_blue)
    sixths = jnp.where(red == value, green - blue, sixths)  # of the circle, times spread
    sixths = jnp.where(sixths < 0, sixths + 6 * spread, sixths)
    hue = floor_ratio(255 * sixths, jnp.maximum(6 * spread, 1))
    saturation = floor_ratio(255 * spread, jnp.maximum(value, 1))
    return hue, saturation, value


def to_rgb(hue, saturation, value):
    """The inverse, float32 [...] each -> uint8 [..., 3]."""

    def channel(first: int):
        k = (first + hue * (6 / 255)) % 6
        share = jnp.clip(jnp.minimum(k, 4 - k), 0, 1)
        return value * (1 - saturation / 255 * share)

    channels = jnp.stack([channel(first) for first in (5, 3, 1)], axis=-1)
    return jnp.floor(channels + 0.5).astype(jnp.uint8)


def turn(image, share):
    """Adds a share of the circle to the hue, in whole steps of 1/255.

    Args:
      image: uint8 [batch, H, W, 3].
      share: float32 [batch], -0.5 to 0.5.
    """
    hue, saturation, value = to_hsv(image)
    steps = jnp.trunc(share * 255)[:, None, None]
    return to_rgb((hue + steps) % 256, saturation, value)
