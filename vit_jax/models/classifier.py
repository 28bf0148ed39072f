"""What every architecture has: the images that it expects, and a linear head."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError

HALF = (0.5, 0.5, 0.5)


class Classifier(nn.Module):
    """Base of the models. With `num_classes=0` they return what the head reads."""

    image_size: tuple[int, int] = (224, 224)
    num_classes: int = 1000
    head_bias: float = 0.0
    head_std: float = 0.0  # of the initial head's normal distribution; 0: zeros
    dtype: jnp.dtype = jnp.float32
    mean: tuple[float, float, float] = HALF  # of the pixels, 0 to 1
    std: tuple[float, float, float] = HALF
    interpolation: str = "bilinear"
    crop: float | None = (
        None  # share of the small side that a central crop keeps; None: the whole image
    )

    scan = False  # layers are not stacked, where an architecture has no field of that name

    @property
    def preprocess(self) -> dict:
        """How images must come: resized and cropped so, then (image / 255 - mean) / std."""
        names = ("mean", "std", "image_size", "interpolation", "crop")
        return {name: getattr(self, name) for name in names}

    def normalize(self, image):
        """uint8 [batch, H, W, 3] -> float32 as `preprocess` says."""
        return normalize(image, self.mean, self.std)

    def with_scan(self, scan: bool):
        """The same model with its layers stacked or not, where it can stack them."""
        return self.clone(scan=scan) if "scan" in self.__dataclass_fields__ else self

    def check(self) -> None:
        """Raises UserError where fields do not fit together."""
        if not isinstance(self.num_classes, int) or self.num_classes < 0:
            raise UserError(
                f"model num_classes={self.num_classes!r}: give a whole number, 0 for no head"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or not all(std > 0 for std in self.std):
            raise UserError(
                f"model mean={self.mean}, std={self.std}: give three numbers each, std above 0"
            )

    def head(self, x, name: str = "head"):
        """Logits; call inside a compact method. By default the head starts at zero (arXiv
        2010.11929 section 3.2).
        """
        kernel = nn.initializers.normal(self.head_std) if self.head_std else nn.initializers.zeros
        bias = nn.initializers.constant(self.head_bias)
        return nn.Dense(self.num_classes, kernel_init=kernel, bias_init=bias, name=name)(x)


def normalize(image, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)):
    """uint8 [batch, H, W, 3] -> float32 (image / 255 - mean) / std; the defaults give [-1, 1]."""
    mean, std = np.asarray(mean), np.asarray(std)
    return image.astype(jnp.float32) / jnp.asarray(255 * std, jnp.float32) - jnp.asarray(
        mean / std, jnp.float32
    )
