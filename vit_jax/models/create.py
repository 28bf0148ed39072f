"""Builds a model by name or by fields, whatever its architecture."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import config as configs
from vit_jax.config import own_parts
from vit_jax.distributed import runtime
from vit_jax.errors import UserError
from vit_jax.models import bit, mixer, own, variants, vit
from vit_jax.models.classifier import Classifier

ARCHITECTURES = {
    model.architecture: model for model in (vit.VisionTransformer, mixer.MlpMixer, bit.ResNet)
}

# Sizes that no model has are mistakes, which would take for ever to build.
LARGEST = {name: configs.MODEL[name].within[1] for name in ("depth", "num_classes")}
LARGEST |= dict.fromkeys(("units", "stem_units"), LARGEST["depth"])
LARGEST_SIZE = configs.MODEL["width"].within[1]  # of all others

PAIRS = ("image_size", "patch_size")
DTYPES = ("dtype", "softmax_dtype")


def pair(size) -> tuple[int, int]:
    """(height, width) from one side or both; anything else is a UserError."""
    sides = tuple(size) if isinstance(size, list | tuple | np.ndarray) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int | np.integer) for side in sides):
        raise UserError(
            f"size {size!r} is neither a whole number nor a pair of them (height, width): correct "
            "it"
        )
    return int(sides[0]), int(sides[1])


def as_dtype(name: str, value) -> jnp.dtype:
    try:
        return jnp.dtype(value)
    except TypeError:
        raise UserError(f"model {name} {value!r} is unknown: use float32 or bfloat16") from None


def check_size(name: str, value) -> None:
    """Raises UserError for a field, a number or a tuple, that is larger than in any model."""
    most = LARGEST.get(name, LARGEST_SIZE)
    for size in value if isinstance(value, tuple) else (value,):
        if isinstance(size, int | np.integer) and size > most:
            raise UserError(f"model {name}={size} is more than {most:,}: correct it")


def class_of(architecture: str) -> type[Classifier]:
    """One of `ARCHITECTURES`, or the class for a model of the user's own."""
    return own.OwnModel if configs.is_own(architecture) else ARCHITECTURES[architecture]


def field_names(architecture: str) -> set[str]:
    names = set(class_of(architecture).__dataclass_fields__)
    return names - {"parent", "name", "architecture"}


def create(
    variant: str | None = None, num_classes: int = 1000, image_size=224, **overrides
) -> Classifier:
    """Builds the module for a named variant; every field of its class may be overridden.

    Args:
      variant: a name that `variants.decode` knows, MODULE:ATTRIBUTE of the user's own, or None to
        give every size by keyword.
      image_size: side in pixels, or (height, width).
      **overrides: fields; `architecture` is one of `ARCHITECTURES`; `pre_logits=True` means as wide
        as the model, sizes may be one int, dtypes may be names.
    """
    if configs.is_own(variant):
        return create_own(variant, num_classes, image_size, overrides)
    try:
        fields = variants.decode(variant) if variant else {}
    except ValueError as error:
        raise UserError(str(error)) from None
    fields |= overrides | dict(num_classes=num_classes, image_size=image_size)
    architecture = fields.pop("architecture", "vit")
    if configs.is_own(architecture):  # of a checkpoint
        own.check_trusted(architecture)
    elif architecture not in ARCHITECTURES:
        raise UserError(
            f"unknown architecture {architecture!r}: use one of {', '.join(ARCHITECTURES)}"
        )
    known = field_names(architecture)
    unknown = sorted(set(fields) - known)
    if unknown:
        raise UserError(
            f"unknown model field {unknown[0]!r} of {architecture}: known are "
            f"{', '.join(sorted(known))}"
        )
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = tuple(value)
        if name in PAIRS:
            fields[name] = pair(value)
        if name in DTYPES:
            fields[name] = as_dtype(name, value)
        check_size(name, fields[name])
    if fields.get("pre_logits") is True:
        fields["pre_logits"] = fields.get("width", vit.VisionTransformer.width)
    if configs.is_own(architecture):
        fields["architecture"] = architecture
    model = class_of(architecture)(**fields)
    model.check()
    return model


def create_own(name: str, num_classes: int, image_size, overrides: dict) -> Classifier:
    """The module for MODULE:ATTRIBUTE of the user's own; arguments as for `create`."""
    own_parts.find(f"config key {own.KEY}", name)
    fields = own.split_settings(overrides)
    return create(None, num_classes, image_size, architecture=name, **fields)


def fields(model: Classifier) -> dict:
    """Constructor arguments as JSON-able values: `create(**fields(model))` is the same model."""
    values = {name: getattr(model, name) for name in sorted(field_names(model.architecture))}
    values |= {name: jnp.dtype(values[name]).name for name in DTYPES if name in values}
    return values | dict(architecture=model.architecture)


def abstract_params(model: Classifier) -> dict:
    """The parameter tree of a model as ShapeDtypeStructs; a new tree every time."""
    return jax.tree.map(lambda shape: shape, traced_params(model))


@functools.lru_cache(maxsize=8)  # tracing twelve layers takes half a second
def traced_params(model: Classifier) -> dict:
    image = jax.ShapeDtypeStruct((1, *model.image_size, 3), np.float32)

    def init(image):  # the key is made inside, for the devices of a plan can't make one
        return model.portable().init(jax.random.key(0), image)["params"]

    no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with no_mesh, runtime.without_collections():
        return jax.eval_shape(init, image)
