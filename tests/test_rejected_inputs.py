"""Test that the programs of launch/ reject bad input in one line, with exit status 2.

The line names the input. No weight is loaded and no file is written before.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import adapters
import decoder
import fine_tune
import generate
import jax
import lifecycle
import pytest
from runs import LAUNCH, contents, options_of, statuses
from toy_model import model_in, start_in, start_two, write_rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a model, adapters, requests, and rows to train on."""
    with model_in(tmp_path_factory.mktemp("rejected")) as place:
        write_rows(place / "data.jsonl", [{"prompt": "the sea", "answer": " is"}])
        c = generate.read_model(place / "model").config
        mesh = decoder.model_mesh(c, jax.devices()[:1])
        lora = adapters.LoraConfig(4, 8.0)
        params = adapters.init_adapters(jax.random.key(0), c, lora, mesh)
        adapters.save_adapters(place / "adapters", params, c, lora, "model")
        yield place


@pytest.fixture
def rejection(place, tmp_path, monkeypatch, capsys):
    """Return a function that runs a program on a copy of these files, one of which may
    be damaged, and returns the one line of its stderr."""

    def fail(*_):
        pytest.fail("the program did not reject its input")

    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(lifecycle, "ignore_signals", lambda: None)
    monkeypatch.setattr(lifecycle, "claim_run", fail)
    monkeypatch.setattr(decoder, "load_model", fail)
    monkeypatch.chdir(shutil.copytree(place, tmp_path / "copy"))

    def run(program, args: str, file: str = "", damage: Callable = None) -> str:
        if damage:
            damage(Path(file))
        before = contents(Path())
        with pytest.raises(SystemExit, match="^2$"):
            program.main(options_of(program, *args.split()))
        output, errors = capsys.readouterr()
        assert errors.count("\n") == 1 and not output
        assert contents(Path()) == before
        return errors

    return run


# ------------------------------------------------------------------------- the options

GENERATE, FINE_TUNE = "model --prompt sea ", "model data.jsonl --out new --devices 1 "


@pytest.mark.parametrize(
    ("program", "args", "named"),
    [
        (generate, "model", "--prompts"),
        (generate, GENERATE + "--max-tokens 0", "--max-tokens"),
        (generate, GENERATE + "--length 1", "prompt of 0"),
        (generate, GENERATE + "--length 257", "--length 257"),
        (generate, GENERATE + "--devices 999", "--devices 999: there "),
        (generate, GENERATE + "--processes 2 --process 1", "--coordinator"),
        (fine_tune, "model none.jsonl --out new", "none.jsonl"),
        (fine_tune, "model /dev/null --out new", "/dev/null"),
        (fine_tune, FINE_TUNE + "--out model", "model"),
        (fine_tune, FINE_TUNE + "--out data.jsonl/new", "data.jsonl"),
        (fine_tune, FINE_TUNE + "--max-length 3", "data.jsonl, line 1"),
        (fine_tune, FINE_TUNE + "--max-length 257", "--max-length 257"),
        (fine_tune, FINE_TUNE + "--learning-rate nan", "--learning-rate"),
        (fine_tune, FINE_TUNE + "--full --rank 4", "--rank"),
        (fine_tune, FINE_TUNE + "--target-modules lm_head", "lm_head"),
        (fine_tune, FINE_TUNE + "--warmup 9", "--warmup"),
        (fine_tune, FINE_TUNE + "--accumulate 3", "--accumulate 3"),
        (fine_tune, FINE_TUNE + "--merge adapters", "--merge"),
        (fine_tune, "model --merge none --out new", "none/adapter_config.json"),
        (fine_tune, FINE_TUNE + "--steps 4 --epochs 1", "--epochs"),
    ],
)
def test_option_is_rejected(rejection, program, args, named):
    assert named in rejection(program, args)


@pytest.mark.parametrize(
    "args", ["--steps 0", "--rate nan", "--coordinator node1", "--allow-nan"]
)
def test_train_rejects_options_before_it_imports_jax(tmp_path, args):
    """It prints its usage in one line, and the error in another."""
    (tmp_path / "jax.py").write_text("raise SystemExit('JAX was imported')")
    command = [sys.executable, LAUNCH / "train.py", *args.split()]
    own = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    usage, line = done.stderr.splitlines()
    assert usage.startswith("usage: ") and args.split()[-2:][0] in line


