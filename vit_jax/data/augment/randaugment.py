"""RandAugment (arXiv 1909.13719) by big_vision's definition (pp/autoaugment.py), for a batch on the
device.

Every operation takes and returns uint8 [batch, H, W, 3]. On accelerators, a layer applies all of
them to all images and selects. No control flow depends on data, so that a step always costs the
same and a batch may be split over devices. Rotation, shear and translation in both directions are
ten gathers whose indices all images share (on a TPU a gather costs per index, not per image);
everything else is arithmetic that XLA fuses.

The results are the same on every platform, bit for bit: before the truncation to uint8, values are
rounded to float32 as in the published results, never by a fused multiply-add, which some compilers
make of a * b + c. There are two exceptions: the grey of `color` differs by one level for 194 of the
2 ** 24 colours, and a pixel whose source lies half-way between two pixels may come from the other
one.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.distributed import hardware

GREY = 128  # fills pixels whose source lies outside of the image
LARGE = 1e6  # larger than every product of a factor and a pixel


def as_uint8(x):
    """Clipped and truncated, not rounded."""
    return jnp.clip(x, 0, 255).astype(jnp.uint8)


def product(a, b):
    """a * b, rounded: the minimum does not change it, but keeps compilers from fusing it with a
    sum.
    """
    return jnp.minimum(a * b, LARGE)


def blend(base, image, factor: float):
    """`base` at factor 0, `image` at 1, and extrapolated (away from `base`) above 1."""
    base = jnp.asarray(base, jnp.float32)
    image = image.astype(jnp.float32)
    return as_uint8(base + product(np.float32(factor), image - base))


def autocontrast(image):
    """Stretches each channel to the full range 0 to 255; a constant channel is unchanged."""
    low = image.min((1, 2), keepdims=True)  # [batch, 1, 1, 3]
    high = image.max((1, 2), keepdims=True)
    # From a table, because division is not exact on all devices.
    scale = jnp.asarray(255 / np.maximum(np.arange(256), 1), jnp.float32)[high - low]
    offset = product(low.astype(jnp.float32), scale)
    stretched = as_uint8(product(image.astype(jnp.float32), scale) - offset)
    return jnp.where(high > low, stretched, image)


def equalize(image):
    """Gives each channel a flat histogram, by Pillow's integer rule; a channel with too few pixels
    for it is unchanged.
    """
    value = image.reshape(len(image), -1, 3).swapaxes(1, 2)  # [batch, 3, pixels]
    counts = hardware.multiply_on_tpu(histogram_by_matmul, histogram_by_scatter, value)
    table = equalization(counts)
    value = hardware.multiply_on_tpu(lookup_by_matmul, lookup_by_gather, value, table)
    return value.astype(jnp.uint8).swapaxes(1, 2).reshape(image.shape)


def equalization(counts):
    """The new value of each old value, int32 [batch, 3, 256], from the histogram, int32 [batch, 3,
    256].
    """
    total = counts.sum(-1, keepdims=True)
    cumulative = counts.cumsum(-1)
    # The count of the brightest value that occurs; those above it are 0.
    brightest = jnp.where(cumulative == total, counts, 0).max(-1, keepdims=True)
    step = (total - brightest) // 255
    table = (cumulative - counts + step // 2) // jnp.maximum(step, 1)
    return jnp.where(step > 0, jnp.minimum(table, 255), jnp.arange(256))


def nibbles(value):
    """The upper and the lower four bits of uint8 [batch, 3, pixels], each one-hot as float32
    [batch, 3, 16, pixels].
    """
    cells = jnp.arange(16, dtype=jnp.uint8)[:, None]
    high = (value[:, :, None] >> 4) == cells
    low = (value[:, :, None] & 15) == cells
    return high.astype(jnp.float32), low.astype(jnp.float32)


def histogram_by_matmul(value):
    """How often each value occurs: uint8 [batch, 3, pixels] -> int32 [batch, 3, 256]. Exact, even
    in bfloat16.
    """
    counts = jnp.einsum("bchn,bcln->bchl", *nibbles(value), preferred_element_type=jnp.float32)
    return counts.reshape(*value.shape[:2], 256).astype(jnp.int32)


def histogram_by_scatter(value):
    """As `histogram_by_matmul`, for devices that scatter fast."""
    count = jax.vmap(lambda cells: jnp.zeros(256, jnp.int32).at[cells].add(1))
    return jax.vmap(count)(value)


def lookup_by_matmul(value, table):
    """table[value]: uint8 [batch, 3, pixels], ints below 256 [batch, 3, 256] -> int32. Exact, even
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
    """Keeps the upper bits of each pixel, at least one. `bits` above 8 keep one, too: the shift
    wraps around in uint8.
    """
    return image & (255 << min((8 - bits) % 256, 7) & 255)


