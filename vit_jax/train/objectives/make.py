"""The objective that a config chooses."""

from vit_jax.models import losses
from vit_jax.models.classifier import Classifier
from vit_jax.train import optim
from vit_jax.train.objectives import classify, mae
from vit_jax.train.objectives.objective import Objective


def make_classify(config, model: Classifier) -> classify.Classify:
    return classify.Classify(model, losses.make_loss(config, model.num_classes))


MAKE = {"classify": make_classify, "mae": mae.make}


def make_objective(config, model: Classifier) -> Objective:
    """
    Args:
      model: what is evaluated and delivered.

    Raises:
      UserError: the objective does not fit to the model.
    """
    return MAKE[config.objective](config, model)
