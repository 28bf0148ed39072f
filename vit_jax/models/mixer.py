"""The MLP-Mixer (arXiv 2105.01601): two MLPs per layer, one across tokens.

Parameters have the published names.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models.classifier import Classifier
from vit_jax.models.dropout import droppath
from vit_jax.models.ops.dense import Dense, patch_embedding
from vit_jax.models.ops.layer_norm import LayerNorm


class MlpBlock(nn.Module):
    """Two layers with a GELU between them, along the last axis: [batch, A, B] -> [batch, A, B]."""

    mlp_dim: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        y = Dense(self.mlp_dim, self.dtype)(x)
        y = sharding.constrain(y, "batch", None, "mlp")
        return Dense(x.shape[-1], self.dtype)(nn.gelu(y, approximate=True))


class MixerBlock(nn.Module):
    """Mixes tokens, then channels (equation 1): [batch, length, embed] -> the same."""

    tokens_mlp_dim: int
    channels_mlp_dim: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, noise=None):
        """`noise`: dict of the layer's droppath rate and key, or None."""
        y = LayerNorm(dtype=self.dtype, name="LayerNorm_0")(x)
        y = y.swapaxes(1, 2)  # [batch, embed, length]
        y = MlpBlock(self.tokens_mlp_dim, self.dtype, name="token_mixing")(y)
        x = x + droppath(y.swapaxes(1, 2), noise, 0)
        y = LayerNorm(dtype=self.dtype, name="LayerNorm_1")(x)
        y = MlpBlock(self.channels_mlp_dim, self.dtype, name="channel_mixing")(y)
        x = sharding.constrain(x + droppath(y, noise, 1), "batch", "length", "embed")
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

    architecture = "mixer"
    any_num_tokens = False

    @property
    def cell(self) -> tuple[int, int]:
        """Pixels by (height, width) that one token stands for."""
        return self.patch_size

    @property
    def grid(self) -> tuple[int, int]:
        """Tokens by (height, width) at `image_size`; the border is padded (SAME)."""
        (height, width), (h, w) = self.image_size, self.patch_size
        return math.ceil(height / h), math.ceil(width / w)

    @property
    def flops(self) -> int:
        d, tokens = self.width, math.prod(self.grid)
        stem = 2 * tokens * math.prod(self.patch_size) * 3 * d
        layer = 4 * tokens * d * (self.tokens_mlp_dim + self.channels_mlp_dim)
        return stem + self.depth * layer + 2 * d * self.num_classes

    @property
    def tensor_sizes(self) -> dict[str, int]:
        return dict(tokens_mlp_dim=self.tokens_mlp_dim, channels_mlp_dim=self.channels_mlp_dim)

    def check_tokens(self, h: int, w: int) -> None:
        """Raises UserError if the parameters mix another number of tokens than the image gives."""
        block = self.variables.get("params", {}).get("MixerBlock_0")
        if block is None:
            return
        tokens = block["token_mixing"]["Dense_0"]["kernel"].shape[0]
        if h * w != tokens:
            raise UserError(
                f"the image gives {h} x {w} patch tokens, but the token mixing of the model was "
                f"trained for {tokens}, and can't be resampled: use images of the size that it was "
                "trained at"
            )

    def noise(self, key, i: int) -> dict | None:
        """Key and drop rate of layer i; None in evaluation."""
        if key is None:
            return None
        rate = self.droppath * i / max(self.depth - 1, 1)
        return dict(key=jax.random.fold_in(key, i), droppath=rate)

    @nn.compact
    def __call__(self, image, train: bool = False):
        self.check_image(image)
        x = sharding.constrain(jnp.asarray(image, self.dtype), "batch", None, None, None)
        x = patch_embedding(self.width, self.patch_size, "SAME", self.dtype, name="stem")(x)
        batch, h, w, _ = x.shape
        self.check_tokens(h, w)
        x = sharding.constrain(x.reshape(batch, h * w, self.width), "batch", "length", "embed")
        self.sow("intermediates", "tokens", x)
        key = self.make_rng("dropout") if train and self.droppath else None
        sizes = (self.tokens_mlp_dim, self.channels_mlp_dim)
        for i in range(self.depth):
            x = MixerBlock(*sizes, self.dtype, name=f"MixerBlock_{i}")(x, self.noise(key, i))
        x = LayerNorm(dtype=self.dtype, name="pre_head_layer_norm")(x)
        self.sow("intermediates", "encoded", x)
        x = x.mean(axis=1)
        self.sow("intermediates", "pre_logits", x)
        return self.logits(x)
