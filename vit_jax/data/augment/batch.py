"""From the bytes that the host sends to what the model trains on: all that happens to a batch on
the device.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.data.augment import erase, mix, randaugment, three_augment
from vit_jax.models import losses

# What an example's random draws are for; each has its own key.
FLIP, RANDAUG, THREE_AUGMENT, ERASE = range(4)


def keys(seed, purpose: int):
    """PRNG keys [batch] of one purpose from the seeds of the examples, int32 [batch, 2]."""
    data = jax.lax.bitcast_convert_type(jnp.asarray(seed), jnp.uint32)
    return jax.vmap(jax.random.fold_in, (0, None))(
        jax.random.wrap_key_data(data, impl="threefry2x32"), purpose
    )


def make_images(data, normalize: Callable) -> Callable:
    """f(image uint8 [batch, H, W, 3], seed int32 [batch, 2]) -> float32, augmented as `config.data`
    says.

    What happens to an image is a function of its own pixels and seed, whatever the rest of the
    batch.
    """

    def images(image, seed):
        if data.flip:
            image = flip(keys(seed, FLIP), image)
        if data.randaug_layers:
            image = randaugment.randaugment(
                keys(seed, RANDAUG), image, data.randaug_layers, data.randaug_magnitude
            )
        if data.three_augment:
            image = three_augment.three_augment(keys(seed, THREE_AUGMENT), image, data.color_jitter)
        image = normalize(image)
        return erase.erase(keys(seed, ERASE), image, data.erase) if data.erase else image

    return images


def make_preprocess(config, normalize: Callable, num_classes: int) -> Callable:
    """f(batch, key) -> dict of float32 `image`, `label` [batch, classes] and `mask`; `key` is of
    the step.
    """
    images = make_images(config.data, normalize)

    def preprocess(batch, key) -> dict:
        image, label = (
            images(batch["image"], batch["seed"]),
            losses.targets(batch["label"], num_classes),
        )
        label = mix.smooth(label, config.label_smoothing)
        image, label, mask = mix.mix_batch(
            key, image, label, batch["mask"], config.mixup, config.cutmix
        )
        return dict(image=image, label=label, mask=mask)

    return preprocess


def flips(key):
    """Which images are mirrored, one half of them: keys [batch] -> bool [batch]."""
    return jax.vmap(jax.random.bernoulli)(key)


def flip(key, image):
    """Mirrors each image with probability one half: keys [batch], image [batch, H, W, C]."""
    return jnp.where(flips(key)[:, None, None, None], image[:, :, ::-1], image)