@pytest.mark.parametrize("missing", ["decoder.py", "adapters.py"])
def test_program_without_its_modules_is_rejected_before_it_imports_jax(
    tmp_path, missing
):
    (tmp_path / "jax.py").write_text("raise SystemExit('JAX was imported')")
    for name in {"generate.py", "decoder.py", "adapters.py"} - {missing}:
        shutil.copy(LAUNCH / name, tmp_path)
    args = ["model", "--prompt", "sea", "--adapters", "adapters"]
    command = [sys.executable, tmp_path / "generate.py", *args]
    done = subprocess.run(command, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{missing} is missing; copy it into {tmp_path}")
    assert done.stderr.count("\n") == 1


# --------------------------------------------------------------------------- the files


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def overwrite(text: bytes) -> Callable:
    return lambda path: path.write_bytes(text)


def change(**new: object) -> Callable:
    """Return a function that sets keys of the JSON object in an old or new file."""

    def write(path: Path) -> None:
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | new))

    return write


def make_int8(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"I8"  ', 1))


def remove_key(name: str) -> Callable:
    """Return a function that removes a key of the JSON object in a file."""

    def write(path: Path) -> None:
        data = json.loads(path.read_text())
        del data[name]
        path.write_text(json.dumps(data))

    return write


def replace_by_bin(index: Path) -> None:
    """Replace the safetensors files and their index."""
    for path in index.parent.glob("model*"):
        path.unlink()
    index.with_name("pytorch_model.bin").write_bytes(b"")


CONFIG, INDEX = "model/config.json", "model/model.safetensors.index.json"
SINGLE = "model/model.safetensors"
TWO = {"rope_type": "linear", "factor": 2.0}
FOUR = {"rope_type": "linear", "factor": 4.0}
TOKENIZER, NAMED = "model/tokenizer.json", "model/tokenizer_config.json"
WEIGHTS, LORA = "model/model-00002-of-00003.safetensors", "adapters/adapter_config.json"


@pytest.mark.parametrize(
    ("file", "damage", "named"),
    [
        (
            CONFIG,
            change(model_type="gpt2", num_attention_heads=None),
            "model_type 'gpt2'",
        ),
        (CONFIG, change(hidden_act="gelu"), "activation 'gelu'"),
        (CONFIG, remove_key("rope_theta"), '"rope_theta": 10000.0'),
        (CONFIG, change(rope_parameters={"rope_theta": 5e5}), "rope_theta is 500000.0"),
        (CONFIG, change(rope_scaling=TWO, rope_parameters=FOUR), "factor is 4.0"),
        (CONFIG, overwrite(b"\xff{}"), CONFIG),
        (CONFIG, change(num_attention_heads="8"), "num_attention_heads"),
        (CONFIG, change(vocab_size=99), "model.embed_tokens"),
        (CONFIG, change(tie_word_embeddings=True), "config.json"),
        (WEIGHTS, truncate, WEIGHTS),
        (WEIGHTS, Path.unlink, WEIGHTS),
        (WEIGHTS, overwrite(b"version https://git-lfs"), "git lfs pull"),
        (WEIGHTS, make_int8, WEIGHTS),
        (INDEX, truncate, INDEX),
        (INDEX, replace_by_bin, "pytorch_model.bin"),
        (SINGLE, overwrite(b""), f"{SINGLE} is not listed in {INDEX}"),
        (TOKENIZER, overwrite(b"no"), TOKENIZER),
        (LORA, change(peft_type="IA3"), LORA),
        (LORA, change(r=8), "adapters"),
        (LORA, change(bias="all"), "bias"),
    ],
)
def test_damaged_file_is_rejected(rejection, file, damage, named):
    args = "model --prompts requests.jsonl --adapters adapters"
    assert named in rejection(generate, args, file, damage)


def test_unknown_stop_token_is_rejected(rejection):
    line = rejection(fine_tune, FINE_TUNE, NAMED, change(eos_token="wet"))
    assert "tokenizer_config.json" in line


REQUESTS = (generate, "model --prompts requests.jsonl", "requests.jsonl")
EXAMPLES = (fine_tune, FINE_TUNE, "data.jsonl")


@pytest.mark.parametrize(
    ("rows", "row", "named"),
    [
        (REQUESTS, b'{"tokens": [1, 2', "delimiter"),
        (REQUESTS, b"[1]", 'one of "prompt"'),
        (REQUESTS, b'{"tokens": [1], "prompt": ""}', 'has "prompt" and "tokens": give'),
        (REQUESTS, b'{"tokens": [1], "max_token": 5}', "max_token (did you mean max_t"),
        (REQUESTS, b'{"tokens": [1, 321]}', "321"),
        (REQUESTS, b'{"tokens": [' + 5000 * b"9" + b"]}", "not valid JSON"),
        (REQUESTS, 100_000 * b"[", "not valid JSON"),
        (REQUESTS, b'{"prompt": "\xff"}', "not valid JSON"),
        (REQUESTS, b'{"prompt": "sea", "stop": [""]}', "stop"),
        (REQUESTS, b'{"messages": []}', "chat template"),
        (REQUESTS, b'{"tokens": []}', "tokens"),
        (REQUESTS, b'{"tokens": [1], "max_tokens": 2.5}', "max_tokens: 2.5"),
        (REQUESTS, b'{"tokens": [1], "temperature": NaN}', "temperature: NaN"),
        (EXAMPLES, b'{"answer": [1]}', '"tokens"'),
        (EXAMPLES, b'{"tokens": [1], "answer": []}', "answer"),
        (EXAMPLES, b'{"tokens": [1], "answer": [1], "answers": [2]}', "answers"),
        (EXAMPLES, b'{"prompt": "sea", "answer": ""}', "answer"),
        (EXAMPLES, b'{"text": ""}', "text"),
        (EXAMPLES, b'{"messages": [{"role": "user"}]}', "message 0 has no content"),
        (
            EXAMPLES,
            b'{"messages": [{"role": "bot"}]}',
            "the role 'bot'; known: s",
        ),
        (EXAMPLES, b'{"messages": [{"role": "user", "content": "a"}]}', "no message"),
        (EXAMPLES, b'{"messages": [{"role": "tool", "content": ""}]}', "no content"),
    ],
)
def test_row_is_rejected(rejection, rows, row, named):
    program, args, file = rows
    line = rejection(program, args, file, overwrite(b"\n" + row))
    assert line.startswith(f"{file}, line 2: ") and named in line


# --------------------------------------------------------------------- the environment


def test_too_little_memory_is_rejected(rejection):
    args = GENERATE + f"--devices 1 --dtype float16 --length {2**31 - 1}"
    line = rejection(generate, args, CONFIG, change(max_position_embeddings=None))
    # 2 layers x keys and values x 2 KV heads x head_dim 16 x 2 bytes x 2^31 positions.
    assert "needs 512.00 GiB (weights 0.00, cache 512.00, logits 0.00)" in line
    # 2^24 sequences x 16 tokens x hidden_size 64 x 4 bytes x 2 layers: 128 GiB.
    line = rejection(fine_tune, FINE_TUNE + f"--batch {2**25} --accumulate 2")
    assert "(weights 0.00, state 0.00, gathered 0.00, inputs of layers 128.00, " in line


def test_one_of_several_processes_is_rejected(rejection, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert "SLURM_STEP_NUM_TASKS" in rejection(generate, GENERATE)


def test_text_without_tokenizers_is_rejected(rejection, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "package tokenizers" in rejection(generate, GENERATE)


def test_distributed_without_a_launcher_is_rejected(place):
    args = ["model", "--prompt", "sea", "--emulate", 1, "--distributed"]
    run = start_in(place, "generate.py", *args)
    assert statuses([run]) == [2]
    assert "--distributed: no launcher found; use --coordinator" in run.errors


def test_two_processes_reject_together(place):
    before = contents(place)
    different = [["model", "--prompt", word] for word in ("sea", "blue")]
    uneven = 2 * [["model", "data.jsonl", "--out", "new", "--batch", 12]]
    for program, args, named in [
        ("generate.py", different, "prompts"),
        ("fine_tune.py", uneven, "--batch 12"),
    ]:
        two = start_two(place, program, *args)
        assert statuses(two) == [2, 2]
        assert named in two[0].errors.splitlines()[-1]  # Gloo prints lines before it
    assert contents(place) == before
