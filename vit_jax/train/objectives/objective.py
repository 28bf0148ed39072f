"""What a run optimizes: the protocol of objectives, and what most of them have in common."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.models import create
from vit_jax.models.classifier import Classifier
from vit_jax.weights import scan_layout
from vit_jax.weights.formats.weights import Weights

BACKWARD = 2  # times the FLOPs of the forward pass


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers on a sequence of tokens, as a plan needs to know them."""

    depth: int
    length: int  # tokens
    width: int
    num_heads: int
    may_scan: bool = True  # whether model.scan stacks them


@dataclasses.dataclass(frozen=True)
class Objective:
    """Parameters, and a loss of them.

    Everything is a pure function that JAX can trace. `batch` is a dict of
      image: float32 [batch, H, W, 3], normalised;
      label: float32 [batch, classes];
      mask: float32 [batch], 0 for what does not count;
      seed: int32 [batch, 2], of every random choice about an example, so that it is the same in any
        microbatch and on any number of devices;
      taught: what `targets` returns, if the objective `teaches`.
    """

    model: Classifier  # what is evaluated and delivered

    # Names in the parameters, at the top, of what the model does not have. For `optim.layer_decay`,
    # those that end in `head` come after the encoder.
    extra = ()
    fixed = ""  # a pattern: parameters that never change, besides those of `optim.frozen`
    draws = ()  # names of what `pictures` returns
    teaches = False  # whether there are `teach` and `targets`

    def init(self, seed: int) -> dict:
        """Fresh parameters, in the layer layout of the model."""
        # The loop layout is initialised first, so that scan changes no number.
        image = jnp.zeros((1, *self.model.image_size, 3))
        params = self.model.with_scan(False).init(jax.random.key(seed), image)["params"]
        return scan_layout.relayout(params, self.model.scan, jnp.stack)

    def abstract_params(self) -> dict:
        """The parameters as ShapeDtypeStructs."""
        if not self.extra:
            return create.abstract_params(self.model)
        return jax.eval_shape(self.init, 0)

    def extra_of(self, weights: Weights) -> dict:
        """The extra parameters by name, numpy, as far as weights have them; others start fresh.

        Raises:
          UserError: the weights have them, but for another objective of this kind.
        """
        return {}

    def abstract_teacher(self) -> dict:
        """Parameters that stay as they are, in `state.teacher`, as ShapeDtypeStructs."""
        return {}

    def loss(self, params, batch: dict, key, step) -> tuple[Any, dict]:
        """The loss of each example, float32 [batch], and metrics by name, [batch] each.

        Args:
          key: of dropout, another one in each microbatch.
          step: updates done, int32 [].
        """
        raise NotImplementedError("an objective defines `loss`")

    def pictures(self, params, batch: dict) -> tuple:
        """Pictures that show the progress, one for each name in `draws`: float32 [batch, H, W, 3]
        each, 0 to 1.
        """
        raise NotImplementedError("an objective that names `draws` defines `pictures`")

    def running(self) -> dict:
        """What `targets` keeps from step to step, as it is at the start."""
        return {}

    def teach(self, state, batch: dict):
        """What a teacher says of a microbatch: a tree of arrays [batch, ...], without gradient."""
        raise NotImplementedError("an objective that `teaches` defines `teach`")

    def targets(self, answers, batch: dict, state) -> tuple[Any, dict, dict]:
        """(`taught`, `state.running` after this step, metrics) of the answers to a whole batch."""
        return answers, state.running, {}

    def ema_decay(self, decay: float, step):
        """The decay of the averaged parameters: it grows as (1 + step) / (10 + step), so that the
        start is forgotten.

        Source: tf.train.ExponentialMovingAverage with num_updates.
        """
        return jnp.minimum(decay, (1.0 + step) / (10.0 + step))

    def of_model(self, params: dict) -> dict:
        """The parameters that the model has."""
        return {name: value for name, value in params.items() if name not in self.extra}

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes by name that the number of devices of tensor parallelism must divide."""
        return self.model.tensor_sizes

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The layers that a training image passes with gradient."""
        model = self.model
        if not model.depth:
            return ()
        length = math.prod(model.grid) + model.num_prefix
        return (Stack(model.depth, length, model.width, model.num_heads),)

    @property
    def train_flops(self) -> int:
        """FLOPs of a training step per image, without what remat computes again."""
        return (1 + BACKWARD) * self.model.flops
