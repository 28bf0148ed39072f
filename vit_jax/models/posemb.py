"""Position embeddings: the kinds of arXiv 2010.11929 table 8, and fixed sines and cosines."""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import UserError

# learn: one row per token (1-D). learn2d: half of the width for the row, half for the column.
# relative: by the distance between tokens, inside attention. sincos2d: fixed.
KINDS = ("learn", "learn2d", "relative", "sincos2d", "none")
# Where the learned ones are added: once after the stem, to the input of every layer, or there from
# shared parameters.
PLACES = ("stem", "every", "shared")

init = nn.initializers.normal(0.02)


def sincos2d(grid: tuple[int, int], width: int, dtype):
    """Fixed 2D sine-cosine embedding of MoCo v3 (arXiv 2104.02057) as in arXiv 2205.01580: [1, h *
    w, width].
    """
    if width % 4:
        raise UserError(f"posemb 'sincos2d' needs a width that is a multiple of 4, got {width}")
    y, x = jnp.mgrid[: grid[0], : grid[1]]
    omega = 1.0 / 10_000 ** (jnp.arange(width // 4) / max(width // 4 - 1, 1))
    y, x = y.reshape(-1, 1) * omega, x.reshape(-1, 1) * omega  # [h * w, width / 4]
    return jnp.concatenate([jnp.sin(x), jnp.cos(x), jnp.sin(y), jnp.cos(y)], axis=1)[None].astype(
        dtype
    )


def held_param(module: nn.Module, name: str, shape: tuple[int, ...], given: str):
    """A parameter whose shape hangs on the image; held with another one, it is an error that says
    so.
    """
    if module.has_variable("params", name):
        found = module.get_variable("params", name).shape
        if found != shape:
            raise UserError(
                f"the image gives {given}, which takes a {name} of {shape}, but the model has "
                f"{found}: load the weights with image_size= to resample it"
            )
    return module.param(name, init, shape)


class PositionEmbedding(nn.Module):
    """A learned position embedding of every token, prefix tokens included: [1, length, embed]."""

    kind: str
    grid: tuple[int, int]  # patch tokens by (height, width)
    num_prefix: int
    width: int

    def held(self, name: str, shape: tuple[int, ...]):
        return held_param(self, name, shape, f"{self.grid[0]} x {self.grid[1]} patch tokens")

    @nn.compact
    def __call__(self):
        h, w = self.grid
        if self.kind == "learn":
            return self.held("pos_embedding", (1, self.num_prefix + h * w, self.width))
        y = self.held("pos_embedding_y", (1, h, 1, self.width // 2))
        x = self.held("pos_embedding_x", (1, 1, w, self.width - self.width // 2))
        patches = [jnp.broadcast_to(axis, (1, h, w, axis.shape[-1])) for axis in (x, y)]
        patches = jnp.concatenate(patches, axis=-1).reshape(1, h * w, self.width)
        if not self.num_prefix:
            return patches
        return jnp.concatenate(
            [self.held("pos_embedding_prefix", (1, self.num_prefix, self.width)), patches], axis=1
        )


def offsets(length: int):
    """Index of the embedding of every distance between a query and a key, p_q - p_k + length - 1:
    [length, length].
    """
    position = jnp.arange(length)
    return position[:, None] - position[None, :] + length - 1
