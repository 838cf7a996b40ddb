# @title Write a small checkpoint
import json
from pathlib import Path

# %% model
QWEN3 = {  # config.json
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "torch_dtype": "bfloat16",
}
TIED = QWEN3 | {"tie_word_embeddings": True}
LLAMA = QWEN3 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 8,
    "rope_theta": 1e4,
    "max_position_embeddings": 1024,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


def shapes_of(config: dict) -> dict[str, tuple[int, ...]]:
    """Return each tensor's shape by its name, in the order of the layers."""
    d, f, head = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    q, k = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    table = config["vocab_size"], d
    shapes = {"model.embed_tokens.weight": table}
    for number in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (d,),
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (k, d),
            "self_attn.v_proj": (k, d),
            "self_attn.o_proj": (d, q),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (d,),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }.items():
            if config["model_type"] == "llama" and shape == (head,):
                continue  # only Qwen3 norms its queries and keys
            shapes[f"model.layers.{number}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = table
    return shapes


def random_tensors(config: dict, seed: int) -> dict[str, np.ndarray]:
    """Return bfloat16 weights, with the same bits on every machine."""
    rng = np.random.Generator(np.random.Philox(seed))
    tensors = {}
    for name, shape in shapes_of(config).items():
        if len(shape) == 1:  # the scale of a norm, near 1
            values = 1 + rng.integers(-20, 21, shape) / 64
        else:
            limit = 2 if "embed" in name else 1.5 * (3 / shape[-1]) ** 0.5
            values = limit * rng.integers(-127, 128, shape) / 127
        tensors[name] = values.astype(jnp.bfloat16)
    return tensors


# %% files
def write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write one safetensors file: the length of the header, the header, the values."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, values in tensors.items():
        start, end = end, end + values.nbytes
        header[name] = {"dtype": "BF16", "shape": values.shape}
        header[name]["data_offsets"] = [start, end]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.tobytes())


def write_checkpoint(
    folder: Path, config: dict, tensors: dict[str, np.ndarray], files: int = 3
) -> None:
    """Write a folder as the Hub has it: config.json, the files, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    names, file_of = [*tensors], {}
    per_file = -(-len(names) // files)
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        in_file = names[number * per_file : (number + 1) * per_file]
        write_file(folder / file, {name: tensors[name] for name in in_file})
        file_of |= dict.fromkeys(in_file, file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}}
    index["weight_map"] = file_of
    text = json.dumps(index, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)
