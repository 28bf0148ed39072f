"""Flips and colours of views: torchvision's pixels, DINO's chances, and independence of all else in
a batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from conftest import golden
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image, ImageFilter

from vit_jax import config as configs
from vit_jax.data.augment import hue, views
from vit_jax.data.augment.batch import VIEWS, keys, make_preprocess

DATA, _ = golden("views_torchvision")
COUNT = 4  # views, of which two are local
SEEDS = np.random.default_rng(0).integers(-(2**31), 2**31, (3000, 2)).astype(np.int32)


def test_hue_is_turned_as_by_torchvision():
    """Against functional.adjust_hue of torchvision 0.29.1 on PIL images: noise, smooth images, and
    the corners of the colour cube. Pillow computes saturation in floats, which may be less by one.
    """
    for share, wanted in zip(DATA["hue_share"], DATA["hue"], strict=True):
        image = DATA["image"][: len(wanted)]
        found = np.asarray(jax.jit(hue.turn)(image, np.full(len(image), share)))
        off = np.abs(found.astype(int) - wanted)
        assert off.max() <= 6 and (off > 0).mean() < 0.002
        np.testing.assert_array_equal(found[4], wanted[4])


def test_colours_are_jittered_as_by_torchvision():
    """Against adjust_brightness, adjust_contrast, adjust_saturation and adjust_hue, in six orders;
    the last image is grey.
    """
    found = jax.jit(views.color_jitter)(DATA["image"], DATA["factors"], DATA["orders"])
    off = np.abs(np.asarray(found).astype(int) - DATA["jittered"])
    assert off.max() <= 6 and (off > 0).mean() < 0.005
    assert not off[5].any()


def choices(seeds, count: int) -> dict:
    chosen = jax.jit(lambda seed: views.choose(keys(seed, VIEWS), count))(seeds)
    return {name: np.asarray(x) for name, x in chosen.items()}


def test_choices_have_the_chances_of_dino():
    chosen = choices(SEEDS, COUNT)
    for name, of_first in choices(SEEDS[:5], 1).items():  # whatever the number of views
        np.testing.assert_array_equal(of_first, chosen[name][:5, :1])
    expected = dict(
        flip=(0.5, 0.5, 0.5, 0.5),
        jitter=(0.8, 0.8, 0.8, 0.8),
        grey=(0.2, 0.2, 0.2, 0.2),
        blur=(1.0, 0.1, 0.5, 0.5),
        solarize=(0.0, 0.2, 0.0, 0.0),
    )
    for name, chances in expected.items():
        for view, chance in enumerate(chances):
            tolerance = 4 * np.sqrt(chance * (1 - chance) / len(SEEDS))
            assert abs(chosen[name][:, view].mean() - chance) <= tolerance
    assert scipy.stats.kstest(chosen["radius"].ravel(), "uniform", (0.1, 1.9)).pvalue > 1e-3
    ranges = ((0.6, 0.8), (0.6, 0.8), (0.8, 0.4), (-0.1, 0.2))
    for values, (low, width) in zip(chosen["factors"].reshape(-1, 4).T, ranges, strict=True):
        assert scipy.stats.kstest(values, "uniform", (low, width)).pvalue > 1e-3
    orders = chosen["order"].reshape(-1, 4) @ [64, 16, 4, 1]
    assert scipy.stats.chisquare(np.unique(orders, return_counts=True)[1]).pvalue > 1e-3
    assert len(np.unique(orders)) == 24
    first = np.stack([x[:, 0].reshape(len(SEEDS), -1)[:, 0] for x in chosen.values()])
    second = np.stack([x[:, 1].reshape(len(SEEDS), -1)[:, 0] for x in chosen.values()])
    varied = (first.std(1) > 0) & (second.std(1) > 0)
    for one, other in zip(first[varied], second[varied], strict=True):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(len(SEEDS))


def test_what_is_chosen_is_carried_out():
    """Each operation alone, of Pillow or numpy."""
    image = np.asarray(DATA["image"][[2, 3]])
    names = ("flip", "jitter", "grey", "blur", "solarize")
    none = {name: np.zeros(2, bool) for name in names}
    none |= dict(radius=np.float32([0.7, 1.9]), factors=DATA["factors"][2:4])
    none |= dict(order=DATA["orders"][2:4])
    run = jax.jit(views.carry_out, static_argnums=2)
    blurred = [
        Image.fromarray(x).filter(ImageFilter.GaussianBlur(float(r)))
        for x, r in zip(image, none["radius"], strict=True)
    ]
    grey = [Image.fromarray(x).convert("L").convert("RGB") for x in image]
    wanted = dict(
        flip=image[:, :, ::-1],
        jitter=DATA["jittered"][2:4],
        grey=np.stack([np.asarray(x) for x in grey]),
        blur=np.stack([np.asarray(x) for x in blurred]),
        solarize=np.where(image < 128, image, 255 - image),
    )
    np.testing.assert_array_equal(run(none, image, True), image)
    for name in names:
        found = run(none | {name: np.ones(2, bool)}, image, True).astype(int)
        off = np.abs(found - wanted[name].astype(int))
        assert off.max() <= (6 if name == "jitter" else 1), name
        assert (off > 0).mean() < 0.02, name
        assert (found != image).any(), name
    flipped = run(none | dict(flip=np.ones(2, bool)), image, False)
    np.testing.assert_array_equal(flipped, image)


def batch_of(rows: int) -> dict:
    rng = np.random.default_rng(0)
    return dict(
        image=rng.integers(0, 256, (rows, 2, 12, 12, 3), np.uint8),
        local=rng.integers(0, 256, (rows, 3, 8, 8, 3), np.uint8),
        label=np.arange(rows, dtype=np.int32),
        mask=np.ones(rows, np.float32),
        seed=SEEDS[:rows],
    )


def normalize(image):
    return image.astype(jnp.float32) / 255


def test_views_do_not_depend_on_the_rest_of_the_batch():
    config = configs.from_values({"objective": "dino"})
    run = jax.jit(make_preprocess(config, normalize, 8))
    batch = batch_of(8)
    whole = run(batch, jax.random.key(0))
    assert whole["image"].shape == (8, 2, 12, 12, 3) and whole["image"].dtype == jnp.float32
    assert whole["local"].shape == (8, 3, 8, 8, 3) and whole["label"].shape == (8, 8)
    turned = run(jax.tree.map(lambda x: x[::-1], batch), jax.random.key(1))
    mesh = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    sharded = jax.device_put(batch, mesh)
    compiled = run.lower(sharded, jax.random.key(0)).compile()
    text = compiled.as_text()
    assert not any(name in text for name in ("all-gather", "all-to-all", "all-reduce"))
    sharded = compiled(sharded, jax.random.key(0))
    for name in ("image", "local", "mask", "seed"):
        np.testing.assert_array_equal(turned[name], whole[name][::-1])
        np.testing.assert_array_equal(sharded[name], whole[name])


def test_equal_crops_become_different_views():
    batch = batch_of(4)
    batch["image"] = np.broadcast_to(batch["image"][:1, :1], batch["image"].shape)
    config = configs.from_values({"objective": "dino", "data.views.local_count": 0})
    del batch["local"]
    result = jax.jit(make_preprocess(config, normalize, 0))(batch, jax.random.key(0))
    assert "local" not in result and result["label"].shape == (4, 0)
    assert len({view.tobytes() for view in np.asarray(result["image"]).reshape(8, -1)}) == 8
