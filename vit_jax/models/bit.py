"""The ResNets of BiT (arXiv 1912.11370): pre-activation bottlenecks, GroupNorm and weight
standardisation.

Parameter names are those of big_vision's `bit_paper`, close to the hybrids':
`root_block/conv_root/kernel`, `block1/unit01/{gn1,gn2,gn3}/{scale,bias}`,
`.../{conv1,conv2,conv3,conv_proj}/kernel`, `norm-pre-head/{scale,bias}`, `head/{kernel,bias}`. The
published files name them by TensorFlow's scopes: `vit_jax.weights.formats.bit` maps both ways.

What differs from the hybrids' stem (`vit_jax.models.resnet`), which is a ResNet v1: the units
normalise before they convolve, and the shortcut is not normalised; GroupNorm's epsilon is 1e-5 and
its variance is that of the centred values; weight standardisation adds 1e-10 to the variance, not
1e-5 to the standard deviation; padding is symmetric.
"""

import functools
import math

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models import resnet
from vit_jax.models.classifier import Classifier

# What the max-pool of the root sees beyond the image. zeros: as in the code that the published
# weights come from (big_transfer). lowest: minus infinity, as in big_vision; it matters if all
# inputs of a window are negative.
POOL_PADDINGS = ("zeros", "lowest")

GROUPS = 32

std_conv = functools.partial(resnet.std_conv, std_eps=0.0, var_eps=1e-10)


def norm_relu(x, name: str, dtype):
    """GroupNorm and ReLU; call inside a compact method. x: [batch, H, W, C]."""
    norm = nn.GroupNorm(GROUPS, epsilon=1e-5, use_fast_variance=False, dtype=dtype, name=name)
    return nn.relu(norm(x))


class RootBlock(nn.Module):
    """7x7 convolution of stride 2 and max-pool of stride 2: [batch, H, W, 3] -> [batch, H / 4, W /
    4, width].
    """

    width: int
    pool_padding: str = "zeros"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = std_conv(self.width, 7, "conv_root", self.dtype, stride=2, padding=3)(x)
        if self.pool_padding == "zeros":
            x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
            return nn.max_pool(x, (3, 3), strides=(2, 2))
        return nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))


class ResidualUnit(nn.Module):
    """Pre-activation bottleneck 1x1, 3x3 (strided), 1x1 with a projected shortcut if the shape
    changes.

    [batch, H, W, in] -> [batch, H / stride, W / stride, 4 * features]
    """

    features: int
    stride: int = 1
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        out = 4 * self.features
        y = norm_relu(x, "gn1", self.dtype)
        if x.shape[-1] != out or self.stride != 1:
            x = std_conv(out, 1, "conv_proj", self.dtype, self.stride)(y)
        y = std_conv(self.features, 1, "conv1", self.dtype)(y)
        y = norm_relu(y, "gn2", self.dtype)
        y = std_conv(self.features, 3, "conv2", self.dtype, self.stride, padding=1)(y)
        y = norm_relu(y, "gn3", self.dtype)
        return x + std_conv(out, 1, "conv3", self.dtype)(y)


class Stage(nn.Module):
    """`units` bottlenecks; the first one strides."""

    units: int
    features: int
    stride: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        stride = self.stride
        for i in range(self.units):
            x = ResidualUnit(self.features, stride, self.dtype, name=f"unit{i + 1:02d}")(x)
            x = sharding.constrain(x, "batch", None, None, "embed")
            stride = 1
        self.sow("intermediates", "output", x)
        return x


class ResNet(Classifier):
    """Image [batch, H, W, 3] normalised as `preprocess` says -> logits [batch, classes] float32.

    With `num_classes=0` it returns what the head reads, [batch, width]. Any image size will do:
    nothing depends on the position. Intermediates (`mutable=["intermediates"]`): root output, the
    output of every stage, the last feature map as the pooling reads it, pre_logits.
    """

    units: tuple[int, ...] = (3, 4, 6, 3)  # bottlenecks by stage
    width_factor: float = 1  # the first stage has 64 times as many features
    pool_padding: str = "zeros"

    architecture = "bit"

    @property
    def stem_width(self) -> int:
        return int(64 * self.width_factor)

    @property
    def width(self) -> int:
        """Channels of the last feature map: what the head reads."""
        return 4 * self.stem_width * 2 ** (len(self.units) - 1)

    @property
    def cell(self) -> tuple[int, int]:
        """Pixels by (height, width) that one position of the last feature map stands for."""
        side = 4 * 2 ** (len(self.units) - 1)
        return side, side

    @property
    def grid(self) -> tuple[int, int]:
        """Positions of the last feature map by (height, width) at `image_size`."""
        (height, width), (h, w) = self.image_size, self.cell
        return math.ceil(height / h), math.ceil(width / w)

    @property
    def flops(self) -> int:
        total, channels = resnet.flops(self.image_size, self.units, self.stem_width)
        return total + 2 * channels * self.num_classes

    def check(self) -> None:
        super().check()
        self.check_choice("pool_padding", POOL_PADDINGS)
        if not self.units or min(self.units) < 1:
            raise UserError(
                f"model units {self.units} must be one or more stages of at least 1 bottleneck each"
            )
        if self.stem_width < GROUPS or self.stem_width % GROUPS:
            raise UserError(
                f"model width_factor {self.width_factor} gives {self.stem_width} features, which "
                f"GroupNorm can't divide into {GROUPS} groups: use a multiple of {GROUPS / 64}"
            )

    @nn.compact
    def __call__(self, image, train: bool = False):
        del train  # the published ResNets have neither dropout nor stochastic depth
        self.check_image(image)
        x = sharding.constrain(jnp.asarray(image, self.dtype), "batch", None, None, None)
        x = RootBlock(self.stem_width, self.pool_padding, self.dtype, name="root_block")(x)
        self.sow("intermediates", "stem", x)
        for i, count in enumerate(self.units):
            stride = 1 if i == 0 else 2
            x = Stage(count, self.stem_width * 2**i, stride, self.dtype, name=f"block{i + 1}")(x)
        x = norm_relu(x, "norm-pre-head", self.dtype)
        self.sow("intermediates", "encoded", x)
        x = x.mean(axis=(1, 2))
        self.sow("intermediates", "pre_logits", x)
        return self.logits(x)
