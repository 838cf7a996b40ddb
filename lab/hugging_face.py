"""Compare launch/decoder.py with Transformers: `nox -s lab -- hugging_face`.

    logits    the small checkpoints of chapters 29 and 30, opened by both
    made      small models that Transformers makes and saves, read by us
    written   all of these, written by us and opened by Transformers and safetensors
    fine_tune launch/fine_tune.py against PEFT and Transformers: losses, and adapters
              that either has saved and the other opens

Both compute in float32: in bfloat16 each would round in its own order.
"""

import json
import math
import os
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import record

sys.path.append(str(record.ROOT / "launch"))
import decoder  # noqa: E402

DECODER = "launch/decoder.py"
FINE_TUNE, ADAPTERS = "launch/fine_tune.py", "launch/adapters.py"
CHECKPOINT = "book/cells/checkpoint.py"
CELL = runpy.run_path(str(record.ROOT / CHECKPOINT), {"jnp": jnp, "np": np})
VARIANTS = {"qwen3": CELL["QWEN3"], "tied": CELL["TIED"], "llama": CELL["LLAMA"]}
DEVICES = 1, 2, 8
PROMPT, NEW = 8, 24  # tokens read, and tokens that greedy decoding adds to them
SHOWN = 16  # of these, in the chapters
COLUMNS = 0, 80, 160, 240  # of the logits, in the chapters
AIM = 1e-4  # the most that two logits may differ
LEAST_GAP = 1e-3  # between the best two, so that every machine takes the same one


def some_tokens() -> np.ndarray:
    """Two rows of 24 tokens: i32[2, 24]."""
    rng = np.random.Generator(np.random.Philox(1))
    return rng.integers(2, 320, (2, 24)).astype(np.int32)


def write(folder: Path, config: dict, files: int = 3) -> Path:
    """A checkpoint of random bits, seed 0, as the chapters write theirs."""
    CELL["write_checkpoint"](folder, config, CELL["random_tensors"](config, 0), files)
    return folder


def load_theirs() -> tuple[ModuleType, ModuleType]:
    """PyTorch and Transformers, which have nothing to ask the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    return torch, transformers


def make_by_transformers(folder: Path, name: str) -> Path:
    """A small model that Transformers makes and saves, in several files.

    Its weights are larger than Transformers draws them, so that wrong answers show."""
    torch, transformers = load_theirs()
    kind = transformers.Qwen3Config if "Qwen3" in name else transformers.LlamaConfig
    config = kind(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16 if "Qwen3" in name else 8,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        bos_token_id=1,
        eos_token_id=None,
        tie_word_embeddings="tied" in name.split(),
    )
    torch.manual_seed(3)  # with others some tokens are nearly equal
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if "norm" in parameter_name:
                p.copy_(1 + 0.3 * torch.randn_like(p))
            else:
                scale = 3 if "embed" in parameter_name else 1.5
                p.copy_(scale * torch.randn_like(p) / p.shape[-1] ** 0.5)
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder / name, max_shard_size="200KB")
    return folder / name


class Answers(NamedTuple):
    """What Transformers says."""

    logits: np.ndarray  # f32[b, t, vocabulary]
    greedy: np.ndarray  # the NEW tokens that it adds to the first few: [b, NEW]
    gap: float  # by how much a best token's logit exceeds the next one's, at least


def theirs(folder: Path, tokens: np.ndarray) -> Answers:
    """Transformers' answers to tokens [b, t]: a model that it opens with something
    missing or left over is an error here, and so are tokens that rounding may swap."""
    torch, transformers = load_theirs()
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    if wrong := {what: names for what, names in about.items() if names}:
        raise SystemExit(f"{folder.name}: Transformers says {wrong}")
    given = torch.from_numpy(tokens).long()
    with torch.no_grad():
        scores = model(given).logits.numpy()
        start = given[:, :PROMPT]
        said = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    both = np.concatenate([scores, torch.stack(said.logits, 1).numpy()], axis=1)
    best = np.sort(both, axis=-1)
    gap = round(float((best[..., -1] - best[..., -2]).min()), 4)
    if gap < LEAST_GAP:
        raise SystemExit(f"{folder.name}: two tokens are only {gap} apart")
    return Answers(scores, said.sequences[:, PROMPT:].numpy(), gap)


def ours(folder: Path, tokens: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of launch/decoder.py on n devices."""
    c = decoder.read_config(folder)
    mesh = decoder.model_mesh(c, jax.devices()[:n])
    weights = decoder.load(decoder.open_folder(folder), c, mesh, jnp.float32)
    rows, length = tokens.shape

    @jax.jit
    def forward(weights, tokens):
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        x, _ = decoder.hidden(weights, tokens, positions, c)
        return decoder.logits(weights, x, c)

    step = jax.jit(decoder.step, static_argnames="c", donate_argnames="caches")
    none = jnp.zeros(rows, jnp.int32)  # no seed, and no heat: greedy
    caches = decoder.empty_caches(c, rows, PROMPT + NEW, jnp.float32)
    read, start, said = jnp.asarray(tokens[:, :PROMPT]), 0, []
    for _ in range(NEW):
        count = read.shape[1]
        at, of = jnp.full(rows, start), jnp.full(rows, count)
        chosen, caches = step(weights, read, at, of, none, none * 0.0, caches, c)
        said.append(np.asarray(chosen))
        read, start = chosen[:, None], start + count
    return np.asarray(forward(weights, tokens)), np.stack(said, axis=1)


