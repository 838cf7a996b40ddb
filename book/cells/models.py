# @title Two networks, as functions of a tree of parameters
import optax


def init_dense(key: jax.Array, inputs: int, outputs: int) -> dict:
    """Return a kernel f32[inputs, outputs], LeCun normal, and a bias of zeros."""
    kernel = jax.nn.initializers.lecun_normal()(key, (inputs, outputs))
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def dense(params: dict, x: jax.Array) -> jax.Array:
    """Return x @ kernel + bias: [n, inputs] -> [n, outputs]."""
    return x @ params["kernel"] + params["bias"]


def init_conv(key: jax.Array, inputs: int, outputs: int) -> dict:
    """Return a kernel f32[3, 3, inputs, outputs], LeCun normal, and a bias of zeros."""
    kernel = jax.nn.initializers.lecun_normal()(key, (3, 3, inputs, outputs))
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def conv(params: dict, x: jax.Array) -> jax.Array:
    """Return a 3 x 3 convolution: [n, h, w, inputs] -> [n, h, w, outputs]."""
    layout = ("NHWC", "HWIO", "NHWC")  # of the images, the kernel and the result
    y = jax.lax.conv_general_dilated(
        x, params["kernel"], (1, 1), "SAME", dimension_numbers=layout
    )
    return y + params["bias"]


def max_pool(x: jax.Array) -> jax.Array:
    """Return the maximum of each 2 x 2 square: [n, h, w, c] -> [n, h/2, w/2, c]."""
    n, h, w, c = x.shape
    return x.reshape(n, h // 2, 2, w // 2, 2, c).max(axis=(2, 4))


def init_mlp(key: jax.Array, hidden_size: int = 128, image_size: int = 8) -> dict:
    """Return the parameters of `mlp` for images of image_size x image_size pixels."""
    hidden_key, out_key = jax.random.split(key)
    return {
        "hidden": init_dense(hidden_key, image_size**2, hidden_size),
        "out": init_dense(out_key, hidden_size, 10),
    }


def mlp(params: dict, x: jax.Array) -> jax.Array:
    """Return logits of one hidden layer: f32[n, 8, 8, 1] -> f32[n, 10]."""
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(dense(params["hidden"], x))
    return dense(params["out"], x)


def init_cnn(key: jax.Array, image_size: int = 8) -> dict:
    """Return the parameters of `cnn` for images of image_size x image_size pixels."""
    keys = jax.random.split(key, 3)
    return {
        "conv1": init_conv(keys[0], 1, 16),
        "conv2": init_conv(keys[1], 16, 32),
        "out": init_dense(keys[2], (image_size // 2) ** 2 * 32, 10),
    }


def cnn(params: dict, x: jax.Array) -> jax.Array:
    """Return logits of two convolutions: f32[n, 8, 8, 1] -> f32[n, 10]."""
    x = max_pool(jax.nn.relu(conv(params["conv1"], x)))
    x = jax.nn.relu(conv(params["conv2"], x))
    return dense(params["out"], x.reshape(len(x), -1))
