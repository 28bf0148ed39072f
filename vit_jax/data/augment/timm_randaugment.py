"""RandAugment (arXiv 1909.13719) as in timm (auto_augment.py of 1.0.31), for a batch on the device.

Recipes write it as rand-m9-mstd0.5-inc1. Unlike big_vision's it has no Cutout, translations are
shares of the image, moved images are interpolated and filled with a colour, an operation is skipped
with probability 0.5, and the magnitude may vary.

Operations take and return uint8 [batch, H, W, 3]. `level` is the magnitude of each image, float32
[batch] from 0 to 10; `sign` is 1 or -1, int32 [batch]. The pixels are those of Pillow 13.0, but
autocontrast, and moved images as affine.py says, may differ by one level.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.data.augment import affine, randaugment, shears, three_augment
from vit_jax.distributed import hardware

LARGEST = 10.0  # magnitude
PROBABILITY = 0.5  # that an operation is applied


@dataclasses.dataclass(frozen=True)
class Policy:
    """What timm takes from its string, and from the other transforms."""

    magnitude: float
    std: float = 0.0  # of the magnitude, a normal distribution that is clipped to 0 and LARGEST
    increasing: bool = False  # inc1: all strengths grow with the magnitude
    fill: tuple[int, int, int] = (128, 128, 128)  # colour around a moved image
    bicubic: bool = True  # or else bilinear


def whole(level, largest: int):
    """level / 10 of `largest`, rounded down: int32 [batch].

    What is added is for products that float32 rounds to just below a whole number.
    """
    return jnp.floor(level / LARGEST * largest + 1e-5).astype(jnp.int32)


def per_image(x):
    """[batch] -> [batch, 1, 1, 1]."""
    return x[:, None, None, None]


def posterize(image, level, sign, policy: Policy):
    """Keeps the upper 4 bits at one end of the magnitudes, and none at the other, where Pillow 13
    has an error and earlier versions made the image black.
    """
    bits = whole(level, 4)
    bits = jnp.where(policy.increasing, 4 - bits, bits)
    return image & per_image(256 - (1 << (8 - bits))).astype(jnp.uint8)


def solarize(image, level, sign, policy: Policy):
    """Inverts the pixels from a threshold on."""
    threshold = whole(level, 256)
    threshold = per_image(jnp.where(policy.increasing, 256 - threshold, threshold))
    return jnp.where(image < threshold, image, 255 - image)


def solarize_add(image, level, sign, policy: Policy):
    """Brightens the pixels below 128."""
    brighter = jnp.minimum(image.astype(jnp.int32) + per_image(whole(level, 110)), 255)
    return jnp.where(image < 128, brighter.astype(jnp.uint8), image)


def factor(level, sign, policy: Policy):
    """How far an image is blended from another one: 1 is the image itself."""
    if policy.increasing:
        return jnp.maximum(0.1, 1 + sign * (level / LARGEST * 0.9))
    return level / LARGEST * 1.8 + 0.1


def blended(base: Callable) -> Callable:
    """The operation that blends from base(image)."""

    def operation(image, level, sign, policy: Policy):
        return three_augment.blend(base(image), image, factor(level, sign, policy))

    return operation


def mean_grey(image):
    return three_augment.mean(three_augment.luma(image))


def smoothed(image):
    """A 3 x 3 mean with weight 5 in the centre, rounded; the border of one pixel is unchanged."""
    whole_numbers = image.astype(jnp.int32)
    total = jax.lax.reduce_window(whole_numbers, 0, jax.lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    mean = (2 * (total + 4 * whole_numbers) + 13) // 26
    inner = (slice(None), slice(1, -1), slice(1, -1))
    return whole_numbers.at[inner].set(mean[inner])


# Name -> f(image, level, sign, policy) -> image.
POINTWISE: dict[str, Callable] = {
    "AutoContrast": lambda image, level, sign, policy: randaugment.autocontrast(image),
    "Equalize": lambda image, level, sign, policy: randaugment.equalize(image),
    "Invert": lambda image, level, sign, policy: randaugment.invert(image),
    "Posterize": posterize,
    "Solarize": solarize,
    "SolarizeAdd": solarize_add,
    "Color": blended(three_augment.luma),
    "Contrast": blended(mean_grey),
    "Brightness": blended(jnp.zeros_like),
    "Sharpness": blended(smoothed),
}
MOVED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
OPS = MOVED + tuple(POINTWISE)  # `op` is a position here, or `SKIPPED`
SKIPPED = len(OPS)


def moves(op, level, sign, height: int, width: int):
    """The map of each image, float32 [batch, 5], see affine.py; zeros if `op` is not in `MOVED`."""
    share = sign * level / LARGEST

    def of(name: str, largest: float):  # the argument of the images that have this operation
        return jnp.where(op == MOVED.index(name), share * largest, 0.0)

    angle = of("Rotate", affine.TURN)  # counter-clockwise
    half = -jnp.tan(angle / 2)
    shear_x = of("ShearX", affine.SHEAR)
    shear_y = of("ShearY", affine.SHEAR)
    # A shear is about the first row or column, not about the centre.
    right = of("TranslateX", affine.SHIFT * width) + shear_x * height / 2
    down = of("TranslateY", affine.SHIFT * height) + shear_y * width / 2
    return jnp.stack([half + shear_x, jnp.sin(angle) + shear_y, half, right, down], axis=1)


def moved(image, op, level, sign, policy: Policy):
    """The images as their operation in `MOVED` moves them."""
    height, width = image.shape[1:3]
    by = moves(op, level, sign, height, width)
    x, y = affine.positions(by, height, width)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    by_shears = functools.partial(shears.interpolate, bicubic=policy.bicubic)
    by_gathers = functools.partial(affine.interpolate, bicubic=policy.bicubic)
    out = hardware.multiply_on_tpu(by_shears, by_gathers, image, by)
    fill = jnp.array(policy.fill, jnp.uint8)
    return jnp.where(inside[..., None], randaugment.as_uint8(out), fill)


def all_at_once(image, op, level, sign, policy: Policy):
    """`operate` by applying every operation to all images: fastest on accelerators."""
    out = jnp.where(per_image(op < len(MOVED)), moved(image, op, level, sign, policy), image)
    for index, function in enumerate(POINTWISE.values(), len(MOVED)):
        out = jnp.where(per_image(op == index), function(image, level, sign, policy), out)
    return out


def one_by_one(image, op, level, sign, policy: Policy):
    """`operate` by a loop over images, each with its own operation only: fastest on a CPU."""
    branches = [lambda image, op, level, sign: moved(image, op, level, sign, policy)]
    for function in POINTWISE.values():
        branches.append(lambda image, op, *args, f=function: f(image, *args, policy))
    branches.append(lambda image, *args: image)

    def one(args):
        image, op, level, sign = (x[None] for x in args)
        branch = jnp.maximum(op[0] - len(MOVED) + 1, 0)
        return jax.lax.switch(branch, branches, image, op, level, sign)[0]

    return jax.lax.map(one, (image, op, level, sign))


def operate(image, op, level, sign, policy: Policy):
    """One operation, or none, on each image: uint8 [batch, H, W, 3], op int32 [batch]."""
    branch = functools.partial(one_by_one, policy=policy)
    select = functools.partial(all_at_once, policy=policy)
    return hardware.branch_or_select(branch, select, image, op, level, sign)


def choose(key, policy: Policy):
    """Random choices of one layer: op, level and sign of `operate` for keys [batch]."""

    def draw(key):
        choice_key, level_key = jax.random.split(key)
        return jax.random.uniform(choice_key, [3]), jax.random.normal(level_key)

    uniform, normal = jax.vmap(draw)(key)
    op = (uniform[:, 0] * len(OPS)).astype(jnp.int32)
    op = jnp.where(uniform[:, 1] < PROBABILITY, op, SKIPPED)
    level = jnp.clip(policy.magnitude + policy.std * normal, 0, LARGEST)
    return op, level, jnp.where(uniform[:, 2] < 0.5, -1, 1)


def timm_randaugment(key, image, num_layers: int, policy: Policy):
    """Applies `num_layers` operations, each drawn uniformly from `OPS` and skipped with probability
    0.5.

    Args:
      key: PRNG keys [batch]; the result for an image depends on its own key only.
      image: uint8 [batch, H, W, 3].
      num_layers: timm's n, 2 unless it is given.

    Returns:
      uint8 [batch, H, W, 3].
    """
    for layer in range(num_layers):
        layer_key = jax.vmap(jax.random.fold_in, (0, None))(key, layer)
        image = operate(image, *choose(layer_key, policy), policy)
    return image