def held_against(folder: Path) -> tuple[dict, Answers]:
    """How far we are from Transformers on each number of devices; its own answers."""
    tokens = some_tokens()
    said = theirs(folder, tokens)
    found = {"gap": said.gap}
    for n in DEVICES:
        logits, greedy = ours(folder, tokens, n)
        off = float(f"{abs(logits - said.logits).max():.1e}")
        same = bool((greedy == said.greedy).all())
        found[f"devices {n}"] = {"off": off, "tokens": same}
    return found, said


def logits(folder: Path) -> dict:
    """What Transformers says of the chapters' checkpoints, and how far we are off."""
    found = {"row": some_tokens()[0].tolist()}
    for name, config in VARIANTS.items():
        agreed, said = held_against(write(folder / name, config))
        shown = said.logits[0][:, COLUMNS].astype(float)
        found[name] = agreed | {
            "best": said.logits[0].argmax(-1).tolist(),
            "logits": shown.round(6).tolist(),
            "greedy": said.greedy[0][:SHOWN].tolist(),
        }
    return found


MADE = "Llama", "Llama tied", "Qwen3", "Qwen3 tied"


def made(folder: Path) -> dict:
    """Models that Transformers has made, and how far we are off."""
    return {n: held_against(make_by_transformers(folder, n))[0] for n in MADE}


def written(folder: Path) -> dict:
    """Checkpoints that we load onto eight devices and write again."""
    from safetensors.numpy import load_file

    found = {}
    folders = [write(folder / name, config) for name, config in VARIANTS.items()]
    folders += [make_by_transformers(folder, name) for name in MADE]
    for read in folders:
        files, c = decoder.open_folder(read), decoder.read_config(read)
        weights = decoder.load(files, c, decoder.model_mesh(c))
        again = read.with_name(f"{read.name} again")
        decoder.save(again, weights, c, read / "config.json", limit=200_000)
        paths, tensors = sorted(again.glob("*.safetensors")), {}
        for path in paths:
            tensors |= load_file(path)
        equal = {n: x.tobytes() for n, x in tensors.items()} == {
            n: np.asarray(x).tobytes() for n, x in files.items()
        }
        before, after = (theirs(x, some_tokens()).logits for x in (read, again))
        off = float(abs(after - before).max())
        found[read.name] = {"files": len(paths), "bits equal": equal, "off": off}
    return found


# --------------------------------------------------------------------- fine-tuning

STEPS, ROWS = 50, 8  # of a batch
RANK, ALPHA = 8, 16
RATES = {"LoRA": 1e-2, "all weights": 1e-3}
LOSS_AIM = 1e-3  # the most that two losses may differ in STEPS steps


