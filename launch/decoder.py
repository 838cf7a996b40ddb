"""A decoder of the Llama or Qwen3 kind, and its weights in Hugging Face's layout.

Chapter 29 explains the parts up to `save`, chapter 30 the caches and the choice of a
token; generate.py runs them. A part begins at a line `# %% NAME`, and a chapter's cell
tagged shared-decoder-NAME holds it. A folder has config.json, and model.safetensors or
several such files with model.safetensors.index.json.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


# %% config
class Scaling(NamedTuple):
    """How Llama 3.1 and later turn slowly what a short context never saw turn round."""

    factor: float
    low: float
    high: float
    trained: int  # positions of the context before


class Config(NamedTuple):
    """The shape of a model, as config.json has it."""

    vocabulary: int
    width: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    head: int  # numbers in one head
    eps: float
    theta: float
    scaling: Scaling | None
    tied: bool  # one table for what comes in and for what goes out
    normed: bool  # queries and keys are normed, as in Qwen3


# %% read
SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim"
)


def read_config(folder: str | Path) -> Config:
    """Read config.json; ValueError, in a sentence, for a model that is not of these."""
    path = Path(folder, "config.json")
    try:
        said = json.loads(path.read_text())
        if not isinstance(said, dict):
            raise ValueError(f"{path} is no JSON object")
        kind = said["model_type"]
        for name in SIZES.split():
            if not isinstance(size := said.get(name) or 1, int) or size < 1:
                raise ValueError(f"{path}: {name} is {size!r}, no number above 0")
        rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        scaling = None
        if rope_type == "llama3":
            names = "factor low_freq_factor high_freq_factor".split()
            trained = rope["original_max_position_embeddings"]
            scaling = Scaling(*(float(rope[name]) for name in names), int(trained))
        heads = said["num_attention_heads"]
        config = Config(
            vocabulary=said["vocab_size"],
            width=said["hidden_size"],
            hidden=said["intermediate_size"],
            layers=said["num_hidden_layers"],
            heads=heads,
            key_heads=said.get("num_key_value_heads") or heads,
            head=said.get("head_dim") or said["hidden_size"] // heads,
            eps=said["rms_norm_eps"],
            theta=said["rope_theta"] if "rope_theta" in said else rope["rope_theta"],
            scaling=scaling,
            tied=said.get("tie_word_embeddings", False),
            normed=kind == "qwen3",
        )
    except KeyError as error:
        raise ValueError(f"{path} does not say {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    refused = {
        f"model_type {kind!r}": kind not in ("llama", "qwen3"),
        f"hidden_act {said.get('hidden_act')!r}": said.get("hidden_act") != "silu",
        f"rope of type {rope_type!r}": rope_type not in ("default", "llama3"),
        f"rope_theta {config.theta!r}": not isinstance(config.theta, int | float),
        f"rms_norm_eps {config.eps!r}": not isinstance(config.eps, int | float),
        "attention_bias": said.get("attention_bias"),
        "mlp_bias": said.get("mlp_bias"),
        "use_sliding_window": said.get("use_sliding_window"),
        "quantization_config": said.get("quantization_config"),
        f"{heads} heads for {config.key_heads} key heads": heads % config.key_heads,
    }
    if found := [what for what, refuse in refused.items() if refuse]:
        raise ValueError(f"{path} asks for what is not here: {', '.join(found)}")
    return config


# %% layers
def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., in] times a weight [out, in], as the files have it."""
    return jnp.einsum("...i,oi->...o", x, w)


def norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return scale * y.astype(x.dtype)


# %% rotary
def frequencies(c: Config) -> jax.Array:
    """Radians by which each pair of a head turns at one position: f32[head / 2]."""
    turns = c.theta ** (-jnp.arange(0, c.head, 2) / c.head)
    if c.scaling is None:
        return turns
    rounds = turns * c.scaling.trained / (2 * math.pi)
    share = (rounds - c.scaling.low) / (c.scaling.high - c.scaling.low)
    share = jnp.clip(share, 0, 1)
    return turns * (share + (1 - share) / c.scaling.factor)


