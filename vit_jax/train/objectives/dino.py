"""Self-distillation without labels: DINO (arXiv 2104.14294), with the masked patches of iBOT (arXiv
2111.07832) and KoLeo as in DINOv2 (arXiv 2304.07193).

The student sees two global views of an image and several local ones, and learns what the teacher,
its running average, says of the other global view. With iBOT, some patches of the student's global
views are hidden, and it learns what the teacher says of them as well. Terms and weights are those
of DINOv2's published code. The teacher is what is evaluated and delivered.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from vit_jax.data.augment.batch import keys
from vit_jax.models.dino import DinoHead, resample_positions
from vit_jax.models.encoder import select
from vit_jax.models.vit import VisionTransformer
from vit_jax.train.objectives import block_masks, dino_checks, dino_targets
from vit_jax.train.objectives.koleo import koleo
from vit_jax.train.objectives.objective import BACKWARD, Objective, Stack
from vit_jax.train.schedules import half_cosine

HIDE = 0x69626F74  # purpose of an example's random choice of patches
HEADS = 0x64696E6F  # of the seed of the heads
STUDENT_TEMPERATURE = 0.1
START_TEMPERATURE = 0.04  # of the teacher
VIEWS = 2  # global ones

HEAD = "dino_head"
PATCH_HEAD = "ibot_head"
MASK = "mask"


def cross_entropy(target, logits):
    """Of probabilities and logits [..., prototypes] -> [...]."""
    return jax.nn.logsumexp(logits, axis=-1) - (target * logits).sum(-1)


def views_loss(targets, logits):
    """The mean over all pairs of a teacher's view and another view of the student.

    Args:
      targets: probabilities of the teacher [batch, 2, prototypes].
      logits: of the student, divided by its temperature [batch, views, prototypes], the first two
        of the same views.

    Returns:
      [batch].
    """
    highest = jax.lax.Precision.HIGHEST
    dots = jnp.einsum("btk,bvk->btv", targets, logits, precision=highest)
    terms = jax.nn.logsumexp(logits, axis=-1)[:, None] - dots
    is_other = 1.0 - jnp.eye(*dots.shape[1:])
    return (terms * is_other).sum((1, 2)) / is_other.sum()


def patches_loss(targets, logits, weight):
    """The mean over the global views of what their hidden patches have in the mean, 0 if a view has
    none: [batch, patches, prototypes], weight [batch, patches] -> [batch].
    """
    return (weight * cross_entropy(targets, logits)).sum(1) / VIEWS


@dataclasses.dataclass(frozen=True)
class Dino(Objective):
    model: VisionTransformer
    head: DinoHead
    total_steps: int
    centering: str
    temperature: float  # of the teacher, after its warm-up
    temperature_warmup_steps: int
    freeze_last_layer: int  # steps
    ibot: bool
    shared_head: bool  # of both losses
    koleo: float  # its weight
    local_count: int
    local_size: int

    teaches = True

    @property
    def patch_head(self) -> str:
        return HEAD if self.shared_head else PATCH_HEAD

    @property
    def extra(self):
        if not self.ibot:
            return (HEAD,)
        return (HEAD, MASK) if self.shared_head else (HEAD, PATCH_HEAD, MASK)

    @property
    def encoder(self) -> VisionTransformer:
        return self.model.clone(pool="tok_unpooled", num_classes=0, pre_logits=0)

    @property
    def local_model(self) -> VisionTransformer:
        return self.encoder.clone(image_size=(self.local_size, self.local_size))

    @property
    def tensor_sizes(self):
        return super().tensor_sizes | {"dino.prototypes": self.head.prototypes}

    def init(self, seed):
        params = super().init(seed)
        head_keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), HEADS))
        features = jnp.zeros((1, self.model.width))
        for name, key in zip((HEAD, PATCH_HEAD), head_keys, strict=True):
            if name in self.extra:
                params[name] = self.head.init(key, features)["params"]
        if self.ibot:
            params[MASK] = jnp.zeros((self.model.width,))
        return params

    def running(self):
        if self.centering != "centering":
            return {}
        names = ("views", "patches") if self.ibot else ("views",)
        return {name: jnp.zeros((self.head.prototypes,)) for name in names}

    def ema_decay(self, decay: float, step):
        """From `decay` to 1 by half a cosine."""
        return half_cosine(decay, 1.0, step / self.total_steps)

    def teacher_temperature(self, step):
        """From 0.04 in equal steps."""
        last = max(self.temperature_warmup_steps - 1, 1)
        share = jnp.minimum(step / last, 1.0) if self.temperature_warmup_steps else 1.0
        return START_TEMPERATURE + (self.temperature - START_TEMPERATURE) * share

    def project(self, params, name: str, tokens):
        """[batch, tokens, embed] -> [batch, tokens, prototypes]."""
        return self.head.apply({"params": params[name]}, tokens)

    def hide(self, seed):
        """`block_masks.draw` of each example."""
        return jax.vmap(lambda key: block_masks.draw(key, self.model.grid))(keys(seed, HIDE))

    def global_tokens(self, params, image, hidden=None, **options):
        """Class and patch tokens of global views: [batch, 2, H, W, 3], hidden bool [batch, 2,
        patches] -> [batch, 2, embed], [batch, 2 * patches, embed].
        """
        batch = len(image)
        if hidden is not None:
            hidden = hidden.reshape(batch * VIEWS, -1, 1)
            mask = params[MASK]
            options |= dict(change=lambda x: jnp.where(hidden, mask.astype(x.dtype), x))
        image = image.reshape(-1, *image.shape[2:])
        tokens = self.encoder.apply({"params": self.of_model(params)}, image, **options)
        patches = tokens[:, self.model.num_prefix :]
        width = self.model.width
        return tokens[:, 0].reshape(batch, VIEWS, width), patches.reshape(batch, -1, width)

    def local_tokens(self, params, image, **options):
        """Class tokens of local views: [batch, views, h, w, 3] -> [batch, views, embed]."""
        params = self.of_model(params)
        if self.model.posemb == "learn":
            embedding = params["Transformer"]["posembed_input"]["pos_embedding"]
            grids = (self.model.grid, self.local_model.grid)
            rows = resample_positions(embedding, self.model.num_prefix, *grids)
            positions = dict(posembed_input=dict(pos_embedding=rows))
            params = params | dict(Transformer=params["Transformer"] | positions)
        flat = image.reshape(-1, *image.shape[2:])
        tokens = self.local_model.apply({"params": params}, flat, **options)
        return tokens[:, 0].reshape(*image.shape[:2], -1)

    def teach(self, state, batch):
        params = state.ema_params
        features, patches = self.global_tokens(params, batch["image"])
        answers = dict(features=features, views=self.project(params, HEAD, features))
        if self.ibot:
            _, index, weight = self.hide(batch["seed"])
            patches = select(patches, index)
            answers |= dict(patches=self.project(params, self.patch_head, patches), weight=weight)
        return answers

    def targets(self, answers, batch, state):
        counts = batch["mask"][:, None]
        weights = dict(views=jnp.tile(counts, (1, VIEWS)))
        if self.ibot:
            weights["patches"] = counts * (answers["weight"] > 0)
        temperature = self.teacher_temperature(state.step)
        taught = {}
        running = {}
        for name, weight in weights.items():
            logits = answers[name]
            if self.centering == "centering":
                center = state.running[name]
                taught[name] = dino_targets.centered(logits, center, temperature)
                running[name] = dino_targets.next_center(center, logits, weight)
            else:
                taught[name] = dino_targets.sinkhorn_knopp(logits, weight, temperature)
        features = answers["features"]
        metrics = dino_targets.collapse_metrics(taught["views"], features, weights["views"])
        return taught, running, metrics

    def with_frozen_last_layer(self, params, step):
        """`params`; in the first steps the prototypes get no gradient."""
        if not self.freeze_last_layer:
            return params

        def freeze(head):
            kernel = head["prototypes"]["kernel"]
            frozen = jax.lax.stop_gradient(kernel)
            kernel = jnp.where(step < self.freeze_last_layer, frozen, kernel)
            return head | dict(prototypes=dict(kernel=kernel))

        heads = [name for name in (HEAD, PATCH_HEAD) if name in params]
        return params | {name: freeze(params[name]) for name in heads}

    def loss(self, params, batch, key, step):
        params = self.with_frozen_last_layer(params, step)
        taught = batch["taught"]
        global_key, local_key = jax.random.split(key)
        hidden = None
        if self.ibot:
            hidden, index, weight = self.hide(batch["seed"])
        options = dict(train=True, rngs={"dropout": global_key})
        features, patches = self.global_tokens(params, batch["image"], hidden, **options)
        views = features
        if self.local_count:
            options = dict(train=True, rngs={"dropout": local_key})
            local = self.local_tokens(params, batch["local"], **options)
            views = jnp.concatenate([features, local], axis=1)
        logits = self.project(params, HEAD, views) / STUDENT_TEMPERATURE
        parts = dict(dino=views_loss(taught["views"], logits))
        total = parts["dino"]
        if self.ibot:
            patches = select(patches, index)
            logits = self.project(params, self.patch_head, patches) / STUDENT_TEMPERATURE
            parts["ibot"] = patches_loss(taught["patches"], logits, weight)
            total += parts["ibot"]
        if self.koleo:
            of_views = jax.vmap(koleo, (1, None), 1)(features, batch["mask"])
            parts["koleo"] = of_views.sum(1)
            total += self.koleo * parts["koleo"]
        return total, parts

    @property
    def stacks(self):
        def stack(model):
            length = math.prod(model.grid) + model.num_prefix
            return Stack(model.depth, length, model.width, model.num_heads)

        return VIEWS * (stack(self.model),) + self.local_count * (stack(self.local_model),)

    @property
    def train_flops(self):
        training = 1 + BACKWARD
        head = self.head.flops(self.model.width)
        total = VIEWS * (training + 1) * (self.model.flops + head)
        total += self.local_count * training * (self.local_model.flops + head)
        if self.ibot:
            total += (training + 1) * block_masks.most(math.prod(self.model.grid)) * head
        return total


def make(config, model, total_steps: int) -> Dino:
    dino_checks.check(config, model)
    settings = config.dino
    head = DinoHead(settings.prototypes, settings.head_width, settings.bottleneck, model.dtype)
    views = config.data.views
    return Dino(
        model,
        head,
        total_steps,
        centering=settings.centering,
        temperature=settings.teacher_temperature,
        temperature_warmup_steps=settings.temperature_warmup_steps,
        freeze_last_layer=settings.freeze_last_layer,
        ibot=settings.ibot,
        shared_head=settings.ibot and settings.shared_head,
        koleo=settings.koleo,
        local_count=views.local_count,
        local_size=views.local_size,
    )
