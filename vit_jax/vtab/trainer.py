"""Many short fine-tunings on a thousand images each, which stay on the devices: one compiled step
serves all tasks.

The head has as many classes as the largest task of the suite, rounded up; logits beyond the classes
of a task are so low that they change neither loss nor gradients.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax.data.augment.batch import FLIP, flip, keys, make_preprocess
from vit_jax.distributed import hardware, sharding, watchdog
from vit_jax.errors import NegativeResult, UserError
from vit_jax.evaluate import classification
from vit_jax.train import optim, step

log = logging.getLogger("vit_jax.vtab")

LOW = -1e9  # a logit of a class that the task has not
LARGER = (
    7 / 6
)  # the side of which training sees a window, relative to it: 448 for 384 (BiT, arXiv 1912.11370, F)
ORDER, AUGMENT = 0, 1  # what random numbers are for
WINDOW = 4  # likewise, of one example; `preprocess` has those before
AHEAD = 16  # steps that may be dispatched ahead of the devices


@dataclasses.dataclass(frozen=True)
class Setting:
    """What runs of a task differ in."""

    lr: float
    steps: int
    seed: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Examples:
    """What is trained on, whole on every device; arrays of one shape for all tasks."""

    image: Any  # uint8 [rows, L, L, 3], with L = larger(size); without windows it fills the upper left corner
    label: Any  # int32 [rows]
    count: Any  # int32 []: the first rows are examples
    classes: Any  # int32 []
    windows: Any  # bool []: training sees random windows
    mirrors: Any  # bool []: and mirrored images


def larger(size: int) -> int:
    return round(size * LARGER)


def known_classes(logits, classes):
    """Logits [batch, all] in which only the first `classes` have a chance."""
    return jnp.where(jnp.arange(logits.shape[-1]) < classes, logits, LOW)


def draw(examples: Examples, batch_size: int, size: int, seed, number) -> dict:
    """The batch of a step: every epoch is a permutation, and windows and mirrors are drawn anew for
    every example.

    Args:
      size: side of the images, in pixels.
      seed, number: of the run, and updates done; int32 [].
    """
    key, rows = jax.random.key(seed), len(examples.label)
    position = number * batch_size + jnp.arange(batch_size)
    epoch, place = position // examples.count, position % examples.count

    def permutation(epoch):
        noise = jax.random.uniform(
            jax.random.fold_in(jax.random.fold_in(key, ORDER), epoch), [rows]
        )
        return jnp.argsort(jnp.where(jnp.arange(rows) < examples.count, noise, 2.0))

    epochs = epoch[0] + jnp.arange(batch_size // least(rows) + 2)
    index = jax.vmap(permutation)(epochs)[epoch - epoch[0], place]
    fold = jax.vmap(
        lambda *data: functools.reduce(jax.random.fold_in, data, jax.random.fold_in(key, AUGMENT))
    )
    seeds = jax.lax.bitcast_convert_type(jax.random.key_data(fold(epoch, index)), jnp.int32)
    margin = examples.image.shape[1] - size
    corner = jax.vmap(lambda key: jax.random.randint(key, [2], 0, margin + 1))(keys(seeds, WINDOW))
    corner = jnp.where(examples.windows, corner, 0)

    def window(i, corner):
        return jax.lax.dynamic_slice(examples.image, (i, *corner, 0), (1, size, size, 3))[0]

    image = sharding.constrain(jax.vmap(window)(index, corner), "batch", None, None, None)
    mirrored = flip(keys(seeds, FLIP), image)
    image = jnp.where(examples.mirrors, mirrored, image)
    return dict(image=image, label=examples.label[index], mask=jnp.ones(batch_size), seed=seeds)


def least(rows: int) -> int:
    """The examples that a task must have, of `rows` that there should be."""
    return rows // 2


def stretched(config, steps: int) -> dict:
    """`config.optim` for another number of steps: what is counted in steps from the start keeps its
    share.
    """
    ratio, values = steps / config.total_steps, config.optim.to_dict()
    for key in ("warmup_steps", "cooldown_steps"):
        values[key] = round(values[key] * ratio)
    if "stairs" in values:
        values["stairs"] = tuple(
            (round(start * ratio), factor) for start, factor in values["stairs"]
        )
    return values


class Finetuner:
    """Trains and evaluates one model on any of the tasks."""

    def __init__(self, config, model, make_params: Callable[[Any], Any], mesh, rows: int):
        """
        Args:
          model: with a head of at least as many classes as any task has.
          make_params: seed -> the parameters that a run starts from.
          rows: examples of a task.
        """
        self.config, self.model, self.make_params, self.mesh, self.rows = (
            config,
            model,
            make_params,
            mesh,
            rows,
        )
        self.steps = {}  # by number of steps: what is compiled
        self.eval_step = jax.jit(
            classification.make_eval_step(
                self.logits, config.loss, model.num_classes, model.normalize
            )
        )

    def logits(self, params_and_classes, image):
        params, classes = params_and_classes
        return known_classes(self.model.apply({"params": params}, image), classes)

    def examples(
        self, image: np.ndarray, label: np.ndarray, classes: int, windows: bool, mirrors: bool
    ) -> Examples:
        """Places images uint8 [N, s, s, 3]; s is `larger(size)` with windows, else the size.

        Raises:
          UserError: there are too few.
        """
        if len(image) < least(self.rows):
            raise UserError(
                f"only {len(image)} of the {self.rows} training images can be read: look at the "
                "data"
            )
        side = larger(self.config.image_size)
        all_images = np.zeros((self.rows, side, side, 3), np.uint8)
        all_images[: len(image), : image.shape[1], : image.shape[2]] = image
        labels = np.zeros(self.rows, np.int32)
        labels[: len(label)] = label
        facts = np.int32(len(image)), np.int32(classes), np.bool_(windows), np.bool_(mirrors)
        return jax.device_put(Examples(all_images, labels, *facts), sharding.replicated(self.mesh))

    def compiled(self, total_steps: int) -> tuple[Callable, Callable]:
        """(start, train_step) of runs of that length: start(params) -> state; train_step(state,
        examples, lr, seed).
        """
        if total_steps in self.steps:
            return self.steps[total_steps]
        config, model = self.config, self.model
        settings = stretched(config, total_steps)
        with (plain := config.copy_and_resolve_references()).unlocked():
            plain.data.flip = False  # `draw` does that
        make_batch = make_preprocess(plain, model.normalize, model.num_classes)

        def optimizer(params, lr):
            return optim.make_optimizer(
                ml_collections.ConfigDict(settings | dict(lr=lr)), params, total_steps
            )

        def start(params):
            return step.create_state(params, optimizer(params, 1.0)[0], config.optim.ema_decay)

        def train_step(state, examples, lr, seed):
            def apply_fn(params, image, key):
                logits = model.apply({"params": params}, image, train=True, rngs={"dropout": key})
                return known_classes(logits, examples.classes)

            tx, schedule = optimizer(state.params, lr)
            options = dict(
                prng=config.prng, accum_steps=config.accum_steps, ema_decay=config.optim.ema_decay
            )
            options |= dict(
                loss=config.loss, preprocess=make_batch, seed=seed, max_skipped=config.max_skipped
            )
            batch = draw(examples, config.data.batch_size, config.image_size, seed, state.step)
            return step.make_train_step(apply_fn, tx, schedule, **options)(state, batch)

        shapes = jax.eval_shape(start, self.make_params(0))
        place = sharding.param_specs(shapes, self.mesh, config.mesh.zero)
        how = dict(donate_argnums=0, compiler_options=hardware.compiler_options(self.mesh))
        self.steps[total_steps] = (
            jax.jit(start, out_shardings=place),
            jax.jit(train_step, out_shardings=(place, None), **how),
        )
        return self.steps[total_steps]

    def train(self, examples: Examples, setting: Setting):
        """The parameters after a run.

        Raises:
          NegativeResult: loss or gradients were not finite, as with a learning rate that is too
            high.
        """
        start, train_step = self.compiled(setting.steps)
        lr, seed = np.float32(setting.lr), np.int32(setting.seed)
        state, pending = start(self.make_params(setting.seed)), []
        for number in range(1, setting.steps + 1):
            state, metrics = train_step(state, examples, lr, seed)
            pending.append(metrics["train/skipped_in_row"])
            if len(pending) > AHEAD:
                pending.pop(0).block_until_ready()
                watchdog.progress.mark(f"step {number} of {setting}")
        if skipped := int(state.skipped_steps):
            log.warning("%s: %d updates were not finite and left out", setting, skipped)
        if int(state.skipped_in_row):
            raise NegativeResult(
                f"loss or gradients were not finite with lr={setting.lr:g}, seed={setting.seed}: "
                "choose a lower one"
            )
        return step.eval_params(state)

    def evaluate(
        self, all_params: Sequence, batches: Iterable[dict], classes: int
    ) -> list[dict[str, float]]:
        """Metrics of each of `all_params`, in one pass over the batches."""
        sums = [[] for _ in all_params]
        for batch in watchdog.each(batches, "evaluation"):
            for own, params in zip(sums, all_params, strict=True):
                own.append(self.eval_step((params, np.int32(classes)), batch))
        return [classification.means(own) for own in sums]
