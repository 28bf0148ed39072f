"""The Vision Transformer (arXiv 2010.11929), pure and hybrid. Parameter names are those of the published weights."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import sharding
from vit_jax.errors import UserError
from vit_jax.models import kernels, resnet, variants

POOLS = ("tok", "gap", "map", "tok_unpooled", "unpooled")
POSEMBS = ("learn", "sincos2d", "none")
# What remat keeps of the forward pass; everything else is computed again in the backward pass.
REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

xavier = nn.initializers.xavier_uniform()
small = nn.initializers.normal(1e-6)


def sincos2d(grid: tuple[int, int], width: int, dtype):
    """Fixed 2D sine-cosine embedding of MoCo v3 (arXiv 2104.02057) as in arXiv 2205.01580: [1, h * w, width]."""
    if width % 4:
        raise UserError(f"posemb 'sincos2d' needs a width that is a multiple of 4, got {width}")
    y, x = jnp.mgrid[: grid[0], : grid[1]]
    omega = 1.0 / 10_000 ** (jnp.arange(width // 4) / max(width // 4 - 1, 1))
    y, x = y.reshape(-1, 1) * omega, x.reshape(-1, 1) * omega  # [h * w, width / 4]
    return jnp.concatenate([jnp.sin(x), jnp.cos(x), jnp.sin(y), jnp.cos(y)], axis=1)[None].astype(dtype)


def dropout(x, rate: float, noise: dict | None, index: int):
    """Dropout with the `index`-th mask of the layer's key; without `noise` (evaluation) x is returned."""
    if noise is None or rate == 0.0:
        return x
    return nn.Dropout(rate)(x, deterministic=False, rng=jax.random.fold_in(noise["key"], index))


def droppath(x, noise: dict | None, index: int):
    """Stochastic depth (arXiv 1603.09382): drops the whole residual branch per example. x: [batch, length, embed]."""
    if noise is None or noise["droppath"] is None:
        return x
    keep = 1.0 - noise["droppath"]
    mask = jax.random.bernoulli(jax.random.fold_in(noise["key"], index), keep, (x.shape[0], 1, 1))
    return x * (mask / keep).astype(x.dtype)


class MlpBlock(nn.Module):
    """Two layers with a tanh-approximated GELU: [batch, length, embed] -> [batch, length, embed]."""

    mlp_dim: int
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, noise=None):
        dense = lambda features: nn.Dense(features, dtype=self.dtype, kernel_init=xavier, bias_init=small)  # noqa: E731
        width = x.shape[-1]
        x = sharding.constrain(dense(self.mlp_dim)(x), "batch", "length", "mlp")
        x = dropout(nn.gelu(x), self.dropout, noise, 1)
        return dropout(dense(width)(x), self.dropout, noise, 2)


class MultiHeadDotProductAttention(nn.Module):
    """Attention of `x` to `context`: [batch, length, embed], [batch, other, embed] -> [batch, length, embed]."""

    num_heads: int
    dtype: jnp.dtype = jnp.float32
    softmax_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, context):
        width = x.shape[-1]

        def project(name, y):
            heads = (self.num_heads, width // self.num_heads)
            y = nn.DenseGeneral(heads, dtype=self.dtype, kernel_init=xavier, name=name)(y)
            return sharding.constrain(y, "batch", "length", "heads", "kv")

        query, key, value = project("query", x), project("key", context), project("value", context)
        y, weights = kernels.attention(query, key, value, self.softmax_dtype)
        self.sow("intermediates", "weights", weights)
        return nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype, kernel_init=xavier, name="out")(y)


class EncoderBlock(nn.Module):
    """Pre-norm block (arXiv 2010.11929 equations 2 and 3): [batch, length, embed] -> [batch, length, embed]."""

    mlp_dim: int
    num_heads: int
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32
    softmax_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, noise=None):
        norm = lambda name: nn.LayerNorm(dtype=self.dtype, name=name)  # noqa: E731
        y = norm("LayerNorm_0")(x)
        y = MultiHeadDotProductAttention(
            self.num_heads, self.dtype, self.softmax_dtype, name="MultiHeadDotProductAttention_1"
        )(y, y)
        x = x + droppath(dropout(y, self.dropout, noise, 0), noise, 3)
        y = norm("LayerNorm_2")(x)
        y = MlpBlock(self.mlp_dim, self.dropout, self.dtype, name="MlpBlock_3")(y, noise)
        x = sharding.constrain(x + droppath(y, noise, 4), "batch", "length", "embed")
        self.sow("intermediates", "output", x)
        return x


class PositionEmbedding(nn.Module):
    """Learned position embedding, one row per token (prefix tokens included): x + pos, [batch, length, embed]."""

    @nn.compact
    def __call__(self, x):
        shape = (1, *x.shape[1:])
        if self.has_variable("params", "pos_embedding"):
            held = self.get_variable("params", "pos_embedding").shape
            if held != shape:
                raise UserError(
                    f"the image gives {shape[1]} tokens of width {shape[2]}, but the position embedding has "
                    f"{held[1]} of {held[2]}: load the weights with image_size= to resample it"
                )
        return x + self.param("pos_embedding", nn.initializers.normal(0.02), shape).astype(x.dtype)


