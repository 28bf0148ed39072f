"""Many short fine-tunings on a thousand images each, which stay on the devices: one compiled step
serves all tasks.

The head has as many classes as the largest task of the suite, rounded up. Logits beyond the classes
of a task are masked with a low value, so they change neither the loss nor the gradients.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax.data.augment.batch import FLIP, flip, keys, make_preprocess
from vit_jax.data.sources.vtab_tasks import RESIZE_RATIO
from vit_jax.distributed import hardware, sharding, watchdog
from vit_jax.errors import NegativeResult, UserError
from vit_jax.evaluate import classification
from vit_jax.models import losses
from vit_jax.train import optim, step
from vit_jax.train.objectives.classify import Classify

log = logging.getLogger("vit_jax.vtab")

MASKED = -1e9  # the logit of a class that the task does not have
# Uses of random numbers: of a run, and of one example (`data.augment.batch` has those before CROP).
ORDER = 0
AUGMENT = 1
CROP = 4
AHEAD = 16  # steps that may be dispatched before the devices have done them


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the runs of a task differ in."""

    lr: float
    steps: int
    seed: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Examples:
    """The training set, replicated on all devices; arrays of one shape for all tasks."""

    image: (
        Any  # uint8 [rows, R, R, 3], R = resized_side(size); without crops in the upper left corner
    )
    label: Any  # int32 [rows]
    count: Any  # int32 []: this many of the first rows are examples
    num_classes: Any  # int32 []
    crop: Any  # bool []: whether to take random crops
    flip: Any  # bool []: whether to flip with probability 0.5


def resized_side(size: int) -> int:
    """Side of the images, in pixels, that random crops of side `size` are taken from."""
    return round(size * RESIZE_RATIO)


def mask_logits(logits, num_classes):
    """Masks the logits [batch, classes] beyond the first `num_classes`."""
    return jnp.where(jnp.arange(logits.shape[-1]) < num_classes, logits, MASKED)


def draw(examples: Examples, batch_size: int, size: int, seed, number) -> dict:
    """The batch of a step: every epoch is a permutation of the examples, each with its own random
    crop and flip.

    Args:
      size: side of the images, in pixels.
      seed: of the run, int32 [].
      number: of updates done, int32 [].
    """
    key = jax.random.key(seed)
    epoch, row = choose_rows(examples, batch_size, key, number)
    augment_key = jax.random.fold_in(key, AUGMENT)

    def example_key(epoch, row):
        return jax.random.fold_in(jax.random.fold_in(augment_key, epoch), row)

    example_keys = jax.vmap(example_key)(epoch, row)
    seeds = jax.lax.bitcast_convert_type(jax.random.key_data(example_keys), jnp.int32)
    image = random_crops(examples, row, size, seeds)
    image = sharding.constrain(image, "batch", None, None, None)
    image = jnp.where(examples.flip, flip(keys(seeds, FLIP), image), image)
    return dict(image=image, label=examples.label[row], mask=jnp.ones(batch_size), seed=seeds)


def choose_rows(examples: Examples, batch_size: int, key, number) -> tuple[jax.Array, jax.Array]:
    """(epoch, row) of each example of a batch, int32 [batch]."""
    rows = len(examples.label)
    order_key = jax.random.fold_in(key, ORDER)

    def permutation(epoch):
        noise = jax.random.uniform(jax.random.fold_in(order_key, epoch), [rows])
        return jnp.argsort(jnp.where(jnp.arange(rows) < examples.count, noise, 2.0))

    position = number * batch_size + jnp.arange(batch_size)
    epoch = position // examples.count
    num_epochs = batch_size // min_examples(rows) + 2  # the most that a batch can be part of
    permutations = jax.vmap(permutation)(epoch[0] + jnp.arange(num_epochs))
    return epoch, permutations[epoch - epoch[0], position % examples.count]


def random_crops(examples: Examples, rows, size: int, seeds):
    """Crops of side `size` from the images of `rows` [batch]: random, or the upper left corner."""
    margin = examples.image.shape[1] - size
    corner = jax.vmap(lambda key: jax.random.randint(key, [2], 0, margin + 1))(keys(seeds, CROP))
    corner = jnp.where(examples.crop, corner, 0)

    def crop(row, corner):
        return jax.lax.dynamic_slice(examples.image, (row, *corner, 0), (1, size, size, 3))[0]

    return jax.vmap(crop)(rows, corner)


def min_examples(rows: int) -> int:
    """The fewest readable examples that a task needs, of `rows`."""
    return rows // 2


def stretch_schedule(config, steps: int) -> dict:
    """`config.optim` for another number of steps: numbers of steps in it change in proportion."""
    ratio = steps / config.total_steps
    values = config.optim.to_dict()
    for key in ("warmup_steps", "cooldown_steps"):
        values[key] = round(values[key] * ratio)
    if "stairs" in values:
        stairs = [(round(start * ratio), factor) for start, factor in values["stairs"]]
        values["stairs"] = tuple(stairs)
    return values