def rotate(x: jax.Array, positions: jax.Array, c: Config) -> jax.Array:
    """Rotary positions: x [b, t, heads, head] turned by its positions [b, t].

    The first half of a head is paired with its second half."""
    angles = positions[..., None, None] * frequencies(c)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, axis=-1)


# %% attention
Cache = tuple[jax.Array, jax.Array]  # keys and values, [b, length, key heads, head]


def look_back(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array
) -> jax.Array:
    """q [b, t, key heads, group, head] over k and v [b, s, key heads, head], where
    visible [b, t, s]; softmax in float32."""
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k).astype(jnp.float32)
    scores = scores * q.shape[-1] ** -0.5
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: Cache | None, positions: jax.Array
) -> tuple[jax.Array, Cache | None]:
    """Let q look back over k and v, or write these into the cache and look over it.

    A position past the end of the cache is not written."""
    slots = positions
    if cache is not None:
        rows = jnp.arange(len(q))[:, None]
        k = cache[0].at[rows, positions].set(k, mode="drop")
        v = cache[1].at[rows, positions].set(v, mode="drop")
        cache = k, v
        slots = jnp.arange(k.shape[1])[None]
    visible = slots[:, None, :] <= positions[:, :, None]
    return look_back(q, k, v, visible), cache


# %% layer
def layer(
    x: jax.Array,
    w: dict[str, jax.Array],
    c: Config,
    positions: jax.Array,
    cache: Cache | None,
    attend: Callable = attend,
) -> tuple[jax.Array, Cache | None]:
    """One layer: x [b, t, width] of tokens at these positions [b, t]."""
    b, t, _ = x.shape
    y = norm(x, w["input_layernorm"], c.eps)
    q = linear(y, w["q_proj"]).reshape(b, t, c.heads, c.head)
    k = linear(y, w["k_proj"]).reshape(b, t, c.key_heads, c.head)
    v = linear(y, w["v_proj"]).reshape(b, t, c.key_heads, c.head)
    if c.normed:
        q = norm(q, w["q_norm"], c.eps)
        k = norm(k, w["k_norm"], c.eps)
    q = rotate(q, positions, c).reshape(b, t, c.key_heads, -1, c.head)
    k = rotate(k, positions, c)
    y, cache = attend(q, k, v, cache, positions)
    x = x + linear(y.reshape(b, t, -1), w["o_proj"])
    y = norm(x, w["post_attention_layernorm"], c.eps)
    gate = jax.nn.silu(linear(y, w["gate_proj"]))
    return x + linear(gate * linear(y, w["up_proj"]), w["down_proj"]), cache


# %% forward
def hidden(
    weights: dict,
    tokens: jax.Array,
    positions: jax.Array,
    c: Config,
    caches: list[Cache] | None = None,
    attend: Callable = attend,
) -> tuple[jax.Array, list[Cache | None]]:
    """What the last layer says of tokens [b, t]: [b, t, width], and all caches."""
    x = weights["embed_tokens"][tokens]
    written = []
    for w, cache in zip(weights["layers"], caches or [None] * c.layers, strict=True):
        x, cache = layer(x, w, c, positions, cache, attend)
        written.append(cache)
    return norm(x, weights["norm"], c.eps), written


def logits(weights: dict, x: jax.Array, c: Config) -> jax.Array:
    """Scores of the next token, f32[..., vocabulary]."""
    table = weights["embed_tokens"] if c.tied else weights["lm_head"]
    return linear(x, table).astype(jnp.float32)


# %% names
AXES = "key", "group"  # of the mesh: key heads, and what shares one


@dataclass(frozen=True)
class Tensor:
    """One array of a model: its name in the files, its shape, and how it is cut."""

    name: str
    shape: tuple[int, ...]
    cut: P


