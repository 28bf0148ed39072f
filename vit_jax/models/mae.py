"""The masked autoencoder (arXiv 2111.06377): a ViT of the visible patches, and a decoder of all.

Parameters are those of the ViT, and below `decoder` those of the decoder.
"""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models import posemb
from vit_jax.models.encoder import Encoder, fields_of, select_patches
from vit_jax.models.ops.dense import Dense, xavier
from vit_jax.models.vit import VisionTransformer

DECODER = "decoder"  # the parameters beside those of the ViT
small_normal = nn.initializers.normal(0.02)


class Decoder(nn.Module):
    """Encoded visible tokens [batch, prefix + kept, embed] -> pixels of every patch [batch,
    patches, h * w * 3].

    Its layers are never stacked.
    """

    grid: tuple[int, int]  # patches by (height, width)
    outputs: int  # numbers per patch
    width: int = 512
    depth: int = 8
    num_heads: int = 16
    mlp_dim: int = 2048
    num_prefix: int = 1
    gelu: str = "erf"
    ln_eps: float = 1e-6
    dtype: jnp.dtype = jnp.float32
    softmax_dtype: jnp.dtype = jnp.float32
    attention: str = "auto"
    remat: str = "none"
    remat_names: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """Forward FLOPs of one image without the first layer, whose input the mask decides."""
        d = self.width
        patches = math.prod(self.grid)
        length = patches + self.num_prefix
        layer = 2 * length * (4 * d * d + 2 * d * self.mlp_dim) + 4 * length * length * d
        return self.depth * layer + 2 * patches * d * self.outputs

    @nn.compact
    def __call__(self, x, restore):
        """`restore`: int32 [batch, patches], the position of every patch among those that are
        kept, followed by those that are hidden.
        """
        x = Dense(self.width, self.dtype, name="embedding", kernel_init=xavier)(x)
        mask = self.param("mask", small_normal, (1, 1, self.width))
        num_hidden = self.num_prefix + restore.shape[1] - x.shape[1]
        hidden = jnp.broadcast_to(mask.astype(x.dtype), (len(x), num_hidden, self.width))
        x = select_patches(jnp.concatenate([x, hidden], axis=1), restore, self.num_prefix)
        names = ("depth", "mlp_dim", "num_heads", "num_prefix", "gelu", "ln_eps", "dtype")
        names += ("softmax_dtype", "attention", "remat", "remat_names")
        x = Encoder(**fields_of(self, *names), posemb="learn", name="Transformer")(x, self.grid)
        head = Dense(self.outputs, self.dtype, name="head", kernel_init=xavier)
        return head(x[:, self.num_prefix :]).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class MaskedAutoencoder:
    """A ViT, its decoder, and what is hidden from the one and predicted by the other."""

    vit: VisionTransformer
    decoder: Decoder
    mask_ratio: float = 0.75
    norm_pixels: bool = True  # predict pixels normalised by the mean and variance of their patch

    @classmethod
    def build(cls, vit: VisionTransformer, fields: dict, **options) -> "MaskedAutoencoder":
        """`fields` of the decoder, besides those that the ViT decides."""
        check_vit(vit)
        shared = ("gelu", "ln_eps", "dtype", "softmax_dtype", "attention", "remat", "remat_names")
        own = dict(grid=vit.grid, outputs=math.prod(vit.patch_size) * 3, num_prefix=vit.num_prefix)
        model = cls(vit, Decoder(**own, **fields_of(vit, *shared), **fields), **options)
        model.check()
        return model

    def check(self) -> None:
        """Raises UserError if the decoder or the mask does not fit."""
        if self.decoder.width % 4:
            raise UserError(
                f"mae.decoder_width={self.decoder.width} is not a multiple of 4, which the fixed "
                "position embedding of the decoder needs: change it"
            )
        if self.decoder.num_heads < 1 or self.decoder.width % self.decoder.num_heads:
            raise UserError(
                f"mae.decoder_width={self.decoder.width} is not divisible by mae.decoder_heads="
                f"{self.decoder.num_heads}: change one of them"
            )
        if not 0 < self.mask_ratio < 1 or not 0 < self.num_kept < self.num_patches:
            raise UserError(
                f"mae.mask_ratio={self.mask_ratio} of {self.num_patches} patches must hide some of "
                "them, and leave some to see: change it"
            )

    @property
    def num_patches(self) -> int:
        return math.prod(self.vit.grid)

    @property
    def num_kept(self) -> int:
        """Patches that the encoder sees, rounded down as in the published code."""
        return int(self.num_patches * (1 - self.mask_ratio))

    @property
    def encoder(self) -> VisionTransformer:
        """The ViT, which returns its tokens."""
        pool = "tok_unpooled" if "cls" in dict(self.vit.prefix) else "unpooled"
        return self.vit.clone(pool=pool, num_classes=0, pre_logits=0)

    @property
    def flops(self) -> int:
        """Forward FLOPs of one image: the encoder's blocks see only what is kept."""
        vit = self.vit
        length = vit.num_prefix + self.num_kept
        patches = 2 * self.num_patches * math.prod(vit.patch_size) * 3 * vit.width
        first = 2 * length * vit.width * self.decoder.width
        return patches + vit.depth * vit.block_flops(length) + first + self.decoder.flops

    def init(self, key) -> dict:
        """Fresh parameters, as in the published code: fixed positions, patches embedded by a Xavier
        matrix, normal tokens.
        """
        encoder_key, decoder_key, patch_key, token_key = jax.random.split(key, 4)
        image = jnp.zeros((1, *self.vit.image_size, 3))
        params = self.encoder.with_scan(False).init(encoder_key, image)["params"]
        kernel = params["embedding"]["kernel"]
        matrix = xavier(patch_key, (math.prod(kernel.shape[:3]), kernel.shape[3]))
        params["embedding"]["kernel"] = matrix.reshape(kernel.shape)
        for i, (name, _) in enumerate(self.vit.prefix):
            params[name] = small_normal(jax.random.fold_in(token_key, i), params[name].shape)
        params[DECODER] = self.init_decoder(decoder_key)
        fix_positions(params, self.vit.grid)
        return params

    def init_decoder(self, key) -> dict:
        """Fresh parameters of the decoder."""
        tokens = jnp.zeros((1, self.vit.num_prefix + self.num_kept, self.vit.width))
        restore = jnp.arange(self.num_patches)[None]
        params = self.decoder.init(key, tokens, restore)["params"]
        fix_positions(params, self.vit.grid)
        return params

    def apply(self, params, image, keep, restore, **options):
        """Pixels of every patch as the decoder predicts them: [batch, patches, h * w * 3].

        Args:
          image: float32 [batch, H, W, 3], normalised.
          keep: int32 [batch, kept], the patches that the encoder sees.
          restore: see `Decoder`.
          options: of the ViT's `apply`, such as train=True.
        """
        vit = {name: value for name, value in params.items() if name != DECODER}
        tokens = self.encoder.apply({"params": vit}, image, keep=keep, **options)
        return self.decoder.apply({"params": params[DECODER]}, tokens, restore)

    def targets(self, image):
        """What is predicted: image [batch, H, W, 3] -> [batch, patches, h * w * 3]."""
        patches = patchify(image, self.vit.patch_size)
        if not self.norm_pixels:
            return patches
        mean, std = mean_and_std(patches)
        return (patches - mean) / std

    def pixels(self, prediction, image):
        """The inverse of `targets`: what a prediction for an image means, [batch, patches, h * w *
        3].
        """
        if not self.norm_pixels:
            return prediction
        mean, std = mean_and_std(patchify(image, self.vit.patch_size))
        return prediction * std + mean


