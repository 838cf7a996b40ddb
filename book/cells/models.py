# @title Two networks, in Flax Linen
import optax
from flax import linen as nn


class MLP(nn.Module):
    """f32[n, 8, 8, 1] -> f32[n, 10] logits, through one hidden layer."""

    hidden: int = 128

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(self.hidden)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


class CNN(nn.Module):
    """f32[n, 8, 8, 1] -> f32[n, 10] logits, through two convolutions."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        return nn.Dense(10)(x.reshape(len(x), -1))
