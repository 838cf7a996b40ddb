"""Adapters for decoder.py: LoRA on its seven projections, and files as PEFT has them.

Chapter 31 explains the parts; fine_tune.py trains with them. A part begins at a line
`# %% NAME`, and a chapter's cell tagged shared-adapters-NAME holds it. A folder has
adapter_config.json and adapter_model.safetensors.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import decoder
import jax
import jax.numpy as jnp
import numpy as np
from decoder import Config, Tensor, divided, open_file, save_folder, tensors
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# %% kinds
ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
TARGETS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


class Lora(NamedTuple):
    """What is trained beside a model: adapters of this rank, on these projections."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adapter(NamedTuple):
    """Two thin arrays: scale * b @ a is what they add to a weight [out, in]."""

    a: jax.Array  # [rank, in]
    b: jax.Array  # [out, rank]


class Quantized(NamedTuple):
    """A weight as int8[out, in], and a scale f32[out] for each output."""

    values: jax.Array
    scale: jax.Array


class Adapted(NamedTuple):
    """A frozen weight with its adapter, or with one of several for each row."""

    base: jax.Array | Quantized
    a: jax.Array  # [rank, in], or [adapters, rank, in]
    b: jax.Array  # [out, rank], or [adapters, out, rank]; the scale is in it
    rows: jax.Array | None = None  # i32[b]: which adapter a row of the batch has


# %% linear
def linear(x: jax.Array, w: jax.Array | Quantized | Adapted) -> jax.Array:
    """x [..., in] times a weight [out, in]: plain, in int8, or with an adapter."""
    if isinstance(w, Adapted):
        a, b = w.a.astype(x.dtype), w.b.astype(x.dtype)
        if w.rows is None:
            return linear(x, w.base) + linear(linear(x, a), b)
        low = jnp.einsum("b...i,bri->b...r", x, a[w.rows])
        return linear(x, w.base) + jnp.einsum("b...r,bor->b...o", low, b[w.rows])
    if isinstance(w, Quantized):
        return linear(x, w.values.astype(x.dtype)) * w.scale.astype(x.dtype)
    return jnp.einsum("...i,oi->...o", x, w)


# %% adapt
def adapt(
    weights: dict,
    adapters: list[dict[str, Adapter]],
    scale: float,
    rows: jax.Array | None = None,
) -> dict:
    """Weights for `hidden`, with these adapters beside them.

    With rows i32[b] the adapters are stacked, and each row of a batch has its own."""
    layers = []
    for w, added in zip(weights["layers"], adapters, strict=True):
        both = {n: Adapted(w[n], ab.a, scale * ab.b, rows) for n, ab in added.items()}
        layers.append(w | both)
    return weights | {"layers": layers}


# %% tensors
def adapter_tensors(c: Config, lora: Lora) -> list[dict[str, Adapter]]:
    """All arrays of the adapters: their names in PEFT's file, shapes and cuts.

    A is cut as the columns of its weight, B as the rows: the rank never is."""

    def beside(base: Tensor) -> Adapter:
        rows, columns = (*base.cut, None, None)[:2]
        out, into = base.shape
        start = f"base_model.model.{base.name.removesuffix('.weight')}"
        a = P(None, columns) if columns else P()
        b = P(rows) if rows else P()
        return Adapter(
            Tensor(f"{start}.lora_A.weight", (lora.rank, into), a),
            Tensor(f"{start}.lora_B.weight", (out, lora.rank), b),
        )

    layers = tensors(c)["layers"]
    return [{name: beside(w[name]) for name in lora.targets} for w in layers]


# %% new
def new_adapters(
    key: jax.Array,
    c: Config,
    lora: Lora,
    mesh: Mesh,
    place: Callable[[Tensor, Mesh], NamedSharding] = divided,
) -> list[dict[str, Adapter]]:
    """Adapters in float32 that change nothing yet: A as PEFT draws it, B zero."""
    flat, form = jax.tree.flatten(adapter_tensors(c, lora))
    made = []
    for number, tensor in enumerate(flat):
        values = np.zeros(tensor.shape, np.float32)
        if ".lora_A." in tensor.name:
            draw = jax.random.fold_in(key, number)
            most = tensor.shape[1] ** -0.5
            values = jax.random.uniform(draw, tensor.shape, minval=-most, maxval=most)
            values = np.asarray(values)
        there = place(tensor, mesh)
        x = jax.make_array_from_callback(tensor.shape, there, values.__getitem__)
        made.append(x)
    return form.unflatten(made)