def check_vit(vit) -> None:
    """Raises UserError if a model can't be the encoder."""
    if vit.architecture != "vit" or vit.stem_units is not None:
        raise UserError(
            "objective=mae hides patches from the encoder, so the model must be a plain ViT: "
            "choose another model.variant"
        )
    if vit.posemb not in ("learn", "sincos2d", "none") or vit.posemb_at != "stem":
        raise UserError(
            f"objective=mae needs positions that are added once: use model.posemb=learn, not "
            f"{vit.posemb} at {vit.posemb_at}"
        )
    if vit.distilled:
        raise UserError("objective=mae trains no distillation token: set model.distilled=False")
    if vit.pool == "map" or vit.fc_norm:
        raise UserError(
            "objective=mae trains neither attention pooling nor fc_norm: use model.pool=gap or "
            "tok, and set them when you fine-tune"
        )


def mean_and_std(patches):
    """[batch, patches, 1] each, of the pixels of a patch."""
    mean = patches.mean(axis=-1, keepdims=True)
    variance = patches.var(axis=-1, keepdims=True, ddof=1)
    return mean, jnp.sqrt(variance + 1e-6)


def fix_positions(params: dict, grid: tuple[int, int]) -> None:
    """Replaces the position embedding of an encoder, [1, prefix + patches, embed], by the fixed one
    of the published code, which is zero for prefix tokens.
    """
    embedding = params["Transformer"].get("posembed_input", {})
    for name, rows in embedding.items():
        width = rows.shape[-1]
        fixed = posemb.sincos2d(grid, width, jnp.float32, period=width // 4)
        embedding[name] = jnp.pad(fixed, ((0, 0), (rows.shape[1] - fixed.shape[1], 0), (0, 0)))


def patchify(image, patch_size: tuple[int, int]):
    """[batch, H, W, channels] -> [batch, patches, h * w * channels], without a border that fills
    no patch.
    """
    batch, height, width, channels = image.shape
    h, w = patch_size
    rows = height // h
    columns = width // w
    image = image[:, : rows * h, : columns * w]
    patches = image.reshape(batch, rows, h, columns, w, channels).transpose(0, 1, 3, 2, 4, 5)
    return patches.reshape(batch, rows * columns, h * w * channels)


def unpatchify(patches, grid: tuple[int, int], patch_size: tuple[int, int]):
    """[batch, patches, h * w * channels] -> [batch, H, W, channels]."""
    rows, columns = grid
    h, w = patch_size
    shape = (len(patches), rows, columns, h, w, -1)
    image = patches.reshape(shape).transpose(0, 1, 3, 2, 4, 5)
    return image.reshape(len(patches), rows * h, columns * w, -1)
