"""The objective that a config chooses."""

from vit_jax.errors import UserError
from vit_jax.models import losses
from vit_jax.models.classifier import Classifier
from vit_jax.train.objectives import classify, dino, mae, masked_patches
from vit_jax.train.objectives.objective import Objective


def make_classify(config, model: Classifier, total_steps: int) -> classify.Classify:
    return classify.Classify(model, losses.make_loss(config, model.num_classes))


MAKE = {
    "classify": make_classify,
    "masked_patches": masked_patches.make,
    "mae": mae.make,
    "dino": dino.make,
}


def make_objective(config, model: Classifier, total_steps: int) -> Objective:
    """
    Args:
      model: what is evaluated and delivered.
      total_steps: updates of the run.

    Raises:
      UserError: the objective does not fit to the model.
    """
    objective = MAKE[config.objective](config, model, total_steps)
    if config.pictures_every and not objective.draws:
        raise UserError(
            f"config key pictures_every={config.pictures_every} has no effect with objective="
            f"{config.objective}, which has nothing to draw: set it to 0"
        )
    return objective
