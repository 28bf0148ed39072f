"""The MLP-Mixer (arXiv 2105.01601): two MLPs per layer, one across tokens. Parameter names are the
published ones.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models import encoder
from vit_jax.models.classifier import Classifier
from vit_jax.models.ops import precision
from vit_jax.models.ops.layer_norm import LayerNorm


class MlpBlock(nn.Module):
    """Two layers with a GELU between them, along the last axis: [batch, A, B] -> [batch, A, B]."""

    mlp_dim: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        layer = precision.layer(self.dtype)
        y = sharding.constrain(nn.Dense(self.mlp_dim, **layer)(x), "batch", None, "mlp")
        return nn.Dense(x.shape[-1], **layer)(nn.gelu(y, approximate=True))


class MixerBlock(nn.Module):
    """Mixes tokens, then channels (equation 1): [batch, length, embed] -> [batch, length, embed]."""

    tokens_mlp_dim: int
    channels_mlp_dim: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, noise=None):
        """`noise`: dict of the layer's droppath rate and key, or None."""
        y = LayerNorm(dtype=precision.layer_dtype(self.dtype), name="LayerNorm_0")(x).swapaxes(
            1, 2
        )  # [batch, embed, length]
        y = MlpBlock(self.tokens_mlp_dim, self.dtype, name="token_mixing")(y).swapaxes(1, 2)
        x = x + encoder.droppath(y, noise, 0)
        y = LayerNorm(dtype=precision.layer_dtype(self.dtype), name="LayerNorm_1")(x)
        y = MlpBlock(self.channels_mlp_dim, self.dtype, name="channel_mixing")(y)
        x = sharding.constrain(x + encoder.droppath(y, noise, 1), "batch", "length", "embed")
        self.sow("intermediates", "output", x)
        return x


class MlpMixer(Classifier):
    """Image [batch, H, W, 3] normalised as `preprocess` says -> logits [batch, classes] float32.

    With `num_classes=0` it returns what the head reads, [batch, embed]. The token-mixing MLPs have
    weights for each position, so a model runs at one number of tokens. Intermediates
    (`mutable=["intermediates"]`): embedded tokens, the output of every block, encoded tokens,
    pre_logits.
    """

    width: int = 768
    depth: int = 12
    patch_size: tuple[int, int] = (16, 16)
    tokens_mlp_dim: int = 384
    channels_mlp_dim: int = 3072
    droppath: float = 0.0  # of the last block; it grows linearly from 0 in the first (appendix B)

    @property
    def num_prefix(self) -> int:
        return 0

    @property
    def cell(self) -> tuple[int, int]:
        """Pixels by (height, width) that one token stands for."""
        return self.patch_size

    @property
    def grid(self) -> tuple[int, int]:
        """Tokens by (height, width) at `image_size`: a border that fills no patch is padded (SAME)."""
        h, w = (
            -(-side // patch) for side, patch in zip(self.image_size, self.patch_size, strict=True)
        )
        return h, w

    def check_tokens(self, grid: tuple[int, int]) -> None:
        """Raises UserError where the parameters mix another number of tokens than the image gives."""
        block = self.variables.get("params", {}).get("MixerBlock_0")
        held = (
            grid[0] * grid[1]
            if block is None
            else block["token_mixing"]["Dense_0"]["kernel"].shape[0]
        )
        if grid[0] * grid[1] != held:
            raise UserError(
                f"the image gives {grid[0]} x {grid[1]} patch tokens, but the token mixing of the "
                f"model was trained for {held}, and can't be resampled: use images of the size "
                "that it was trained at"
            )

    @nn.compact
    def __call__(self, image, train: bool = False):
        x = sharding.constrain(jnp.asarray(image, self.dtype), "batch", None, None, None)
        layer = precision.patch_layer(self.dtype)
        x = nn.Conv(
            self.width, self.patch_size, self.patch_size, padding="SAME", name="stem", **layer
        )(x)
        batch, *grid, _ = x.shape
        self.check_tokens(tuple(grid))
        x = sharding.constrain(
            x.reshape(batch, grid[0] * grid[1], self.width), "batch", "length", "embed"
        )
        self.sow("intermediates", "tokens", x)
        key = self.make_rng("dropout") if train and self.droppath else None
        for i in range(self.depth):
            rate = self.droppath * i / max(self.depth - 1, 1)
            noise = dict(key=jax.random.fold_in(key, i), droppath=rate) if key is not None else None
            block = MixerBlock(
                self.tokens_mlp_dim, self.channels_mlp_dim, self.dtype, name=f"MixerBlock_{i}"
            )
            x = block(x, noise)
        x = LayerNorm(dtype=precision.layer_dtype(self.dtype), name="pre_head_layer_norm")(x)
        self.sow("intermediates", "encoded", x)
        x = x.mean(axis=1)
        self.sow("intermediates", "pre_logits", x)
        return (self.head(x) if self.num_classes else x).astype(jnp.float32)
