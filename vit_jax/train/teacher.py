"""The teacher of a distillation: weights from anywhere, which answer and do not learn."""

import dataclasses
import hashlib
from collections.abc import Mapping

import jax
import numpy as np

from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models import create, variants
from vit_jax.models.classifier import Classifier
from vit_jax.weights import load
from vit_jax.weights.formats.weights import naming

KEY = "config key distill.teacher"


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model, and its parameters unless only shapes matter."""

    model: Classifier
    params: dict = dataclasses.field(default_factory=dict)  # numpy, or {}
    class_names: tuple[str, ...] = ()
    fingerprint: str = ""  # of the parameters in the file

    def check(self, num_classes: int, class_names: tuple[str, ...], mesh) -> None:
        """Raises UserError if it does not answer for these classes, or does not fit on the mesh."""
        if self.model.num_classes != num_classes:
            raise UserError(
                f"{KEY}: the teacher has {self.model.num_classes} classes, but the model has "
                f"{num_classes}: choose a teacher that was trained on the same classes"
            )
        pairs = zip(self.class_names, class_names, strict=False)
        for number, (theirs, ours) in enumerate(pairs):
            if theirs != ours:
                raise UserError(
                    f"{KEY}: class {number} of the teacher is {theirs!r}, but that of the training "
                    f"data is {ours!r}: choose a teacher that was trained on the same classes"
                )
        with naming(KEY):
            sharding.check_model(self.model, mesh)

    def place(self, abstract: dict) -> dict:
        """Its parameters on the devices, or, without any, fresh ones.

        Args:
          abstract: ShapeDtypeStructs with shardings.
        """

        def put(value, goal):
            return jax.device_put(value.astype(goal.dtype), goal.sharding, may_alias=False)

        if self.params:
            return jax.tree.map(put, self.params, abstract)

        def init():
            image = np.zeros((1, *self.model.image_size, 3), np.float32)
            return self.model.init(jax.random.key(0), image)["params"]

        return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))()


def fingerprint(params: Mapping[str, np.ndarray]) -> str:
    """A digest of parameters by name."""
    digest = hashlib.sha256()
    for name, value in sorted(params.items()):
        digest.update(f"{name} {value.shape} {value.dtype}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()[:16]


def read(config) -> Teacher | None:
    """The teacher of a run that has one; it computes in the dtype of the student.

    Raises:
      UserError: its weights can't be read, or are of another variant than the config says.
    """
    if config.objective != "distill":
        return None
    settings = config.distill
    if not settings.teacher:
        raise UserError(
            f"{KEY} is empty: give the weights of the teacher, such as "
            "--config.distill.teacher=WORKDIR_OR_FILE"
        )
    size = settings.teacher_size or None
    with naming(KEY):
        weights = load.read(settings.teacher, image_size=size)
        check_variant(settings.teacher_variant, weights)
        model, params = load.build(weights, image_size=size, dtype=config.model.dtype)
    # Names of the hub's files are free text.
    class_names = weights.class_names if weights.loss else ()
    return Teacher(model, params, class_names, fingerprint(weights.params))


def check_variant(variant: str, weights: load.Weights) -> None:
    """Raises UserError if weights are not of the variant that a config gives."""
    theirs = variants.name_of(create.fields(create.create(**weights.fields)))
    if variant and variant != theirs:
        raise UserError(
            f"the weights are of {theirs or 'a model without a name'}, but "
            f"distill.teacher_variant={variant}: correct it, or leave it empty"
        )


def declared(config, num_classes: int) -> Teacher | None:
    """The same without parameters; with a variant in the config, no weights need to be at hand."""
    if config.objective != "distill":
        return None
    settings = config.distill
    if settings.teacher_variant:
        size = settings.teacher_size or config.image_size
        options = dict(dtype=config.model.dtype)
        with naming("config key distill.teacher_variant"):
            model = create.create(settings.teacher_variant, num_classes, size, **options)
        return Teacher(model)
    try:
        return dataclasses.replace(read(config), params={})
    except UserError as error:
        raise type(error)(
            f"{error}; or give distill.teacher_variant, such as R50x1, to go without weights here"
        ) from error
