"""The rules: facts -> keys of a config, each with its reason. Pure functions."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.train.recipe.facts import Data, Device, Start

# With fewer held-out images many checkpoints have the same accuracy, but not the same loss.
ENOUGH_FOR_TOP1 = 100

# --- length: BiT-HyperRule, arXiv 1912.11370 section 3.3 ---
STEPS = ((20_000, 500), (500_000, 10_000), (math.inf, 20_000))  # up to so many images, steps
EPOCHS = 50  # at most: the rule's 500 steps of 512 images are 1,600 epochs of 160 photos
LARGEST_BATCH = 512  # of the rule, and of arXiv 2010.11929 table 4
SMALLEST_BATCH = 16
STEPS_PER_EPOCH = 8  # at least, with larger batches
EVALUATIONS = 20
PICTURES = 4
# In evaluations. With 5, runs ended while the learning rate was still high, and were worse than
# trial runs of a fifth of their length, whose learning rate had fallen.
PATIENCE = 10

# --- learning rates ---
LRS = (0.003, 0.01, 0.03)  # arXiv 2010.11929 table 4, of SGD with batches of 512
HEAD_LR = 0.001  # of Adam
ALL_BUT_HEAD = "(?!head).*"
TRIAL = 5  # a trial run has a fifth of the steps of the final one,
TRIAL_STEPS = (50, 500)  # but at least and at most so many

# --- time ---
PATIENT_S = 30 * 60  # that a CPU may take
START_S = 15  # of each run: to open data, weights and the cache of compiled programs

IMBALANCED = 3  # times as many images in the largest class as in the smallest
BALANCE = 0.5  # the square root of the counts, as arXiv 1805.00932 samples hashtags


@dataclasses.dataclass(frozen=True)
class Choice:
    """One row of the table."""

    what: str
    chosen: str
    why: str
    values: Mapping[str, object] = dataclasses.field(default_factory=dict)  # keys of the config


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Images in each part, and in a batch."""

    train: int
    held_out: int
    batch: int = 1
    given: int = 0  # steps that the user wants

    def steps(self, epochs: float) -> int:
        """Updates by the rule, or in so many epochs if those are fewer."""
        if self.given:
            return self.given
        by_rule = up_to(STEPS, self.train)
        return max(1, min(by_rule, round(epochs * self.train / self.batch)))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is trained, with which learning rates (several: trial runs choose), and for how long."""

    head_only: bool = False
    lrs: tuple[float, ...] = LRS
    epochs: float = EPOCHS  # at most


def up_to(table: Sequence[tuple[float, int]], number: float) -> int:
    """The value of the first row that `number` is not above."""
    return next(value for limit, value in table if number <= limit)


# --- the data ---


def check(data: Data) -> None:
    """Raises UserError if there is nothing to learn, or nothing to hold out."""
    present = np.flatnonzero(data.counts)
    if not len(present):
        raise UserError(f"{data.name} {data.split} has no image with a label: add labels")
    if data.many_labels:  # the counts are those of their first labels
        return
    if len(present) < 2:
        name = data.class_names[int(present[0])]
        raise UserError(
            f"{data.name} {data.split} has images of one class only ({name}): a classifier needs "
            "two or more, each in a folder of its own"
        )
    if data.counts.max() == 1 and not data.val:
        raise UserError(
            f"{data.name} {data.split} has one image of each class: at least two are needed, one "
            "to train on and one to hold out"
        )


def report_on(data: Data) -> list[Choice]:
    """The test split, if there is one."""
    if not data.test:
        return []
    values = {"evals.test.data.split": data.test}
    why = "evaluated once, at the end, with what was best on the held-out part"
    return [Choice("test", f"split {data.test}", why, values)]


def classes(data: Data) -> list[Choice]:
    """The loss for several labels, or the balance of classes, if it is needed."""
    if data.many_labels:
        return [Choice("loss", "sigmoid_xent", "several labels", {"loss": "sigmoid_xent"})]
    counts = data.counts[data.counts > 0]
    largest, smallest = int(counts.max()), int(counts.min())
    if largest <= IMBALANCED * smallest:
        return []
    why = (
        f"the largest class has {largest:,} images, the smallest {smallest:,}: training sees them "
        "in proportion to the square roots"
    )
    return [Choice("class balance", f"{BALANCE:g}", why, {"data.class_balance": BALANCE})]


def augmentation(sizes: Sizes) -> Choice:
    """Random crops and flips; a short run of pretrained weights needs no stronger ones."""
    area = 0.3 if sizes.train <= STEPS[0][0] else 0.05
    values = {"data.crop": "inception", "data.area_min": area, "data.flip": True}
    values["data.on_corrupt"] = "skip"
    why = "no RandAugment in a short run; --config.data.flip=False if left and right differ"
    return Choice("augmentation", f"crops of {100 * area:.0f} to 100 %, flips", why, values)


# --- the model and the device ---


def model(start: Start, device: Device) -> Choice:
    """The resolution and precision of the weights' model."""
    values = {
        "image_size": start.image_size,
        "model.dtype": "bfloat16" if device.bfloat16 else "float32",
    }
    why = "the resolution of the weights; a higher --config.image_size shows more detail"
    return Choice("model", f"{start.variant}, {start.image_size} pixels", why, values)


