"""All that happens to a training batch on the device, from uint8 images to the model's input."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax.data.augment import erase, mix, randaugment, three_augment
from vit_jax.models import losses

# Purposes of an example's random choices; each has its own key.
FLIP, RANDAUG, THREE_AUGMENT, ERASE = range(4)


def keys(seed, purpose: int):
    """PRNG keys [batch] for one purpose from the seeds of the examples, int32 [batch, 2]."""
    data = jax.lax.bitcast_convert_type(jnp.asarray(seed), jnp.uint32)
    key = jax.random.wrap_key_data(data, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in, (0, None))(key, purpose)


def make_images(data, normalize: Callable) -> Callable:
    """f(image uint8 [batch, H, W, 3], seed int32 [batch, 2]) -> float32, as `config.data` says.

    The result for an image depends on its own pixels and seed only, not on the rest of the batch.
    """

    def images(image, seed):
        if data.flip:
            image = flip(keys(seed, FLIP), image)
        if data.randaug_layers:
            key = keys(seed, RANDAUG)
            image = randaugment.randaugment(key, image, data.randaug_layers, data.randaug_magnitude)
        if data.three_augment:
            image = three_augment.three_augment(keys(seed, THREE_AUGMENT), image, data.color_jitter)
        image = normalize(image)
        if data.erase:
            image = erase.erase(keys(seed, ERASE), image, data.erase)
        return image

    return images


def make_preprocess(config, normalize: Callable, num_classes: int) -> Callable:
    """f(batch, key of the step) -> dict of float32 `image`, `label` [batch, classes] and `mask`."""
    images = make_images(config.data, normalize)

    def preprocess(batch, key) -> dict:
        image = images(batch["image"], batch["seed"])
        label = losses.targets(batch["label"], num_classes)
        if config.label_smoothing:
            label = optax.smooth_labels(label, config.label_smoothing)
        image, label, mask = mix.mix_batch(
            key, image, label, batch["mask"], config.mixup, config.cutmix
        )
        return dict(image=image, label=label, mask=mask)

    return preprocess


def flips(key):
    """Which images are flipped, with probability 0.5: keys [batch] -> bool [batch]."""
    return jax.vmap(jax.random.bernoulli)(key)


def flip(key, image):
    """Flips images left and right with probability 0.5: keys [batch], image [batch, H, W, C]."""
    return jnp.where(flips(key)[:, None, None, None], image[:, :, ::-1], image)
