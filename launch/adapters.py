"""LoRA adapters for decoder.py, an int8 base, and the files that PEFT reads and writes.

Chapter 31 explains the parts; fine_tune.py trains adapters, generate.py uses them. A
part begins at a line `# %% NAME`, and a chapter's cell tagged shared-adapters-NAME
contains it. An adapter folder has adapter_config.json and adapter_model.safetensors.
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
from decoder import (
    Config,
    Tensor,
    model_tensors,
    open_safetensors,
    save_folder,
    tensor_sharding,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# %% types
ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
TARGETS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


class LoraConfig(NamedTuple):
    """Which projections have adapters, and of what rank and scale."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adapter(NamedTuple):
    """Two low-rank factors, which add scale * b @ a to a weight [out, in]."""

    a: jax.Array  # [rank, in]
    b: jax.Array  # [out, rank]


class Quantized(NamedTuple):
    """A weight as int8[out, in], with a scale f32[out] for each output."""

    values: jax.Array
    scale: jax.Array


class AdaptedWeight(NamedTuple):
    """A frozen weight with its adapter, or with a stack of adapters for a batch."""

    base: jax.Array | Quantized
    a: jax.Array  # [rank, in], or [adapters, rank, in]
    b: jax.Array  # [out, rank], or [adapters, out, rank]; times the scale
    adapter_ids: jax.Array | None = None  # i32[b]: each sequence's adapter in the stack


# %% linear
def linear(x: jax.Array, w: jax.Array | Quantized | AdaptedWeight) -> jax.Array:
    """x [..., in] times a weight [out, in]: plain, in int8, or with an adapter."""
    if isinstance(w, AdaptedWeight):
        a, b = w.a.astype(x.dtype), w.b.astype(x.dtype)
        if w.adapter_ids is None:
            return linear(x, w.base) + linear(linear(x, a), b)
        low = jnp.einsum("b...i,bri->b...r", x, a[w.adapter_ids])
        return linear(x, w.base) + jnp.einsum("b...r,bor->b...o", low, b[w.adapter_ids])
    if isinstance(w, Quantized):
        return linear(x, w.values.astype(x.dtype)) * w.scale.astype(x.dtype)
    return jnp.einsum("...i,oi->...o", x, w)


# %% adapt
def with_adapters(
    weights: dict,
    adapters: list[dict[str, Adapter]],
    scale: float,
    adapter_ids: jax.Array | None = None,
) -> dict:
    """Return weights whose projections have adapters, without copying the weights.

    With adapter_ids i32[b], `adapters` is a stack, and each sequence uses its own."""
    layers = []
    for w, pairs in zip(weights["layers"], adapters, strict=True):
        adapted = {
            name: AdaptedWeight(w[name], pair.a, scale * pair.b, adapter_ids)
            for name, pair in pairs.items()
        }
        layers.append(w | adapted)
    return weights | {"layers": layers}


# %% tensors
def adapter_tensors(config: Config, lora: LoraConfig) -> list[dict[str, Adapter]]:
    """Return each factor's name in PEFT's file, its shape, and its PartitionSpec.

    A is sharded as its weight's columns, B as the rows; the rank is never sharded."""

    def factors(weight: Tensor) -> Adapter:
        rows, columns = (*weight.spec, None, None)[:2]
        out_size, in_size = weight.shape
        prefix = f"base_model.model.{weight.name.removesuffix('.weight')}"
        a = P(None, columns) if columns else P()
        b = P(rows) if rows else P()
        return Adapter(
            Tensor(f"{prefix}.lora_A.weight", (lora.rank, in_size), a),
            Tensor(f"{prefix}.lora_B.weight", (out_size, lora.rank), b),
        )

    layers = model_tensors(config)["layers"]
    return [{name: factors(w[name]) for name in lora.target_modules} for w in layers]


# %% init
def init_adapters(
    key: jax.Array,
    config: Config,
    lora: LoraConfig,
    mesh: Mesh,
    sharding_of: Callable[[Tensor, Mesh], NamedSharding] = tensor_sharding,
) -> list[dict[str, Adapter]]:
    """Return float32 adapters that do not change the model yet: A is uniform in
    ±1 / sqrt(in), as in PEFT, and B is zero."""
    leaves, treedef = jax.tree.flatten(adapter_tensors(config, lora))
    arrays = []
    for index, tensor in enumerate(leaves):
        values = np.zeros(tensor.shape, np.float32)
        if ".lora_A." in tensor.name:
            bound = tensor.shape[1] ** -0.5
            values = jax.random.uniform(
                jax.random.fold_in(key, index),
                tensor.shape,
                minval=-bound,
                maxval=bound,
            )
            values = np.asarray(values)
        sharding = sharding_of(tensor, mesh)
        x = jax.make_array_from_callback(tensor.shape, sharding, values.__getitem__)
        arrays.append(x)
    return treedef.unflatten(arrays)


# %% quantize
def quantize(w: jax.Array) -> Quantized:
    """Round a weight [out, in] to int8, with one absmax scale per output."""
    w = w.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(w).max(axis=1), 1e-12) / 127
    return Quantized(jnp.round(w / scale[:, None]).astype(jnp.int8), scale)


