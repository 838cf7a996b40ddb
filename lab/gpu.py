"""Time programs on one GPU: `nox -s lab -- gpu [PART ...] [--record]`.

It needs one NVIDIA GPU of 80 GB and JAX with CUDA. Weights are random, and their shapes
are those of Llama 3 8B and Llama 3.2 1B. Times are medians, in seconds.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from record import Part, installed


class Config(NamedTuple):
    """The shape of a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_8B = Config(128_256, 4096, 14_336, 32, 32, 8, 128)
LLAMA_1B = Config(128_256, 2048, 8192, 16, 32, 8, 64)
DECODE = (  # positions in the cache: batch sizes
    (128, (1, 8, 32, 64, 128, 256, 512, 1024)),
    (2048, (1, 4, 16, 64, 128, 160)),
    (8192, (1, 4, 16, 32, 40)),
)


def seconds(run: Callable[[], object], calls: int = 10, rounds: int = 3) -> float:
    """Return the median over rounds of the time per call."""
    jax.block_until_ready(run())
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def matmul() -> dict[str, float]:
    """Return FLOP/s of n x n matmuls, and of 16,384-row ones that read few columns."""
    found = {}
    for n in (512, 1024, 2048, 4096, 8192, 16_384):
        x = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
        found[f"{n}"] = 2 * n**3 / seconds(partial(jax.jit(jnp.matmul), x, x))
    return found


def rows() -> dict[str, float]:
    """Return the time of x [batch, 4096] times w [4096, 14336], by batch."""
    w = jax.random.normal(jax.random.key(0), (14, 4096, 14_336), jnp.bfloat16)

    @jax.jit
    def products(x, w):  # of 14 weights, so that none stays in the L2 cache
        return [x @ w[i] for i in range(len(w))]

    found = {}
    for batch in (1, 8, 32, 64, 128, 192, 256, 384, 512, 1024, 2048):
        x = jnp.ones((batch, 4096), jnp.bfloat16)
        found[f"{batch}"] = seconds(lambda: products(x, w)) / len(w)
    return found


def memory() -> dict[str, float]:
    """Return bytes/s of a copy in HBM, and between HBM and pinned host memory."""
    x = jnp.ones(2**30, jnp.float32)
    add = jax.jit(lambda x: x + 1)
    found = {"HBM, read and write": 2 * x.nbytes / seconds(lambda: add(x))}
    device = x.sharding
    host = device.with_memory_kind("pinned_host")
    found["device to host"] = x.nbytes / seconds(lambda: jax.device_put(x, host), 2)
    y = jax.device_put(x, host)
    found["host to device"] = x.nbytes / seconds(lambda: jax.device_put(y, device), 2)
    return found


def precision() -> dict[str, float]:
    """Return the largest relative error of a float32 matmul, by precision."""
    x, y = np.random.default_rng(0).normal(size=(2, 1024, 1024)).astype(np.float32)
    exact = x.astype(np.float64) @ y
    found = {}
    for name in ("default", "high", "highest"):
        z = jax.jit(partial(jnp.matmul, precision=name))(x, y)
        found[name] = float(np.abs(z - exact).max() / np.abs(exact).max())
    return found


