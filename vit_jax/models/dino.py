"""The projection head of DINO (arXiv 2104.14294 appendix C), and a ViT's positions for crops of
another size.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.distributed import sharding
from vit_jax.models.ops.dense import Dense

LAYERS = 3
normal = nn.initializers.normal(0.02)
# U(-1, 1) / sqrt(fan in), as torch's nn.Linear.
torch_uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def unit(x, axis: int):
    """`x` divided by its L2 norm along an axis."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=axis, keepdims=True), 1e-12)


class Prototypes(nn.Module):
    """Cosine similarities to learned directions: [batch, ..., embed] -> [batch, ..., prototypes]
    float32.
    """

    count: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", torch_uniform, (x.shape[-1], self.count))
        x = unit(x.astype(jnp.float32), -1).astype(self.dtype)
        kernel = unit(kernel, 0).astype(self.dtype)
        y = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
        return sharding.constrain(y, "batch", *[None] * (y.ndim - 2), "prototypes")


class DinoHead(nn.Module):
    """An MLP of three layers, and `Prototypes`: [batch, ..., embed] -> [batch, ..., prototypes].

    The prototypes have norm 1, as with the published `norm_last_layer`.
    """

    prototypes: int = 65_536
    width: int = 2048
    bottleneck: int = 256
    dtype: jnp.dtype = jnp.float32

    def flops(self, embed: int) -> int:
        """Forward FLOPs of one token of this width."""
        widths = embed + self.bottleneck
        return 2 * (self.width * (widths + self.width) + self.bottleneck * self.prototypes)

    @nn.compact
    def __call__(self, x):
        # With these names, tensor parallelism splits the first two layers as those of an MLP block.
        for i in range(LAYERS - 1):
            x = Dense(self.width, self.dtype, name=f"Dense_{i}", kernel_init=normal)(x)
            x = nn.gelu(x, approximate=False)
        last = f"Dense_{LAYERS - 1}"
        x = Dense(self.bottleneck, self.dtype, name=last, kernel_init=normal)(x)
        return Prototypes(self.prototypes, self.dtype, name="prototypes")(x)


def resample_positions(rows, num_prefix: int, old: tuple[int, int], new: tuple[int, int]):
    """A learned position embedding for another grid, bicubic: [1, prefix + old, embed] -> [1,
    prefix + new, embed]; a function that has a gradient.
    """
    prefix = rows[:, :num_prefix]
    embed = rows.shape[-1]
    grid = rows[:, num_prefix:].reshape(1, *old, embed)
    grid = jax.image.resize(grid, (1, *new, embed), "cubic", antialias=True)
    return jnp.concatenate([prefix, grid.reshape(1, -1, embed)], axis=1)
