"""From a config to what is trained: steps, mesh, model, optimizer, state and step.

Everything here is shapes and places: no array is made, and no record is read. So the same code says
what a run will be (`--dry_run`), compiles it for a pod that is not at hand (`vit_jax.plan`), and
trains.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from vit_jax import config as configs
from vit_jax.config import own_parts
from vit_jax.data import shapes, to_device
from vit_jax.data.augment.batch import make_preprocess
from vit_jax.data.sources import catalog, vtab_tasks
from vit_jax.distributed import hardware, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.evaluate import own as own_evaluations
from vit_jax.models import create, variants
from vit_jax.models.classifier import PREPARATION, Classifier
from vit_jax.train import optim, step
from vit_jax.train import state as states
from vit_jax.train import teacher as teachers
from vit_jax.train.objectives.make import make_objective
from vit_jax.train.objectives.objective import Objective
from vit_jax.train.schedules import plan_steps
from vit_jax.train.teacher import Teacher
from vit_jax.weights import adapt

log = logging.getLogger("vit_jax.train")

NONE = MappingProxyType({})
IMAGES = ("mean", "std", *PREPARATION)  # fields of any model: the images that it expects
MOST_EPOCHS = 300  # of a fine-tuning, without a warning


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What a config means on a mesh."""

    config: Any
    facts: catalog.Facts  # of the training data
    total_steps: int  # updates of the whole run
    mesh: Mesh | AbstractMesh
    model: Classifier  # what is evaluated and delivered
    objective: Objective
    tx: optax.GradientTransformation
    schedule: Callable  # updates done -> learning rate
    chip: hardware.Tpu | None = None  # that the mesh is made of, if a plan needs to know it
    teacher: Teacher | None = None  # of a distillation

    @classmethod
    def build(
        cls, config, facts, mesh, chip=None, start: Mapping = NONE, teacher: Teacher | None = None
    ) -> "Experiment":
        """Puts the parts together.

        Args:
          facts: of the training data: `catalog.declared` or `catalog.found`.
          mesh: of real devices, of a described topology, or an AbstractMesh.
          start: fields of the model that the run starts from.
          teacher: of a distillation.

        Raises:
          UserError: they do not fit together.
        """
        own_parts.check(config)
        total_steps = plan_steps(config, facts.num_examples)
        warn_of_augmentation(config.data)
        sharding.check_batch(mesh, config.data.batch_size, config.accum_steps)
        classes = facts.num_classes if configs.uses_labels(config) else 0
        model = make_model(config, classes, start)
        config = completed(config, model)
        if teacher is not None:
            teacher.check(model.num_classes, facts.class_names, mesh)
        objective = make_objective(config, model, total_steps, teacher)
        sharding.check_model(objective, mesh)
        config = with_fixed(config, objective)
        tx, schedule = make_optimizer(config, objective.abstract_params(), total_steps)
        experiment = cls(
            config, facts, total_steps, mesh, model, objective, tx, schedule, chip, teacher
        )
        experiment.check_own()
        return experiment

    @classmethod
    def declared(cls, config) -> "Experiment":
        """What `config` declares, without devices and data; an axis of -1 counts as 1."""
        return cls.without_data(config, meshes.abstract_mesh(config.mesh))

    @classmethod
    def on_devices(cls, config, devices: list | None = None, chip=None) -> "Experiment":
        """What `config` means on these devices (default: all of the job), without data."""
        devices = jax.devices() if devices is None else devices
        mesh = meshes.make_mesh(config.mesh, sorted(devices, key=lambda device: device.id))
        return cls.without_data(config, mesh, chip)

    @classmethod
    def without_data(cls, config, mesh, chip=None) -> "Experiment":
        """What `config` declares on a mesh."""
        facts = catalog.declared(config)
        teacher = teachers.declared(config, facts.num_classes)
        return cls.build(config, facts, mesh, chip, declared_start(config), teacher)

    def check_own(self) -> None:
        """Raises UserError if a part of the user's own does not fit. Those that `build` has made
        are checked already.
        """
        config = self.config
        own_evaluations.check(config, self.model, self.facts.set_size)
        if not configs.has_views(config) and config.data.augment:
            preprocess = make_preprocess(config, self.model.normalize, self.model.num_classes)
            batch = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.abstract_batch
            )
            jax.eval_shape(preprocess, batch, jax.random.key(0, impl=config.prng))

    @property
    def num_chips(self) -> int:
        return self.mesh.devices.size

    @functools.cached_property
    def abstract_state(self) -> step.TrainState:
        """The state as ShapeDtypeStructs with shardings."""
        return states.abstract_state(self.config, self.objective, self.tx, self.mesh)

    @functools.cached_property
    def abstract_batch(self) -> dict:
        """A global batch as ShapeDtypeStructs with shardings."""
        config = self.config
        return to_device.abstract_batch(
            self.mesh, config.data.batch_size, shapes.of_training(config), self.facts.set_size
        )

    @functools.cached_property
    def train_step(self) -> Callable:
        """train_step(state, batch) -> (state, metrics), jitted; the state is donated."""
        return make_train_step(self)

    def eval_params(self, state: step.TrainState) -> dict:
        """The parameters of the model to evaluate."""
        return self.objective.of_model(step.eval_params(state))

    @property
    def teacher_fingerprint(self) -> str:
        """A digest of the parameters of the teacher; "" without one."""
        return self.teacher.fingerprint if self.teacher else ""

    @property
    def sizes(self) -> dict[str, int]:
        """What a step number means in epochs, images and FLOPs, for readers of the metrics."""
        params = jax.tree.leaves(self.abstract_state.params)
        return dict(
            total_steps=self.total_steps,
            batch_size=self.config.data.batch_size,
            num_examples=self.facts.num_examples,
            num_classes=self.model.num_classes,
            parameters=sum(leaf.size for leaf in params),
            train_flops_per_image=self.objective.train_flops,
        )

    @property
    def meta(self) -> dict:
        """What a checkpoint says of itself, as JSON."""
        meta = dict(
            config=configs.to_json(self.config),
            model=create.fields(self.model),
            extra=self.objective.extra,
            class_names=self.facts.class_names,
        )
        if self.teacher is not None:
            meta["teacher_fingerprint"] = self.teacher_fingerprint
        return meta


