"""How an image is prepared for evaluation: resized and cropped as the weights expect, or as the
config says.

The sizes are rounded as in timm 1.0.31 (its transforms of evaluation) and transformers 5.24 (its
processors with torchvision).
"""

import dataclasses
import math

from vit_jax.errors import UserError
from vit_jax.models.classifier import Classifier


@dataclasses.dataclass(frozen=True)
class Preparation:
    """Resizes an image to `target`, in one of the ways of `classifier.RESIZE`, and crops its
    centre.
    """

    size: tuple[int, int]  # (height, width) of the result
    target: tuple[int, int]  # the same before the crop, of an image with the result's aspect ratio
    resize: str = "squash"
    method: str = "bilinear"  # of resizing
    pixels_of: str = "tensorflow"  # the library whose operations are used
    fill: tuple[int, int, int] = (0, 0, 0)  # colour of a border, which resize="longer" leaves

    @property
    def is_cropped(self) -> bool:
        return self.resize != "squash" or self.target != self.size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of an image after resizing, as timm and transformers round it."""
        if self.resize == "squash":
            return self.target
        shorter = min(self.target)
        is_square = shorter == max(self.target)
        if self.resize == "shorter" and (is_square or self.pixels_of != "timm"):
            longer = int(shorter * max(height, width) / min(height, width))
            return (shorter, longer) if height <= width else (longer, shorter)
        ratios = (height / self.target[0], width / self.target[1])
        ratio = min(ratios) if self.resize == "shorter" else max(ratios)
        return round(height / ratio), round(width / ratio)

    def border(self, extra: int) -> int:
        """Pixels to leave out before the crop, of `extra` in all; below 0: to add."""
        if extra < 0:
            return -(-extra // 2)
        return round(extra / 2) if self.pixels_of == "timm" else extra // 2

    def crops_as_in(self, library: str) -> bool:
        """Whether another library leaves out the same border of those sides that have the same
        length for every image. Half of an odd border is rounded down, or to the even number.
        """
        extra = [before - after for before, after in zip(self.target, self.size, strict=True)]
        other = dataclasses.replace(self, pixels_of=library)
        sides = extra if self.resize == "squash" else extra[:1]
        return all(self.border(side) == other.border(side) for side in sides)

    def __str__(self) -> str:
        sides = self.target
        if self.resize == "shorter" and self.pixels_of != "timm":
            sides = (min(self.target),) * 2
        side = sides[0] if sides[0] == sides[1] else f"{sides[0]} x {sides[1]}"
        what = "the whole image" if self.resize == "squash" else f"the {self.resize} side"
        text = f"{what} resized to {side}, {self.method} as in {self.pixels_of}"
        if not self.is_cropped:
            return text
        return f"{text}, then the central {self.size[0]} x {self.size[1]}"


def target(size: tuple[int, int], crop: float, library: str) -> tuple[int, int]:
    """(height, width) of which a central crop of `size` is the share `crop`."""
    whole = math.floor if library == "timm" else round
    return whole(size[0] / crop), whole(size[1] / crop)


def expected(model: Classifier, size: tuple[int, int] | None = None) -> Preparation:
    """What a model expects; `size`: (height, width) of the result, if not that of the model."""
    size = size or model.image_size
    return Preparation(
        size=size,
        target=target(size, model.crop or 1.0, model.pixels_of),
        resize=model.resize if model.crop else "squash",
        method=model.interpolation,
        pixels_of=model.pixels_of,
        fill=tuple(round(255 * value) for value in model.mean),
    )


def configured(data, size: tuple[int, int], model: Classifier | None = None) -> Preparation:
    """What `data` of an evaluation says, and otherwise a model expects.

    Args:
      data: the keys `crop`, `method`, and `fraction` for a central crop.
      size: (height, width) of the result.
      model: None: the images of the published weights.

    Raises:
      UserError: TensorFlow, which `data.method` asks for, can't do it.
    """
    how = expected(model or Classifier(), size)
    if data.crop == "resize":
        how = dataclasses.replace(how, resize="squash", target=size)
    if data.crop == "central":
        cropped_from = target(size, data.fraction, how.pixels_of)
        method = "area" if how.pixels_of == "tensorflow" else how.method
        how = dataclasses.replace(how, resize="shorter", target=cropped_from, method=method)
    if data.method:
        how = dataclasses.replace(how, method=data.method, pixels_of="tensorflow")
        if how.resize == "longer" or min(how.target) < min(how.size):
            raise UserError(
                f"data.method={data.method} of an evaluation adds no border to images, which these "
                "weights expect: leave it out, or set its data.crop, too"
            )
    return how
