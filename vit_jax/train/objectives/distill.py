"""Distillation from a teacher (DeiT, arXiv 2012.12877): what it says of the same pixels is a label,
too.

With a distilled model, the distillation token learns from the teacher, and the class token from the
label; any other model learns from both.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError
from vit_jax.models import losses
from vit_jax.models.classifier import Classifier
from vit_jax.train.objectives.objective import Objective


def soft(dist_logits, teacher_logits, temperature: float):
    """Equation 2: temperature^2 times the divergence from the teacher's softmax to the student's,
    both at `temperature`: [batch, classes] -> [batch].
    """
    student = jax.nn.log_softmax(dist_logits / temperature)
    teacher = jax.nn.log_softmax(teacher_logits / temperature)
    return temperature**2 * (jnp.exp(teacher) * (teacher - student)).sum(-1)


def hard(dist_logits, teacher_logits, temperature: float):
    """Equation 3: cross-entropy with the teacher's likeliest class: [batch, classes] -> [batch]."""
    label = teacher_logits.argmax(-1)
    return optax.softmax_cross_entropy_with_integer_labels(dist_logits, label)


KINDS = {"hard": hard, "soft": soft}


def combined(label_loss, dist_logits, teacher_logits, kind: str, weight: float, temperature: float):
    """The loss of each example, [batch]; `label_loss`: that of the label, [batch]."""
    teacher_loss = KINDS[kind](dist_logits, teacher_logits, temperature)
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
    """
    label_loss = losses.softmax_xent(logits, label)
    return combined(label_loss, dist_logits, teacher_logits, kind, weight, temperature).mean()


@dataclasses.dataclass(frozen=True)
class Distill(Objective):
    """`teacher` and its parameters, which the step has in `TrainState.teacher`."""

    teacher: Classifier
    loss_fn: Callable  # of the label
    kind: str
    weight: float
    temperature: float
    every: int

    def teach(self, params, batch, step):
        """The teacher's logits [batch, classes] for the student's pixels, at the teacher's size and
        normalisation; zeros in steps without an answer.
        """
        image = batch["image"] * jnp.asarray(self.model.std) + jnp.asarray(self.model.mean)
        shape = (image.shape[0], *self.teacher.image_size, 3)
        if image.shape != shape:
            image = jnp.clip(jax.image.resize(image, shape, "bilinear"), 0, 1)
        image = (image - jnp.asarray(self.teacher.mean)) / jnp.asarray(self.teacher.std)

        def answer(image):
            return self.teacher.apply({"params": params}, image)

        if self.every == 1:
            return answer(image)
        nothing = jnp.zeros((image.shape[0], self.model.num_classes))
        return jax.lax.cond(step % self.every == 0, answer, lambda _: nothing, image)

    def loss(self, params, batch, key, step):
        options = dict(train=True, rngs={"dropout": key})
        if self.model.distilled:
            options |= dict(apart=True)
        logits = self.model.apply({"params": params}, batch["image"], **options)
        logits, dist_logits = logits if self.model.distilled else (logits, logits)
        label_loss = self.loss_fn(logits, batch["label"])
        teacher_logits = batch["taught"]
        settings = (self.kind, self.weight, self.temperature)
        both = combined(label_loss, dist_logits, teacher_logits, *settings)
        agree = (dist_logits.argmax(-1) == teacher_logits.argmax(-1)).astype(jnp.float32)
        if self.every > 1:
            is_taught = step % self.every == 0
            both = jnp.where(is_taught, both, label_loss)
        return both, dict(agreement=agree)

    @property
    def train_flops(self):
        return super().train_flops + self.teacher.flops // self.every


def check(model: Classifier, teacher: Classifier) -> None:
    """Raises UserError if the teacher can't answer for the student's classes."""
    if teacher.num_classes != model.num_classes:
        raise UserError(
            f"the teacher has {teacher.num_classes} classes, but the model has "
            f"{model.num_classes}: choose a teacher that was trained on the same classes"
        )
