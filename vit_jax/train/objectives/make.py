"""The objective that a config chooses."""

from vit_jax.config import is_own
from vit_jax.models import losses
from vit_jax.models.classifier import Classifier
from vit_jax.train.objectives import classify, dino, distill, mae, masked_patches, own
from vit_jax.train.objectives.objective import Objective
from vit_jax.train.teacher import Teacher


def make_classify(config, model: Classifier, total_steps: int) -> classify.Classify:
    return classify.Classify(model, losses.make_loss(config, model.num_classes))


MAKE = {
    "classify": make_classify,
    "masked_patches": masked_patches.make,
    "mae": mae.make,
    "dino": dino.make,
}


def make_objective(
    config, model: Classifier, total_steps: int, teacher: Teacher | None = None
) -> Objective:
    """
    Args:
      model: what is evaluated and delivered.
      total_steps: updates of the run.
      teacher: of a distillation.

    Raises:
      UserError: the objective does not fit the model.
    """
    if is_own(config.objective):
        return own.make(config, model, total_steps)
    if config.objective == "distill":
        return distill.make(config, model, teacher.model)
    return MAKE[config.objective](config, model, total_steps)
