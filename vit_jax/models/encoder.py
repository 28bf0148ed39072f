"""The transformer encoder: blocks of attention and MLP, unrolled or scanned, by the names of the
published weights.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.distributed import sharding
from vit_jax.models.ops import attention as kernels
from vit_jax.models.ops import einsum, precision
from vit_jax.models.ops.layer_norm import LayerNorm
from vit_jax.models.posemb import PositionEmbedding, held_param, offsets

# What remat keeps of the forward pass; everything else is computed again in the backward pass. By
# the names to keep.
REMAT_POLICIES = {
    "none": lambda names: None,
    "names": lambda names: jax.checkpoint_policies.save_only_these_names(*names),
    "dots": lambda names: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": lambda names: jax.checkpoint_policies.nothing_saveable,
}
# Results inside of a block: of the three projections, of attention before its last projection, of
# the MLP's first.
REMAT_NAMES = ("query", "key", "value", "attended", "hidden")
# Rate of stochastic depth in the layers, from the `share` of the depth that lies before them.
DROPPATH_SHAPES = {
    "linear": lambda rate, share: rate * share,
    "constant": lambda rate, share: rate * jnp.ones_like(share),
}
GELUS = {
    "tanh": lambda x: nn.gelu(x, approximate=True),
    "erf": lambda x: nn.gelu(x, approximate=False),
}

xavier = nn.initializers.xavier_uniform()
small = nn.initializers.normal(1e-6)


def dropout(x, rate: float, noise: dict | None, index: int, last: str = "embed"):
    """Dropout with the `index`-th mask of the layer's key; without `noise` (evaluation) x is
    returned.

    x: [batch, length, embed], or another logical axis as the `last`.
    """
    if noise is None or rate == 0.0:
        return x
    key = jax.random.fold_in(noise["key"], index)
    kept, probability = sharding.bernoulli(key, 1.0 - rate, x.shape, "batch", "length", last)
    return jnp.where(kept, x / probability, jnp.zeros_like(x))


def droppath(x, noise: dict | None, index: int):
    """Stochastic depth (arXiv 1603.09382): drops the whole residual branch per example. x: [batch,
    length, embed].
    """
    if noise is None or noise["droppath"] is None:
        return x
    keep = 1.0 - noise["droppath"]
    mask = jax.random.bernoulli(jax.random.fold_in(noise["key"], index), keep, (x.shape[0], 1, 1))
    return x * (mask / keep).astype(x.dtype)


class LayerScale(nn.Module):
    """Multiplies every channel by a learned factor (CaiT, arXiv 2103.17239): [batch, length, embed]
    -> the same.
    """

    initial: float
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        gamma = self.param("gamma", nn.initializers.constant(self.initial), (x.shape[-1],))
        return x * gamma.astype(precision.layer_dtype(self.dtype))


class MlpBlock(nn.Module):
    """Two layers with a GELU between them: [batch, length, embed] -> [batch, length, embed]."""

    mlp_dim: int
    dropout: float = 0.0
    gelu: str = "tanh"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, noise=None):
        layer = dict(kernel_init=xavier, bias_init=small, **precision.layer(self.dtype))
        dense = lambda features: nn.Dense(features, **layer)  # noqa: E731
        gelu = precision.activation(GELUS[self.gelu], self.dtype)
        width = x.shape[-1]
        x = sharding.constrain(dense(self.mlp_dim)(x), "batch", "length", "mlp").astype(self.dtype)
        x = dropout(gelu(checkpoint_name(x, "hidden")), self.dropout, noise, 1, "mlp")
        return dropout(dense(width)(x), self.dropout, noise, 2)


class HeadProjection(nn.Module):
    """A layer onto heads: [batch, length, embed] -> [batch, length, heads, kv], with
    nn.DenseGeneral's parameters.

    Its products are those of matrices [embed, heads * kv]. With an axis of heads, TPUs pad the
    gradient's 64 channels
    to 128 where fsdp shards it, which takes twice the time: by the compiler's cycles, a step of
    L/16 on v5e:8x8 takes 384.8 Mcycles with nn.DenseGeneral and JAX's derivative of attention, and
    332.0 with this and `kernels.einsum`.
    """

    heads: int
    kv: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        def init(key, shape):
            return xavier(key, (shape[0], self.heads * self.kv)).reshape(shape)

        kernel = self.param("kernel", init, (x.shape[-1], self.heads, self.kv))
        bias = self.param("bias", nn.initializers.zeros, (self.heads, self.kv))
        kernel = kernel.astype(precision.layer_dtype(self.dtype)).reshape(
            x.shape[-1], self.heads * self.kv
        )
        y = precision.matmul(x, precision.gradient_as_is(kernel), self.dtype) + bias.astype(
            precision.layer_dtype(self.dtype)
        ).reshape(-1)
        return y.reshape(*x.shape[:-1], self.heads, self.kv)


class MultiHeadDotProductAttention(nn.Module):
    """Attention of `x` to `context`: [batch, length, embed], [batch, other, embed] -> [batch,
    length, embed].

    With `relative`, the distance between query and key has an embedding that acts as a second key
    (arXiv 2010.11929 appendix D.4). This, and who asks for the weights
    (`mutable=["intermediates"]`), takes einsum whatever `attention`.
    """

    num_heads: int
    relative: bool = False
    dtype: jnp.dtype = jnp.float32
    softmax_dtype: jnp.dtype = jnp.float32
    attention: str = "auto"

    @nn.compact
    def __call__(self, x, context):
        width = x.shape[-1]

        def project(name, y):
            y = HeadProjection(self.num_heads, width // self.num_heads, self.dtype, name=name)(y)
            return checkpoint_name(sharding.constrain(y, "batch", "length", "heads", "kv"), name)

        query, key, value = project("query", x), project("key", context), project("value", context)
        distance = None
        if self.relative:
            shape = (2 * x.shape[1] - 1, width // self.num_heads)
            rows = held_param(self, "relative_embedding", shape, f"{x.shape[1]} tokens")
            distance = rows[offsets(x.shape[1])].astype(self.dtype)  # [length, length, kv]
        if self.relative or self.is_mutable_collection("intermediates"):
            weights = einsum.attention_weights(query, key, self.softmax_dtype, distance)
            self.sow("intermediates", "weights", weights)
            y = einsum.weighted(weights, value)
        else:
            y = kernels.attention(query, key, value, self.dtype, self.softmax_dtype, self.attention)
        y = checkpoint_name(y, "attended")
        return nn.DenseGeneral(
            width, axis=(-2, -1), kernel_init=xavier, name="out", **precision.layer(self.dtype)
        )(y)


class EncoderBlock(nn.Module):
    """Pre-norm block (arXiv 2010.11929 equations 2 and 3): [batch, length, embed] -> [batch,
    length, embed].
    """

    mlp_dim: int
    num_heads: int
    dropout: float = 0.0
    layer_scale: float = 0.0
    gelu: str = "tanh"
    ln_eps: float = 1e-6
    relative: bool = False
    posemb: dict | None = None  # arguments of this layer's own position embedding
    dtype: jnp.dtype = jnp.float32
    softmax_dtype: jnp.dtype = jnp.float32
    attention: str = "auto"

    @nn.compact
    def __call__(self, x, noise=None, position=None):
        """`position`: [1, length, embed] added to the input, or None."""

        def scale(name, y):
            return LayerScale(self.layer_scale, self.dtype, name=name)(y) if self.layer_scale else y

        norm = lambda name: LayerNorm(self.ln_eps, precision.layer_dtype(self.dtype), name=name)  # noqa: E731
        if self.posemb is not None:
            position = PositionEmbedding(**self.posemb, name="posembed_input")()
        if position is not None:
            x = x + position.astype(x.dtype)
        y = norm("LayerNorm_0")(x)
        attention = MultiHeadDotProductAttention(
            self.num_heads,
            self.relative,
            self.dtype,
            self.softmax_dtype,
            self.attention,
            name="MultiHeadDotProductAttention_1",
        )
        y = attention(y, y)
        x = x + droppath(scale("LayerScale_1", dropout(y, self.dropout, noise, 0)), noise, 3)
        y = norm("LayerNorm_2")(x)
        y = MlpBlock(self.mlp_dim, self.dropout, self.gelu, self.dtype, name="MlpBlock_3")(y, noise)
        x = sharding.constrain(
            x + droppath(scale("LayerScale_3", y), noise, 4), "batch", "length", "embed"
        )
        x = precision.in_memory(x, 0, 1, 2)
        self.sow("intermediates", "output", x)
        return x


class Encoder(nn.Module):
    """`depth` blocks, unrolled or scanned, and the final LayerNorm: [batch, length, embed] -> the
    same.
    """

    depth: int
    mlp_dim: int
    num_heads: int
    posemb: str = "learn"
    posemb_at: str = "stem"
    num_prefix: int = 0
    final_norm: bool = True
    dropout: float = 0.0
    droppath: float = 0.0
    droppath_shape: str = "linear"
    layer_scale: float = 0.0
    gelu: str = "tanh"
    ln_eps: float = 1e-6
    scan: bool = False
    remat: str = "none"
    remat_names: tuple[str, ...] = REMAT_NAMES
    dtype: jnp.dtype = jnp.float32
    softmax_dtype: jnp.dtype = jnp.float32
    attention: str = "auto"

    def noise(self, key):
        """Keys [depth] and drop rates [depth] of the layers."""
        if key is None:
            return None
        rates = DROPPATH_SHAPES[self.droppath_shape](
            self.droppath, jnp.arange(self.depth) / max(self.depth - 1, 1)
        )
        return dict(
            key=jax.random.split(key, self.depth), droppath=rates if self.droppath else None
        )

    def make_block(self, name: str, posemb: dict | None) -> EncoderBlock:
        block = EncoderBlock
        if self.remat != "none":
            # Under scan the barrier against common-subexpression elimination only costs: the loop
            # is one already.
            block = nn.remat(
                block,
                prevent_cse=not self.scan,
                policy=REMAT_POLICIES[self.remat](self.remat_names),
            )
        fields = ("dropout", "layer_scale", "gelu", "ln_eps", "dtype", "softmax_dtype", "attention")
        shared = {field: getattr(self, field) for field in fields}
        relative = self.posemb == "relative"
        return block(
            self.mlp_dim, self.num_heads, relative=relative, posemb=posemb, **shared, name=name
        )

    @nn.compact
    def __call__(self, x, grid: tuple[int, int], key=None):
        """`grid`: patch tokens by (height, width), behind `num_prefix` others; `key`: of dropout,
        None to evaluate.
        """
        own, position = None, None
        if self.posemb in ("learn", "learn2d"):
            own = dict(kind=self.posemb, grid=grid, num_prefix=self.num_prefix, width=x.shape[-1])
            if self.posemb_at != "every":
                position, own = PositionEmbedding(**own, name="posembed_input")(), None
        if self.posemb_at == "stem" and position is not None:
            x, position = x + position.astype(x.dtype), None
        if key is not None:
            key, first = jax.random.split(key)
            x = dropout(x, self.dropout, dict(key=first), 0)
        x = sharding.constrain(x, "batch", "length", "embed")
        noise = self.noise(key)
        if self.scan:
            layers = nn.scan(
                lambda layer, x, noise: (layer(x, noise, position), None),
                variable_axes={"params": 0, "intermediates": 0},
                split_rngs={"params": True},
                length=self.depth,
            )
            x, _ = layers(self.make_block("encoderblock", own), x, noise)
        else:
            for i in range(self.depth):
                layer = self.make_block(f"encoderblock_{i}", own)
                x = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], noise), position)
        if not self.final_norm:
            return x
        return LayerNorm(self.ln_eps, precision.layer_dtype(self.dtype), name="encoder_norm")(x)


class MAPHead(nn.Module):
    """Attention pooling (arXiv 2106.04560 section 3.2): [batch, length, embed] -> [batch, embed]."""

    mlp_dim: int
    num_heads: int
    gelu: str = "tanh"
    ln_eps: float = 1e-6
    dtype: jnp.dtype = jnp.float32
    softmax_dtype: jnp.dtype = jnp.float32
    attention: str = "auto"

    @nn.compact
    def __call__(self, x):
        probe = self.param("probe", xavier, (1, 1, x.shape[-1])).astype(x.dtype)
        probe = jnp.tile(probe, (x.shape[0], 1, 1))
        fields = dict(dtype=self.dtype, softmax_dtype=self.softmax_dtype, attention=self.attention)
        x = MultiHeadDotProductAttention(
            self.num_heads, **fields, name="MultiHeadDotProductAttention_0"
        )(probe, x)
        y = LayerNorm(self.ln_eps, precision.layer_dtype(self.dtype), name="LayerNorm_0")(x)
        y = MlpBlock(self.mlp_dim, gelu=self.gelu, dtype=self.dtype, name="MlpBlock_0")(y)
        return (x + y)[:, 0]
