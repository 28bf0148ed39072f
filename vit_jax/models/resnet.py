"""The ResNet stem of the hybrids: v1 bottlenecks with GroupNorm and weight standardisation."""

import math

import flax.linen as nn
import jax.numpy as jnp


class StdConv(nn.Conv):
    """Convolution that standardises its kernel per output channel (arXiv 1903.10520); the parameter
    is not standardised.

    The published weights of the hybrids add their epsilon to the standard deviation, those of BiT
    to the variance.
    """

    std_eps: float = 1e-5
    var_eps: float = 0.0

    def param(self, name, *args, **kwargs):
        value = super().param(name, *args, **kwargs)
        if name != "kernel":
            return value
        return standardized(value, self.std_eps, self.var_eps)


def standardized(kernel, std_eps: float = 1e-5, var_eps: float = 0.0):
    """[h, w, in, out] with mean 0 and standard deviation 1 over all but the last axis."""
    mean = kernel.mean((0, 1, 2), keepdims=True)
    var = kernel.var((0, 1, 2), keepdims=True)
    return (kernel - mean) / (jnp.sqrt(var + var_eps) + std_eps)


def std_conv(
    features: int, side: int, name: str, dtype, stride: int = 1, padding="SAME", **eps
) -> StdConv:
    sides = (side, side)
    strides = (stride, stride)
    return StdConv(features, sides, strides, padding, use_bias=False, dtype=dtype, name=name, **eps)


class ResidualUnit(nn.Module):
    """Bottleneck 1x1, 3x3 (strided), 1x1 with a projected shortcut if the shape changes.

    [batch, H, W, in] -> [batch, H / stride, W / stride, 4 * features]
    """

    features: int
    stride: int = 1
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        def norm(name, **kwargs):
            return nn.GroupNorm(dtype=self.dtype, name=name, **kwargs)

        out = 4 * self.features
        shortcut = x
        if x.shape[-1] != out or self.stride != 1:
            shortcut = norm("gn_proj")(std_conv(out, 1, "conv_proj", self.dtype, self.stride)(x))
        y = nn.relu(norm("gn1")(std_conv(self.features, 1, "conv1", self.dtype)(x)))
        y = nn.relu(norm("gn2")(std_conv(self.features, 3, "conv2", self.dtype, self.stride)(y)))
        y = norm("gn3", scale_init=nn.initializers.zeros)(std_conv(out, 1, "conv3", self.dtype)(y))
        return nn.relu(shortcut + y)


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
            x = ResidualUnit(self.features, stride, self.dtype, name=f"unit{i + 1}")(x)
            stride = 1
        return x


def stem(image, units: tuple[int, ...], width: int, dtype):
    """Root (7x7 stride 2, max-pool stride 2), then one stage per entry of `units`; call inside a
    compact method.

    [batch, H, W, 3] -> [batch, H / s, W / s, C] with s = 4 * 2^(stages - 1), or 4 without stages.
    """
    x = std_conv(width, 7, "conv_root", dtype, stride=2)(image)
    x = nn.relu(nn.GroupNorm(dtype=dtype, name="gn_root")(x))
    x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
    for i, count in enumerate(units):
        x = Stage(count, width * 2**i, 1 if i == 0 else 2, dtype, name=f"block{i + 1}")(x)
    return x


def conv_flops(out_size: tuple[int, int], side: int, c_in: int, c_out: int) -> int:
    return 2 * math.prod(out_size) * side * side * c_in * c_out


def halved(size: tuple[int, int]) -> tuple[int, int]:
    return math.ceil(size[0] / 2), math.ceil(size[1] / 2)


def flops(image_size: tuple[int, int], units: tuple[int, ...], width: int) -> tuple[int, int]:
    """Forward FLOPs of a hybrid's stem, or of BiT's ResNet without its head, for one image; and the
    channels of its output.
    """
    size = halved(image_size)
    total = conv_flops(size, 7, 3, width)
    size = halved(size)
    c_in = width
    for stage, count in enumerate(units):
        features = width * 2**stage
        for unit in range(count):
            strides = unit == 0 and stage > 0
            total += conv_flops(size, 1, c_in, features)
            if strides:
                size = halved(size)
            if strides or c_in != 4 * features:
                total += conv_flops(size, 1, c_in, 4 * features)
            total += conv_flops(size, 3, features, features)
            total += conv_flops(size, 1, features, 4 * features)
            c_in = 4 * features
    return total, c_in