def rms_norm(x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return y.astype(x.dtype)


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotate x [b, t, heads, head_dim] by its positions [t]."""
    frequencies = 5e5 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = positions[:, None, None] * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def linear(x: jax.Array, w: jax.Array | tuple[jax.Array, jax.Array]) -> jax.Array:
    """Multiply by a weight, or by int8 values and a scale per output."""
    if isinstance(w, tuple):
        return (x @ w[0].astype(x.dtype)) * w[1]
    return x @ w


def layer_shapes(c: Config) -> dict[str, tuple[int, int]]:
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return {
        "qkv": (c.hidden_size, q + 2 * kv),
        "out": (q, c.hidden_size),
        "gate_up": (c.hidden_size, 2 * c.intermediate_size),
        "down": (c.intermediate_size, c.hidden_size),
    }


def init(c: Config, int8: bool = False) -> dict:
    """Return random weights in bfloat16, or the layers' in int8 with scales."""

    @partial(jax.jit, static_argnums=1)
    def normal(key, shape):
        return 0.02 * jax.random.normal(key, shape, jnp.bfloat16)

    def weight(key, shape):
        if not int8:
            return normal(key, shape)
        values = jax.random.randint(key, shape, -127, 128, jnp.int8)
        return values, jnp.full(shape[1], 3e-4, jnp.bfloat16)

    keys = iter(jax.random.split(jax.random.key(0), 4 * c.num_layers + 2))
    shapes = layer_shapes(c)
    return {
        "embed": normal(next(keys), (c.vocab_size, c.hidden_size)),
        "layers": [
            {name: weight(next(keys), shape) for name, shape in shapes.items()}
            for _ in range(c.num_layers)
        ],
        "head": normal(next(keys), (c.hidden_size, c.vocab_size)),
    }


def split_heads(x: jax.Array, c: Config) -> tuple[jax.Array, ...]:
    """Split [b, t, q + 2 kv] into queries, keys and values [b, t, heads, head_dim]."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    parts = jnp.split(x, (q, q + kv), axis=-1)
    return tuple(part.reshape(*x.shape[:2], -1, c.head_dim) for part in parts)


def decode_layer(x, w, cache, position, c: Config):
    """x [b, 1, hidden_size]; a cache is keys and values [b, kv heads, length, head]."""
    b = len(x)
    q, k, v = split_heads(linear(rms_norm(x), w["qkv"]), c)
    q, k = rope(q, position[None]), rope(k, position[None])
    write = jax.lax.dynamic_update_slice_in_dim
    keys = write(cache[0], k.swapaxes(1, 2), position, axis=2)
    values = write(cache[1], v.swapaxes(1, 2), position, axis=2)
    q = q.reshape(b, c.num_kv_heads, -1, c.head_dim)
    scores = jnp.einsum("bkgh,bksh->bkgs", q, keys).astype(jnp.float32)
    visible = jnp.arange(keys.shape[2]) <= position
    scores = jnp.where(visible, scores * c.head_dim**-0.5, -jnp.inf)
    y = jnp.einsum("bkgs,bksh->bkgh", jax.nn.softmax(scores).astype(x.dtype), values)
    x = x + linear(y.reshape(b, 1, -1), w["out"])
    gate, up = jnp.split(linear(rms_norm(x), w["gate_up"]), 2, axis=-1)
    return x + linear(jax.nn.silu(gate) * up, w["down"]), (keys, values)


def decode_step(params, caches, tokens, position, c: Config):
    """Append one token to each sequence; return the next tokens [b] and the caches."""
    x = params["embed"][tokens][:, None]
    updated = []
    for w, cache in zip(params["layers"], caches, strict=True):
        x, cache = decode_layer(x, w, cache, position, c)
        updated.append(cache)
    return (rms_norm(x)[:, 0] @ params["head"]).argmax(-1), updated


def prefill_layer(x, w, c: Config):
    q, k, v = split_heads(linear(rms_norm(x), w["qkv"]), c)
    positions = jnp.arange(x.shape[1])
    q, k = rope(q, positions), rope(k, positions)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    x = x + linear(y.reshape(*x.shape[:2], -1), w["out"])
    gate, up = jnp.split(linear(rms_norm(x), w["gate_up"]), 2, axis=-1)
    return x + linear(jax.nn.silu(gate) * up, w["down"]), (k, v)


def prefill_step(params, tokens, c: Config):
    """Return the next token of each prompt [b, t], and the keys and values."""
    x = params["embed"][tokens]
    caches = []
    for w in params["layers"]:
        x, cache = prefill_layer(x, w, c)
        caches.append(cache)
    return (rms_norm(x[:, -1]) @ params["head"]).argmax(-1), caches


def decode(int8: bool = False, plan=DECODE) -> dict[str, dict[str, float]]:
    """Return the time of a decode step of the 8B, by cache length and batch."""
    c = LLAMA_8B
    params = init(c, int8)
    cases = [(length, batch) for length, batches in plan for batch in batches]

    def structs(length, batch):
        shape = batch, c.num_kv_heads, length, c.head_dim
        half = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        return [(half, half)] * c.num_layers, jax.ShapeDtypeStruct((batch,), jnp.int32)

    def compiled(case):
        step = jax.jit(partial(decode_step, c=c), donate_argnums=1)
        return step.lower(params, *structs(*case), jnp.int32(0)).compile()

    with ThreadPoolExecutor(6) as pool:
        programs = dict(zip(cases, pool.map(compiled, cases), strict=True))
    found: dict[str, dict[str, float]] = {}
    for (length, batch), step in programs.items():
        caches, _ = structs(length, batch)
        caches = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), caches)
        tokens, times = jnp.zeros(batch, jnp.int32), []
        for _ in range(4):
            start = time.perf_counter()
            for position in range(length - 20, length):
                tokens, caches = step(params, caches, tokens, jnp.int32(position))
            jax.block_until_ready(tokens)
            times.append((time.perf_counter() - start) / 20)
        found.setdefault(f"{length}", {})[f"{batch}"] = statistics.median(times[1:])
        print(length, batch, 1e3 * statistics.median(times[1:]), "ms", flush=True)
        del caches
    return found


def decode_int8() -> dict[str, dict[str, float]]:
    """Return the same with the layers' weights in int8."""
    return decode(True, ((2048, (1, 16, 64)),))


def prefill() -> dict[str, float]:
    """Return the time of the 8B's first token, by the length of one prompt."""
    c = LLAMA_8B
    params = init(c)
    step = jax.jit(partial(prefill_step, c=c))
    found = {}
    for length in (128, 512, 2048, 8192):
        tokens = jnp.zeros((1, length), jnp.int32)
        found[f"{length}"] = seconds(lambda: step(params, tokens)[0], 5)
        print("prefill", length, found[f"{length}"], flush=True)
    return found


def train() -> dict[str, float]:
    """Return the time of an AdamW step of the 1B, its tokens, and the loss after it.

    Weights and moments are float32, the arithmetic is bfloat16, and each layer is
    checkpointed, with a batch of 8 sequences of 2,048 tokens."""
    c, shape = LLAMA_1B, (8, 2048)
    params = init(c)
    params["layers"] = jax.tree.map(lambda *ws: jnp.stack(ws), *params["layers"])
    del params["head"]  # tied
    params = jax.tree.map(lambda w: w.astype(jnp.float32), params)
    optimizer = optax.adamw(1e-4)

    def loss_fn(params, tokens):
        params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        layer = jax.checkpoint(lambda x, w: (prefill_layer(x, w, c)[0], None))
        x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
        logits = (rms_norm(x) @ params["embed"].T)[:, :-1].astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = optimizer.init(params)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, c.vocab_size)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        params, opt_state, loss = step(params, opt_state, tokens)
        loss = float(loss)
        times.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(times[2:]),
        "first call": times[0],
        "tokens": math.prod(shape),
        "parameters": sum(w.size for w in jax.tree.leaves(params)),
        "loss": loss,
        "peak bytes": jax.devices()[0].memory_stats()["peak_bytes_in_use"],
    }