def tensors(c: Config) -> dict:
    """All arrays of a model, in the tree that `hidden` takes."""
    rows, columns, by_key_head = P(AXES), P(None, AXES), P("key")
    q, k, d, f = c.heads * c.head, c.key_heads * c.head, c.width, c.hidden
    parts = {
        "input_layernorm": ("input_layernorm", (d,), P()),
        "q_proj": ("self_attn.q_proj", (q, d), rows),
        "k_proj": ("self_attn.k_proj", (k, d), by_key_head),
        "v_proj": ("self_attn.v_proj", (k, d), by_key_head),
        "o_proj": ("self_attn.o_proj", (d, q), columns),
        "post_attention_layernorm": ("post_attention_layernorm", (d,), P()),
        "gate_proj": ("mlp.gate_proj", (f, d), rows),
        "up_proj": ("mlp.up_proj", (f, d), rows),
        "down_proj": ("mlp.down_proj", (d, f), columns),
    }
    if c.normed:
        parts["q_norm"] = ("self_attn.q_norm", (c.head,), P())
        parts["k_norm"] = ("self_attn.k_norm", (c.head,), P())

    def one_layer(number: int) -> dict[str, Tensor]:
        start = f"model.layers.{number}."
        return {
            key: Tensor(f"{start}{name}.weight", shape, cut)
            for key, (name, shape, cut) in parts.items()
        }

    tree = {
        "embed_tokens": Tensor("model.embed_tokens.weight", (c.vocabulary, d), rows),
        "layers": [one_layer(number) for number in range(c.layers)],
        "norm": Tensor("model.norm.weight", (d,), P()),
    }
    if not c.tied:
        tree["lm_head"] = Tensor("lm_head.weight", (c.vocabulary, d), rows)
    return tree


def model_mesh(c: Config, devices: list | None = None) -> Mesh:
    """A mesh of all devices: as many as possible by key heads, the rest in groups."""
    devices = devices or jax.devices()
    by_key_head = math.gcd(len(devices), c.key_heads)
    shape = by_key_head, len(devices) // by_key_head
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


