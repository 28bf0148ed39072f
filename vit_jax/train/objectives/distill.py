"""Distillation from a teacher (DeiT, arXiv 2012.12877): what it says of the same pixels is a label,
too.

With a distilled model, the distillation token learns from the teacher, and the class token from the
label; any other model learns from both.

The teacher sees what the student sees: augmented, mixed and erased, at its own size and
normalisation. So its answers change from step to step, and are not kept: those for another view
teach less (arXiv 2106.05237 section 3.1). It computes in the dtype of the student. Labels are
smoothed and mixed; what a hard teacher says is not.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import create, losses
from vit_jax.models.classifier import Classifier
from vit_jax.train.objectives.objective import Objective

# Losses in which a class has a probability of its own.
WITHOUT_SOFTMAX = ("sigmoid_xent", "multilabel_xent")


def soft(logits, teacher_logits, temperature: float):
    """The teacher's part of equation 2: temperature^2 KL(teacher || student), softmaxes at
    `temperature`: [batch, classes] -> [batch].

    The paper writes the student first; this is the order of the published code.
    """
    student = jax.nn.log_softmax(logits / temperature)
    teacher = jax.nn.log_softmax(teacher_logits / temperature)
    return temperature**2 * (jnp.exp(teacher) * (teacher - student)).sum(-1)


def hard(logits, teacher_logits, loss_fn: Callable = losses.softmax_xent):
    """The teacher's part of equation 3: its likeliest class is a label: [batch, classes] ->
    [batch].
    """
    label = jax.nn.one_hot(teacher_logits.argmax(-1), teacher_logits.shape[-1])
    return loss_fn(logits, label)


def combined(label_loss, teacher_loss, weight):
    return (1 - weight) * label_loss + weight * teacher_loss


def loss(logits, dist_logits, teacher_logits, label, kind="hard", weight=0.5, temperature=3.0):
    """The mean over a batch, [].

    Args:
      logits, dist_logits: of the heads that learn from the label and from the teacher, [batch,
        classes]; the same without a distillation token.
      teacher_logits: [batch, classes].
      label: float [batch, classes].
      kind: "hard" or "soft".
      weight: of the teacher: 1/2 in equation 3, 0.1 in the experiments with equation 2.
      temperature: of soft targets.
    """
    if kind == "soft":
        teacher_loss = soft(dist_logits, teacher_logits, temperature)
    else:
        teacher_loss = hard(dist_logits, teacher_logits)
    return combined(losses.softmax_xent(logits, label), teacher_loss, weight).mean()


@dataclasses.dataclass(frozen=True)
class Distill(Objective):
    """The parameters of `teacher` are in `TrainState.teacher`."""

    teacher: Classifier
    label_loss: Callable  # f(logits, label [batch, classes]) -> [batch]
    teacher_loss: Callable  # f(logits, the teacher's logits [batch, classes]) -> [batch]
    weight: float
    every: int  # steps

    teaches = True

    def abstract_teacher(self):
        return create.abstract_params(self.teacher)

    def is_taught(self, step):
        """bool []: whether the teacher answers in the update after `step` others."""
        return (step + 1) % self.every == 0

    def see(self, image):
        """The student's images as the teacher takes them."""
        size = (len(image), *self.teacher.image_size, 3)
        if image.shape != size:
            image = jax.image.resize(image, size, "bilinear")
        std = np.asarray(self.teacher.std)
        scale = np.asarray(self.model.std) / std
        shift = (np.asarray(self.model.mean) - np.asarray(self.teacher.mean)) / std
        return image * scale.astype(np.float32) + shift.astype(np.float32)

    def teach(self, state, batch):
        """The teacher's logits [batch, classes]; zeros in steps without an answer."""

        def answer(image):
            return self.teacher.apply({"params": state.teacher}, self.see(image))

        def nothing(image):
            return jnp.zeros((len(image), self.teacher.num_classes))

        if self.every == 1:
            return answer(batch["image"])
        return jax.lax.cond(self.is_taught(state.step), answer, nothing, batch["image"])

    def loss(self, params, batch, key, step):
        options = dict(train=True, rngs={"dropout": key})
        if self.model.distilled:
            options |= dict(apart=True)
        logits = self.model.apply({"params": params}, batch["image"], **options)
        dist_logits = logits
        if self.model.distilled:
            logits, dist_logits = logits
        taught = batch["taught"]
        is_taught = self.is_taught(step)
        agreement = dist_logits.argmax(-1) == taught.argmax(-1)
        agreement = jnp.where(is_taught, agreement.astype(jnp.float32), jnp.nan)
        label_loss = self.label_loss(logits, batch["label"])
        teacher_loss = self.teacher_loss(dist_logits, taught)
        weight = jnp.where(is_taught, self.weight, 0.0)
        return combined(label_loss, teacher_loss, weight), dict(agreement=agreement)

    @property
    def train_flops(self):
        return super().train_flops + self.teacher.flops // self.every


def make(config, model: Classifier, teacher: Classifier) -> Distill:
    settings = config.distill
    label_loss = losses.make_loss(config, model.num_classes)

    def from_soft(logits, teacher_logits):
        return soft(logits, teacher_logits, settings.temperature)

    def from_hard(logits, teacher_logits):
        return hard(logits, teacher_logits, label_loss)

    if settings.kind == "soft" and config.loss in WITHOUT_SOFTMAX:
        raise UserError(
            f"config key distill.kind=soft compares softmaxes, which loss={config.loss} does not "
            "train: use kind=hard, or loss=softmax_xent"
        )
    teacher_loss = from_soft if settings.kind == "soft" else from_hard
    return Distill(
        model, teacher, label_loss, teacher_loss, settings.weight, settings.teacher_every
    )
