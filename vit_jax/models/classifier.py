"""What every architecture has: the images that it expects, a linear head, and facts that others ask
for.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError

HALF = (0.5, 0.5, 0.5)
PILLOW = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
# Whose operations resize and crop images, with their interpolations.
LIBRARIES = {"tensorflow": ("bilinear", "bicubic"), "timm": PILLOW, "transformers": PILLOW}
# What is resized before a crop: one side, with the aspect ratio kept, or both. If it is the longer
# side, a border fills the crop.
RESIZE = ("shorter", "longer", "squash")
PREPARATION = ("pixels_of", "interpolation", "crop", "resize")  # the fields for evaluation images


class Classifier(nn.Module):
    """Base of the models. With `num_classes=0` they return what the head reads.

    Every architecture also defines `architecture` (its name in `create`), `width`, `cell` (pixels
    per token), `grid` (tokens) and `flops` (forward FLOPs of one image: 2 per multiply-add of every
    matrix product and convolution, attention included).
    """

    image_size: tuple[int, int] = (224, 224)
    num_classes: int = 1000
    head_bias: float = 0.0
    head_std: float = 0.0  # of the initial head's normal distribution; 0: zeros, but in timm's way
    dtype: jnp.dtype = jnp.float32
    mean: tuple[float, float, float] = HALF  # of the pixels, 0 to 1
    std: tuple[float, float, float] = HALF
    # How images are prepared for evaluation; see preparation.py.
    pixels_of: str = "tensorflow"  # one of LIBRARIES
    interpolation: str = "bilinear"
    # The central crop as a share of what the image is resized to, such as 0.875; None: the whole
    # image.
    crop: float | None = None
    resize: str = "shorter"  # one of RESIZE

    # Facts about an architecture, unless it says otherwise.
    depth = 0  # layers on a sequence of tokens; 0: none
    num_heads = 0  # of attention in every layer; 0: none
    stem_units = None  # bottlenecks by stage of the ResNet stem of a hybrid
    prefix = ()  # (parameter, tokens) before the patch tokens, in order
    distilled = False  # whether there is a second head, for what a teacher says
    can_stack = False  # whether `scan=True` can run the layers as one loop over stacked parameters
    scan = False
    remat_choices = ("none",)  # from the most memory to the least
    any_num_tokens = True  # false: the weights fit one number of tokens and cannot be resampled

    @property
    def num_prefix(self) -> int:
        return sum(count for _, count in self.prefix)

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes by name that the number of devices of tensor parallelism must divide."""
        return {}

    @property
    def preprocess(self) -> dict:
        """How images are resized and cropped; then comes (image / 255 - mean) / std."""
        names = ("mean", "std", "image_size", "interpolation", "crop")
        return {name: getattr(self, name) for name in names}

    def normalize(self, image):
        """uint8 [batch, H, W, 3] -> float32 as `preprocess` says."""
        return normalize(image, self.mean, self.std)

    def denormalize(self, image):
        """The inverse of `normalize`, but 0 to 1: float32 [batch, H, W, 3]."""
        return image * jnp.asarray(self.std) + jnp.asarray(self.mean)

    def check_image(self, image) -> None:
        """Raises UserError for an array that can't be a batch of normalised images [batch, H, W,
        3]; the message says what to do.
        """
        shape = np.shape(image)
        if not jnp.issubdtype(jnp.result_type(image), jnp.floating):
            raise UserError(
                f"the image is {jnp.result_type(image).name}, but the model expects normalised "
                "floats: use model.normalize(image), or vit_jax.preprocess(model, images)"
            )
        problem = shape_problem(shape)
        if problem:
            raise UserError(
                f"the image has shape {shape}, but the model expects [batch, height, width, 3]: "
                f"{problem}"
            )

    def with_scan(self, scan: bool):
        """The same model with its layers stacked or not, if it can stack them."""
        return self.clone(scan=scan) if self.can_stack else self

    def portable(self):
        """The same model without choices that only some platforms can run."""
        return self

    def check(self) -> None:
        """Raises UserError if fields do not fit together."""
        if not isinstance(self.num_classes, int) or self.num_classes < 0:
            raise UserError(
                f"model num_classes={self.num_classes!r}: give a whole number, 0 for no head"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise UserError(
                f"model mean={self.mean}, std={self.std}: give three numbers each, std above 0"
            )
        self.check_choice("pixels_of", LIBRARIES)
        self.check_choice("interpolation", LIBRARIES[self.pixels_of])
        # Only the others add a border to an image that is smaller than the crop.
        is_published = self.pixels_of == "tensorflow"
        self.check_choice("resize", ("shorter", "squash") if is_published else RESIZE)
        most = 1 if is_published else min(self.image_size)
        if self.crop is not None and not 0 < self.crop <= most:
            raise UserError(f"model crop={self.crop}: give a share from 0 to {most}, or None")

    def check_choice(self, field: str, choices) -> None:
        value = getattr(self, field)
        if value not in choices:
            raise UserError(f"model {field} {value!r} is unknown: use one of {', '.join(choices)}")

    def head(self, x, name: str = "head"):
        """Logits; call inside a compact method. By default the head starts at zero (arXiv
        2010.11929 section 3.2).
        """
        kernel = nn.initializers.normal(self.head_std) if self.head_std else nn.initializers.zeros
        bias = nn.initializers.constant(self.head_bias)
        return nn.Dense(self.num_classes, kernel_init=kernel, bias_init=bias, name=name)(x)

    def logits(self, x):
        """What a model returns: the head's logits, or x if there are no classes; float32."""
        if self.num_classes:
            x = self.head(x)
        return x.astype(jnp.float32)


def normalize(image, mean=HALF, std=HALF):
    """uint8 [batch, H, W, 3] -> float32 (image / 255 - mean) / std; the defaults give [-1, 1]."""
    mean = np.asarray(mean)
    std = np.asarray(std)
    scale = jnp.asarray(255 * std, jnp.float32)
    return image.astype(jnp.float32) / scale - jnp.asarray(mean / std, jnp.float32)


def shape_problem(shape: tuple[int, ...]) -> str:
    """What to do about an array that is not [batch, height, width, 3]; "" if it is."""
    if len(shape) == 3 and shape[-1] == 3:
        return "add the batch axis, image[None]"
    if len(shape) in (3, 4) and shape[-1] != 3 and shape[-3] == 3:
        return "the channels come first: move them, np.moveaxis(image, -3, -1)"
    if len(shape) == 4 and shape[-1] == 1:
        return "it is grey: repeat the channel, np.repeat(image, 3, axis=-1)"
    if len(shape) in (2, 3) and shape[-1] not in (1, 3, 4):
        return "it is grey: add channels, np.stack([image] * 3, axis=-1)"
    if len(shape) == 4 and shape[-1] == 4:
        return "leave out the alpha channel, image[..., :3]"
    if len(shape) != 4 or shape[-1] != 3:
        return "give images with three channels, red, green and blue"
    return ""