def write_rows(path: Path, count: int, vocabulary: int, sizes: list[int]) -> Path:
    """Rows that count on, of unlike lengths: prompts and answers below these sizes."""
    rng = np.random.Generator(np.random.Philox(2))
    with path.open("w") as file:
        for _ in range(count):
            start, size, more = rng.integers(
                [2, 2, 1], [vocabulary - sum(sizes), *sizes]
            )
            said = list(range(start, start + size + more))
            row = {"tokens": said[:size], "answer": said[size:]}
            print(json.dumps(row), file=file)
    return path


def batches_of(base: Path, rows: Path) -> Callable[[int], tuple]:
    """A function that gives the batch of a step of launch/fine_tune.py: tokens,
    which of them are real, and the tokens of answers or -100, each [ROWS, t]."""
    import fine_tune
    import generate

    every = fine_tune.read_rows(rows, generate.read_model(base), [], math.inf)
    longest = max(len(row.tokens) for row in every)

    def batch(step: int) -> tuple:
        some = fine_tune.rows_of_step(every, 0, step, ROWS)
        tokens, targets = fine_tune.make_batch(some, ROWS, longest)
        labels = np.full(tokens.shape, -100)
        labels[:, 1:] = np.where(targets[:, :-1] < 0, -100, targets[:, :-1])
        return tokens, tokens > 0, labels  # no row has a token 0

    return batch


