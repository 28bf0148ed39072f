"""What timm 1.0.31 and torchvision 0.29.1 make of given images, draws and parameters: the golden
data of the named variants of a recipe.

    python tests/data/peer_variants.py FOLDER

writes randaug_timm.npz, resize_torchvision.npz and init_timm.npz, with a Python that has timm.
"""

import json
import pathlib
import random
import sys
import types

import numpy as np

SIZE = (18, 22)
FILL = (124, 116, 104)  # the mean of ImageNet
MAGNITUDES = (0, 3, 7.3, 10)
# The operations of rand-inc1, and those that differ without it.
MOVED = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
FIXED = ("AutoContrast", "Equalize", "Invert")
STRONGER = ("Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast", "Brightness", "Sharpness")
# Keeping no bit at all is an error of Pillow 13; before, the image became black.
REFUSED = (("Posterize", 0), ("PosterizeIncreasing", 10))
DRAWS = 3000
VALUES = 600  # of each parameter


def images() -> np.ndarray:
    """One image with a smooth, a noisy and a flat part, and one of noise in few levels: uint8 [2,
    H, W, 3].
    """
    rng = np.random.default_rng(0)
    height, width = SIZE
    y, x = np.mgrid[:height, :width]
    smooth = 128 + 90 * np.sin(np.stack([y / 5 + x / 9, x / 7, y / 4 - x / 6], -1))
    smooth[10:, :9] = rng.integers(0, 256, (8, 9, 3))
    smooth[2:7, 14:] = (200, 30, 90)
    levels = rng.integers(60, 180, (*SIZE, 3))
    return np.stack([smooth, levels]).astype(np.uint8)


def cases() -> list[dict]:
    """Every operation with magnitudes and signs; `bicubic` only matters for those that move."""
    found = []
    for magnitude in MAGNITUDES:
        for negative in (False, True):
            arguments = dict(magnitude=magnitude, negative=negative)
            for bicubic in (True, False):
                found += [dict(arguments, op=name, bicubic=bicubic) for name in MOVED]
            found += [dict(arguments, op=name + "Increasing") for name in STRONGER[3:]]
        alone = dict(magnitude=magnitude, negative=False)
        found += [dict(alone, op=name) for name in STRONGER]
        found += [dict(alone, op=name + "Increasing") for name in STRONGER[:2]]
    found += [dict(op=name, magnitude=5, negative=False) for name in FIXED]
    return [case for case in found if (case["op"], case["magnitude"]) not in REFUSED]


def distorted(image: np.ndarray, case: dict) -> np.ndarray:
    from PIL import Image
    from timm.data import auto_augment

    # timm negates an argument if its random number is above 0.5.
    auto_augment.random = types.SimpleNamespace(random=lambda: float(case["negative"]))
    kind = Image.Resampling.BILINEAR
    if case.get("bicubic", True):
        kind = Image.Resampling.BICUBIC
    hparams = dict(img_mean=FILL, interpolation=kind)
    operation = auto_augment.AugmentOp(case["op"], 1.0, case["magnitude"], hparams)
    result = np.asarray(operation(Image.fromarray(image)))
    auto_augment.random = random
    return result


def draws(policy: str = "rand-m9-mstd0.5-inc1") -> dict[str, np.ndarray]:
    """Of `DRAWS` images and two layers each: the operation by name, "" if it is skipped; its
    magnitude, NaN if it has none; its sign, 0 if it has none.
    """
    from timm.data import auto_augment

    random.seed(0)
    np.random.seed(0)
    transform = auto_augment.rand_augment_transform(policy, dict(img_mean=FILL))
    seen = []

    def record(operation):
        level_fn = operation.level_fn

        def level(magnitude, hparams):
            found["magnitude"] = magnitude
            return level_fn(magnitude, hparams)

        def apply(image, *args, **options):
            found.update(op=operation.name)
            if operation.name in MOVED:
                found["sign"] = np.sign(args[0])
            return image

        operation.aug_fn = apply
        if level_fn is not None:
            operation.level_fn = level

    for operation in transform.ops:
        record(operation)
    for _ in range(DRAWS):
        for operation in np.random.choice(transform.ops, transform.num_layers):
            found = dict(op="", magnitude=np.nan, sign=0)
            operation(None)
            seen.append(found)
    return dict(
        op=np.array([one["op"] for one in seen]),
        magnitude=np.float32([one["magnitude"] for one in seen]),
        sign=np.int8([one["sign"] for one in seen]),
    )


def randaug_timm() -> dict[str, np.ndarray]:
    given = images()
    wanted = cases()
    outputs = [[distorted(image, case) for image in given] for case in wanted]
    config = json.dumps(dict(cases=wanted, fill=FILL))
    drawn = {f"draws/{name}": value for name, value in draws().items()}
    return dict(image=given, output=np.stack(outputs), config=config, **drawn)


def resize_torchvision() -> dict[str, np.ndarray]:
    """Resized windows of PIL images: some smaller and some larger than the result, of 16 pixels."""
    from PIL import Image
    from torchvision.transforms import InterpolationMode, functional

    image = Image.fromarray(images()[0]).resize((90, 70), Image.Resampling.BICUBIC)
    windows = [[0, 0, 70, 90], [3, 11, 61, 47], [20, 30, 9, 13], [8, 1, 16, 16]]
    found = dict(image=np.asarray(image), windows=np.int32(windows), config=json.dumps({}))
    for kind in (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC):
        crops = [functional.resized_crop(image, *window, [16, 16], kind) for window in windows]
        found[kind.value] = np.stack([np.asarray(crop) for crop in crops])
    return found


def sample(values: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.permutation(values.ravel())[:VALUES].astype(np.float32)


def init_timm() -> dict[str, np.ndarray]:
    """Values of every parameter, in the way of weight_init='' and of 'jax'."""
    import timm
    import torch

    torch.manual_seed(0)
    sizes = dict(num_classes=100, depth=1, img_size=64)
    pooled = dict(global_pool="map", class_token=False, reg_tokens=4, init_values=1e-4)
    models = dict(
        timm=timm.create_model("deit_tiny_distilled_patch16_224", **sizes),
        timm_map=timm.create_model("vit_tiny_patch16_224", **sizes, **pooled),
        jax=timm.create_model("vit_tiny_patch16_224", **sizes, weight_init="jax"),
    )
    found = dict(config=json.dumps(dict(depth=1, image_size=64, num_classes=100)))
    for name, model in models.items():
        for leaf, value in model.named_parameters():
            found[f"{name}/{leaf}"] = sample(value.detach().numpy())
    return found


FILES = dict(randaug_timm=randaug_timm, resize_torchvision=resize_torchvision, init_timm=init_timm)

if __name__ == "__main__":
    for file, make in FILES.items():
        np.savez_compressed(pathlib.Path(sys.argv[1]) / f"{file}.npz", **make())
