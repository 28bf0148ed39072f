"""The ResNet stem of the hybrids: ResNet v1 bottlenecks with GroupNorm and weight standardisation."""

import flax.linen as nn
import jax.numpy as jnp


class StdConv(nn.Conv):
    """Convolution whose kernel is standardised at use, per output channel (arXiv 1903.10520); the
    stored one stays raw.

    The published weights of the hybrids add their epsilon to the standard deviation, those of BiT
    to the variance.
    """

    std_eps: float = 1e-5
    var_eps: float = 0.0

    def param(self, name, *args, **kwargs):
        value = super().param(name, *args, **kwargs)
        if name != "kernel":
            return value
        mean, var = value.mean((0, 1, 2), keepdims=True), value.var((0, 1, 2), keepdims=True)
        return (value - mean) / (jnp.sqrt(var + self.var_eps) + self.std_eps)


def std_conv(
    features: int, side: int, name: str, dtype, stride: int = 1, padding="SAME", **eps
) -> StdConv:
    return StdConv(
        features,
        (side, side),
        (stride, stride),
        padding,
        use_bias=False,
        dtype=dtype,
        name=name,
        **eps,
    )


class ResidualUnit(nn.Module):
    """Bottleneck 1x1, 3x3 (strided), 1x1 with a projected shortcut where the shape changes.

    [batch, H, W, in] -> [batch, H / stride, W / stride, 4 * features]
    """

    features: int
    stride: int = 1
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        norm = lambda name, **kwargs: nn.GroupNorm(dtype=self.dtype, name=name, **kwargs)  # noqa: E731
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
        for i in range(self.units):
            x = ResidualUnit(
                self.features, self.stride if i == 0 else 1, self.dtype, name=f"unit{i + 1}"
            )(x)
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
