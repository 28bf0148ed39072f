"""The Vision Transformer (arXiv 2010.11929), pure and hybrid.

Parameters have the published names.
"""

import math
from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models import encoder, mlp, posemb, resnet, timm_init
from vit_jax.models.classifier import Classifier
from vit_jax.models.ops import attention
from vit_jax.models.ops.dense import Dense, patch_embedding
from vit_jax.models.ops.layer_norm import LayerNorm

# How parameters start: as in the published JAX code, or as in timm.
WEIGHT_INITS = ("jax", "timm")
# tok: class token; gap: mean of the patch tokens; map: attention pooling; 0: the first patch token;
# tok_gap: class token and mean, side by side, for the linear classifiers of DINOv2 (arXiv
# 2304.07193); unpooled: every token, after the class token or without one.
POOLS = ("tok", "gap", "tok_gap", "map", "0", "tok_unpooled", "unpooled")


class VisionTransformer(Classifier):
    """Image [batch, H, W, 3] normalised as `preprocess` says -> logits [batch, classes] float32.

    With `num_classes=0` it returns what the head reads, [batch, embed], twice as wide if `pool` is
    tok_gap; with an unpooled `pool`, every token has its logits, [batch, length, classes]. Tokens
    are cls, dist, registers, patches.
    A distilled model (arXiv 2012.12877) has two heads, and returns their mean. Intermediates
    (`mutable=["intermediates"]`): stem output, embedded tokens, the encoder's input, the attention
    weights and output of every block, encoded tokens, and what the head reads, as `pre_logits`, or
    `features` if there is a layer `pre_logits`.
    """

    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    patch_size: tuple[int, int] = (16, 16)
    stem_units: tuple[int, ...] | None = None  # of a hybrid's ResNet: bottlenecks by stage
    stem_width: int = 64
    pool: str = "tok"
    class_token: bool = False  # have one even if `pool` does not read it
    distilled: bool = False
    registers: int = 0  # tokens that nothing reads (arXiv 2309.16588)
    posemb: str = "learn"
    posemb_at: str = "stem"
    pre_logits: int = 0  # width of the tanh layer before the head; 0: none
    fc_norm: bool = False  # the final LayerNorm comes after the pooling
    mlp: str = "gelu"
    gelu: str = "tanh"
    ln_eps: float = 1e-6
    dropout: float = 0.0
    droppath: float = 0.0
    droppath_shape: str = "linear"
    layer_scale: float = 0.0  # initial factor of the residual branches' channels; 0: none
    weight_init: str = "jax"
    scan: bool = False
    remat: str = "none"
    remat_names: tuple[str, ...] = encoder.REMAT_NAMES
    softmax_dtype: jnp.dtype = jnp.float32
    attention: str = "auto"

    architecture = "vit"
    can_stack = True
    remat_choices = tuple(encoder.REMAT_POLICIES)

    @property
    def prefix(self) -> tuple[tuple[str, int], ...]:
        """(parameter, tokens) before the patch tokens, in order."""
        has_cls = self.class_token or self.pool.startswith("tok")
        counts = (("cls", int(has_cls)), ("dist", int(self.distilled)), ("reg", self.registers))
        return tuple((name, count) for name, count in counts if count)

    @property
    def stem_stride(self) -> int:
        """Pixels per side that become one position of the stem's output."""
        return 1 if self.stem_units is None else 4 * 2 ** max(len(self.stem_units) - 1, 0)

    @property
    def cell(self) -> tuple[int, int]:
        """Pixels by (height, width) that one patch token stands for."""
        return self.stem_stride * self.patch_size[0], self.stem_stride * self.patch_size[1]

    @property
    def grid(self) -> tuple[int, int]:
        """Patch tokens by (height, width) at `image_size`: the stem pads (SAME), the patches drop a
        border (VALID).
        """
        h, w = (math.ceil(side / self.stem_stride) for side in self.image_size)
        return h // self.patch_size[0], w // self.patch_size[1]

    @property
    def flops(self) -> int:
        d, m, tokens = self.width, self.mlp_dim, math.prod(self.grid)
        total, channels = 0, 3
        if self.stem_units is not None:
            total, channels = resnet.flops(self.image_size, self.stem_units, self.stem_width)
        total += 2 * tokens * math.prod(self.patch_size) * channels * d

        length = tokens + self.num_prefix
        total += self.depth * self.block_flops(length)
        if self.pool == "map":
            total += 2 * (2 * tokens + 2) * d * d + 4 * tokens * d + 4 * d * m
        heads = 2 if self.distilled else 1
        if "unpooled" in self.pool:
            heads = length
        pooled = 2 * d if self.pool == "tok_gap" else d
        features = self.pre_logits or pooled
        return total + 2 * heads * (self.pre_logits * pooled + self.num_classes * features)

    def block_flops(self, length: int) -> int:
        """FLOPs of one encoder block for one image of so many tokens."""
        d = self.width
        layers = 3 if self.mlp == "swiglu" else 2
        attended = 3 if self.posemb == "relative" else 2  # keys, values and, if relative, distances
        products = 2 * length * (4 * d * d + layers * d * self.mlp_dim)
        return products + 2 * attended * length * length * d

    @property
    def tensor_sizes(self) -> dict[str, int]:
        return dict(num_heads=self.num_heads, mlp_dim=self.mlp_dim)

    def portable(self):
        return self.clone(attention="auto")

    def check(self) -> None:
        super().check()
        self.check_choice("pool", POOLS)
        self.check_choice("posemb", posemb.KINDS)
        self.check_choice("posemb_at", posemb.PLACES)
        self.check_choice("remat", encoder.REMAT_POLICIES)
        self.check_choice("mlp", mlp.MLPS)
        self.check_choice("gelu", mlp.GELUS)
        self.check_choice("droppath_shape", encoder.DROPPATH_SHAPES)
        self.check_choice("weight_init", WEIGHT_INITS)
        self.check_choice("attention", attention.ATTENTIONS)
        unknown = set(self.remat_names) - set(encoder.REMAT_NAMES)
        if unknown:
            raise UserError(
                f"model remat_names {unknown.pop()!r} is unknown: use some of "
                f"{', '.join(encoder.REMAT_NAMES)}"
            )
        if self.num_heads < 1 or self.width % self.num_heads:
            raise UserError(
                f"model width {self.width} is not divisible by num_heads {self.num_heads}: change "
                "one of them"
            )
        if self.attention == "cudnn":
            problem = attention.cudnn_refuses(self.dtype, self.width // self.num_heads)
            if problem:
                raise UserError(f"model attention=cudnn {problem}")
        if self.posemb_at != "stem" and self.posemb not in ("learn", "learn2d"):
            raise UserError(
                f"model posemb_at={self.posemb_at} has no effect with posemb={self.posemb}: use "
                "posemb=learn or learn2d"
            )
        if self.distilled and self.pool != "tok":
            raise UserError(
                f"a distilled model reads its class token: use pool=tok, not {self.pool}"
            )
        if min(self.grid) < 1:
            raise UserError(
                f"image_size {self.image_size} is smaller than one patch of {self.cell} pixels: "
                "use larger images or smaller patches"
            )

    @nn.nowrap
    def init(self, rngs, *args, **options) -> dict:
        """As of every Linen module; the parameters start as `weight_init` says."""
        variables = super().init(rngs, *args, **options)
        if self.weight_init == "jax":
            return variables
        key = rngs
        if isinstance(rngs, Mapping):
            key = rngs["params"]
        params = timm_init.like_timm(key, variables["params"], self.width, self.head_std)
        return variables | dict(params=params)

    def embed(self, image, change=None):
        """Tokens [batch, length, embed] without learned positions, and the grid of the patch
        tokens.

        Args:
          change: f(patch embeddings [batch, patches, embed]) -> the same, before any position.
        """
        x = sharding.constrain(jnp.asarray(image, self.dtype), "batch", None, None, None)
        if self.stem_units is not None:
            x = resnet.stem(x, self.stem_units, self.stem_width, self.dtype)
            self.sow("intermediates", "stem", x)
        x = patch_embedding(self.width, self.patch_size, "VALID", self.dtype, name="embedding")(x)
        batch, h, w, _ = x.shape
        x = x.reshape(batch, h * w, self.width)
        if change is not None:
            x = change(x)
        if self.posemb == "sincos2d":
            x = x + posemb.sincos2d((h, w), self.width, x.dtype)
        prefix = [
            self.param(name, nn.initializers.zeros, (1, count, self.width))
            for name, count in self.prefix
        ]
        prefix = [jnp.tile(token.astype(x.dtype), (batch, 1, 1)) for token in prefix]
        x = jnp.concatenate([*prefix, x], axis=1)
        self.sow("intermediates", "tokens", x)
        return x, (h, w)

    def make_encoder(self) -> encoder.Encoder:
        names = ("depth", "mlp_dim", "num_heads", "posemb", "posemb_at", "num_prefix")
        names += ("dropout", "droppath", "droppath_shape", "layer_scale", "mlp", "gelu", "ln_eps")
        names += ("scan", "remat", "remat_names", "dtype", "softmax_dtype", "attention")
        fields = encoder.fields_of(self, *names)
        return encoder.Encoder(**fields, final_norm=not self.fc_norm, name="Transformer")

    def map_head(self) -> encoder.MAPHead:
        names = ("mlp_dim", "num_heads", "gelu", "ln_eps", "dtype", "softmax_dtype", "attention")
        return encoder.MAPHead(**encoder.fields_of(self, *names), name="MAPHead_0")

    def pooled(self, x):
        """What the head reads: [batch, length, embed] -> [batch, embed]; [batch, 2 * embed] if
        `pool` is tok_gap; [2, batch, embed] if distilled; all tokens if unpooled.
        """
        if self.distilled:
            x = x[:, :2].swapaxes(0, 1)
        elif self.pool == "tok":
            x = x[:, 0]
        elif self.pool == "0":
            x = x[:, self.num_prefix]
        elif self.pool == "gap":
            x = x[:, self.num_prefix :].mean(axis=1)
        elif self.pool == "tok_gap":
            x = jnp.concatenate([x[:, 0], x[:, self.num_prefix :].mean(axis=1)], axis=-1)
        elif self.pool == "map":
            x = self.map_head()(x[:, self.num_prefix :])
        if self.fc_norm:
            x = LayerNorm(self.ln_eps, self.dtype, name="fc_norm")(x)
        if self.pre_logits:
            x = jnp.tanh(Dense(self.pre_logits, self.dtype, name="pre_logits")(x))
        return x

    def logits(self, x):
        if not self.distilled:
            return super().logits(x)
        if not self.num_classes:
            return x.mean(axis=0).astype(jnp.float32)
        logits = sum(self.two_logits(x)) / 2
        return logits.astype(jnp.float32)

    def two_logits(self, x):
        """Those of the class token and of the distillation token: [2, batch, embed] -> twice
        [batch, classes].
        """
        return self.head(x[0]), self.head(x[1], "head_dist")

    @nn.compact
    def __call__(self, image, train: bool = False, change=None, keep=None, apart: bool = False):
        """
        Args:
          change, keep: of patch tokens that pretraining hides; see `embed` and `Encoder`.
          apart: return the logits of both heads of a distilled model instead of their mean.
        """
        self.check_image(image)
        x, grid = self.embed(image, change)
        key = None
        if train and (self.dropout or self.droppath):
            key = self.make_rng("dropout")
        x = self.make_encoder()(x, grid, key, keep)
        self.sow("intermediates", "encoded", x)
        x = self.pooled(x)
        # A layer may have the name pre_logits.
        name = "features" if self.pre_logits else "pre_logits"
        self.sow("intermediates", name, x.mean(axis=0) if self.distilled else x)
        return self.two_logits(x) if apart else self.logits(x)
