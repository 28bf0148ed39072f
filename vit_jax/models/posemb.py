"""Position embeddings: the kinds of arXiv 2010.11929 table 8, and fixed sin-cos embeddings.

`weights/adapt.py` resamples them for another resolution.
"""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import UserError

# learn: one row per token (1-D). learn2d: half of the width for the row, half for the column.
# relative: by the distance between tokens, inside attention. sincos2d: fixed.
KINDS = ("learn", "learn2d", "relative", "sincos2d", "none")
# Where learned embeddings are added: once after the stem, to the input of every layer with
# parameters of its own, or to the input of every layer with shared parameters.
PLACES = ("stem", "every", "shared")

init = nn.initializers.normal(0.02)


def sincos2d(grid: tuple[int, int], width: int, dtype, period: int | None = None):
    """Fixed 2-D sin-cos embedding of MoCo v3 (arXiv 2104.02057): [1, h * w, width].

    Args:
      period: channels in which the frequency falls to 1 / 10,000; None: width / 4 - 1, as in arXiv
        2205.01580. MoCo v3 and MAE have width / 4.
    """
    if width % 4:
        raise UserError(f"posemb 'sincos2d' needs a width that is a multiple of 4, got {width}")
    y, x = jnp.mgrid[: grid[0], : grid[1]]
    period = period or max(width // 4 - 1, 1)
    omega = 1.0 / 10_000 ** (jnp.arange(width // 4) / period)
    y = y.reshape(-1, 1) * omega  # [h * w, width / 4]
    x = x.reshape(-1, 1) * omega
    rows = jnp.concatenate([jnp.sin(x), jnp.cos(x), jnp.sin(y), jnp.cos(y)], axis=1)
    return rows[None].astype(dtype)


def param_of_image_size(module: nn.Module, name: str, shape: tuple[int, ...], tokens: str):
    """A parameter whose shape depends on the image size: an error if the weights are for another.

    `tokens`: what the image gives, for the message.
    """
    if module.has_variable("params", name):
        existing = module.get_variable("params", name).shape
        if existing != shape:
            raise UserError(
                f"the image gives {tokens}, which takes a {name} of {shape}, but the model has "
                f"{existing}: load the weights with image_size= to resample it"
            )
    return module.param(name, init, shape)


class PositionEmbedding(nn.Module):
    """A learned position embedding of every token, prefix tokens included: [1, length, embed]."""

    kind: str
    grid: tuple[int, int]  # patch tokens by (height, width)
    num_prefix: int
    width: int

    def rows(self, name: str, *shape: int):
        tokens = f"{self.grid[0]} x {self.grid[1]} patch tokens"
        return param_of_image_size(self, name, shape, tokens)

    @nn.compact
    def __call__(self):
        h, w = self.grid
        if self.kind == "learn":
            return self.rows("pos_embedding", 1, self.num_prefix + h * w, self.width)
        half = self.width // 2
        y = self.rows("pos_embedding_y", 1, h, 1, half)
        x = self.rows("pos_embedding_x", 1, 1, w, self.width - half)
        x = jnp.broadcast_to(x, (1, h, w, self.width - half))
        y = jnp.broadcast_to(y, (1, h, w, half))
        patches = jnp.concatenate([x, y], axis=-1).reshape(1, h * w, self.width)
        if not self.num_prefix:
            return patches
        prefix = self.rows("pos_embedding_prefix", 1, self.num_prefix, self.width)
        return jnp.concatenate([prefix, patches], axis=1)


def relative_index(length: int):
    """Row of the embedding of the distance between a query and a key, p_q - p_k + length - 1:
    [length, length].
    """
    position = jnp.arange(length)
    return position[:, None] - position[None, :] + length - 1