def quantize_layers(weights: dict) -> dict:
    """Return the same model with the seven projections of each layer in int8."""
    layers = [w | {n: quantize(w[n]) for n in TARGETS} for w in weights["layers"]]
    return weights | {"layers": layers}


# %% merge
def merge_adapters(
    weights: dict, adapters: list[dict[str, Adapter]], scale: float, dtype: object
) -> dict:
    """Return plain weights in dtype, with the adapters added to them in float32."""

    def merge(w: jax.Array | Quantized, pair: Adapter) -> jax.Array:
        if isinstance(w, Quantized):
            w = w.values * w.scale[:, None]
        a, b = pair.a.astype(jnp.float32), pair.b.astype(jnp.float32)
        return w.astype(jnp.float32) + scale * jnp.matmul(b, a, precision="highest")

    layers = [
        w | {name: merge(w[name], pair) for name, pair in pairs.items()}
        for w, pairs in zip(weights["layers"], adapters, strict=True)
    ]
    merged = weights | {"layers": layers}
    return jax.tree.map(lambda w: w.astype(dtype), merged)


# %% read
UNSUPPORTED = (  # PEFT's options that change what an adapter computes
    "alora_invocation_tokens alpha_pattern fan_in_fan_out kasa_config "
    "layer_replication layers_to_transform lora_bias modules_to_save rank_pattern "
    "target_parameters trainable_token_indices use_bdlora use_dora use_qalora"
).split()


def read_lora_config(folder: str | Path) -> LoraConfig:
    """Read adapter_config.json; raise ValueError if it is not plain LoRA."""
    path = Path(folder, "adapter_config.json")
    if not path.exists():
        raise ValueError(f"{path} is missing")
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("peft_type") != "LORA":
        raise ValueError(f"{path}: its peft_type is not LORA")
    unsupported = [name for name in UNSUPPORTED if data.get(name)]
    if data.get("bias", "none") != "none":
        unsupported.append(f"bias {data['bias']!r}")
    init = data.get("init_lora_weights", True)
    if init not in (True, False, "gaussian", "orthogonal", "eva"):
        unsupported.append(f"init_lora_weights {init!r}, which may change the base")
    if unsupported:
        raise ValueError(f"{path}: not supported: {', '.join(unsupported)}")
    modules, rank, alpha = map(data.get, ("target_modules", "r", "lora_alpha"))
    if not isinstance(modules, list) or not {*map(str, modules)} <= {*TARGETS}:
        raise ValueError(
            f"{path}: target_modules {modules} is not a list of some of "
            f"{', '.join(TARGETS)}"
        )
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"{path}: r {rank!r} or lora_alpha {alpha!r} is not valid")
    if data.get("use_rslora"):
        alpha *= math.sqrt(rank)  # its scale is alpha / sqrt(rank)
    return LoraConfig(rank, alpha, tuple(name for name in TARGETS if name in modules))


def load_adapters(
    folder: str | Path,
    config: Config,
    mesh: Mesh,
    sharding_of: Callable[[Tensor, Mesh], NamedSharding] = tensor_sharding,
) -> tuple[list[dict[str, Adapter]], LoraConfig]:
    """Load adapters in float32; each device reads only its own shards.

    Raise ValueError if they are not adapters for this model."""
    lora = read_lora_config(folder)
    tree = adapter_tensors(config, lora)
    path = Path(folder, "adapter_model.safetensors")
    files = open_safetensors(path)
    expected = {tensor.name: tensor.shape for tensor in jax.tree.leaves(tree)}
    found = {name: values.shape for name, values in files.items()}
    if differing := {name for name, _ in expected.items() ^ found.items()}:
        some = ", ".join(sorted(differing)[:3])
        raise ValueError(
            f"{path} does not fit this model: missing, unexpected or of another "
            f"shape: {some} ({len(differing)} in all)"
        )

    def load(tensor: Tensor) -> jax.Array:
        def shard(index: tuple[slice, ...]) -> np.ndarray:
            return np.array(files[tensor.name][index], np.float32)

        return jax.make_array_from_callback(
            tensor.shape, sharding_of(tensor, mesh), shard
        )

    return jax.tree.map(load, tree), lora


# %% write
def save_adapters(
    folder: str | Path,
    adapters: list[dict[str, Adapter]],
    config: Config,
    lora: LoraConfig,
    base: str,
) -> None:
    """Write a new folder of adapters that PEFT reads; `base` names their model."""
    names = [tensor.name for tensor in jax.tree.leaves(adapter_tensors(config, lora))]
    arrays = dict(zip(names, jax.tree.leaves(adapters), strict=True))
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [*lora.target_modules],
        "bias": "none",
    }
    text = json.dumps(adapter_config, indent=2)
    files = {"adapter_model.safetensors": arrays}
    save_folder(folder, {"adapter_config.json": text}, files)


# %% use
decoder.linear = linear  # decoder.decoder_layer finds it there