# %% file
KINDS = {"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32}
Files = dict[str, np.ndarray]  # a tensor's name, and its numbers, still in the file


def open_file(path: Path) -> Files:
    """The tensors of one safetensors file, mapped and not yet read."""
    if not path.exists():
        raise ValueError(f"{path} is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if first == b"version ":
            raise ValueError(f"{path} is a pointer of Git LFS: run git lfs pull")
        if len(first) < 8 or length > size - 8:
            raise ValueError(f"{path} is no safetensors file: it begins with {first}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            asked = "dtype", "shape", "data_offsets"
            entries = {n: [entry[a] for a in asked] for n, entry in header.items()}
            spans = [(begin, end) for _, _, (begin, end) in entries.values()]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is no safetensors file: no header") from None
    start = 8 + length
    last = max((end for _, end in spans), default=0)
    if size != start + last:
        raise ValueError(
            f"{path} has {size:,} bytes; its header asks for {start + last:,}"
        )
    if sum(end - begin for begin, end in spans) != last:
        raise ValueError(f"{path}: its tensors overlap, or leave gaps")
    found = {}
    for name, (said, shape, (begin, end)) in entries.items():
        if said not in KINDS:
            raise ValueError(f"{path}: {name} is of type {said}, not {[*KINDS]}")
        kind, shape = np.dtype(KINDS[said]), tuple(shape)
        if end - begin != math.prod(shape) * kind.itemsize:
            raise ValueError(f"{path}: {name} has {end - begin} bytes for {shape}")
        found[name] = np.memmap(path, kind, "r", start + begin, shape)
    return found


# %% folder
def open_folder(folder: str | Path) -> Files:
    """The tensors of all files of a folder, each from the file that the index names."""
    index = Path(folder, "model.safetensors.index.json")
    if not index.exists():
        return open_file(Path(folder, "model.safetensors"))
    try:
        where = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{index} is no index of tensors") from None
    files = {file: open_file(Path(folder, file)) for file in sorted({*where.values()})}
    for name, file in where.items():
        if name not in files[file]:
            raise ValueError(f"{index} says that {file} has {name}; it does not")
    for file, found in files.items():
        if extra := [name for name in found if where.get(name) != file]:
            raise ValueError(f"{file} has {extra[0]}, which {index} does not say")
    return {name: files[file][name] for name, file in where.items()}


# %% check
def same_rows(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays have the same bits, read a thousand rows at a time."""
    if one.shape != other.shape:
        return False
    parts = [slice(start, start + 1000) for start in range(0, one.shape[0], 1000)]
    return all(one[part].tobytes() == other[part].tobytes() for part in parts)


def check_files(files: Files, tree: dict, c: Config) -> None:
    """Complain of names, shapes and types that are not what a model asks for."""
    files = {n: x for n, x in files.items() if not n.endswith("rotary_emb.inv_freq")}
    wanted = {tensor.name: tensor for tensor in jax.tree.leaves(tree)}
    if c.tied and "lm_head.weight" in files:
        head = files.pop("lm_head.weight")
        table = files.get("model.embed_tokens.weight")
        if table is not None and not same_rows(head, table):
            raise ValueError("config.json ties the two tables, and they differ")
    for what, names in (
        ("missing in the files", wanted.keys() - files),
        ("in the files, and not of this model", files.keys() - wanted),
    ):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise ValueError(f"{what}: {some} ({len(names)} in all)")
    for name, tensor in wanted.items():
        if files[name].shape != tensor.shape:
            found = files[name].shape
            raise ValueError(f"{name} is {found} in the files, not {tensor.shape}")
    if len(kinds := {str(files[name].dtype) for name in wanted}) > 1:
        raise ValueError(f"the files mix types: {', '.join(sorted(kinds))}")


# %% load
def divided(tensor: Tensor, mesh: Mesh) -> NamedSharding:
    """A tensor cut as it says; ValueError if its sizes do not divide."""
    sharding = NamedSharding(mesh, tensor.cut)
    try:
        sharding.shard_shape(tensor.shape)
    except ValueError:
        why = f"{tensor.name} {tensor.shape} does not divide by {tensor.cut}"
        raise ValueError(f"{why} over {dict(mesh.shape)}") from None
    return sharding


def load(
    files: Files,
    c: Config,
    mesh: Mesh,
    dtype: object = None,
    place: Callable[[Tensor, Mesh], NamedSharding] = divided,
) -> dict:
    """The weights of a model, each device's parts read by themselves."""
    tree = tensors(c)
    check_files(files, tree, c)

    def one(tensor: Tensor) -> jax.Array:
        parts = {}  # devices that hold the same part share one reading

        def part(index: tuple[slice, ...]) -> np.ndarray:
            key = str(index)
            if key not in parts:
                parts[key] = np.array(files[tensor.name][index], dtype)
            return parts[key]

        return jax.make_array_from_callback(tensor.shape, place(tensor, mesh), part)

    return jax.tree.map(one, tree)


# %% write
def in_all(path: Path, work: Callable[[], None], here: bool = True) -> None:
    """Let every process, or each where here is True, do what may fail in one of them.

    OSError in all of them if it does, which says in which."""
    code = 0
    try:
        if here:
            work()
    except OSError as error:
        code = error.errno or -1
    codes = np.ravel(multihost_utils.process_allgather(np.int32(code)))
    for number, code in enumerate(codes.tolist()):
        if code:
            where = f" (in process {number})" if len(codes) > 1 else ""
            raise OSError(code, os.strerror(code) + where, str(path))


def save_file(path: Path, arrays: dict[str, jax.Array], first: bool) -> None:
    """Write one safetensors file; every process writes what its devices hold."""
    kinds = {np.dtype(kind): name for name, kind in KINDS.items()}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, x in arrays.items():
        start, end = end, end + x.nbytes
        header[name] = {"dtype": kinds[x.dtype], "shape": x.shape}
        header[name]["data_offsets"] = [start, end]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def make() -> None:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.flush()
            if hasattr(os, "posix_fallocate"):  # a full disk says so now
                os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
            file.truncate(8 + len(text) + end)
            os.fsync(file.fileno())

    def fill() -> None:
        for name, x in arrays.items():
            start = 8 + len(text) + header[name]["data_offsets"][0]
            room = np.memmap(path, x.dtype, "r+", start, x.shape)
            for shard in x.addressable_shards:
                if shard.replica_id == 0:
                    room[shard.index] = shard.data
            room.flush()

    in_all(path, make, first)
    in_all(path, fill)


def save_folder(
    folder: str | Path,
    texts: dict[str, str | Path],
    files: dict[str, dict[str, jax.Array]],
) -> None:
    """Write texts, copies of small files, and safetensors files into a new folder.

    It has its name when it is whole. On OSError, in all processes, nothing is left."""
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists: nothing is written over it")
    part = folder.with_name(folder.name + ".partial")
    first = jax.process_index() == 0

    def begin() -> None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for name, text in texts.items():
            if isinstance(text, Path):
                shutil.copyfile(text, part / name)
            else:
                (part / name).write_text(text)

    try:
        in_all(part, begin, first)
        for name, arrays in files.items():
            save_file(part / name, arrays, first)
        in_all(folder, lambda: os.replace(part, folder), first)
    except OSError:
        if first:
            shutil.rmtree(part, ignore_errors=True)
        raise


# %% save
def save(
    folder: str | Path,
    weights: dict,
    c: Config,
    config: Path,
    limit: int,
    beside: tuple[Path, ...] = (),
) -> None:
    """Write a folder that `load` reads: each process writes its shards into the same
    files, on a disk that all share. No process holds a tensor that is cut whole.

    `config` is the config.json to keep, and `beside` are small files that go with it.
    A file takes at most `limit` bytes, unless one tensor is larger."""
    names = [tensor.name for tensor in jax.tree.leaves(tensors(c))]
    arrays = dict(zip(names, jax.tree.leaves(weights), strict=True))
    groups, size = [[]], 0
    for name, x in arrays.items():
        if size and size + x.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += x.nbytes
    where, files = {}, {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        where |= dict.fromkeys(group, file)
        files[file] = {name: arrays[name] for name in group}
    index = {"metadata": {"total_size": sum(x.nbytes for x in arrays.values())}}
    index["weight_map"] = where
    texts = {"config.json": Path(config)} | {path.name: path for path in beside}
    texts["model.safetensors.index.json"] = json.dumps(index, indent=2)
    save_folder(folder, texts, files)


# %% cache
def empty_caches(c: Config, rows: int, length: int, dtype: object) -> list[Cache]:
    """A cache for each layer: zeros for so many rows and positions."""
    shape = (rows, length, c.key_heads, c.head)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(c.layers)]


# %% choose
def choose(
    scores: jax.Array, seeds: jax.Array, positions: jax.Array, heat: jax.Array
) -> jax.Array:
    """The next token of each row: the best where heat is 0, else a sample at this heat.

    The key follows from a row's own seed and position, so that neither the other rows
    nor the number of devices play a part. scores f32[b, vocabulary], the rest [b]."""

    def draw(seed: jax.Array, position: jax.Array, row: jax.Array) -> jax.Array:
        return jax.random.categorical(
            jax.random.fold_in(jax.random.key(seed), position), row
        )

    cooled = scores / jnp.maximum(heat, 1e-6)[:, None]
    drawn = jax.vmap(draw)(seeds, positions, cooled)
    return jnp.where(heat > 0, drawn, scores.argmax(-1))


# %% step
def step(
    weights: dict,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    seeds: jax.Array,
    heat: jax.Array,
    caches: list[Cache],
    c: Config,
    attend: Callable = attend,
) -> tuple[jax.Array, list[Cache]]:
    """Each row reads its first count [b] of tokens [b, t], at positions from start [b],
    and says the token that follows the last of them; a row of count 0 reads nothing."""
    length = caches[0][0].shape[1]
    offsets = jnp.arange(tokens.shape[1])
    read = offsets < count[:, None]
    positions = jnp.where(read, start[:, None] + offsets, length)  # these are dropped
    x, caches = hidden(weights, tokens, positions, c, caches, attend)
    last = jnp.maximum(count - 1, 0)[:, None, None]
    x = jnp.take_along_axis(x, last, axis=1)[:, 0]
    return choose(logits(weights, x, c), seeds, start + count, heat), caches
