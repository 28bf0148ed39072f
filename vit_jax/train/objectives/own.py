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
    if config.pictures_every and objective.draws:
        check_pictures(part, objective)
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


def abstract_batch(model: Classifier) -> dict:
    return dict(
        image=jax.ShapeDtypeStruct((BATCH, *model.image_size, 3), jnp.float32),
        label=jax.ShapeDtypeStruct((BATCH, model.num_classes), jnp.float32),
        mask=jax.ShapeDtypeStruct((BATCH,), jnp.float32),
        seed=jax.ShapeDtypeStruct((BATCH, 2), jnp.int32),
    )


def check_loss(part: own_parts.OwnPart, objective: Objective) -> None:
    """Raises UserError if the loss, or what is taught for it, does not have the right shapes."""
    params = jax.eval_shape(objective.init, 0)
    running = jax.eval_shape(part.guard(objective.running))

    def losses(params, batch, running):
        zero = jnp.zeros((), jnp.int32)
        state = step.TrainState(zero, params, {}, params, zero, zero, running)
        batch, after, watched = step.teach(objective, state, batch, accum_steps=1)
        return objective.loss(params, batch, jax.random.key(0), zero), after, watched

    batch = abstract_batch(objective.model)
    result, after, watched = jax.eval_shape(part.guard(losses), params, batch, running)
    if shapes(after) != shapes(running):
        raise part.error("returns in `targets` other arrays than those of `running`: keep them")
    for name, value in watched.items():
        if value.shape:
            raise part.error(
                f"returns {own_parts.shown(value)} as {name!r} in `targets`, but it must return "
                "one number for the whole batch"
            )
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


def check_pictures(part: own_parts.OwnPart, objective: Objective) -> None:
    """Raises UserError if there is not one batch of pictures for each name in `draws`."""
    params = jax.eval_shape(objective.init, 0)
    batch = abstract_batch(objective.model)
    found = jax.eval_shape(part.guard(objective.pictures), params, batch)
    expected = [batch["image"].shape] * len(objective.draws)
    if [getattr(value, "shape", None) for value in found] != expected:
        shown = ", ".join(map(own_parts.shown, found))
        raise part.error(
            f"returns {shown} in `pictures` for {BATCH} images, but it must return a tuple of "
            f"float32 {list(batch['image'].shape)}, one for each name in `draws`"
        )


def shapes(params: dict):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
