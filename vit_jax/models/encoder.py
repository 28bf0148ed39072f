"""The transformer encoder: blocks of attention and MLP, unrolled or scanned.

Parameters have the published names.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.distributed import sharding
from vit_jax.models.dropout import (
    ATTENTION,
    ATTENTION_PATH,
    DROPPATH_SHAPES,
    MLP_PATH,
    dropout,
    droppath,
)
from vit_jax.models.mlp import MlpBlock
from vit_jax.models.ops.attention import attend
from vit_jax.models.ops.dense import HeadProjection, OutputProjection, xavier
from vit_jax.models.ops.einsum import attention_weights, weighted
from vit_jax.models.ops.layer_norm import LayerNorm
from vit_jax.models.ops.tpu_layout import in_memory
from vit_jax.models.posemb import PositionEmbedding, param_of_image_size, relative_index

# Name -> f(remat_names) -> policy: what is stored for the backward pass, which computes the rest
# again.
REMAT_POLICIES = {
    "none": lambda names: None,
    "names": lambda names: jax.checkpoint_policies.save_only_these_names(*names),
    "dots": lambda names: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": lambda names: jax.checkpoint_policies.nothing_saveable,
}
# Results inside a block: of the three projections, of attention before its output projection, of
# the MLP's first layer (and of its gate).
REMAT_NAMES = ("query", "key", "value", "attended", "hidden")


def fields_of(module: nn.Module, *names: str) -> dict:
    """Fields of a module, to give to a part of it."""
    return {name: getattr(module, name) for name in names}


def select(x, index):
    """Rows of each example: [batch, length, embed], int32 [batch, count] without repetition ->
    [batch, count, embed].
    """
    options = dict(unique_indices=True, mode="promise_in_bounds")
    return jax.vmap(lambda rows, i: rows.at[i].get(**options))(x, index)


def select_patches(x, index, num_prefix: int):
    """`select` among the patch tokens; the prefix tokens stay in front."""
    prefix = jnp.broadcast_to(jnp.arange(num_prefix), (len(x), num_prefix))
    return select(x, jnp.concatenate([prefix, index + num_prefix], axis=1))


class LayerScale(nn.Module):
    """Multiplies every channel by a learned factor (CaiT, arXiv 2103.17239): [batch, length, embed]
    -> the same.
    """

    initial: float

    @nn.compact
    def __call__(self, x):
        gamma = self.param("gamma", nn.initializers.constant(self.initial), (x.shape[-1],))
        return x * gamma.astype(x.dtype)


class MultiHeadDotProductAttention(nn.Module):
    """Attention of `x` to `context`: [batch, length, embed], [batch, other, embed] -> [batch,
    length, embed].

    With `relative`, the distance between query and key has an embedding that acts as a second key
    (arXiv 2010.11929 appendix D.4). That, and a caller who asks for the attention weights
    (`mutable=["intermediates"]`), takes einsum whatever `attention`.
    """

    num_heads: int
    relative: bool = False
    dtype: jnp.dtype = jnp.float32
    softmax_dtype: jnp.dtype = jnp.float32
    attention: str = "auto"

    @nn.compact
    def __call__(self, x, context):
        query = self.project("query", x)
        key = self.project("key", context)
        value = self.project("value", context)
        distance = self.distance(x) if self.relative else None
        if self.relative or self.is_mutable_collection("intermediates"):
            weights = attention_weights(query, key, self.softmax_dtype, distance)
            self.sow("intermediates", "weights", weights)
            y = weighted(weights, value)
        else:
            y = attend(query, key, value, self.dtype, self.softmax_dtype, self.attention)
        return OutputProjection(x.shape[-1], self.dtype, name="out")(y)

    def project(self, name: str, x):
        """[batch, length, embed] -> [batch, length, heads, kv]."""
        kv = x.shape[-1] // self.num_heads
        y = HeadProjection(self.num_heads, kv, self.dtype, name=name)(x)
        return sharding.constrain(y, "batch", "length", "heads", "kv")

    def distance(self, x):
        """Embeddings of the distances between tokens: [length, length, kv]."""
        _, length, width = x.shape
        shape = (2 * length - 1, width // self.num_heads)
        rows = param_of_image_size(self, "relative_embedding", shape, f"{length} tokens")
        return rows[relative_index(length)].astype(self.dtype)


class EncoderBlock(nn.Module):
    """Pre-norm block (arXiv 2010.11929 equations 2 and 3): [batch, length, embed] -> the same."""

    mlp_dim: int
    num_heads: int
    dropout: float = 0.0
    layer_scale: float = 0.0
    mlp: str = "gelu"
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
        if self.posemb is not None:
            position = PositionEmbedding(**self.posemb, name="posembed_input")()
        if position is not None:
            x = x + position.astype(x.dtype)

        y = LayerNorm(self.ln_eps, self.dtype, name="LayerNorm_0")(x)
        y = MultiHeadDotProductAttention(
            **fields_of(self, "num_heads", "relative", "dtype", "softmax_dtype", "attention"),
            name="MultiHeadDotProductAttention_1",
        )(y, y)
        y = dropout(y, self.dropout, noise, ATTENTION)
        if self.layer_scale:
            y = LayerScale(self.layer_scale, name="LayerScale_1")(y)
        x = x + droppath(y, noise, ATTENTION_PATH)

        y = LayerNorm(self.ln_eps, self.dtype, name="LayerNorm_2")(x)
        fields = fields_of(self, "mlp_dim", "dropout", "gelu", "dtype")
        y = MlpBlock(**fields, kind=self.mlp, name="MlpBlock_3")(y, noise)
        if self.layer_scale:
            y = LayerScale(self.layer_scale, name="LayerScale_3")(y)
        x = x + droppath(y, noise, MLP_PATH)

        x = in_memory(sharding.constrain(x, "batch", "length", "embed"), 0, 1, 2)
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
    mlp: str = "gelu"
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
        rates = None
        if self.droppath:
            share = jnp.arange(self.depth) / max(self.depth - 1, 1)
            rates = DROPPATH_SHAPES[self.droppath_shape](self.droppath, share)
        return dict(key=jax.random.split(key, self.depth), droppath=rates)

    def make_block(self, name: str, posemb: dict | None) -> EncoderBlock:
        block = EncoderBlock
        if self.remat != "none":
            # Under scan the barrier against common-subexpression elimination only costs: the loop
            # already is one.
            policy = REMAT_POLICIES[self.remat](self.remat_names)
            block = nn.remat(block, prevent_cse=not self.scan, policy=policy)
        fields = fields_of(self, "mlp_dim", "num_heads", "dropout", "layer_scale", "mlp", "gelu")
        fields |= fields_of(self, "ln_eps", "dtype", "softmax_dtype", "attention")
        return block(**fields, relative=self.posemb == "relative", posemb=posemb, name=name)

    def add_position(self, x, grid: tuple[int, int]):
        """Learned positions, added to x or for the layers: x, the arguments of each layer's own
        embedding, the embedding that all layers share. One of the last two, or both, are None.
        """
        if self.posemb not in ("learn", "learn2d"):
            return x, None, None
        fields = dict(kind=self.posemb, grid=grid, num_prefix=self.num_prefix, width=x.shape[-1])
        if self.posemb_at == "every":
            return x, fields, None
        position = PositionEmbedding(**fields, name="posembed_input")()
        if self.posemb_at == "shared":
            return x, None, position
        return x + position.astype(x.dtype), None, None

    @nn.compact
    def __call__(self, x, grid: tuple[int, int], key=None, keep=None):
        """`grid`: patch tokens by (height, width), after `num_prefix` others; `key`: for dropout
        and stochastic depth, None in evaluation; `keep`: int32 [batch, count], the only patch
        tokens that are encoded, None for all.
        """
        x, posemb, position = self.add_position(x, grid)
        if keep is not None:
            x = select_patches(x, keep, self.num_prefix)
        if key is not None:
            key, first = jax.random.split(key)
            x = dropout(x, self.dropout, dict(key=first), 0)
        x = sharding.constrain(x, "batch", "length", "embed")
        self.sow("intermediates", "input", x)
        noise = self.noise(key)
        if self.scan:
            layers = nn.scan(
                lambda layer, x, noise: (layer(x, noise, position), None),
                variable_axes={"params": 0, "intermediates": 0},
                split_rngs={"params": True},
                length=self.depth,
            )
            x, _ = layers(self.make_block("encoderblock", posemb), x, noise)
        else:
            for i in range(self.depth):
                layer = self.make_block(f"encoderblock_{i}", posemb)
                x = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], noise), position)
        if not self.final_norm:
            return x
        return LayerNorm(self.ln_eps, self.dtype, name="encoder_norm")(x)


class MAPHead(nn.Module):
    """Attention pooling (arXiv 2106.04560, 3.2): [batch, length, embed] -> [batch, embed]."""

    mlp_dim: int
    num_heads: int
    gelu: str = "tanh"
    ln_eps: float = 1e-6
    dtype: jnp.dtype = jnp.float32
    softmax_dtype: jnp.dtype = jnp.float32
    attention: str = "auto"

    @nn.compact
    def __call__(self, x):
        batch, _, width = x.shape
        probe = self.param("probe", xavier, (1, 1, width)).astype(x.dtype)
        probe = jnp.tile(probe, (batch, 1, 1))
        x = MultiHeadDotProductAttention(
            **fields_of(self, "num_heads", "dtype", "softmax_dtype", "attention"),
            name="MultiHeadDotProductAttention_0",
        )(probe, x)
        y = LayerNorm(self.ln_eps, self.dtype, name="LayerNorm_0")(x)
        y = MlpBlock(self.mlp_dim, gelu=self.gelu, dtype=self.dtype, name="MlpBlock_0")(y)
        return (x + y)[:, 0]
