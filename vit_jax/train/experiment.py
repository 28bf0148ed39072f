"""From a config to what is trained: model, optimizer, state and step."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax import config as configs
from vit_jax.data import to_device
from vit_jax.data.augment.batch import make_preprocess
from vit_jax.data.sources import catalog
from vit_jax.distributed import hardware, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models import classifier, create
from vit_jax.train import optim, step
from vit_jax.train import state as states
from vit_jax.weights import adapt

log = logging.getLogger("vit_jax.train")


def plan_steps(config, num_examples: int) -> int:
    """The number of updates of the run."""
    if not config.total_steps and not config.total_epochs:
        raise UserError("config keys total_steps and total_epochs are both 0: set one of them")
    steps = config.total_steps or round(config.total_epochs * num_examples / config.data.batch_size)
    if steps < 1:
        raise UserError(
            f"total_epochs={config.total_epochs} of {num_examples} examples is less than one batch "
            f"of {config.data.batch_size}: train longer or use a smaller batch"
        )
    return steps


def make_model(config, num_classes: int) -> classifier.Classifier:
    """The model that `config.model` describes: its variant, and what differs from the defaults."""
    unset = configs.defaults().model
    fields = {
        k: v
        for k, v in config.model.items()
        if v != unset[k] and k not in ("variant", "num_classes")
    }
    return create.create(config.model.variant, num_classes, config.image_size, **fields)


def make_optimizer(config, model, total_steps: int):
    """(tx, schedule) of the run."""
    if config.optim.warmup_steps >= total_steps:
        log.warning(
            "the %d steps of the run end inside the warm-up of %d",
            total_steps,
            config.optim.warmup_steps,
        )
    if config.optim.cooldown_steps > total_steps:
        raise UserError(
            f"config key optim.cooldown_steps={config.optim.cooldown_steps} is more than the "
            f"{total_steps} steps of the run: make it shorter"
        )
    return optim.make_optimizer(config.optim, adapt.abstract_params(model), total_steps)


def make_train_step(config, mesh, model, tx, schedule, abstract) -> Callable:
    """train_step(state, batch) of the run; `abstract`: the state, which stays where it is and is
    donated.
    """

    def apply_fn(params, image, key):
        return model.apply({"params": params}, image, train=True, rngs={"dropout": key})

    train_step = step.make_train_step(
        apply_fn,
        tx,
        schedule,
        loss=config.loss,
        preprocess=make_preprocess(config, model.normalize, model.num_classes),
        seed=config.seed,
        prng=config.prng,
        accum_steps=config.accum_steps,
        ema_decay=config.optim.ema_decay,
        max_skipped=config.max_skipped,
    )
    place = states.shardings(abstract), None
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=place,
        compiler_options=hardware.compiler_options(mesh),
    )


@dataclasses.dataclass(frozen=True)
class Job:
    """What a config would be on a pod: shapes and places alone."""

    config: Any
    chip: hardware.Tpu | None  # None: the devices at hand
    mesh: Mesh
    model: Any
    optimizer: Any
    num_examples: int
    total_steps: int
    state: Any  # of ShapeDtypeStructs with shardings
    batch: Any
    train_step: Any  # jitted

    @property
    def num_chips(self) -> int:
        return self.mesh.devices.size


def on_devices(config, chip: hardware.Tpu | None, devices: list) -> Job:
    """What a config is on those devices, which may be described ones."""
    facts = catalog.declared(config)
    total_steps = plan_steps(config, facts.num_examples)
    mesh = meshes.make_mesh(config.mesh, sorted(devices, key=lambda device: device.id))
    sharding.check_batch(mesh, config.data.batch_size, config.accum_steps)
    model = make_model(config, facts.num_classes)
    sharding.check_model(model, mesh)
    tx, schedule = make_optimizer(config, model, total_steps)
    with jax.set_mesh(mesh):
        state = states.abstract_state(config, model, tx, mesh)
    batch = to_device.abstract_batch(mesh, config.data.batch_size, config.image_size)
    train_step = make_train_step(config, mesh, model, tx, schedule, state)
    return Job(
        config, chip, mesh, model, tx, facts.num_examples, total_steps, state, batch, train_step
    )
