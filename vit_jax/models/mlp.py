"""The MLP of an encoder block. Parameters have the published names."""

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.distributed import sharding
from vit_jax.models.dropout import HIDDEN, MLP, dropout
from vit_jax.models.ops.activation import activate
from vit_jax.models.ops.dense import Dense, xavier

# gelu: two layers with a GELU between them. swiglu (arXiv 2002.05202): the first layer's output is
# multiplied by the SiLU of a gate, a third layer.
MLPS = ("gelu", "swiglu")
GELUS = {
    "tanh": lambda x: nn.gelu(x, approximate=True),
    "erf": lambda x: nn.gelu(x, approximate=False),
}

small = nn.initializers.normal(1e-6)


class MlpBlock(nn.Module):
    """One of `MLPS`, with `mlp_dim` hidden units: [batch, length, embed] -> the same."""

    mlp_dim: int
    dropout: float = 0.0
    kind: str = "gelu"
    gelu: str = "tanh"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, noise=None):
        y = self.hidden("Dense_0", x)
        if self.kind == "swiglu":
            y = y * activate(nn.silu, self.hidden("gate", x), self.dtype)
        else:
            y = activate(GELUS[self.gelu], y, self.dtype)
        y = dropout(y, self.dropout, noise, HIDDEN)
        y = self.layer("Dense_1", x.shape[-1])(y)
        return dropout(y, self.dropout, noise, MLP)

    def hidden(self, name: str, x):
        """[batch, length, embed] -> [batch, length, mlp]."""
        y = self.layer(name, self.mlp_dim)(x)
        y = sharding.constrain(y, "batch", "length", "mlp")
        return checkpoint_name(y.astype(self.dtype), "hidden")

    def layer(self, name: str, features: int) -> Dense:
        return Dense(features, self.dtype, xavier, small, name=name)
