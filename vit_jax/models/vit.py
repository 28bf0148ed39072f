"""The Vision Transformer (arXiv 2010.11929), pure and hybrid. Parameter names are those of the
published weights.
"""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models import posemb, resnet
from vit_jax.models.classifier import Classifier
from vit_jax.models.encoder import (
    DROPPATH_SHAPES,
    GELUS,
    REMAT_NAMES,
    REMAT_POLICIES,
    Encoder,
    MAPHead,
)
from vit_jax.models.ops import attention as kernels
from vit_jax.models.ops import precision
from vit_jax.models.ops.layer_norm import LayerNorm

# tok: class token; gap: mean of the patch tokens; map: attention pooling; 0: the first patch token;
# unpooled: every token, after the class token or without one.
POOLS = ("tok", "gap", "map", "0", "tok_unpooled", "unpooled")


class VisionTransformer(Classifier):
    """Image [batch, H, W, 3] normalised as `preprocess` says -> logits [batch, classes] float32.

    With `num_classes=0` it returns what the head reads, [batch, embed]; with an unpooled `pool`,
    every token has its logits, [batch, length, classes]. Tokens are cls, dist, registers, patches.
    A distilled model (arXiv 2012.12877) has two heads, and returns their mean. Intermediates
    (`mutable=["intermediates"]`): stem output, embedded tokens, the attention weights and output of
    every block, encoded tokens, pre_logits.
    """

    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    patch_size: tuple[int, int] = (16, 16)
    stem_units: tuple[int, ...] | None = (
        None  # bottlenecks by stage of the ResNet stem; None: no stem
    )
    stem_width: int = 64
    pool: str = "tok"
    class_token: bool = False  # have one even where `pool` does not read it
    distilled: bool = False
    registers: int = 0  # tokens that nothing reads (arXiv 2309.16588)
    posemb: str = "learn"
    posemb_at: str = "stem"
    pre_logits: int = 0  # width of the tanh layer before the head; 0: none
    fc_norm: bool = False  # the final LayerNorm follows the pooling
    gelu: str = "tanh"
    ln_eps: float = 1e-6
    dropout: float = 0.0
    droppath: float = 0.0
    droppath_shape: str = "linear"
    layer_scale: float = 0.0  # initial factor of the residual branches' channels; 0: none
    scan: bool = False
    remat: str = "none"
    remat_names: tuple[str, ...] = REMAT_NAMES
    softmax_dtype: jnp.dtype = jnp.float32
    attention: str = "auto"

    @property
    def prefix(self) -> tuple[tuple[str, int], ...]:
        """(parameter, tokens) before the patch tokens, in order."""
        has_cls = self.class_token or self.pool.startswith("tok")
        counts = (("cls", int(has_cls)), ("dist", int(self.distilled)), ("reg", self.registers))
        return tuple((name, count) for name, count in counts if count)

    @property
    def num_prefix(self) -> int:
        return sum(count for _, count in self.prefix)

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
        h, w = (-(-side // self.stem_stride) for side in self.image_size)
        return h // self.patch_size[0], w // self.patch_size[1]

    def check(self) -> None:
        super().check()
        choices = dict(
            pool=POOLS,
            posemb=posemb.KINDS,
            posemb_at=posemb.PLACES,
            remat=tuple(REMAT_POLICIES),
            gelu=tuple(GELUS),
        )
        choices |= dict(droppath_shape=tuple(DROPPATH_SHAPES), attention=kernels.ATTENTIONS)
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise UserError(
                    f"model {field} {getattr(self, field)!r} is unknown: use one of "
                    f"{', '.join(allowed)}"
                )
        if unknown := set(self.remat_names) - set(REMAT_NAMES):
            raise UserError(
                f"model remat_names {unknown.pop()!r} is unknown: use some of "
                f"{', '.join(REMAT_NAMES)}"
            )
        if self.num_heads < 1 or self.width % self.num_heads:
            raise UserError(
                f"model width {self.width} is not divisible by num_heads {self.num_heads}: change "
                "one of them"
            )
        if self.attention == "cudnn" and (
            refused := kernels.cudnn_refuses(self.dtype, self.width // self.num_heads)
        ):
            raise UserError(f"model attention=cudnn {refused}")
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

    def embed(self, image):
        """Tokens [batch, length, embed] without learned positions, and the grid of the patch
        tokens.
        """
        x = sharding.constrain(jnp.asarray(image, self.dtype), "batch", None, None, None)
        if self.stem_units is not None:
            x = resnet.stem(x, self.stem_units, self.stem_width, self.dtype)
            self.sow("intermediates", "stem", x)
        layer = precision.patch_layer(self.dtype)
        x = nn.Conv(
            self.width, self.patch_size, self.patch_size, padding="VALID", name="embedding", **layer
        )(x)
        batch, *grid, _ = x.shape
        x = x.reshape(batch, grid[0] * grid[1], self.width)
        if self.posemb == "sincos2d":
            x = x + posemb.sincos2d(grid, self.width, x.dtype)
        prefix = [
            self.param(name, nn.initializers.zeros, (1, n, self.width)) for name, n in self.prefix
        ]
        x = jnp.concatenate(
            [*(jnp.tile(token.astype(x.dtype), (batch, 1, 1)) for token in prefix), x], axis=1
        )
        self.sow("intermediates", "tokens", x)
        return x, tuple(grid)

    def encoder(self) -> Encoder:
        own = [name for name in Encoder.__dataclass_fields__ if name in self.__dataclass_fields__]
        fields = {name: getattr(self, name) for name in own if name not in ("parent", "name")}
        return Encoder(
            **fields, num_prefix=self.num_prefix, final_norm=not self.fc_norm, name="Transformer"
        )

    def pooled(self, x):
        """What the head reads: [batch, length, embed] -> [batch, embed], or all tokens where
        nothing is pooled.
        """
        if self.pool == "tok":
            x = x[:, :2].swapaxes(0, 1) if self.distilled else x[:, 0]
        elif self.pool == "0":
            x = x[:, self.num_prefix]
        elif self.pool == "gap":
            x = x[:, self.num_prefix :].mean(axis=1)
        elif self.pool == "map":
            names = (
                "mlp_dim",
                "num_heads",
                "gelu",
                "ln_eps",
                "dtype",
                "softmax_dtype",
                "attention",
            )
            pool = MAPHead(**{name: getattr(self, name) for name in names}, name="MAPHead_0")
            x = pool(x[:, self.num_prefix :])
        if self.fc_norm:
            x = LayerNorm(self.ln_eps, precision.layer_dtype(self.dtype), name="fc_norm")(x)
        if self.pre_logits:
            x = jnp.tanh(
                nn.Dense(self.pre_logits, name="pre_logits", **precision.layer(self.dtype))(x)
            )
        return x

    @nn.compact
    def __call__(self, image, train: bool = False):
        x, grid = self.embed(image)
        noisy = train and (self.dropout or self.droppath)
        x = self.encoder()(x, grid, self.make_rng("dropout") if noisy else None)
        self.sow("intermediates", "encoded", x)
        x = self.pooled(x)
        self.sow("intermediates", "pre_logits", x.mean(axis=0) if self.distilled else x)
        if self.distilled:
            x = (
                (self.head(x[0]) + self.head(x[1], "head_dist")) / 2
                if self.num_classes
                else x.mean(axis=0)
            )
        elif self.num_classes:
            x = self.head(x)
        return x.astype(jnp.float32)
