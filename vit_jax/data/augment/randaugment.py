"""RandAugment (arXiv 1909.13719) by big_vision's definition (pp/autoaugment.py), for a batch on the
device.

Every operation takes and returns uint8 [batch, H, W, 3]. A layer applies all of them to all images
and selects: there is no control flow that depends on data, so a step always costs the same and a
batch may be split over devices. Made for that: rotation, shear and translation by either sign are
ten gathers whose indices all images share (on a TPU a gather costs per index, not per image), and
everything else is arithmetic that XLA fuses.

The results are the same on every platform, bit by bit: what is truncated to uint8 is rounded to
float32 as it was for the published results, and never by a fused multiply-add, which some compilers
make of a * b + c. Two exceptions: the grey of `color` is one level off for 194 of the 2 ** 24
colours, and a pixel whose source lies half-way between two pixels may come from the other one.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.distributed import hardware

GREY = 128  # fills what an operation leaves empty
LARGE = 1e6  # above every product of a factor and a pixel


def as_uint8(x):
    """Clipped and truncated, not rounded."""
    return jnp.clip(x, 0, 255).astype(jnp.uint8)


def product(a, b):
    """a * b, rounded: the minimum changes nothing but keeps compilers from fusing it with a sum."""
    return jnp.minimum(a * b, LARGE)


def blend(base, image, factor: float):
    """`base` at factor 0, `image` at 1, and beyond it (away from `base`) above 1."""
    base, image = jnp.asarray(base, jnp.float32), image.astype(jnp.float32)
    return as_uint8(base + product(np.float32(factor), image - base))


def autocontrast(image):
    """Stretches each channel to the full range 0 to 255; a constant channel stays."""
    low, high = (
        image.min((1, 2), keepdims=True),
        image.max((1, 2), keepdims=True),
    )  # [batch, 1, 1, 3]
    scales = jnp.asarray(
        255 / np.maximum(np.arange(256), 1), jnp.float32
    )  # as table: not all devices divide exactly
    scale = scales[high - low]
    stretched = as_uint8(
        product(image.astype(jnp.float32), scale) - product(low.astype(jnp.float32), scale)
    )
    return jnp.where(high > low, stretched, image)


def equalize(image):
    """Gives each channel a flat histogram, by Pillow's integer rule; stays where there are too few
    pixels for it.
    """
    value = image.reshape(len(image), -1, 3).swapaxes(1, 2)  # [batch, 3, pixels]
    counts = hardware.multiply_or_index(histogram_by_matmul, histogram_by_scatter, value)
    table = flattening(counts)
    value = hardware.multiply_or_index(lookup_by_matmul, lookup_by_gather, value, table)
    return value.astype(jnp.uint8).swapaxes(1, 2).reshape(image.shape)


def flattening(counts):
    """The new value of each old one: how often it occurs, int32 [batch, 3, 256] -> int32 [batch, 3,
    256].
    """
    total, seen = counts.sum(-1, keepdims=True), counts.cumsum(-1)
    brightest = jnp.where(seen == total, counts, 0).max(
        -1, keepdims=True
    )  # what comes after it occurs 0 times
    step = (total - brightest) // 255
    table = (seen - counts + step // 2) // jnp.maximum(step, 1)
    return jnp.where(step > 0, jnp.minimum(table, 255), jnp.arange(256))


def nibbles(value):
    """The upper and the lower four bits of uint8 [batch, 3, pixels], each one-hot as float32
    [batch, 3, 16, pixels].
    """
    cells = jnp.arange(16, dtype=jnp.uint8)[:, None]
    high, low = value[:, :, None] >> 4, value[:, :, None] & 15
    return (high == cells).astype(jnp.float32), (low == cells).astype(jnp.float32)


def histogram_by_matmul(value):
    """How often each value occurs: uint8 [batch, 3, pixels] -> int32 [batch, 3, 256]. Exact, also
    in bfloat16.
    """
    counts = jnp.einsum("bchn,bcln->bchl", *nibbles(value), preferred_element_type=jnp.float32)
    return counts.reshape(*value.shape[:2], 256).astype(jnp.int32)


def histogram_by_scatter(value):
    """As `histogram_by_matmul`, for devices that scatter fast."""
    count = jax.vmap(lambda cells: jnp.zeros(256, jnp.int32).at[cells].add(1))
    return jax.vmap(count)(value)


def lookup_by_matmul(value, table):
    """table[value]: uint8 [batch, 3, pixels], ints below 256 [batch, 3, 256] -> int32. Exact, also
    in bfloat16.
    """
    high, low = nibbles(value)
    rows = table.reshape(*table.shape[:2], 16, 16).astype(jnp.float32)
    rows = jnp.einsum("bchl,bchn->bcln", rows, high, preferred_element_type=jnp.float32)
    return (rows * low).sum(2).astype(jnp.int32)


def lookup_by_gather(value, table):
    """As `lookup_by_matmul`, for devices that gather fast."""
    return jnp.take_along_axis(table, value.astype(jnp.int32), -1)


def invert(image):
    """Turns each pixel into 255 minus its value."""
    return 255 - image


def posterize(image, bits: int):
    """Keeps the upper bits of each pixel, at least one. More than 8 keep one too: the shift wraps
    round in uint8.
    """
    return image & (255 << min((8 - bits) % 256, 7) & 255)


def solarize(image, threshold: int):
    """Inverts the pixels from `threshold` on. It is a uint8: 256 (magnitude 10) acts as 0 and
    inverts them all.
    """
    return jnp.where(image < threshold % 256, image, 255 - image)


def solarize_add(image, addition: int):
    """Brightens the pixels below 128."""
    brighter = jnp.minimum(image.astype(jnp.int32) + addition, 255).astype(jnp.uint8)
    return jnp.where(image < 128, brighter, image)


def grey(image):
    """uint8 [batch, H, W, 3] -> [batch, H, W, 1]: 0.2989 R + 0.587 G + 0.114 B, times 255.5 / 255
    as in TensorFlow.
    """
    weights = np.round(np.array([0.2989, 0.5870, 0.1140]) * (255.5 / 255) * 2**20).astype(np.int32)
    return ((image.astype(jnp.int32) * weights).sum(-1, keepdims=True) >> 20).astype(jnp.uint8)


def color(image, factor: float):
    """Blends from the grey image."""
    return blend(grey(image), image, factor)


def contrast(image, factor: float):
    """Blends from one grey: H * W / 256 up to 255. The definition takes this for the mean, and so
    do we.
    """
    return blend(min(image.shape[1] * image.shape[2] // 256, 255), image, factor)


def brightness(image, factor: float):
    """Blends from black."""
    return blend(0, image, factor)


def add_product(total, weight: float, pixel):
    """total + weight * pixel, rounded once to float32, on every device.

    With 12 bits each, both parts of the weight have exact products. `error` is what the first sum
    lost (Knuth, TAOCP volume 2, 4.2.2), and its sum with the smaller product is exact, too.
    """
    high = np.float32(np.float16(weight))
    low = np.float32(weight) - high
    term = high * pixel
    first = total + term
    back = first - total
    error = (total - (first - back)) + (term - back)
    return first + (error + low * pixel)


def smoothed(image):
    """A 3 x 3 mean with weight 5 in the centre, truncated to uint8.

    The sum is rounded to float32 after every fused multiply-add, in row-major order, as the
    convolution of the
    published results did it: before the truncation the last bit counts.
    """
    height, width = image.shape[1:3]
    padded = jnp.pad(image, [(0, 0), (1, 1), (1, 1), (0, 0)]).astype(jnp.float32)
    total = jnp.zeros(image.shape)
    for y in range(3):
        for x in range(3):
            weight = np.float32(5 if y == x == 1 else 1) / np.float32(13)
            total = add_product(total, weight, padded[:, y : y + height, x : x + width])
    return as_uint8(total)


def sharpness(image, factor: float):
    """Blends from the smoothed image; the border of one pixel stays."""
    row, column = np.arange(image.shape[1])[:, None, None], np.arange(image.shape[2])[None, :, None]
    inside = (row > 0) & (row < image.shape[1] - 1) & (column > 0) & (column < image.shape[2] - 1)
    return blend(jnp.where(inside, smoothed(image), image), image, factor)


def pack(image):
    """uint8 [batch, H, W, 3] -> int32 [batch, H, W]: three times fewer indices to gather."""
    red, green, blue = (image[..., channel].astype(jnp.int32) for channel in range(3))
    return red | green << 8 | blue << 16


def unpack(packed):
    """The inverse of `pack`."""
    return jnp.stack([packed & 255, packed >> 8 & 255, packed >> 16], -1).astype(jnp.uint8)


def project(packed, matrix):
    """Pixel (x, y) becomes the one nearest to (a x + b y + c, d x + e y + f), or grey; matrix: a,
    b, c, d, e, f.

    int32 [batch, H, W] in and out. The matrix consists of numbers: all images share the indices.
    """
    height, width = packed.shape[1:]
    a, b, c, d, e, f = np.asarray(matrix, np.float32)
    x, y = np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)[:, None]
    column = jax.lax.round(jnp.asarray(a * x) + jnp.asarray(b * y) + c).astype(
        jnp.int32
    )  # [H, W], halves away from 0
    row = jax.lax.round(jnp.asarray(d * x) + jnp.asarray(e * y) + f).astype(jnp.int32)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    source = jnp.where(inside, row * width + column, 0).reshape(-1)
    moved = jnp.take(packed.reshape(len(packed), -1), source, axis=1, mode="clip").reshape(
        packed.shape
    )
    return jnp.where(inside, moved, GREY * 0x010101)


def rotation(degrees: float, height: int, width: int):
    """The matrix that turns counter-clockwise about the centre, in float32."""
    angle = np.float32(degrees) * np.float32(math.pi / 180)
    cos, sin, height, width = (
        np.cos(angle),
        np.sin(angle),
        np.float32(height - 1),
        np.float32(width - 1),
    )
    return (
        cos,
        -sin,
        (width - (cos * width - sin * height)) / 2,
        sin,
        cos,
        (height - (sin * width + cos * height)) / 2,
    )


def cutout(image, half: int, centre):
    """Greys the square of side 2 * half around `centre`, int32 [batch, 2], cut at the border (arXiv
    1708.04552).
    """
    row, column = (
        jnp.arange(image.shape[1])[:, None, None],
        jnp.arange(image.shape[2])[None, :, None],
    )
    y, x = centre[:, 0, None, None, None], centre[:, 1, None, None, None]
    inside = (row >= y - half) & (row < y + half) & (column >= x - half) & (column < x + half)
    return jnp.where(inside, jnp.uint8(GREY), image)


def enhance(m: float) -> float:
    """The blend factor of a magnitude: 0.1 to 1.9 for 0 to 10; the image itself at 5."""
    return m / 10 * 1.8 + 0.1


# Name -> f(magnitude, height, width), the matrix. Shears and translations by a positive amount move
# to the left and up.
MATRICES: dict[str, Callable] = {
    "Rotate": lambda m, height, width: rotation(m / 10 * 30, height, width),
    "ShearX": lambda m, height, width: (1, m / 10 * 0.3, 0, 0, 1, 0),
    "ShearY": lambda m, height, width: (1, 0, 0, m / 10 * 0.3, 1, 0),
    "TranslateX": lambda m, height, width: (
        1,
        0,
        m / 10 * 100,
        0,
        1,
        0,
    ),  # pixels, whatever the size of the image
    "TranslateY": lambda m, height, width: (1, 0, 0, 0, 1, m / 10 * 100),
}

# Name -> f(image, magnitude, centre), the other operations.
POINTWISE: dict[str, Callable] = {
    "AutoContrast": lambda image, m, centre: autocontrast(image),
    "Equalize": lambda image, m, centre: equalize(image),
    "Invert": lambda image, m, centre: invert(image),
    "Posterize": lambda image, m, centre: posterize(image, int(m / 10 * 4)),
    "Solarize": lambda image, m, centre: solarize(image, int(m / 10 * 256)),
    "Color": lambda image, m, centre: color(image, enhance(m)),
    "Contrast": lambda image, m, centre: contrast(image, enhance(m)),
    "Brightness": lambda image, m, centre: brightness(image, enhance(m)),
    "Sharpness": lambda image, m, centre: sharpness(image, enhance(m)),
    "Cutout": lambda image, m, centre: cutout(image, int(m / 10 * 40), centre),
    "SolarizeAdd": lambda image, m, centre: solarize_add(image, int(m / 10 * 110)),
}

OPS = tuple(MATRICES | POINTWISE)  # what RandAugment chooses from; `op` below is a position in it


def all_at_once(image, op, negative, centre, m: float):
    """`operate` by applying everything to all images: the cheapest way where kernels are wide."""
    packed = out = pack(image)
    for index, matrix in enumerate(MATRICES.values()):
        for sign in (1, -1):
            chosen = (op == index) & (negative == (sign < 0))
            moved = project(packed, matrix(sign * m, *image.shape[1:3]))
            out = jnp.where(chosen[:, None, None], moved, out)
    out = unpack(out)
    for index, function in enumerate(POINTWISE.values(), len(MATRICES)):
        out = jnp.where((op == index)[:, None, None, None], function(image, m, centre), out)
    return out


def one_by_one(image, op, negative, centre, m: float):
    """`operate` by a loop over images, which applies to each only what was chosen: the cheapest way
    on a CPU.
    """

    def one(args):
        image, op, negative, centre = (x[None] for x in args)

        def moved(matrix, image):
            there, back = matrix(m, *image.shape[1:3]), matrix(-m, *image.shape[1:3])
            projections = (lambda x: project(x, back)), (lambda x: project(x, there))
            return unpack(jax.lax.cond(negative[0], *projections, pack(image)))

        branches = [functools.partial(moved, matrix) for matrix in MATRICES.values()]
        branches += [
            lambda x, function=function: function(x, m, centre) for function in POINTWISE.values()
        ]
        return jax.lax.switch(op[0], branches, image)[0]

    return jax.lax.map(one, (image, op, negative, centre))


def operate(image, op, negative, centre, m: float):
    """One operation on each image.

    Args:
      image: uint8 [batch, H, W, 3].
      op: int32 [batch], positions in `OPS`.
      negative: bool [batch], the direction of rotation, shear and translation.
      centre: int32 [batch, 2], (row, column) for Cutout.
      m: magnitude.
    """
    ways = (functools.partial(way, m=m) for way in (one_by_one, all_at_once))
    return hardware.branch_or_select(*ways, image, op, negative, centre)


def choose(key, height: int, width: int):
    """What chance decides in one layer: op, negative and centre of `operate` for keys [batch]."""
    uniform = jax.vmap(lambda key: jax.random.uniform(key, [4]))(key)
    scaled = (uniform * jnp.array([len(OPS), 2, height, width])).astype(jnp.int32)
    return scaled[:, 0], scaled[:, 1] == 1, scaled[:, 2:]


def randaugment(key, image, num_layers: int, magnitude: float):
    """Applies `num_layers` operations, each drawn uniformly from `OPS` and always applied.

    The definition also draws a probability per operation, but never uses it.

    Args:
      key: PRNG keys [batch]; what happens to an image depends on its own key only.
      image: uint8 [batch, H, W, 3].
      num_layers: N of the paper, mostly 1 to 3.
      magnitude: M of the paper, 0 to 30; one for all operations.

    Returns:
      uint8 [batch, H, W, 3].
    """
    for layer in range(num_layers):
        layer_key = jax.vmap(jax.random.fold_in, (0, None))(key, layer)
        image = operate(image, *choose(layer_key, *image.shape[1:3]), magnitude)
    return image
