"""preprocessor_config.json: how the image processors of transformers prepare images."""

import logging
import re

from vit_jax.errors import UserError
from vit_jax.models.classifier import Classifier
from vit_jax.models.preparation import expected

log = logging.getLogger(__name__)

# Defaults of the image processors of transformers 5.24; `square`: a size of one number is of both
# sides, not of the shorter one.
COMMON = dict(do_resize=True, do_rescale=True, rescale_factor=1 / 255, do_normalize=True)
COMMON |= dict(size=224, square=True, resample=3, do_center_crop=False, crop_size=224)
COMMON |= dict(image_mean=(0.5,) * 3, image_std=(0.5,) * 3)
CLIP = dict(square=False, do_center_crop=True)
CLIP |= dict(image_mean=(0.48145466, 0.4578275, 0.40821073))
CLIP |= dict(image_std=(0.26862954, 0.26130258, 0.27577711))
PROCESSORS = {
    "ViT": COMMON | dict(resample=2),
    "DeiT": COMMON | dict(size=256, do_center_crop=True),
    "Siglip": COMMON | dict(size=dict(height=224, width=224), square=False),
    "CLIP": COMMON | CLIP,
    "Bit": COMMON | CLIP,
    "Beit": COMMON,
    "Dinov2": COMMON | CLIP,  # it has Bit's
}
RESAMPLING = dict(enumerate(("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")))  # PIL


def read(processor: dict, config: dict, path) -> dict:
    """Fields of a model that say how images are prepared, from preprocessor_config.json; {} if it
    is empty.

    What it leaves out has the default of its class, or of the model's.
    """
    if not processor:
        return {}
    name = str(processor.get("image_processor_type") or processor.get("feature_extractor_type"))
    name = re.sub(r"(ImageProcessor|FeatureExtractor).*", "", name)
    model_type = str(config.get("model_type")).split("_")[0]
    names = {known.lower(): known for known in PROCESSORS}
    standard = name if name in PROCESSORS else names.get(model_type, "ViT")
    if name not in (standard, "None"):
        log.warning(
            "%s: its processor, %s, is not known here: images are prepared as by %s's",
            *(path, name, standard),
        )
    settings = PROCESSORS[standard] | without_none(processor)
    return dict(
        pixels_of="transformers",
        interpolation=RESAMPLING.get(settings["resample"], str(settings["resample"])),
        **normalization(settings),
        **geometry(settings, path),
    )


def without_none(values: dict) -> dict:
    return {key: value for key, value in values.items() if value is not None}


def normalization(settings: dict) -> dict:
    """mean and std of pixels from 0 to 1, by what transformers does to those from 0 to 255."""
    scale = 255 * settings["rescale_factor"] if settings["do_rescale"] else 255.0
    mean = settings["image_mean"] if settings["do_normalize"] else (0.0,) * 3
    std = settings["image_std"] if settings["do_normalize"] else (1.0,) * 3
    if scale == 1:
        return dict(mean=tuple(mean), std=tuple(std))
    return dict(mean=tuple(x / scale for x in mean), std=tuple(x / scale for x in std))


def geometry(settings: dict, path) -> dict:
    """The fields crop and resize.

    Raises:
      UserError: sizes that have no such fields.
    """
    size = settings["size"]
    if isinstance(size, int):
        size = dict(height=size, width=size) if settings["square"] else dict(shortest_edge=size)
    if isinstance(size, list):
        size = dict(zip(("height", "width"), size, strict=True))
    size = without_none(size)
    sides = tuple(size.get(side) for side in ("height", "width"))
    is_squashed = all(sides)
    if not settings["do_resize"] or (not is_squashed and set(size) != {"shortest_edge"}):
        log.warning(
            "%s: its processor does not resize images to one size (%s): here, whole images are "
            "resized",
            *(path, f"do_resize={settings['do_resize']}, size={size}"),
        )
        return dict(crop=None)
    target = sides if is_squashed else (size["shortest_edge"],) * 2
    if not settings["do_center_crop"]:
        return dict(crop=None) if is_squashed else dict(crop=1.0, resize="shorter")
    crop = cropped(settings["crop_size"])
    if not crop:
        raise UserError(
            f"{path}: its processor crops images, but crop_size={settings['crop_size']} has no "
            "height and width: correct preprocessor_config.json"
        )
    share = crop[0] / target[0] if is_squashed else min(crop) / target[0]
    if is_squashed and round(crop[1] / share) != target[1]:
        raise UserError(
            f"{path}: its processor crops {crop} from {target}, of each side another share, which "
            "is not supported: make crop_size and size in preprocessor_config.json proportional"
        )
    return dict(crop=share, resize="squash" if is_squashed else "shorter")


def cropped(size) -> tuple[int, int] | None:
    """(height, width) of a crop_size, which is a number, a list or a dict."""
    if isinstance(size, dict):
        height = size.get("height") or size.get("width")
        return height and (height, size.get("width") or height)
    return (size, size) if isinstance(size, int) else size and tuple(size)


def obstacles(model: Classifier) -> list[str]:
    """What no processor can do to images."""
    how = expected(model)
    by_both_sides = how.resize == "shorter" and how.pixels_of != "transformers"
    features = {
        "images with a border": how.resize == "longer",
        "a crop of images that are not square": by_both_sides and how.size[0] != how.size[1],
        f"a crop of {how.size} from {how.target}": not how.crops_as_in("transformers"),
        f"{model.interpolation} interpolation": model.interpolation in ("box", "hamming"),
    }
    return [name for name, present in features.items() if present]


def write(model: Classifier, name: str) -> dict:
    """preprocessor_config.json; `name`: ViT or DeiT."""
    numbers = {how: number for number, how in RESAMPLING.items()}
    how = expected(model)
    height, width = how.target
    processor = dict(
        image_processor_type=f"{name}ImageProcessor",
        do_resize=True,
        size=dict(height=height, width=width),
        resample=numbers[model.interpolation],
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        do_center_crop=False,  # DeiT's default is to crop to 224
        image_mean=list(model.mean),
        image_std=list(model.std),
    )
    if how.is_cropped:  # before transformers 5, ViT's can't crop, and DeiT's resizes both sides
        is_squashed = how.resize == "squash"
        processor |= dict(
            image_processor_type="DeiTImageProcessor" if is_squashed else "BitImageProcessor",
            size=processor["size"] if is_squashed else dict(shortest_edge=min(how.target)),
            do_center_crop=True,
            crop_size=dict(height=how.size[0], width=how.size[1]),
        )
    return processor