class Encoder(nn.Module):
    """`depth` blocks, unrolled or scanned, and the final LayerNorm: [batch, length, embed] -> the same."""

    depth: int
    mlp_dim: int
    num_heads: int
    posemb: str = "learn"
    dropout: float = 0.0
    droppath: float = 0.0
    scan: bool = False
    remat: str = "none"
    dtype: jnp.dtype = jnp.float32
    softmax_dtype: jnp.dtype = jnp.float32

    def noise(self, key):
        """Keys [depth] and drop rates [depth] of the layers; the rate grows linearly with depth (arXiv 1603.09382)."""
        if key is None:
            return None
        rates = self.droppath * jnp.arange(self.depth) / max(self.depth - 1, 1)
        return dict(key=jax.random.split(key, self.depth), droppath=rates if self.droppath else None)

    @nn.compact
    def __call__(self, x, key=None):
        if self.posemb == "learn":
            x = PositionEmbedding(name="posembed_input")(x)
        if key is not None:
            key, first = jax.random.split(key)
            x = dropout(x, self.dropout, dict(key=first), 0)
        x = sharding.constrain(x, "batch", "length", "embed")
        noise = self.noise(key)

        block = EncoderBlock
        if self.remat != "none":
            # Under scan the barrier against common-subexpression elimination only costs: the loop is one already.
            block = nn.remat(block, prevent_cse=not self.scan, policy=REMAT_POLICIES[self.remat])
        make = lambda name: block(  # noqa: E731
            self.mlp_dim, self.num_heads, self.dropout, self.dtype, self.softmax_dtype, name=name
        )
        if self.scan:
            layers = nn.scan(
                lambda layer, x, noise: (layer(x, noise), None),
                variable_axes={"params": 0, "intermediates": 0},
                split_rngs={"params": True},
                length=self.depth,
            )
            x, _ = layers(make("encoderblock"), x, noise)
        else:
            for i in range(self.depth):
                x = make(f"encoderblock_{i}")(x, jax.tree.map(lambda leaf, i=i: leaf[i], noise))
        return nn.LayerNorm(dtype=self.dtype, name="encoder_norm")(x)


class MAPHead(nn.Module):
    """Attention pooling (arXiv 2106.04560 section 3.2): [batch, length, embed] -> [batch, embed]."""

    mlp_dim: int
    num_heads: int
    dtype: jnp.dtype = jnp.float32
    softmax_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        probe = self.param("probe", xavier, (1, 1, x.shape[-1])).astype(x.dtype)
        probe = jnp.tile(probe, (x.shape[0], 1, 1))
        x = MultiHeadDotProductAttention(
            self.num_heads, self.dtype, self.softmax_dtype, name="MultiHeadDotProductAttention_0"
        )(probe, x)
        y = nn.LayerNorm(dtype=self.dtype, name="LayerNorm_0")(x)
        return (x + MlpBlock(self.mlp_dim, dtype=self.dtype, name="MlpBlock_0")(y))[:, 0]