PARTS = {
    f.__name__: f
    for f in (
        matmul,
        rows,
        memory,
        precision,
        decode,
        decode_int8,
        prefill,
        train,
    )
}


def measure(*parts: str) -> Iterator[tuple[str, object]]:
    """Time these parts, or all."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        sys.exit(f"this measurement needs a GPU, and JAX found {device.device_kind}")
    for part in parts or PARTS:
        yield part, {"device": device.device_kind, "found": PARTS[part]()}


def same(recorded: dict, found: dict) -> bool:
    """Return whether each value is within 20 % of the recorded one."""
    old, new = jax.tree.leaves(recorded["found"]), jax.tree.leaves(found["found"])
    return np.shape(old) == np.shape(new) and np.allclose(old, new, rtol=0.2)


def files(part: str) -> list[str]:
    """Return this program."""
    return ["lab/gpu.py"]


def versions() -> dict[str, str]:
    """Return the versions of JAX and its plugin."""
    return installed("jax", "jax-cuda13-plugin", "nvidia-cudnn-cu13")


def cell(parts: dict[str, Part]) -> str:
    """Return a cell with what chapters show of the record."""
    found = {name: part["found"]["found"] for name, part in parts.items()}

    def scaled(values: dict, scale: float, digits: int) -> dict:
        return {
            int(key) if key.isdigit() else key: scaled(value, scale, digits)
            if isinstance(value, dict)
            else round(scale * value, digits)
            for key, value in values.items()
        }

    made_with = {"date": parts["decode"]["recorded"]} | parts["decode"]["versions"]
    return f"""# @title Recorded times on one H100 (nox -s lab -- gpu)
recorded_gpu_with = {made_with}
# Llama 3 8B with random bfloat16 weights. Positions in the cache: batch: ms per step.
recorded_decode = {scaled(found["decode"], 1e3, 2)}
# The same with int8 weights in the layers.
recorded_decode_int8 = {scaled(found["decode_int8"], 1e3, 2)}
# Tokens of one prompt: ms until its first token.
recorded_prefill = {scaled(found["prefill"], 1e3, 1)}
# Rows of x: microseconds of x [rows, 4096] times w [4096, 14336] in bfloat16.
recorded_rows = {scaled(found["rows"], 1e6, 1)}
# n: TFLOP/s of an n x n matmul in bfloat16.
recorded_matmul = {scaled(found["matmul"], 1e-12, 0)}
# GB/s of copies.
recorded_copies = {scaled(found["memory"], 1e-9, 0)}
# The largest relative error of a 1,024 x 1,024 float32 matmul, by precision.
recorded_precision = {scaled(found["precision"], 1, 7)}
# One AdamW step of Llama 3.2 1B.
recorded_train = {scaled(found["train"], 1, 3)}
"""