class Finetuner:
    """Trains and evaluates one model on any of the tasks."""

    def __init__(self, config, model, make_params: Callable[[Any], Any], mesh, rows: int):
        """
        Args:
          model: its head has at least as many classes as any task.
          make_params: seed -> the parameters that a run starts from.
          rows: number of examples of a task.
        """
        self.config = config
        self.model = model
        self.make_params = make_params
        self.mesh = mesh
        self.rows = rows
        self.programs = {}  # number of steps -> what `compiled` returns
        self.eval_step = jax.jit(
            classification.make_eval_step(
                self.logits, config.loss, model.num_classes, model.normalize
            )
        )

    def logits(self, params_and_classes, image):
        params, num_classes = params_and_classes
        return mask_logits(self.model.apply({"params": params}, image), num_classes)

    def examples(
        self, image: np.ndarray, label: np.ndarray, num_classes: int, crop: bool, flip: bool
    ) -> Examples:
        """Places images uint8 [N, s, s, 3] on the devices; s is `resized_side(size)` with crops,
        else the size.
        """
        if len(image) < min_examples(self.rows):
            raise UserError(
                f"only {len(image)} of the {self.rows} training images can be read: check the data "
                "set"
            )
        side = resized_side(self.config.image_size)
        images = np.zeros((self.rows, side, side, 3), np.uint8)
        images[: len(image), : image.shape[1], : image.shape[2]] = image
        labels = np.zeros(self.rows, np.int32)
        labels[: len(label)] = label
        examples = Examples(
            image=images,
            label=labels,
            count=np.int32(len(image)),
            num_classes=np.int32(num_classes),
            crop=np.bool_(crop),
            flip=np.bool_(flip),
        )
        return jax.device_put(examples, sharding.replicated(self.mesh))

    def compiled(self, total_steps: int) -> tuple[Callable, Callable]:
        """(start, train_step) of runs of that length: start(params) -> state; train_step(state,
        examples, lr, seed) -> (state, metrics).
        """
        if total_steps in self.programs:
            return self.programs[total_steps]
        config = self.config
        settings = stretch_schedule(config, total_steps)

        def optimizer(params, lr):
            changed = config.copy_and_resolve_references()
            with changed.unlocked():
                changed.optim = ml_collections.ConfigDict(settings | dict(lr=lr))
            return optim.make_optimizer(changed.optim, params, total_steps, changed)

        def start(params):
            return step.create_state(params, optimizer(params, 1.0)[0], config.optim.ema_decay)

        shapes = jax.eval_shape(start, self.make_params(0))
        specs = sharding.param_specs(shapes, self.mesh, config.mesh.zero)
        train_step = jax.jit(
            self.make_train_step(optimizer),
            out_shardings=(specs, None),
            donate_argnums=0,
            compiler_options=hardware.compiler_options(self.mesh),
        )
        self.programs[total_steps] = (jax.jit(start, out_shardings=specs), train_step)
        return self.programs[total_steps]

    def make_train_step(self, optimizer: Callable) -> Callable:
        """train_step(state, examples, lr, seed) -> (state, metrics).

        Args:
          optimizer: (params, lr) -> (tx, schedule).
        """
        config = self.config
        model = self.model
        plain = config.copy_and_resolve_references()
        with plain.unlocked():
            plain.data.flip = False  # `draw` does that
        make_batch = make_preprocess(plain, model.normalize, model.num_classes)

        def train_step(state, examples, lr, seed):
            def loss_fn(logits, label):
                return losses.LOSSES[config.loss](mask_logits(logits, examples.num_classes), label)

            tx, schedule = optimizer(state.params, lr)
            update = step.make_train_step(
                Classify(model, loss_fn),
                tx,
                schedule,
                prng=config.prng,
                accum_steps=config.accum_steps,
                ema_decay=config.optim.ema_decay,
                preprocess=make_batch,
                seed=seed,
                max_skipped=config.max_skipped,
            )
            batch = draw(examples, config.data.batch_size, config.image_size, seed, state.step)
            return update(state, batch)

        return train_step

    def train(self, examples: Examples, setting: Setting):
        """The parameters after a run.

        Raises:
          NegativeResult: loss or gradients were not finite, for example because the learning rate
            is too high.
        """
        start, train_step = self.compiled(setting.steps)
        lr = np.float32(setting.lr)
        seed = np.int32(setting.seed)
        state = start(self.make_params(setting.seed))
        pending = []
        for number in range(1, setting.steps + 1):
            state, metrics = train_step(state, examples, lr, seed)
            pending.append(metrics["train/skipped_in_row"])
            if len(pending) > AHEAD:
                pending.pop(0).block_until_ready()
                watchdog.progress.mark(f"step {number} of {setting}")
        skipped = int(state.skipped_steps)
        if skipped:
            log.warning("%s: skipped %d updates that were not finite", setting, skipped)
        if int(state.skipped_in_row):
            raise NegativeResult(
                f"loss or gradients were not finite with lr={setting.lr:g}, seed={setting.seed}: "
                "choose a lower one"
            )
        return step.eval_params(state)

    def evaluate(
        self, all_params: Sequence, batches: Iterable[dict], num_classes: int
    ) -> list[dict[str, float]]:
        """Metrics of each of `all_params`, in one pass over the batches."""
        sums = [[] for _ in all_params]
        for batch in watchdog.each(batches, "evaluation"):
            for own, params in zip(sums, all_params, strict=True):
                own.append(self.eval_step((params, np.int32(num_classes)), batch))
        return [classification.means(own) for own in sums]
