"""An optimizer of the user's own, in the place of adam or sgd, and what it must be able to do."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax.config import own_parts


def own_optimizer(config, params, schedule: Callable, total_steps: int):
    """`config.optim.name`, as an optax transformation of the gradient without a learning rate, such
    as optax.scale_by_lion().

    Args:
      params: parameter tree, shapes suffice.

    Raises:
      UserError: it does not fit.
    """
    part = own_parts.part("optim.name", config.optim.name, config)

    def make(tree) -> optax.GradientTransformation:
        return transformation(part, part(schedule=schedule, total_steps=total_steps, params=tree))

    tx = make(params)
    check_state(part, tx, params)
    check_direction(part, make, params)
    return tx


def transformation(part: own_parts.OwnPart, tx) -> optax.GradientTransformation:
    """What the part returned, with its errors; a UserError if it is anything else."""
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise part.error(
            f"returns {own_parts.shown(tx)}, but it must return an optax.GradientTransformation"
        )
    tx = optax.with_extra_args_support(tx)
    return optax.GradientTransformation(part.guard(tx.init), part.guard(tx.update))


def check_state(part: own_parts.OwnPart, tx: optax.GradientTransformation, params) -> None:
    """Raises UserError if updates are not like parameters, or the state can't be saved."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    state = jax.eval_shape(tx.init, shapes)
    updates, after = jax.eval_shape(tx.update, shapes, state, shapes)

    def facts(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    if facts(updates) != facts(shapes):
        raise part.error("gives updates of other shapes or dtypes than the parameters have")
    if facts(after) != facts(state):
        raise part.error("gives a state of other shapes or dtypes after an update than before")
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state)):
        raise part.error(
            "has a key of jax.random.key in its state, which can't be saved: use jax.random.PRNGKey"
        )


def check_direction(part: own_parts.OwnPart, make: Callable, params) -> None:
    """Raises UserError if a first update would go up the loss, as with the learning rate inside.

    Tried on parameters of the same names, of one number each; `make` gives the transformation for
    a tree of shapes.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
        return  # in vit_jax.vtab, inside of the step
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1,) * leaf.ndim, leaf.dtype), params)
    tx = make(shapes)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
        updates, _ = jax.jit(lambda tree: tx.update(tree, tx.init(tree), tree))(ones)
        total = sum(float(leaf.sum()) for leaf in jax.tree.leaves(updates))
    if total < 0:
        raise part.error(
            "steps against the gradient, as if it had the learning rate inside: return the "
            "transformation before it, such as optax.scale_by_lion() for optax.lion(lr); learning "
            "rate and weight decay are applied after it"
        )
