# @title Four more programs
from collections.abc import Callable
from functools import partial

from jax.sharding import PartitionSpec as P


def tensor_parallel(devices: list[jax.Device]) -> tuple[Callable, tuple]:
    """Return tensor parallelism: tokens are replicated, both blocks sharded over F."""
    mesh = mesh_of(devices, "model")
    w_in = described(mesh, (D, F), None, "model")
    w_out = described(mesh, (F, D), "model")
    x = described(mesh, (TOKENS, D))
    return step_for([(w_in, w_out), (w_in, w_out)], x)


def routed_loss(weights: tuple, x: jax.Array) -> jax.Array:
    """Return the mean square after a layer of eight experts, one per device."""
    router, w_in, w_out = weights  # [D, 8], [1, D, F], [1, F, D]
    scores = jax.nn.softmax((x @ router).astype(jnp.float32))  # [1024, 8]
    chosen = jax.nn.one_hot(scores.argmax(axis=1), 8)
    place = (chosen.cumsum(axis=0) * chosen).sum(axis=1) - 1  # of the expert's queue
    racks = chosen[:, :, None] * jax.nn.one_hot(place, 128)[:, None]
    racks = racks.astype(x.dtype)  # [1024 tokens, 8 experts, 128 places]
    letters = jnp.einsum("tep,td->epd", racks, x)
    letters = jax.lax.all_to_all(letters, "expert", 0, 1, tiled=True)
    letters = jax.nn.gelu(letters @ w_in) @ w_out  # [1, 1024, D]
    letters = jax.lax.all_to_all(letters, "expert", 1, 0, tiled=True)
    gate = scores.max(axis=1, keepdims=True).astype(x.dtype)
    x = x + gate * jnp.einsum("tep,epd->td", racks, letters)
    return jax.lax.pmean(jnp.mean(jnp.square(x.astype(jnp.float32))), "expert")


def routed_step(weights: tuple, x: jax.Array) -> tuple[tuple, jax.Array]:
    loss, grads = jax.value_and_grad(routed_loss)(weights, x)
    return descend(weights, grads), loss


def experts(devices: list[jax.Device]) -> tuple[Callable, tuple]:
    """Return expert parallelism: one expert per device, a replicated router."""
    mesh = mesh_of(devices, "expert")
    router = described(mesh, (D, 8))
    w_in = described(mesh, (8, D, F), "expert")
    w_out = described(mesh, (8, F, D), "expert")
    x = described(mesh, (TOKENS, D), "expert")
    cut = (P(), P("expert"), P("expert"))
    specs = dict(in_specs=(cut, P("expert")), out_specs=(cut, P()))
    step = jax.shard_map(routed_step, mesh=mesh, **specs)
    return jax.jit(step, donate_argnums=0), ((router, w_in, w_out), x)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, unroll: int = 1) -> jax.Array:
    """Return full attention of one block of queries [1024, 8, 128] over all eight
    blocks of keys and values, which are sent to the next device in turn."""
    right = [(d, (d + 1) % 8) for d in range(8)]

    def visit(carry: tuple, _: None) -> tuple[tuple, None]:
        k, v, highest, total, mixed = carry
        scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) / 128**0.5
        new_highest = jnp.maximum(highest, scores.max(axis=2))
        weights = jnp.exp(scores - new_highest[:, :, None])
        fade = jnp.exp(highest - new_highest)
        total = fade * total + weights.sum(axis=2)
        part = jnp.einsum("hqk,khd->hqd", weights.astype(v.dtype), v)
        mixed = fade[:, :, None] * mixed + part.astype(jnp.float32)
        k, v = jax.lax.ppermute((k, v), "seq", right)
        return (k, v, new_highest, total, mixed), None

    zeros = jnp.zeros_like(q, jnp.float32).swapaxes(0, 1)  # [8 heads, 1024, 128]
    start = (k, v, zeros[:, :, 0] - jnp.inf, zeros[:, :, 0], zeros)
    end, _ = jax.lax.scan(visit, start, length=8, unroll=unroll)
    _, _, _, total, mixed = end
    return (mixed / total[:, :, None]).swapaxes(0, 1).astype(q.dtype)


def ring_attention(
    devices: list[jax.Device], unroll: int = 1
) -> tuple[Callable, tuple]:
    """Return the forward pass of ring attention over eight blocks, as a loop."""
    mesh = mesh_of(devices, "seq")
    body = partial(attend, unroll=unroll)
    step = jax.shard_map(body, mesh=mesh, in_specs=P("seq"), out_specs=P("seq"))
    heads = described(mesh, (TOKENS, 8, 128), "seq")
    return jax.jit(step), (heads, heads, heads)


def ring_attention_unrolled(devices: list[jax.Device]) -> tuple[Callable, tuple]:
    """Return ring attention with its loop unrolled."""
    return ring_attention(devices, unroll=8)
