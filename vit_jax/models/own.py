"""A model of the user's own as one of ours: `model.variant` = MODULE:ATTRIBUTE, a Flax module class
or a function that returns a module.

The module takes images [batch, H, W, 3] float32, normalised, and returns logits [batch, classes].
Its parameters keep their names. Its layer `head` is the one whose input are the features, and which
fine-tuning replaces.
"""

import inspect
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax import config as configs
from vit_jax.config import own_parts
from vit_jax.errors import UserError
from vit_jax.models.classifier import Classifier
from vit_jax.models.flops import count_flops

KEY = "model.variant"


class OwnModel(Classifier):
    """Image [batch, H, W, 3] normalised as `preprocess` says -> logits [batch, classes] float32.

    With `num_classes=0` it returns what the layer `head` reads.
    """

    architecture: str = ""  # MODULE:ATTRIBUTE
    # JSON of the keys of `config.model` that differ from the defaults, and of `config.user`.
    settings: str = "{}"

    def config(self) -> ml_collections.FrozenConfigDict:
        """What the module gets as `config`: only the groups `model` and `user`."""
        given = json.loads(self.settings)
        model = dict(configs.defaults().model) | given.get("model", {})
        model |= dict(num_classes=self.num_classes, dtype=jnp.dtype(self.dtype).name)
        return ml_collections.FrozenConfigDict(dict(model=model, user=given.get("user", {})))

    def part(self) -> own_parts.OwnPart:
        return own_parts.part(KEY, self.architecture, self.config())

    def setup(self):
        part = self.part()
        size = self.image_size[0] if len(set(self.image_size)) == 1 else self.image_size
        inner = part(num_classes=max(self.num_classes, 1), image_size=size)
        if not isinstance(inner, nn.Module):
            raise part.error(f"gives {own_parts.shown(inner)}, but it must give a Flax module")
        self.inner = inner
        nn.share_scope(self, self.inner)

    def __call__(self, image, train: bool = False):
        part = self.part()
        knows_train = "train" in inspect.signature(type(self.inner).__call__).parameters
        options = dict(train=train) if knows_train else {}
        apply = part.guard(self.inner.__call__)
        if self.num_classes:
            return to_float32(part, apply(image, **options))
        seen = []

        def skip_head(call, arguments, more, context):
            if context.module.path == ("head",) and context.method_name == "__call__":
                seen.append(arguments[0])
                return arguments[0]
            return call(*arguments, **more)

        with nn.intercept_methods(skip_head):
            apply(image, **options)
        if not seen:
            raise part.error(
                "has no layer named 'head': name the last one so, as in nn.Dense(num_classes, "
                'name="head")'
            )
        return to_float32(part, seen[0])

    @property
    def cell(self) -> tuple[int, int]:
        return self.image_size

    @property
    def grid(self) -> tuple[int, int]:
        return (1, 1)

    @property
    def width(self) -> int:
        return features_shape(self)[-1]

    @property
    def flops(self) -> int:
        image = jax.ShapeDtypeStruct((1, *self.image_size, 3), jnp.float32)
        return count_flops(self.apply, variables_of(self), image)

    def check(self) -> None:
        """Raises UserError if the module does not fit."""
        super().check()
        part = self.part()
        variables = variables_of(self)
        others = sorted(variables.keys() - {"params"})
        if others:
            raise part.error(
                f"has variables of the kind {others[0]!r}, but a state has only parameters: use "
                "GroupNorm or LayerNorm in place of BatchNorm"
            )
        batch = 2
        image = jax.ShapeDtypeStruct((batch, *self.image_size, 3), jnp.float32)
        result = jax.eval_shape(
            lambda v, x: self.apply(v, x, train=True, rngs={"dropout": jax.random.key(0)}),
            *(variables, image),
        )
        if self.num_classes and result.shape != (batch, self.num_classes):
            raise part.error(
                f"returns {own_parts.shown(result)} for images {list(image.shape)}, but it must "
                f"return logits {[batch, self.num_classes]}"
            )
        features = features_shape(self)
        if len(features) != 2:
            raise part.error(
                f"gives its layer 'head' an input of shape {list(features)}, but it must be "
                "[batch, width], the features of each image"
            )


def to_float32(part: own_parts.OwnPart, x):
    if not isinstance(x, jax.Array):
        raise part.error(f"returns {own_parts.shown(x)}, but it must return an array of logits")
    return x.astype(jnp.float32)


def variables_of(model: OwnModel) -> dict:
    """All variables of a new model as ShapeDtypeStructs."""
    image = jax.ShapeDtypeStruct((1, *model.image_size, 3), np.float32)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.eval_shape(model.init, jax.random.key(0), image)


def features_shape(model: OwnModel) -> tuple[int, ...]:
    """That of the features of one image."""
    headless = model.clone(num_classes=0)
    image = jax.ShapeDtypeStruct((1, *model.image_size, 3), np.float32)
    return jax.eval_shape(headless.apply, variables_of(headless), image).shape


def split_settings(overrides: dict) -> dict:
    """Arguments of `create` for a model of the user's own as fields of OwnModel: other keys of
    `config.model`, and `user`, become `settings`.
    """
    fields = {name: value for name, value in overrides.items() if name in FIELDS}
    rest = {name: value for name, value in overrides.items() if name not in FIELDS}
    user = rest.pop("user", {})
    unknown = sorted(rest.keys() - configs.MODEL.keys())
    if unknown:
        raise UserError(
            f"unknown model field {unknown[0]!r} of a model of your own: keys of your own go into "
            "config.user, or user=dict(...)"
        )
    if rest or user:
        fields["settings"] = json.dumps(dict(model=rest, user=user), sort_keys=True)
    return fields


FIELDS = set(OwnModel.__dataclass_fields__) - {"parent", "name"}


def check_trusted(architecture: str) -> None:
    """Raises UserError for a model that a checkpoint names, unless its code may be run.

    Besides the rules for its module, it must be defined there, not imported from elsewhere.
    """
    if architecture in own_parts.named:
        return
    own_parts.check_trusted(architecture)
    module = own_parts.find("the model of the weights", architecture)
    if module.__module__.split(".")[0] != architecture.split(":")[0].split(".")[0]:
        del own_parts.named[architecture]
        raise UserError(
            f"the weights are of the model {architecture}, which is not defined in this module: "
            "choose other weights"
        )
