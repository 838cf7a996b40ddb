"""Llama, Qwen3 and Gemma 3 (text) models, from folders in Hugging Face's layout.

Chapter 29 explains the parts up to `save_model`, chapter 30 the KV cache and sampling;
generate.py and fine_tune.py use them. A part begins at a line `# %% NAME`, and a cell
of a chapter tagged shared-decoder-NAME contains it. A folder contains config.json, and
model.safetensors or several such files with model.safetensors.index.json.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


# %% config
class RopeScaling(NamedTuple):
    """The frequency scaling of Llama 3.1 and later (rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class Config(NamedTuple):
    """The architecture of a model, from its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool  # embed_tokens is also the output projection
    qk_norm: bool  # RMSNorm of queries and keys, as in Qwen3
    # Gemma 3:
    hidden_act: str = "silu"
    embed_scale: float = 1.0
    norm_offset: float = 0.0  # RMSNorm multiplies by offset + weight
    post_norms: bool = False  # RMSNorm also after attention and after the MLP
    query_pre_attn_scalar: int | None = None  # scales attention instead of head_dim
    layer_types: tuple[str, ...] = ()  # "sliding_attention" or "full_attention"
    sliding_window: int | None = None  # positions that a sliding layer attends to
    sliding_rope_theta: float | None = None

    def of_layer(self, index: int) -> "Config":
        """Return the configuration of one layer, which is sliding if it has a
        sliding_window."""
        if self.layer_types and self.layer_types[index] == "sliding_attention":
            return self._replace(rope_theta=self.sliding_rope_theta, rope_scaling=None)
        return self._replace(sliding_window=None)


# %% read
SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim"
)
UNSUPPORTED = (
    "attention_bias mlp_bias use_sliding_window quantization_config "
    "attn_logit_softcapping final_logit_softcapping use_bidirectional_attention"
)
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": jax.nn.gelu}
HIDDEN_ACT = {"llama": "silu", "qwen3": "silu", "gemma3_text": "gelu_pytorch_tanh"}


def read_json(source: object, text: bytes) -> Any:
    """Return the value of a JSON text; raise ValueError, which names its source."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)
        raise ValueError(f"{source}: not valid JSON ({reason})") from None


def read_rope(data: dict, layer_type: str = "full_attention") -> dict:
    """Return the RoPE parameters of a config.json: those in rope_parameters, and those
    outside it, where older files have them. Raise ValueError if they contradict."""
    inside = data.get("rope_parameters") or {}
    inside = dict(inside.get(layer_type, inside))
    outside, base = dict(data.get("rope_scaling") or {}), "rope_theta"
    if layer_type == "sliding_attention":
        outside, base = {}, "rope_local_base_freq"
    for rope in filter(None, (inside, outside)):
        rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    if base in data:
        outside["rope_theta"] = data[base]
    for name in inside.keys() & outside.keys():
        if inside[name] != outside[name]:
            raise ValueError(
                f"{name} is {inside[name]!r} in rope_parameters, but {outside[name]!r} "
                "outside it; remove the wrong one"
            )
    return outside | inside


def read_config(folder: str | Path) -> Config:
    """Return the Config of a folder; raise ValueError for an unsupported model."""
    path = Path(folder, "config.json")
    data = read_json(path, path.read_bytes())
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    if (model_type := data.get("model_type")) not in HIDDEN_ACT:
        supported = ", ".join(HIDDEN_ACT)
        raise ValueError(
            f"{path}: model_type {model_type!r} is not supported; {supported} are"
        )
    try:
        for name in SIZES.split():
            if not isinstance(size := data.get(name) or 1, int) or size < 1:
                raise ValueError(f"{name} is {size!r}, not a positive integer")
        rope, scaling = read_rope(data), None
        if "rope_theta" not in rope:
            raise ValueError(
                'there is no rope_theta; for Llama 2, add "rope_theta": 10000.0'
            )
        if (rope_type := rope.get("rope_type", "default")) == "llama3":
            scaling = RopeScaling(*(float(rope[name]) for name in RopeScaling._fields))
        num_heads = data["num_attention_heads"]
        config = Config(
            vocab_size=data["vocab_size"],
            hidden_size=data["hidden_size"],
            intermediate_size=data["intermediate_size"],
            num_layers=data["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=data.get("num_key_value_heads") or num_heads,
            head_dim=data.get("head_dim") or data["hidden_size"] // num_heads,
            rms_norm_eps=data["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
            rope_scaling=scaling,
            tie_word_embeddings=data.get(
                "tie_word_embeddings", model_type == "gemma3_text"
            ),
            qk_norm=model_type != "llama",
        )
        if model_type == "gemma3_text":
            period, layers = data.get("sliding_window_pattern", 6), config.num_layers
            types = data.get("layer_types") or [
                "sliding_attention" if (i + 1) % period else "full_attention"
                for i in range(layers)
            ]
            if len(types) != layers:
                raise ValueError(f"{len(types)} layer_types for {layers} layers")
            config = config._replace(
                hidden_act="gelu_pytorch_tanh",
                embed_scale=config.hidden_size**0.5,
                norm_offset=1.0,
                post_norms=True,
                query_pre_attn_scalar=data["query_pre_attn_scalar"],
                layer_types=tuple(types),
                sliding_window=data["sliding_window"],
                sliding_rope_theta=read_rope(data, "sliding_attention")["rope_theta"],
            )
    except KeyError as error:
        raise ValueError(f"{path} has no {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    act = data.get("hidden_activation", data.get("hidden_act"))
    theta, eps, kv_heads = config.rope_theta, config.rms_norm_eps, config.num_kv_heads
    checks = {
        f"activation {act!r}": act != HIDDEN_ACT[model_type],
        f"rope_type {rope_type!r}": rope_type not in ("default", "llama3"),
        f"rope_theta {theta!r}": not isinstance(theta, int | float),
        f"rms_norm_eps {eps!r}": not isinstance(eps, int | float),
        f"{num_heads} heads with {kv_heads} KV heads": num_heads % kv_heads,
    }
    for name in UNSUPPORTED.split():
        checks[name] = data.get(name)
    if unsupported := [what for what, failed in checks.items() if failed]:
        raise ValueError(f"{path}: not supported: {', '.join(unsupported)}")
    return config


# %% layers
def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply x [..., in] by a weight [out, in], the layout of the files."""
    return jnp.einsum("...i,oi->...o", x, w)


def rms_norm(
    x: jax.Array, scale: jax.Array, eps: float, offset: float = 0.0
) -> jax.Array:
    """Apply RMSNorm over the last axis, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    if offset:  # Gemma 3 also scales in float32
        return ((offset + scale.astype(jnp.float32)) * y).astype(x.dtype)
    return scale * y.astype(x.dtype)


# %% rope
def rope_frequencies(config: Config) -> jax.Array:
    """Return the angle per position of each pair, in radians: f32[head_dim / 2]."""
    d, scaling = config.head_dim, config.rope_scaling
    frequencies = config.rope_theta ** (-jnp.arange(0, d, 2) / d)
    if scaling is None:
        return frequencies
    factor, low, high, positions = scaling
    rotations = frequencies * positions / (2 * math.pi)  # in the original context
    kept = jnp.clip((rotations - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def apply_rope(x: jax.Array, positions: jax.Array, config: Config) -> jax.Array:
    """Rotate x [b, t, heads, head_dim] by the angles of its positions [b, t].

    The first half of a head is paired with its second half."""
    angles = positions[..., None, None] * rope_frequencies(config)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(rotated, axis=-1)


# %% attention
Cache = tuple[jax.Array, jax.Array]  # keys and values: [b, length, KV heads, head_dim]


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attend from q [b, t, KV heads, group, head_dim] to k and v [b, s, KV heads,
    head_dim] where mask [b, t, s] is True; the softmax is computed in float32."""
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k).astype(jnp.float32)
    scores = scores * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v)


def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: Cache | None,
    positions: jax.Array,
    window: int | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Write k and v [b, t, KV heads, head_dim] into the cache at positions [b, t], then
    attend to the cache; without a cache, attend to k and v. With a window, attend only
    to that many positions, the last of which is the query's own.

    A position beyond the end of the cache is not written."""
    key_positions = positions
    if cache is not None:
        batch = jnp.arange(len(q))[:, None]
        k = cache[0].at[batch, positions].set(k, mode="drop")
        v = cache[1].at[batch, positions].set(v, mode="drop")
        cache = k, v
        key_positions = jnp.arange(k.shape[1])[None]
    mask = key_positions[:, None, :] <= positions[:, :, None]
    if window:
        mask &= key_positions[:, None, :] > positions[:, :, None] - window
    return attention(q, k, v, mask), cache


# %% layer
def decoder_layer(
    x: jax.Array,
    w: dict[str, jax.Array],
    config: Config,
    positions: jax.Array,
    cache: Cache | None,
    attention_fn: Callable = cached_attention,
) -> tuple[jax.Array, Cache | None]:
    """Apply one layer to x [b, t, hidden_size] of tokens at positions [b, t].

    config is that of the layer (`of_layer`). attention_fn has the parameters of
    `cached_attention`; only sliding layers pass a window."""
    b, t, _ = x.shape
    kv_heads, d = config.num_kv_heads, config.head_dim
    norm = partial(rms_norm, eps=config.rms_norm_eps, offset=config.norm_offset)
    y = norm(x, w["input_layernorm"])
    q = linear(y, w["q_proj"]).reshape(b, t, config.num_heads, d)
    k = linear(y, w["k_proj"]).reshape(b, t, kv_heads, d)
    v = linear(y, w["v_proj"]).reshape(b, t, kv_heads, d)
    if config.qk_norm:
        q = norm(q, w["q_norm"])
        k = norm(k, w["k_norm"])
    q = apply_rope(q, positions, config).reshape(b, t, kv_heads, -1, d)
    k = apply_rope(k, positions, config)
    if config.query_pre_attn_scalar:  # attention_fn multiplies by head_dim ** -0.5
        q = q * (d / config.query_pre_attn_scalar) ** 0.5
    if config.sliding_window:
        attention_fn = partial(attention_fn, window=config.sliding_window)
    y, cache = attention_fn(q, k, v, cache, positions)
    y = linear(y.reshape(b, t, -1), w["o_proj"])
    if config.post_norms:
        x = x + norm(y, w["post_attention_layernorm"])
        y = norm(x, w["pre_feedforward_layernorm"])
    else:
        x = x + y
        y = norm(x, w["post_attention_layernorm"])
    gate = ACTIVATIONS[config.hidden_act](linear(y, w["gate_proj"]))
    y = linear(gate * linear(y, w["up_proj"]), w["down_proj"])
    if config.post_norms:
        y = norm(y, w["post_feedforward_layernorm"])
    return x + y, cache


# %% forward
def hidden_states(
    weights: dict,
    tokens: jax.Array,
    positions: jax.Array,
    config: Config,
    caches: list[Cache] | None = None,
    attention_fn: Callable = cached_attention,
) -> tuple[jax.Array, list[Cache | None]]:
    """Return the final hidden states [b, t, hidden_size] of tokens [b, t], and the
    updated cache of each layer."""
    x = weights["embed_tokens"][tokens] * config.embed_scale
    caches, updated = caches or [None] * config.num_layers, []
    for i, (w, cache) in enumerate(zip(weights["layers"], caches, strict=True)):
        of_layer = config.of_layer(i)
        x, cache = decoder_layer(x, w, of_layer, positions, cache, attention_fn)
        updated.append(cache)
    eps, offset = config.rms_norm_eps, config.norm_offset
    return rms_norm(x, weights["norm"], eps, offset), updated


def compute_logits(weights: dict, x: jax.Array, config: Config) -> jax.Array:
    """Return the logits f32[..., vocab_size] of the next token from x [..., hidden]."""
    head = weights["embed_tokens" if config.tie_word_embeddings else "lm_head"]
    return linear(x, head).astype(jnp.float32)


# %% names
AXES = "kv", "group"  # mesh axes: over KV heads, and over the query heads of one


@dataclass(frozen=True)
class Tensor:
    """One array of a model: its name in the files, its shape, and its partitioning."""

    name: str
    shape: tuple[int, ...]
    spec: P


def model_tensors(config: Config) -> dict:
    """Return all arrays of a model, in the tree that `hidden_states` takes."""
    by_row, by_column, by_kv_head = P(AXES), P(None, AXES), P("kv")
    q, k = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    d, f, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    parts = {
        "input_layernorm": ("input_layernorm", (d,), P()),
        "q_proj": ("self_attn.q_proj", (q, d), by_row),
        "k_proj": ("self_attn.k_proj", (k, d), by_kv_head),
        "v_proj": ("self_attn.v_proj", (k, d), by_kv_head),
        "o_proj": ("self_attn.o_proj", (d, q), by_column),
        "post_attention_layernorm": ("post_attention_layernorm", (d,), P()),
        "gate_proj": ("mlp.gate_proj", (f, d), by_row),
        "up_proj": ("mlp.up_proj", (f, d), by_row),
        "down_proj": ("mlp.down_proj", (d, f), by_column),
    }
    if config.qk_norm:
        parts["q_norm"] = ("self_attn.q_norm", (config.head_dim,), P())
        parts["k_norm"] = ("self_attn.k_norm", (config.head_dim,), P())

    if config.post_norms:
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            parts[name] = name, (d,), P()

    def layer_tensors(number: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{number}."
        return {
            key: Tensor(f"{prefix}{name}.weight", shape, spec)
            for key, (name, shape, spec) in parts.items()
        }

    tree = {
        "embed_tokens": Tensor("model.embed_tokens.weight", (vocab, d), by_row),
        "layers": [layer_tensors(number) for number in range(config.num_layers)],
        "norm": Tensor("model.norm.weight", (d,), P()),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = Tensor("lm_head.weight", (vocab, d), by_row)
    return tree


def model_mesh(config: Config, devices: list | None = None) -> Mesh:
    """Return a mesh (Auto axes) whose axis kv has as many devices as divide the KV
    heads, and whose axis group has the rest."""
    devices = devices or jax.devices()
    kv = math.gcd(len(devices), config.num_kv_heads)
    shape = kv, len(devices) // kv
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


# %% file
DTYPES = {"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32}
Files = dict[str, np.ndarray]  # a tensor's name, and its values as a memory map


def open_safetensors(path: Path) -> Files:
    """Return the tensors of one safetensors file as memory maps, which are not read
    yet; raise ValueError if the file is damaged or has unsupported dtypes."""
    if not path.exists():
        raise ValueError(f"{path} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if first == b"version ":
            raise ValueError(f"{path} is a pointer of Git LFS: run git lfs pull")
        if len(first) < 8 or length > size - 8:
            raise ValueError(
                f"{path} is not a safetensors file: it starts with {first}"
            )
        try:
            header = read_json(path, file.read(length))
            header.pop("__metadata__", None)
            keys = "dtype", "shape", "data_offsets"
            entries = {
                name: [entry[key] for key in keys] for name, entry in header.items()
            }
            spans = [(begin, end) for _, _, (begin, end) in entries.values()]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is not a safetensors file: no header") from None
    start = 8 + length
    last = max((end for _, end in spans), default=0)
    if size != start + last:
        raise ValueError(
            f"{path} has {size:,} bytes, but its header describes {start + last:,}"
        )
    if sum(end - begin for begin, end in spans) != last:
        raise ValueError(f"{path}: its tensors overlap or leave gaps")
    tensors = {}
    for name, (dtype_name, shape, (begin, end)) in entries.items():
        if dtype_name not in DTYPES:
            raise ValueError(
                f"{path}: {name} has dtype {dtype_name}; supported are {[*DTYPES]}"
            )
        dtype, shape = np.dtype(DTYPES[dtype_name]), tuple(shape)
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path}: {name} has {end - begin} bytes for {shape}")
        tensors[name] = np.memmap(path, dtype, "r", start + begin, shape)
    return tensors


# %% folder
def open_model(folder: str | Path) -> Files:
    """Return the tensors of all files of a folder, each from the file that the index
    names; raise ValueError if files and index do not agree."""
    index = Path(folder, "model.safetensors.index.json")
    single = Path(folder, "model.safetensors")
    if not index.exists():
        if not single.exists() and (other := [*Path(folder).glob("*.bin")]):
            raise ValueError(
                f"{folder} has {other[0].name}, but no safetensors file; convert it by "
                "save_pretrained of Transformers (the page of generate.py says how, "
                "under Convert other formats)"
            )
        return open_safetensors(single)
    try:
        file_of = dict(read_json(index, index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{index} has no weight_map of tensors") from None
    if single.exists() and single.name not in file_of.values():
        raise ValueError(f"{single} is not listed in {index}; remove the outdated one")
    files = {
        file: open_safetensors(Path(folder, file))
        for file in sorted({*file_of.values()})
    }
    for name, file in file_of.items():
        if name not in files[file]:
            raise ValueError(f"{index} lists {name} in {file}, which does not have it")
    for file, tensors in files.items():
        if extra := [name for name in tensors if file_of.get(name) != file]:
            raise ValueError(
                f"{file} has {extra[0]}, which {index} does not list there"
            )
    return {name: files[file][name] for name, file in file_of.items()}


# %% check
def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays have the same bits, reading 1,000 rows at a time."""
    if one.shape != other.shape:
        return False
    parts = [slice(start, start + 1000) for start in range(0, one.shape[0], 1000)]
    return all(one[part].tobytes() == other[part].tobytes() for part in parts)


def check_tensors(files: Files, tree: dict, config: Config) -> None:
    """Raise ValueError unless the files have the names and shapes of the tree, in one
    dtype."""
    files = {n: x for n, x in files.items() if not n.endswith("rotary_emb.inv_freq")}
    expected = {tensor.name: tensor for tensor in jax.tree.leaves(tree)}
    if config.tie_word_embeddings and "lm_head.weight" in files:
        head = files.pop("lm_head.weight")
        table = files.get("model.embed_tokens.weight")
        if table is not None and not same_bits(head, table):
            raise ValueError(
                "config.json has tie_word_embeddings, but lm_head.weight differs from "
                "model.embed_tokens.weight"
            )
    for what, names in (
        ("missing in the files", expected.keys() - files),
        ("in the files, but not part of this model", files.keys() - expected),
    ):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise ValueError(f"{what}: {some} ({len(names)} in all)")
    for name, tensor in expected.items():
        if (shape := files[name].shape) != tensor.shape:
            raise ValueError(f"{name} has shape {shape}, expected {tensor.shape}")
    if len(dtypes := {str(files[name].dtype) for name in expected}) > 1:
        raise ValueError(f"the files mix dtypes: {', '.join(sorted(dtypes))}")


def check_finite(weights: dict, config: Config) -> None:
    """Raise ValueError, which names a tensor, unless all weights are finite."""
    all_finite = jax.jit(lambda x: jnp.isfinite(x).all())
    # bool() waits for each result: JAX 0.7 on CPUs can hang if many are queued.
    finite = [bool(all_finite(x)) for x in jax.tree.leaves(weights)]
    tensors = jax.tree.leaves(model_tensors(config))
    if bad := [x.name for x, good in zip(tensors, finite, strict=True) if not good]:
        raise ValueError(
            f"{bad[0]} has NaN or infinite values ({len(bad)} tensors in all)"
        )


# %% load
def tensor_sharding(tensor: Tensor, mesh: Mesh) -> NamedSharding:
    """Return the sharding of a tensor; raise ValueError if it is not divisible."""
    sharding = NamedSharding(mesh, tensor.spec)
    try:
        sharding.shard_shape(tensor.shape)
    except ValueError:
        what = f"{tensor.name} {tensor.shape} is not divisible by {tensor.spec}"
        raise ValueError(f"{what} over {dict(mesh.shape)}") from None
    return sharding


def load_model(
    files: Files,
    config: Config,
    mesh: Mesh,
    dtype: object = None,
    sharding_of: Callable[[Tensor, Mesh], NamedSharding] = tensor_sharding,
) -> dict:
    """Return the sharded weights of a model, in the dtype of the files if None; of each
    tensor, only the blocks of this process's devices are read.

    Raise ValueError for files that do not fit the Config, or weights not finite."""
    tree = model_tensors(config)
    check_tensors(files, tree, config)

    def load_one(tensor: Tensor) -> jax.Array:
        blocks = {}  # devices with the same block share one read

        def read_block(index: tuple[slice, ...]) -> np.ndarray:
            key = str(index)
            if key not in blocks:
                blocks[key] = np.array(files[tensor.name][index], dtype)
            return blocks[key]

        sharding = sharding_of(tensor, mesh)
        return jax.make_array_from_callback(tensor.shape, sharding, read_block)

    weights = jax.tree.map(load_one, tree)
    check_finite(weights, config)
    return weights


# %% write
def run_on_all(path: Path, work: Callable[[], None], here: bool = True) -> None:
    """Run `work` in every process where `here` is True; if it raises OSError in one,
    raise OSError in all of them, with the index of that process."""
    code = 0
    try:
        if here:
            work()
    except OSError as error:
        code = error.errno or -1
    codes = np.ravel(multihost_utils.process_allgather(np.int32(code)))
    for number, code in enumerate(codes.tolist()):
        if code:
            process = f" (in process {number})" if len(codes) > 1 else ""
            raise OSError(code, os.strerror(code) + process, str(path))


def save_safetensors(path: Path, arrays: dict[str, jax.Array], first: bool) -> None:
    """Write one safetensors file; each process writes the shards of its devices, after
    the process where `first` is True has created the file."""
    dtype_names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, x in arrays.items():
        start, end = end, end + x.nbytes
        header[name] = {"dtype": dtype_names[x.dtype], "shape": x.shape}
        header[name]["data_offsets"] = [start, end]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def create() -> None:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.flush()
            if hasattr(os, "posix_fallocate"):  # raises now if the disk is full
                os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
            file.truncate(8 + len(text) + end)
            os.fsync(file.fileno())

    def fill() -> None:
        for name, x in arrays.items():
            start = 8 + len(text) + header[name]["data_offsets"][0]
            values = np.memmap(path, x.dtype, "r+", start, x.shape)
            for shard in x.addressable_shards:
                if shard.replica_id == 0:
                    values[shard.index] = shard.data
            values.flush()

    run_on_all(path, create, first)
    run_on_all(path, fill)


def save_folder(
    folder: str | Path,
    texts: dict[str, str | Path],
    files: dict[str, dict[str, jax.Array]],
) -> None:
    """Write texts, copies of small files, and safetensors files into a new folder.

    The folder gets its name when it is complete. Raise ValueError if it exists; on
    OSError, raised in all processes, nothing is left of it."""
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists and would be overwritten")
    partial = folder.with_name(folder.name + ".partial")
    first = jax.process_index() == 0

    def create() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, text in texts.items():
            if isinstance(text, Path):
                shutil.copyfile(text, partial / name)
            else:
                (partial / name).write_text(text)

    try:
        run_on_all(partial, create, first)
        for name, arrays in files.items():
            save_safetensors(partial / name, arrays, first)
        run_on_all(folder, lambda: os.replace(partial, folder), first)
    except OSError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


# %% save
def save_model(
    folder: str | Path,
    weights: dict,
    config: Config,
    config_file: Path,
    max_file_bytes: int,
    extra_files: tuple[Path, ...] = (),
) -> None:
    """Write a folder that `open_model` opens, with copies of a config.json and of small
    extra files, on a disk that all processes share.

    Each process writes its shards into the same files and gathers nothing. A file has
    at most `max_file_bytes` of tensors, unless one tensor is larger."""
    names = [tensor.name for tensor in jax.tree.leaves(model_tensors(config))]
    arrays = dict(zip(names, jax.tree.leaves(weights), strict=True))
    groups, size = [[]], 0
    for name, x in arrays.items():
        if size and size + x.nbytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += x.nbytes
    file_of, files = {}, {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        file_of |= dict.fromkeys(group, file)
        files[file] = {name: arrays[name] for name in group}
    index = {"metadata": {"total_size": sum(x.nbytes for x in arrays.values())}}
    index["weight_map"] = file_of
    texts = {"config.json": Path(config_file)} | {
        path.name: path for path in extra_files
    }
    texts["model.safetensors.index.json"] = json.dumps(index, indent=2)
    save_folder(folder, texts, files)


# %% cache
def init_cache(config: Config, batch: int, length: int, dtype: object) -> list[Cache]:
    """Return a cache of zeros for each layer: [batch, length, KV heads, head_dim]."""
    shape = batch, length, config.num_kv_heads, config.head_dim
    layers = range(config.num_layers)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in layers]


# %% sample
def sample(
    logits: jax.Array, seeds: jax.Array, positions: jax.Array, temperature: jax.Array
) -> jax.Array:
    """Return the next token of each sequence, i32[b], from logits f32[b, vocab_size]:
    the highest-scoring one where the temperature is 0, otherwise a sample.

    The key depends only on a sequence's own seed and position, so neither the rest of
    the batch nor the number of devices changes the sample. All other arguments: [b]."""

    def draw(seed: jax.Array, position: jax.Array, scaled: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.categorical(key, scaled)

    scaled = logits / jnp.maximum(temperature, 1e-6)[:, None]
    drawn = jax.vmap(draw)(seeds, positions, scaled)
    return jnp.where(temperature > 0, drawn, logits.argmax(-1))


# %% step
def serve_step(
    weights: dict,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    seeds: jax.Array,
    temperature: jax.Array,
    caches: list[Cache],
    config: Config,
    attention_fn: Callable = cached_attention,
) -> tuple[jax.Array, list[Cache]]:
    """Process the first count [b] of tokens [b, t], at positions from start [b]; return
    the token that follows the last of them, i32[b], and the caches. A sequence with
    count 0 changes nothing, and its token is meaningless."""
    length = caches[0][0].shape[1]
    offsets = jnp.arange(tokens.shape[1])
    valid = offsets < count[:, None]
    positions = jnp.where(
        valid, start[:, None] + offsets, length
    )  # length: not written
    x, caches = hidden_states(weights, tokens, positions, config, caches, attention_fn)
    last = jnp.maximum(count - 1, 0)[:, None, None]
    x = jnp.take_along_axis(x, last, axis=1)[:, 0]
    logits = compute_logits(weights, x, config)
    return sample(logits, seeds, start + count, temperature), caches
