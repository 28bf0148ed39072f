"""Turns the hue of images on the device as torchvision does with PIL images: in Pillow's HSV, whose
hue, saturation and value are whole numbers up to 255.
"""

import jax.numpy as jnp
import numpy as np

OFFSET = np.float32([5, 3, 1])  # of red, green and blue, in sixths of the circle; see to_rgb


def floor_ratio(numerator, denominator):
    """floor(numerator / denominator) of whole numbers from 0 to 2^19 and from 1 to 2^11, float32;
    exact, even if a division is not.
    """
    return jnp.floor((numerator + 0.5) / denominator)


def to_hsv(image):
    """uint8 [..., 3] -> hue, saturation and value, whole numbers 0 to 255, float32 [...] each."""
    red, green, blue = (image[..., i].astype(jnp.float32) for i in range(3))
    value = jnp.maximum(jnp.maximum(red, green), blue)
    spread = value - jnp.minimum(jnp.minimum(red, green), blue)
    # Sixths of the circle, times spread.
    sixths = jnp.where(green == value, 2 * spread + blue - red, 4 * spread + red - green)
    sixths = jnp.where(red == value, green - blue, sixths)
    sixths = jnp.where(sixths < 0, sixths + 6 * spread, sixths)
    hue = floor_ratio(255 * sixths, jnp.maximum(6 * spread, 1))
    saturation = floor_ratio(255 * spread, jnp.maximum(value, 1))
    return hue, saturation, value


def to_rgb(hue, saturation, value):
    """The inverse, float32 [...] each -> uint8 [..., 3].

    In each channel, k goes round the circle: from 1 to 3 the channel is lowest, from 4 on it equals
    the value, and in between it is linear.
    """
    # By broadcasting: for stacked channels, XLA computes everything once more for each of them.
    hue, saturation, value = (x[..., None] for x in (hue, saturation, value))
    k = OFFSET + hue * (6 / 255)
    k = jnp.where(k >= 6, k - 6, k)
    share = jnp.clip(jnp.minimum(k, 4 - k), 0, 1)
    return jnp.floor(value * (1 - saturation / 255 * share) + 0.5).astype(jnp.uint8)


def turn(image, share):
    """Adds a share of the circle to the hue, in whole steps of 1/255.

    Args:
      image: uint8 [batch, H, W, 3].
      share: float32 [batch], -0.5 to 0.5.
    """
    hue, saturation, value = to_hsv(image)
    hue += jnp.trunc(share * 255)[:, None, None]
    hue = jnp.where(hue < 0, hue + 256, jnp.where(hue > 255, hue - 256, hue))
    return to_rgb(hue, saturation, value)
