"""An objective of the user's own: `config.objective` = MODULE:ATTRIBUTE, a subclass of Objective or
a function that returns one.
"""

import jax
import jax.numpy as jnp

from vit_jax.config import own_parts
from vit_jax.models import create
from vit_jax.models.classifier import Classifier
from vit_jax.train import step
from vit_jax.train.objectives.objective import Objective

BATCH = 4  # images in the trial on shapes


def make(config, model: Classifier, total_steps: int) -> Objective:
    """The objective that `config.objective` names, tried on shapes.

    Raises:
      UserError: it does not fit.
    """
    part = own_parts.part("objective", config.objective, config)
    objective = part(model=model, total_steps=total_steps)
    if not isinstance(objective, Objective):
        raise part.error(
            f"gives {own_parts.shown(objective)}, but it must give a subclass of "
            "vit_jax.train.objectives.objective.Objective"
        )
    check_params(part, objective)
    check_loss(part, objective)
    return objective


def check_params(part: own_parts.OwnPart, objective: Objective) -> None:
    """Raises UserError if `init` does not give the parameters of the model and those in `extra`."""
    params = jax.eval_shape(part.guard(objective.init), 0)
    if not isinstance(params, dict):
        raise part.error(f"gives {own_parts.shown(params)} in `init`, but it must give a dict")
    unknown = set(objective.extra) ^ (
        params.keys() - create.abstract_params(objective.model).keys()
    )
    if unknown:
        raise part.error(
            f"differs in {min(unknown)!r}: `extra` must name exactly what `init` adds to the "
            "parameters of the model"
        )
    if shapes(objective.of_model(params)) != shapes(create.abstract_params(objective.model)):
        raise part.error("changes the shapes of the model's parameters in `init`: only add others")


def check_loss(part: own_parts.OwnPart, objective: Objective) -> None:
    """Raises UserError if the loss, or what is taught for it, does not have the right shapes."""
    params = jax.eval_shape(objective.init, 0)
    batch = dict(
        image=jax.ShapeDtypeStruct((BATCH, *objective.model.image_size, 3), jnp.float32),
        label=jax.ShapeDtypeStruct((BATCH, objective.model.num_classes), jnp.float32),
        mask=jax.ShapeDtypeStruct((BATCH,), jnp.float32),
        seed=jax.ShapeDtypeStruct((BATCH, 2), jnp.int32),
    )
    running = part.guard(objective.running)()

    def losses(params, batch):
        zero = jnp.zeros((), jnp.int32)
        state = step.TrainState(zero, params, {}, params, zero, zero, running)
        batch, _, _ = step.teach(objective, state, batch, accum_steps=1)
        return objective.loss(params, batch, jax.random.key(0), zero)

    result = jax.eval_shape(part.guard(losses), params, batch)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise part.error(
            f"returns {own_parts.shown(result)} in `loss`, but it must return the pair (loss of "
            "each example, dict of metrics)"
        )
    loss, metrics = result
    for name, value in dict(loss=loss, **metrics).items():
        if getattr(value, "shape", None) != (BATCH,) or value.dtype != jnp.float32:
            raise part.error(
                f"returns {own_parts.shown(value)} as {name!r} in `loss` for {BATCH} images, but "
                "it must return float32 [batch], one number for each example"
            )


def shapes(params: dict):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