def batch_size(sizes: Sizes, device: Device) -> Choice:
    """A power of two for every device."""
    wanted = min(max(sizes.train / STEPS_PER_EPOCH, SMALLEST_BATCH), LARGEST_BATCH, sizes.train)
    per_device = 2 ** max(0, math.floor(math.log2(wanted / device.count)))
    batch = per_device * device.count
    why = f"at least {STEPS_PER_EPOCH} steps per epoch" if batch < LARGEST_BATCH else "the paper's"
    return Choice("batch", f"{batch} images", why, {"data.batch_size": batch})


# --- what is trained, for how long ---


def plans(device: Device, lrs: tuple[float, ...]) -> list[Plan]:
    """In order of preference; a CPU takes the first that ends in time.

    Args:
      lrs: the user's learning rates; (): ours.
    """
    if not device.is_cpu:
        return [Plan(lrs=lrs or LRS)]
    head = Plan(True, lrs or (HEAD_LR,))
    return [
        Plan(lrs=lrs or LRS),
        Plan(lrs=lrs or (LRS[1],), epochs=EPOCHS / 2),
        head,
        *(dataclasses.replace(head, epochs=epochs) for epochs in (20, 10, 5)),
    ]


def trial_steps(total: int) -> int:
    least, most = TRIAL_STEPS
    return min(total, max(least, min(total // TRIAL, most)))


def seconds(plan: Plan, sizes: Sizes, cost) -> float:
    """How long trial runs and the final run take, if that does not stop early.

    Args:
      cost: `step_s`, seconds of a step with its images; `eval_s`, of the evaluation of an image;
        `compile_s`, of compiling the step. See `measure.Measured`.
    """
    total = sizes.steps(plan.epochs)
    trials = len(plan.lrs) if len(plan.lrs) > 1 else 0
    steps = trials * trial_steps(total) + total
    evaluations = trials + min(EVALUATIONS, total)
    evaluating = evaluations * sizes.held_out * cost.eval_s
    return steps * cost.step_s + evaluating + (trials + 1) * (cost.compile_s + START_S)


def choose_plan(
    options: Sequence[Plan], sizes: Sizes, cost_of: Callable[[bool], object]
) -> tuple[Plan, float]:
    """(the first plan that ends in time, else the shortest; its seconds).

    Args:
      cost_of: f(head only?) -> its measured cost. That of all of the model is asked for only if it
        may be low enough.
    """
    for plan in options:
        is_last = plan is options[-1]
        if not plan.head_only and not is_last:
            at_least = seconds(plan, sizes, cost_of(True))
            if at_least > PATIENT_S:
                continue
        taken = seconds(plan, sizes, cost_of(plan.head_only))
        if taken <= PATIENT_S or is_last:
            break
    return plan, taken


def trained(plan: Plan) -> str:
    return "the head only" if plan.head_only else "all of the model"


def training(plan: Plan, sizes: Sizes) -> list[Choice]:
    """Optimizer, learning rates and length of a plan."""
    steps = sizes.steps(plan.epochs)
    if plan.head_only:
        why = f"training all of the model takes this CPU longer than {PATIENT_S // 60} minutes"
        values = {"optim.name": "adam", "optim.frozen": ALL_BUT_HEAD}
    else:
        why = "as in the ViT paper: SGD, momentum 0.9, gradients clipped to 1"
        values = {"optim.name": "sgd", "optim.momentum": 0.9, "optim.grad_clip_norm": 1.0}
    return [
        Choice("trained", trained(plan), why, values),
        rates(plan, steps),
        length(plan, sizes, steps),
    ]


def rates(plan: Plan, steps: int) -> Choice:
    text = ", ".join(f"{lr:g}" for lr in plan.lrs)
    values = {"optim.lr": plan.lrs[0], "optim.schedule": "cosine"}
    values["optim.warmup_steps"] = steps // 10
    why = "one, to save time"
    if len(plan.lrs) > 1:
        why = f"the best of trial runs of {trial_steps(steps)} steps, by what is held out"
    return Choice("learning rate", text, why, values)


def length(plan: Plan, sizes: Sizes, steps: int) -> Choice:
    every = max(1, steps // EVALUATIONS)
    metric = "top1" if sizes.held_out >= ENOUGH_FOR_TOP1 else "loss"
    values = {
        "total_steps": steps,
        "log_every": max(1, min(50, steps // EVALUATIONS)),
        "pictures_every": max(1, steps // PICTURES),
        "early_stopping": PATIENCE,
        "checkpoint.every": every,
        "checkpoint.keep_last": 1,
        "checkpoint.keep_best": f"eval/held_out/{metric}",
    }
    epochs = steps * sizes.batch / sizes.train
    why = "by the number of images (BiT's rule)"
    if plan.epochs < EPOCHS:
        why = "what ends in time"
    if sizes.given:
        why = "set on the command line"
    why += f"; ends if the held-out {metric} is not better in {PATIENCE * every} steps"
    return Choice("length", f"{steps:,} steps = {epochs:.3g} epochs", why, values)