def solarize(image, threshold: int):
    """Inverts the pixels from `threshold` on. The threshold is a uint8: 256 (magnitude 10) acts as
    0 and inverts all.
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
    """Blends from one grey: H * W / 256, at most 255. big_vision takes this for the mean, and so do
    we.
    """
    return blend(min(image.shape[1] * image.shape[2] // 256, 255), image, factor)


def brightness(image, factor: float):
    """Blends from black."""
    return blend(0, image, factor)


def add_product(total, weight: float, pixel):
    """total + weight * pixel, rounded once to float32, on every device.

    With 12 bits each, both parts of the weight have exact products. `error` is the rounding error
    of the first sum (Knuth, TAOCP volume 2, 4.2.2); its sum with the smaller product is exact, too.
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

    The sum is rounded to float32 after every fused multiply-add, in row-major order, like the
    convolution of the published results: the last bit matters for the truncation.
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
    """Blends from the smoothed image; the border of one pixel is unchanged."""
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
    """Pixel (x, y) of the result is the one nearest to (a x + b y + c, d x + e y + f), or grey.

    Args:
      packed: int32 [batch, H, W], as the result.
      matrix: numbers a, b, c, d, e, f, so that all images share the indices.
    """
    height, width = packed.shape[1:]
    a, b, c, d, e, f = np.asarray(matrix, np.float32)
    x = np.arange(width, dtype=np.float32)
    y = np.arange(height, dtype=np.float32)[:, None]

    def nearest(by_x, by_y, offset):  # int32 [H, W]; halves are rounded away from 0
        return jax.lax.round(jnp.asarray(by_x) + jnp.asarray(by_y) + offset).astype(jnp.int32)

    column = nearest(a * x, b * y, c)
    row = nearest(d * x, e * y, f)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    source = jnp.where(inside, row * width + column, 0).reshape(-1)
    moved = jnp.take(packed.reshape(len(packed), -1), source, axis=1, mode="clip")
    return jnp.where(inside, moved.reshape(packed.shape), GREY * 0x010101)


def rotation(degrees: float, height: int, width: int):
    """The matrix that rotates counter-clockwise about the centre, in float32."""
    angle = np.float32(degrees) * np.float32(math.pi / 180)
    cos = np.cos(angle)
    sin = np.sin(angle)
    right = np.float32(width - 1)
    bottom = np.float32(height - 1)
    offset_x = (right - (cos * right - sin * bottom)) / 2
    offset_y = (bottom - (sin * right + cos * bottom)) / 2
    return cos, -sin, offset_x, sin, cos, offset_y


def cutout(image, half: int, centre):
    """Greys the square of side 2 * half around `centre`, int32 [batch, 2], clipped at the border
    (arXiv 1708.04552).
    """
    row = jnp.arange(image.shape[1])[:, None, None]
    column = jnp.arange(image.shape[2])[None, :, None]
    y = centre[:, 0, None, None, None]
    x = centre[:, 1, None, None, None]
    inside = (row >= y - half) & (row < y + half) & (column >= x - half) & (column < x + half)
    return jnp.where(inside, jnp.uint8(GREY), image)


def enhance(m: float) -> float:
    """The blend factor of a magnitude: 0.1 to 1.9 for 0 to 10; the image itself at 5."""
    return m / 10 * 1.8 + 0.1


# Name -> f(magnitude, height, width) -> matrix. Positive shears and translations move to the left
# and up. Translations are in pixels, whatever the size of the image.
MATRICES: dict[str, Callable] = {
    "Rotate": lambda m, height, width: rotation(m / 10 * 30, height, width),
    "ShearX": lambda m, height, width: (1, m / 10 * 0.3, 0, 0, 1, 0),
    "ShearY": lambda m, height, width: (1, 0, 0, m / 10 * 0.3, 1, 0),
    "TranslateX": lambda m, height, width: (1, 0, m / 10 * 100, 0, 1, 0),
    "TranslateY": lambda m, height, width: (1, 0, 0, 0, 1, m / 10 * 100),
}

# Name -> f(image, magnitude, centre) -> image, the other operations.
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

OPS = tuple(MATRICES | POINTWISE)  # RandAugment chooses from these; `op` below is a position here


def all_at_once(image, op, negative, centre, m: float):
    """`operate` by applying every operation to all images: fastest on accelerators."""
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
    """`operate` by a loop over images, each with its own operation only: fastest on a CPU."""

    def one(args):
        image, op, negative, centre = (x[None] for x in args)

        def moved(matrix, image):
            forth = functools.partial(project, matrix=matrix(m, *image.shape[1:3]))
            back = functools.partial(project, matrix=matrix(-m, *image.shape[1:3]))
            return unpack(jax.lax.cond(negative[0], back, forth, pack(image)))

        branches = [functools.partial(moved, matrix) for matrix in MATRICES.values()]
        for function in POINTWISE.values():
            branches.append(functools.partial(function, m=m, centre=centre))
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
    branch = functools.partial(one_by_one, m=m)
    select = functools.partial(all_at_once, m=m)
    return hardware.branch_or_select(branch, select, image, op, negative, centre)


def choose(key, height: int, width: int):
    """Random choices of one layer: op, negative and centre of `operate` for keys [batch]."""
    uniform = jax.vmap(lambda key: jax.random.uniform(key, [4]))(key)
    scaled = (uniform * jnp.array([len(OPS), 2, height, width])).astype(jnp.int32)
    return scaled[:, 0], scaled[:, 1] == 1, scaled[:, 2:]


def randaugment(key, image, num_layers: int, magnitude: float):
    """Applies `num_layers` operations, each drawn uniformly from `OPS` and always applied.

    big_vision also draws a probability per operation, but never uses it.

    Args:
      key: PRNG keys [batch]; the result for an image depends on its own key only.
      image: uint8 [batch, H, W, 3].
      num_layers: N of the paper, usually 1 to 3.
      magnitude: M of the paper, 0 to 30; one for all operations.

    Returns:
      uint8 [batch, H, W, 3].
    """
    for layer in range(num_layers):
        layer_key = jax.vmap(jax.random.fold_in, (0, None))(key, layer)
        image = operate(image, *choose(layer_key, *image.shape[1:3]), magnitude)
    return image