class VisionTransformer(nn.Module):
    """Image [batch, H, W, 3] normalised as `preprocess` says -> logits [batch, classes] float32.

    With `num_classes=0` it returns what the head reads, [batch, embed]; with an unpooled `pool`, every token has its
    logits, [batch, length, classes]. Intermediates (`mutable=["intermediates"]`): stem output, embedded tokens, the
    attention weights and output of every block, encoded tokens, pre_logits.
    """

    image_size: tuple[int, int] = (224, 224)
    num_classes: int = 1000
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    patch_size: tuple[int, int] = (16, 16)
    stem_units: tuple[int, ...] | None = None  # bottlenecks by stage of the ResNet stem; None: no stem
    stem_width: int = 64
    pool: str = "tok"
    posemb: str = "learn"
    pre_logits: int = 0  # width of the tanh layer before the head; 0: none
    head_bias: float = 0.0
    dropout: float = 0.0
    droppath: float = 0.0
    scan: bool = False
    remat: str = "none"
    dtype: jnp.dtype = jnp.float32
    softmax_dtype: jnp.dtype = jnp.float32

    @property
    def num_prefix(self) -> int:
        """Tokens before the patch tokens (the class token)."""
        return int(self.pool.startswith("tok"))

    @property
    def stem_stride(self) -> int:
        """Pixels per side that become one position of the stem's output."""
        return 1 if self.stem_units is None else 4 * 2 ** max(len(self.stem_units) - 1, 0)

    @property
    def grid(self) -> tuple[int, int]:
        """Patch tokens by (height, width) at `image_size`: the stem pads (SAME), the patches drop a border (VALID)."""
        h, w = (-(-side // self.stem_stride) for side in self.image_size)
        return h // self.patch_size[0], w // self.patch_size[1]

    @property
    def preprocess(self) -> dict:
        """How images must be normalised: (image / 255 - mean) / std, that is to [-1, 1]."""
        half = (0.5, 0.5, 0.5)
        return dict(mean=half, std=half, image_size=self.image_size, interpolation="bilinear", crop=None)

    @nn.compact
    def __call__(self, image, train: bool = False):
        x = sharding.constrain(jnp.asarray(image, self.dtype), "batch", None, None, None)
        if self.stem_units is not None:
            x = resnet.stem(x, self.stem_units, self.stem_width, self.dtype)
            self.sow("intermediates", "stem", x)
        x = nn.Conv(self.width, self.patch_size, self.patch_size, padding="VALID", dtype=self.dtype, name="embedding")(
            x
        )
        batch, h, w, _ = x.shape
        x = x.reshape(batch, h * w, self.width)
        if self.posemb == "sincos2d":
            x = x + sincos2d((h, w), self.width, x.dtype)
        if self.num_prefix:
            cls = self.param("cls", nn.initializers.zeros, (1, 1, self.width)).astype(x.dtype)
            x = jnp.concatenate([jnp.tile(cls, (batch, 1, 1)), x], axis=1)
        self.sow("intermediates", "tokens", x)

        noisy = train and (self.dropout or self.droppath)
        encoder = {name: getattr(self, name) for name in Encoder.__dataclass_fields__ if name not in ("parent", "name")}
        x = Encoder(**encoder, name="Transformer")(x, self.make_rng("dropout") if noisy else None)
        self.sow("intermediates", "encoded", x)

        if self.pool == "tok":
            x = x[:, 0]
        elif self.pool == "gap":
            x = x.mean(axis=1)
        elif self.pool == "map":
            x = MAPHead(self.mlp_dim, self.num_heads, self.dtype, self.softmax_dtype, name="MAPHead_0")(x)
        if self.pre_logits:
            x = jnp.tanh(nn.Dense(self.pre_logits, dtype=self.dtype, name="pre_logits")(x))
        self.sow("intermediates", "pre_logits", x)
        if self.num_classes:
            bias = nn.initializers.constant(self.head_bias)
            x = nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros, bias_init=bias, name="head")(x)
        return x.astype(jnp.float32)


def pair(size) -> tuple[int, int]:
    """(height, width) from one side or both; anything else is a UserError."""
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int | np.integer) for side in sides):
        raise UserError(f"size {size!r} is neither a whole number nor a pair of them (height, width): correct it")
    return int(sides[0]), int(sides[1])


def create(variant: str | None = None, num_classes: int = 1000, image_size=224, **overrides) -> VisionTransformer:
    """Builds the module for a named variant; every field of `VisionTransformer` may be overridden.

    Args:
      variant: a name that `variants.decode` knows, or None to give every size by keyword.
      image_size: side in pixels, or (height, width).
      **overrides: fields; `pre_logits=True` means as wide as the model, sizes may be one int, dtypes may be names.

    Raises:
      UserError: unknown variant or field, or values that do not fit together.
    """
    try:
        fields = variants.decode(variant) if variant else {}
    except ValueError as error:
        raise UserError(str(error)) from None
    fields |= overrides | dict(num_classes=num_classes, image_size=pair(image_size))
    known = set(VisionTransformer.__dataclass_fields__) - {"parent", "name"}
    if unknown := sorted(set(fields) - known):
        raise UserError(f"unknown model field {unknown[0]!r}: known are {', '.join(sorted(known))}")
    if "patch_size" in fields:
        fields["patch_size"] = pair(fields["patch_size"])
    for name in ("dtype", "softmax_dtype"):
        if name in fields:
            try:
                fields[name] = jnp.dtype(fields[name])
            except TypeError:
                raise UserError(f"model {name} {fields[name]!r} is unknown: use float32 or bfloat16") from None
    if fields.get("pre_logits") is True:
        fields["pre_logits"] = fields.get("width", VisionTransformer.width)
    model = VisionTransformer(**fields)
    check(model)
    return model


def check(model: VisionTransformer) -> None:
    """Raises UserError where fields do not fit together."""
    for field, value, allowed in (
        ("pool", model.pool, POOLS),
        ("posemb", model.posemb, POSEMBS),
        ("remat", model.remat, tuple(REMAT_POLICIES)),
    ):
        if value not in allowed:
            raise UserError(f"model {field} {value!r} is unknown: use one of {', '.join(allowed)}")
    if model.width % model.num_heads:
        raise UserError(
            f"model width {model.width} is not divisible by num_heads {model.num_heads}: change one of them"
        )
    if min(model.grid) < 1:
        raise UserError(
            f"image_size {model.image_size} is smaller than one patch of "
            f"{tuple(model.stem_stride * side for side in model.patch_size)} pixels: use larger images or smaller "
            "patches"
        )


def fields(model: VisionTransformer) -> dict:
    """Constructor arguments as JSON-able values: `create(**fields(model))` builds the same model."""
    names = set(VisionTransformer.__dataclass_fields__) - {"parent", "name"}
    values = {name: getattr(model, name) for name in sorted(names)}
    return values | {name: jnp.dtype(values[name]).name for name in ("dtype", "softmax_dtype")}
