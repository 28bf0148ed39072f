"""Masked autoencoding (arXiv 2111.06377): the pixels of hidden patches from those that are seen."""

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.data.augment.batch import keys
from vit_jax.models.mae import DECODER, MaskedAutoencoder, patchify, unpatchify
from vit_jax.train.objectives.objective import BACKWARD, Objective
from vit_jax.weights import scan_layout

HIDE = 0x6D6165  # purpose of an example's random choice of patches


def ranks(noise):
    """(patches in the order of their noise, the rank of each patch): float32 [batch, patches] ->
    int32, int32 [batch, patches].
    """
    order = jnp.argsort(noise, axis=1)
    return order, jnp.argsort(order, axis=1)


def losses(model: MaskedAutoencoder, params, image, noise, **options):
    """(loss [batch], prediction [batch, patches, h * w * 3], mask [batch, patches], 1 where a patch
    is hidden): the mean squared error over the hidden patches of each image.

    Args:
      image: float32 [batch, H, W, 3], normalised.
      noise: float32 [batch, patches]; the patches with the lowest are seen.
      options: of the ViT's `apply`.
    """
    order, rank = ranks(noise)
    mask = (rank >= model.num_kept).astype(jnp.float32)
    prediction = model.apply(params, image, order[:, : model.num_kept], rank, **options)
    errors = jnp.square(prediction - model.targets(image)).mean(axis=-1)
    return (errors * mask).sum(axis=1) / mask.sum(axis=1), prediction, mask


def forward(model: MaskedAutoencoder, params, image, noise):
    """`losses` with the mean loss of the batch, []."""
    loss, prediction, mask = losses(model, params, image, noise)
    return loss.mean(), prediction, mask


@dataclasses.dataclass(frozen=True)
class Mae(Objective):
    autoencoder: MaskedAutoencoder

    extra = (DECODER,)
    draws = ("seen", "reconstruction", "original")

    @property
    def fixed(self):
        posemb = "Transformer/posembed_input/.*"
        if self.model.posemb == "learn":
            return f"({DECODER}/)?{posemb}"
        return f"{DECODER}/{posemb}"

    def init(self, seed):
        params = self.autoencoder.init(jax.random.key(seed))
        return scan_layout.relayout(params, self.model.scan, jnp.stack)

    def noise(self, seed):
        """What decides which patches are seen: int32 [batch, 2] -> float32 [batch, patches]."""
        shape = (self.autoencoder.num_patches,)
        return jax.vmap(lambda key: jax.random.uniform(key, shape))(keys(seed, HIDE))

    def loss(self, params, batch, key, step):
        noise = self.noise(batch["seed"])
        options = dict(train=True, rngs={"dropout": key})
        loss, _, _ = losses(self.autoencoder, params, batch["image"], noise, **options)
        return loss, {}

    def pictures(self, params, batch):
        """Hidden patches are grey in what is seen, and predicted in the reconstruction."""
        model = self.model
        image = batch["image"]
        _, prediction, mask = losses(self.autoencoder, params, image, self.noise(batch["seed"]))
        hidden = mask[..., None] > 0
        patches = patchify(image, model.patch_size)
        predicted = self.autoencoder.pixels(prediction, image)
        kinds = (jnp.where(hidden, 0, patches), jnp.where(hidden, predicted, patches), patches)
        return tuple(model.denormalize(unpatchify(x, model.grid, model.patch_size)) for x in kinds)

    @property
    def train_flops(self):
        return (1 + BACKWARD) * self.autoencoder.flops


def make(config, model, total_steps: int) -> Mae:
    settings = config.mae
    fields = dict(
        width=settings.decoder_width,
        depth=settings.decoder_depth,
        num_heads=settings.decoder_heads,
        mlp_dim=4 * settings.decoder_width,
    )
    options = dict(mask_ratio=settings.mask_ratio, norm_pixels=settings.norm_pixels)
    return Mae(model, MaskedAutoencoder.build(model, fields, **options))
