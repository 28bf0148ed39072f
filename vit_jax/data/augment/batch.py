"""All that happens to a training batch on the device, from uint8 images to the model's input."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax import config as configs
from vit_jax.config import own_parts
from vit_jax.data.augment import erase, mix, randaugment, three_augment, timm_randaugment, views
from vit_jax.models import losses
from vit_jax.models.classifier import HALF

# Purposes of an example's random choices; each has its own key.
FLIP, RANDAUG, THREE_AUGMENT, ERASE = range(4)
VIEWS = 0x76696577


def keys(seed, purpose: int):
    """PRNG keys [batch] for one purpose from the seeds of the examples, int32 [batch, 2]."""
    data = jax.lax.bitcast_convert_type(jnp.asarray(seed), jnp.uint32)
    key = jax.random.wrap_key_data(data, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in, (0, None))(key, purpose)


OWN = 0x6F776E  # of the keys of parts of the user's own, apart from those of mixup and CutMix


def apply_randaugment(key, image, data, mean):
    """The RandAugment of `data.randaug_ops`; see `augment_pixels`."""
    layers = data.randaug_layers
    if data.randaug_ops == "big_vision":
        return randaugment.randaugment(key, image, layers, data.randaug_magnitude)
    policy = timm_randaugment.Policy(
        magnitude=data.randaug_magnitude,
        std=data.randaug_std,
        increasing=data.randaug_ops == "timm_inc",
        fill=tuple(round(255 * value) for value in mean),
        bicubic=data.method.startswith("bicubic"),  # timm passes on how images are resized
    )
    return timm_randaugment.timm_randaugment(key, image, layers, policy)


def augment_pixels(data, image, seed, mean=HALF):
    """Flips and operations on colours, as `config.data` says: image uint8 [batch, H, W, 3], seed
    int32 [batch, 2] -> uint8.

    The result for an image depends on its own pixels and seed only, not on the rest of the batch.

    Args:
      mean: of the pixels, 0 to 1, with which timm's RandAugment fills what an image has left.
    """
    if data.flip:
        image = flip(keys(seed, FLIP), image)
    if data.randaug_layers:
        image = apply_randaugment(keys(seed, RANDAUG), image, data, mean)
    if data.three_augment:
        image = three_augment.three_augment(keys(seed, THREE_AUGMENT), image, data.color_jitter)
    return image


def make_preprocess(config, normalize: Callable, num_classes: int) -> Callable:
    """f(batch, key of the step) -> dict of float32 `image`, `label` [batch, classes] and `mask`,
    and `seed` as it was.
    """
    if configs.has_views(config):
        return make_views(config, normalize, num_classes)
    data = config.data
    mean = config.model.mean or HALF
    own = make_own(config)

    def preprocess(batch, key) -> dict:
        label = losses.targets(batch["label"], num_classes)
        if config.label_smoothing:
            label = optax.smooth_labels(label, config.label_smoothing)
        image = augment_pixels(data, batch["image"], batch["seed"], mean)
        image, label = own(image, label, key)
        image = normalize(image)
        if data.erase:
            image = erase.erase(keys(batch["seed"], ERASE), image, data.erase)
        image, label, mask = mix.mix_batch(
            key, image, label, batch["mask"], config.mixup, config.cutmix
        )
        return dict(image=image, label=label, mask=mask, seed=batch["seed"])

    return preprocess


def make_views(config, normalize: Callable, num_classes: int) -> Callable:
    """The same if examples have several views: `image` [batch, 2, H, W, 3] and `local` [batch,
    views, side, side, 3]; the key of the step has no effect.
    """

    def preprocess(batch, key) -> dict:
        key = keys(batch["seed"], VIEWS)
        image, local = views.augment_views(
            key, batch["image"], batch.get("local"), config.data.flip
        )
        label = losses.targets(batch["label"], num_classes)
        result = dict(image=normalize(image), label=label, mask=batch["mask"], seed=batch["seed"])
        if local is not None:
            result["local"] = normalize(local)
        return result

    return preprocess


def make_own(config) -> Callable:
    """f(image, label, key of the step) -> (image, label): the augmentations of the user's own, on
    images float32 [batch, H, W, 3], 0 to 255. Without any, nothing is changed.
    """
    parts = [own_parts.part("data.augment", name, config) for name in config.data.augment]

    def own(image, label, key):
        if parts:
            image = image.astype(jnp.float32)
        for number, part in enumerate(parts):
            part_key = jax.random.fold_in(jax.random.fold_in(key, OWN), number)
            result = part(image=image, label=label, key=part_key)
            check_result(part, result, image, label)
            image, label = result
        return image, label

    return own


def check_result(part: own_parts.OwnPart, result, image, label) -> None:
    """Raises UserError if an augmentation does not return an image and a label as it got them."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise part.error(
            f"returns {own_parts.shown(result)}, but it must return the pair (image, label)"
        )
    for name, before, after in zip(("image", "label"), (image, label), result, strict=True):
        if own_parts.shown(after) != own_parts.shown(before):
            raise part.error(
                f"returns {name} as {own_parts.shown(after)}, but it must be as it was given, "
                f"{own_parts.shown(before)}"
            )


def flips(key):
    """Which images are flipped, with probability 0.5: keys [batch] -> bool [batch]."""
    return jax.vmap(jax.random.bernoulli)(key)


def flip(key, image):
    """Flips images left and right with probability 0.5: keys [batch], image [batch, H, W, C]."""
    return jnp.where(flips(key)[:, None, None, None], image[:, :, ::-1], image)