def their_step(model: object, rate: float, steps: int) -> Callable:
    """A function that takes a step of AdamW, without decay, on a batch: its loss."""
    torch, transformers = load_theirs()
    params = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(params, lr=rate, weight_decay=0.0)
    schedule = transformers.get_cosine_schedule_with_warmup(adam, steps // 10, steps)

    def step(tokens: np.ndarray, real: np.ndarray, labels: np.ndarray) -> float:
        given = [torch.from_numpy(np.int64(x)) for x in (tokens, real, labels)]
        loss = model(given[0], attention_mask=given[1], labels=given[2]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        adam.step()
        schedule.step()
        adam.zero_grad()
        return float(loss.detach())

    return step


def logits_with(base: Path, place: Path | None) -> np.ndarray:
    """Our logits of some tokens, with the adapters of a folder if there is one."""
    import adapters

    c = decoder.read_config(base)
    mesh = decoder.model_mesh(c)
    weights = decoder.load(decoder.open_folder(base), c, mesh, jnp.float32)
    if place:
        added, lora = adapters.load_adapters(place, c, mesh)
        weights = adapters.adapt(weights, added, lora.scale)
    tokens = some_tokens()
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, _ = decoder.hidden(weights, tokens, positions, c)
    return np.asarray(decoder.logits(weights, x, c))


def fine_tune(folder: Path) -> dict:
    """The same steps from the same weights, adapters and rows, by both; then each opens
    what the other has saved."""
    import adapters
    import peft

    torch, transformers = load_theirs()
    base = write(folder / "qwen3", VARIANTS["qwen3"])
    rows = write_rows(folder / "rows.jsonl", 100, 320, [20, 30])
    batch, found, c = batches_of(base, rows), {}, decoder.read_config(base)
    one, lora = decoder.model_mesh(c, jax.devices()[:1]), adapters.Lora(RANK, ALPHA)
    fresh = adapters.new_adapters(jax.random.key(0), c, lora, one)
    adapters.save_adapters(folder / "fresh", fresh, c, lora, str(base))

    def opened(name: str, place: Path | None, **how: object) -> object:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32
        )
        return peft.PeftModel.from_pretrained(model, place, **how) if place else model

    def scores(model: object) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(torch.from_numpy(some_tokens()).long()).logits.numpy()

    def off(ours: np.ndarray, theirs: np.ndarray) -> float:
        return float(f"{abs(ours - theirs).max():.1e}")

    for what, rate in RATES.items():
        is_lora = what == "LoRA"
        fresh_place = folder / "fresh" if is_lora else None
        how = {"is_trainable": True} if is_lora else {}
        model = opened("qwen3", fresh_place, **how)
        take = their_step(model.train(), rate, STEPS)
        losses = [take(*batch(number)) for number in range(STEPS)]
        row = {"losses": [round(loss, 6) for loss in losses], "off": {}}
        for n in DEVICES:
            out = folder / f"{what} {n}"
            kind = ["--rank", RANK, "--alpha", ALPHA] if is_lora else ["--full"]
            words = [base, rows, "--out", out, "--steps", STEPS, "--rate", rate, *kind]
            words += ["--emulate", n, "--log-every", 1, "--batch", ROWS]
            command = [sys.executable, record.ROOT / FINE_TUNE, *words]
            done = subprocess.run(
                [*map(str, command)], check=True, stdout=subprocess.PIPE, text=True
            )
            told = re.findall(r"^step +\d+  loss (\S+)$", done.stdout, re.M)
            assert len(told) == STEPS, done.stdout
            row["off"][f"devices {n}"] = off(np.float64(told), np.float64(losses))
        ours = folder / f"{what} 8"
        if is_lora:
            model.save_pretrained(folder / "theirs")
            pairs = {
                "opened by PEFT": (ours, opened("qwen3", ours)),
                "opened by us": (folder / "theirs", model),
            }
            for name, (place, said) in pairs.items():
                row[name] = off(logits_with(base, place), scores(said))
            before = logits_with(base, None)
            row["logits moved"] = round(float(abs(scores(model) - before).max()), 2)
        else:
            row["opened by Transformers"] = off(
                logits_with(ours, None), scores(opened(ours.name, None))
            )
        found[what] = row
        print(f"{what}: {row}", flush=True)
    reached = {
        what: max(row["off"].values()) <= LOSS_AIM
        and max(row[name] for name in row if name.startswith("opened")) <= AIM
        for what, row in found.items()
    }
    return found | {"steps": STEPS, "reached": reached}


PARTS = {
    "logits": (logits, [DECODER, CHECKPOINT]),
    "made": (made, [DECODER]),
    "written": (written, [DECODER, CHECKPOINT]),
    "fine_tune": (fine_tune, [FINE_TUNE, ADAPTERS, DECODER, CHECKPOINT]),
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
    return record.installed("jax", "torch", "transformers", "safetensors", "peft")


def same(kept: object, found: object) -> bool:
    """Whether two results agree: numbers to within AIM, losses in what they reached."""
    if isinstance(kept, dict) and isinstance(found, dict):
        if "reached" in kept:
            return kept["reached"] == found.get("reached")
        alike = kept.keys() == found.keys()
        return alike and all(same(kept[name], found[name]) for name in kept)
    if isinstance(kept, list) and isinstance(found, list):
        return len(kept) == len(found) and all(map(same, kept, found))
    if isinstance(kept, float) and isinstance(found, float):
        return abs(kept - found) <= AIM + 5e-5  # and what rounding adds
    return kept == found


def cell(parts: dict[str, record.Part]) -> str:
    """What chapters 29 and 30 show of the record."""
    part = parts["logits"]
    found, about = part["found"], part["versions"]
    made_with = {"date": part["recorded"]}
    made_with |= {name: about[name] for name in ("transformers", "torch")}

    def numbers(of: list[int]) -> str:
        lines = textwrap.wrap(" ".join(map(str, of)), 60)
        quoted = " ".join(repr(f"{line} ") for line in lines)
        return f"np.array(({quoted}).split(), int)"

    text = f"{HEAD}TRANSFORMERS_ON = {made_with}\nTOKENS = {numbers(found['row'])}\n"
    text += f"COLUMNS = {[*COLUMNS]}\nTRANSFORMERS = {{"
    for name in VARIANTS:
        said = found[name]
        text += f"{name!r}: {{'best': {numbers(said['best'])}, 'greedy': "
        text += f"{numbers(said['greedy'])}, 'logits': {said['logits']}}}, "
    return text + "}\n"


HEAD = """\
# @title Recorded answers of Transformers
# Written by `nox -s lab -- hugging_face --record`: what Transformers computes, in
# float32, from the small checkpoints with seed 0 that this notebook writes.
#   best     the best next token at each position of TOKENS
#   logits   of these COLUMNS, at each position of TOKENS
#   greedy   the 16 tokens that follow the first 8
"""