# %% quantize
def quantize(w: jax.Array) -> Quantized:
    """A weight [out, in] rounded to 255 steps, from the largest of each output."""
    w = w.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(w).max(axis=1), 1e-12) / 127
    return Quantized(jnp.round(w / scale[:, None]).astype(jnp.int8), scale)


def quantize_layers(weights: dict) -> dict:
    """The same model, with the seven projections of each layer in int8."""
    layers = [w | {n: quantize(w[n]) for n in TARGETS} for w in weights["layers"]]
    return weights | {"layers": layers}


# %% merge
def merge(
    weights: dict, adapters: list[dict[str, Adapter]], scale: float, dtype: object
) -> dict:
    """Plain weights of this type; the adapters are added to them in float32."""

    def added(w: jax.Array | Quantized, ab: Adapter) -> jax.Array:
        if isinstance(w, Quantized):
            w = w.values * w.scale[:, None]
        a, b = ab.a.astype(jnp.float32), ab.b.astype(jnp.float32)
        return w.astype(jnp.float32) + scale * jnp.matmul(b, a, precision="highest")

    layers = [
        w | {name: added(w[name], ab) for name, ab in each.items()}
        for w, each in zip(weights["layers"], adapters, strict=True)
    ]
    merged = weights | {"layers": layers}
    return jax.tree.map(lambda w: w.astype(dtype), merged)


# %% read
OTHER_SUMS = (  # of PEFT's options, those by which an adapter adds something else
    "alora_invocation_tokens alpha_pattern fan_in_fan_out kasa_config "
    "layer_replication layers_to_transform lora_bias modules_to_save rank_pattern "
    "target_parameters trainable_token_indices use_bdlora use_dora use_qalora"
).split()


def read_lora(folder: str | Path) -> Lora:
    """Read adapter_config.json; ValueError, in a sentence, for what is not LoRA."""
    path = Path(folder, "adapter_config.json")
    if not path.exists():
        raise ValueError(f"{path} is missing")
    try:
        said = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if said.get("peft_type") != "LORA":
        raise ValueError(f"{path} is of {said.get('peft_type')!r}, not of LORA")
    asked = [name for name in OTHER_SUMS if said.get(name)]
    if said.get("bias", "none") != "none":
        asked.append(f"bias {said['bias']!r}")
    born = said.get("init_lora_weights", True)
    if born not in (True, False, "gaussian", "orthogonal", "eva"):
        asked.append(f"init_lora_weights {born!r}, which may change the base")
    if asked:
        raise ValueError(f"{path} asks for what is not here: {', '.join(asked)}")
    targets = said["target_modules"]
    if isinstance(targets, str) or not {*targets} <= {*TARGETS}:
        raise ValueError(f"{path} has target_modules {targets}, not of {[*TARGETS]}")
    rank, alpha = said["r"], said["lora_alpha"]
    if said.get("use_rslora"):
        alpha *= math.sqrt(rank)  # its scale is alpha / sqrt(rank)
    return Lora(rank, alpha, tuple(name for name in TARGETS if name in targets))


def load_adapters(
    folder: str | Path,
    c: Config,
    mesh: Mesh,
    place: Callable[[Tensor, Mesh], NamedSharding] = divided,
) -> tuple[list[dict[str, Adapter]], Lora]:
    """The adapters of a folder in float32, each device's parts read by themselves."""
    lora = read_lora(folder)
    tree = adapter_tensors(c, lora)
    path = Path(folder, "adapter_model.safetensors")
    files = open_file(path)
    shapes = {tensor.name: tensor.shape for tensor in jax.tree.leaves(tree)}
    found = {name: values.shape for name, values in files.items()}
    if differ := {name for name, _ in shapes.items() ^ found.items()}:
        some = ", ".join(sorted(differ)[:3])
        raise ValueError(f"{path} is not for this model: it differs in {some}")

    def one(tensor: Tensor) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            return np.array(files[tensor.name][index], np.float32)

        return jax.make_array_from_callback(tensor.shape, place(tensor, mesh), part)

    return jax.tree.map(one, tree), lora


# %% write
def save_adapters(
    folder: str | Path,
    adapters: list[dict[str, Adapter]],
    c: Config,
    lora: Lora,
    base: str,
) -> None:
    """Write adapters as PEFT reads them; `base` names the model they are for."""
    names = [tensor.name for tensor in jax.tree.leaves(adapter_tensors(c, lora))]
    arrays = dict(zip(names, jax.tree.leaves(adapters), strict=True))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [*lora.targets],
        "bias": "none",
    }
    text = json.dumps(config, indent=2)
    files = {"adapter_model.safetensors": arrays}
    save_folder(folder, {"adapter_config.json": text}, files)


# %% use
decoder.linear = linear  # where decoder.layer looks for it
