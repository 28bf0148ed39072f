"""Masked autoencoding (arXiv 2111.06377): the pixels of hidden patches from those that are seen."""

import dataclasses
import logging

import jax
import jax.numpy as jnp

from vit_jax.data.augment.batch import keys
from vit_jax.errors import UserError
from vit_jax.models.mae import DECODER, MaskedAutoencoder, patchify, unpatchify
from vit_jax.train.objectives.objective import BACKWARD, Objective, Stack
from vit_jax.weights import scan_layout
from vit_jax.weights.autoencoder import fit_decoder
from vit_jax.weights.formats.infer import decoder_sizes
from vit_jax.weights.formats.weights import Weights

log = logging.getLogger(__name__)

MLP_RATIO = 4  # of the decoder
# Field of the decoder -> key of config.mae.
KEYS = dict(width="decoder_width", depth="decoder_depth", num_heads="decoder_heads")
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

    def extra_of(self, weights):
        if weights.objective != "mae" or not weights.extra:
            return {}
        check_sizes(self.autoencoder, weights)
        check_settings(self.autoencoder, weights)
        return {DECODER: fit_decoder(weights, self.autoencoder)}

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
    def tensor_sizes(self):
        decoder = self.autoencoder.decoder
        sizes = {"decoder_heads": decoder.num_heads, "decoder's mlp_dim": decoder.mlp_dim}
        return self.model.tensor_sizes | sizes

    @property
    def stacks(self):
        model = self.autoencoder
        vit = model.vit
        decoder = model.decoder
        encoder = Stack(vit.depth, vit.num_prefix + model.num_kept, vit.width, vit.num_heads)
        length = vit.num_prefix + model.num_patches
        sizes = (decoder.depth, length, decoder.width, decoder.num_heads)
        return encoder, Stack(*sizes, may_scan=False)

    @property
    def train_flops(self):
        return (1 + BACKWARD) * self.autoencoder.flops


def check_sizes(model: MaskedAutoencoder, weights: Weights) -> None:
    """Raises UserError if the decoder of the weights has other sizes than that of the config."""
    saved = decoder_sizes(weights.extra, weights.path, weights.file_names)
    differ = [name for name in KEYS if saved[name] != getattr(model.decoder, name)]
    if differ:
        flags = " ".join(f"--config.mae.{KEYS[name]}={saved[name]}" for name in differ)
        raise UserError(
            f"the decoder of init_from={weights.path} differs from config.mae in "
            f"{', '.join(KEYS[name] for name in differ)}: add {flags}"
        )
    if saved["mlp_dim"] != model.decoder.mlp_dim:
        raise UserError(
            f"the decoder of init_from={weights.path} has an MLP of {saved['mlp_dim']}, not of "
            f"{MLP_RATIO} * mae.decoder_width={model.decoder.mlp_dim}: start from its encoder "
            "alone, which `vit_jax.convert` writes with --format=timm"
        )


def check_settings(model: MaskedAutoencoder, weights: Weights) -> None:
    """Logs how the task differs from that of the weights."""
    for key in ("mask_ratio", "norm_pixels"):
        ours = getattr(model, key)
        theirs = weights.settings.get(key, ours)
        if theirs != ours:
            log.warning(
                "the decoder of init_from learned with mae.%s=%s, not %s", key, theirs, ours
            )


def make(config, model, total_steps: int) -> Mae:
    settings = config.mae
    fields = dict(
        {name: settings[key] for name, key in KEYS.items()},
        mlp_dim=MLP_RATIO * settings.decoder_width,
    )
    options = dict(mask_ratio=settings.mask_ratio, norm_pixels=settings.norm_pixels)
    return Mae(model, MaskedAutoencoder.build(model, fields, **options))