def warn_of_augmentation(data) -> None:
    """Logs how crops and flips of a task of VTAB differ from those of `vit_jax.vtab run`."""
    for name in catalog.data_sets(data):
        if not name.startswith(vtab_tasks.PREFIX):
            continue
        for key, standard in vtab_tasks.augmentation(name).items():
            if key in data and data[key] != standard:
                log.warning(
                    "%s: data.%s=%s, but `vit_jax.vtab run` has %s: crops and flips can change "
                    "labels",
                    *(name, key, data[key], standard),
                )


def declared_start(config) -> Mapping:
    """Fields of the model that a run starts from, as far as its shapes depend on them: with a
    variant in the config the weights need not be at hand.
    """
    if not config.init_from:
        return NONE
    if config.model.variant:
        if None in config.model.values():
            log.warning(
                "init_from=%s is not read: what the config leaves open of the model is shown as "
                "the default",
                config.init_from,
            )
        return NONE
    return states.read_weights(config).fields


def warn_of_epochs(experiment: Experiment) -> None:
    """Logs a warning if a fine-tuning sees its images very often, which takes long and overfits."""
    config = experiment.config
    data = config.data
    images = experiment.total_steps * data.batch_size
    epochs = images / experiment.facts.num_examples
    if not config.init_from or epochs <= MOST_EPOCHS or data.name.startswith(vtab_tasks.PREFIX):
        return
    log.warning(
        "%s steps of %d images are %s epochs of the %s images of %s, more than %d: set fewer "
        "total_steps, or let `vit_jax finetune FOLDER` choose",
        *(f"{experiment.total_steps:,}", data.batch_size, f"{epochs:,.0f}"),
        *(f"{experiment.facts.num_examples:,}", catalog.data_name(data), MOST_EPOCHS),
    )


def make_model(config, num_classes: int, start: Mapping = NONE) -> Classifier:
    """The model that `config.model` describes: its variant, and what differs from the defaults.

    Args:
      start: fields of the model that the run starts from. They hold for what the config leaves
        open (None, or the size of the variant), and for what it has no key for.
    """
    default = configs.defaults().model
    given = {name: value for name, value in config.model.items() if value is not None}
    variant = given.pop("variant", None)
    del given["num_classes"]
    changed = {name: value for name, value in given.items() if value != default[name]}
    if configs.is_own(variant):
        kept = {name: start[name] for name in IMAGES if name in start and name not in given}
        user = configs.to_json(config.user)
        return create.create(variant, num_classes, config.image_size, **kept | changed, user=user)
    if not start:
        variant = variant or default.variant
        return create.create(variant, num_classes, config.image_size, **changed)
    decided = given.keys() - (set(adapt.SIZES) - changed.keys()) | {"num_classes", "image_size"}
    if variant:
        decided |= variants.FIELDS
    kept = {name: value for name, value in start.items() if name not in decided}
    return create.create(variant, num_classes, config.image_size, **kept | changed)


def completed(config, model: Classifier):
    """The config with the model's values for the keys that are None."""
    missing = [name for name, value in config.model.items() if value is None]
    if not missing:
        return config
    fields = create.fields(model)
    default = configs.defaults().model
    variant = config.model.variant or variants.name_of(fields)
    has_sizes = variant and not configs.is_own(variant)
    sizes = variants.decode(variant) if has_sizes else {}
    values = {name: fields.get(name, default[name]) for name in missing}
    for name in values.keys() & sizes.keys():
        if values[name] == sizes[name]:
            values[name] = default[name]
    if "variant" in values:
        values["variant"] = variant
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.model.update(values)
    return config.lock()


def with_fixed(config, objective: Objective):
    """The config with what never changes in `optim.frozen`."""
    if not objective.fixed:
        return config
    if config.optim.frozen:
        optim.check_patterns("frozen", [config.optim.frozen], objective.abstract_params())
    config = config.copy_and_resolve_references()
    with config.unlocked():
        patterns = filter(None, (config.optim.frozen, objective.fixed))
        config.optim.frozen = "|".join(patterns)
    return config.lock()


def make_optimizer(config, params, total_steps: int):
    """(tx, schedule) of the run; `params`: ShapeDtypeStructs."""
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
    return optim.make_optimizer(config.optim, params, total_steps, config)


def make_train_step(experiment: Experiment) -> Callable:
    """train_step(state, batch) of the run; the new state has the shardings of the old one."""
    config = experiment.config
    model = experiment.model
    train_step = step.make_train_step(
        experiment.objective,
        experiment.tx,
        experiment.schedule,
        preprocess=make_preprocess(config, model.normalize, model.num_classes),
        seed=config.seed,
        prng=config.prng,
        frozen=config.optim.frozen,
        accum_steps=config.accum_steps,
        ema_decay=config.optim.ema_decay,
        max_skipped=config.max_skipped,
    )
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(states.shardings(experiment.abstract_state), None),
        compiler_options=hardware.compiler_options(experiment.mesh),
    )


def total_bytes(compiled) -> int:
    """Bytes of one device while a compiled step runs: state, batch and temporary arrays."""
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return total + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
