"""launch/fine_tune.py: its numbers are those of a plain loop on any number of devices,
what stops it loses nothing, and what it will not do it refuses in a sentence.

Faults of checkpoints themselves are in test_faults.py: lifecycle.py keeps them.
"""

import json
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import adapters
import decoder
import fine_tune
import generate
import jax
import jax.numpy as jnp
import lifecycle
import numpy as np
import optax
import pytest
from runs import SLOWLY, TOLERANCE, read_until, statuses
from test_faults import fill, linux_root, small_disk
from test_generate import (
    answers,
    begin,
    begin_two,
    damaged,
    give,
    model_in,
    options_of,
    plain_answers,
    plain_weights,
    prepared,
    say,
    sentence,
    write_model,
    write_rows,
)

STEPS, SAVE, LOG, SEED = 24, 10, 8, 7
SHORT = ["model", "data.jsonl", "--eval", "held.jsonl", "--steps", STEPS]
SHORT += ["--save-every", SAVE, "--log-every", LOG, "--seed", SEED]
LORA = ["--rank", 4, "--alpha", 8, "--rate", 1e-2]
T = 32  # no less than any row has


def some_rows(seed: int, count: int) -> list[dict]:
    """Rows that count on, of unlike lengths, from the longest to the shortest."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        start, size, more = rng.integers([2, 2, 1], [280, 12, 21])
        tokens = [int(start + i) for i in range(size + more)]
        rows.append({"tokens": tokens[:size], "answer": tokens[size:]})
    return sorted(rows, key=lambda row: -len(row["tokens"] + row["answer"]))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the folder `model`, and its rows."""
    with model_in(tmp_path_factory.mktemp("fine_tune")) as place:
        write_rows(place / "data.jsonl", some_rows(0, 30))
        write_rows(place / "held.jsonl", some_rows(1, 13))
        yield place


def read_adapters(place: Path, name: str) -> list:
    c = decoder.read_config(place / "model")
    mesh = decoder.model_mesh(c, jax.devices()[:1])
    params, lora = adapters.load_adapters(place / name, c, mesh)
    assert lora == adapters.Lora(4, 8.0)
    return params


def same_bits(one: Path, other: Path) -> None:
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


def close(found: object, due: object, **tolerance: float) -> None:
    """Two trees of arrays have numbers that are close."""
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), found, due)


# ------------------------------------------------------------------- the plain loop


def added(weights: dict, params: list, scale: float) -> dict:
    """Plain weights with adapters added to them."""
    layers = []
    for w, pairs in zip(weights["layers"], params, strict=True):
        new = {name: w[name] + scale * pair.b @ pair.a for name, pair in pairs.items()}
        layers.append(w | new)
    return weights | {"layers": layers}


def plain_run(place: Path, full: bool, rate: float) -> tuple[dict, object]:
    """What the program should print, and what it should have trained.

    It has one device, one length, whole logits, and one schedule in NumPy."""
    weights, c = plain_weights(place / "model")
    model = generate.read_model(place / "model")
    paths = place / "data.jsonl", place / "held.jsonl"
    train, held = (fine_tune.read_rows(path, model, [], T) for path in paths)
    epochs = [np.random.default_rng([SEED, n]).permutation(30) for n in range(9)]
    order = np.concatenate(epochs)
    warm = np.arange(2) / 2
    cool = (1 + np.cos(np.pi * np.arange(STEPS - 2) / (STEPS - 2))) / 2
    rates = jnp.array(rate * np.concatenate([warm, cool]))
    adam = optax.adam(lambda count: rates[count])

    def mean_loss(params, batch):
        w = params if full else added(weights, params, 2.0)
        places = jnp.broadcast_to(jnp.arange(T), batch.tokens.shape)
        x, _ = decoder.hidden(w, batch.tokens, places, c)
        logs = jax.nn.log_softmax(decoder.logits(w, x, c))
        known = batch.targets >= 0
        found = jnp.take_along_axis(logs, batch.targets[..., None], axis=2)
        return -(found[..., 0] * known).sum() / known.sum()

    @jax.jit
    def step(params, memory, batch):
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)
        updates, memory = adam.update(grads, memory)
        return optax.apply_updates(params, updates), memory, loss

    params = weights
    if not full:
        mesh = decoder.model_mesh(c, jax.devices()[:1])
        key, lora = jax.random.key(SEED), adapters.Lora(4, 8.0)
        params = adapters.new_adapters(key, c, lora, mesh)
    memory, score = adam.init(params), jax.jit(mean_loss)
    held = fine_tune.make_batch(held, 13, T)
    printed = {(0, "eval loss"): score(params, held)}
    for done in range(1, STEPS + 1):
        rows = [train[row] for row in order[8 * done - 8 : 8 * done]]
        batch = fine_tune.make_batch(rows, 8, T)
        params, memory, loss = step(params, memory, batch)
        if done % LOG == 0:
            printed[done, "loss"] = loss
        if done % SAVE == 0 or done == STEPS:
            printed[done, "eval loss"] = score(params, held)
    return printed, params


def check(said: str, expected: dict, start: int = -1, stop: int = STEPS) -> None:
    """What a run has printed of the steps after start, where it was restored, up to
    stop is what was expected."""
    lines = re.findall(r"^step +(\d+)  (loss|eval loss) (\S+)", said, re.M)
    found = {(int(step), what): float(number) for step, what, number in lines}
    found.pop((start, "eval loss"), None)
    due = {line: expected[line] for line in expected if start < line[0] <= stop}
    assert found.keys() == due.keys(), said
    close(found, due, **TOLERANCE)


# ----------------------------------------------------------------------------- numbers


@pytest.fixture(scope="module")
def whole(place):
    """A run on eight devices: what it has said. Its folders are `whole` and so on."""
    run = begin(place, "fine_tune.py", *SHORT, *LORA, "--out", "whole", "--emulate", 8)
    assert statuses([run], 300) == [0], run.complaints
    assert run.complaints == ""
    return run.said


@pytest.fixture(scope="module")
def expected(place):
    return plain_run(place, False, 1e-2)


def test_eight_devices_give_the_numbers_of_a_plain_loop(place, whole, expected):
    printed, params = expected
    check(whole, printed)
    assert printed[STEPS, "eval loss"] < 0.9 * printed[0, "eval loss"]  # it learns
    close(read_adapters(place, "whole"), params, rtol=1e-2, atol=1e-4)


def test_all_weights_can_be_trained(place):
    """And come back as a folder that loads, in its own type."""
    words = [*SHORT, "--full", "--rate", 1e-3, "--out", "full"]
    (place / "model" / "generation_config.json").write_text('{"eos_token_id": 3}')
    run = begin(place, "fine_tune.py", *words, "--emulate", 8)
    assert statuses([run], 300) == [0], run.complaints
    printed, params = plain_run(place, True, 1e-3)
    check(run.said, printed)
    found, c = plain_weights(place / "full")
    assert c == decoder.read_config(place / "model")
    close(found, params, rtol=2**-7, atol=1e-3)
    files = decoder.open_folder(place / "full")
    assert {x.dtype.name for x in files.values()} == {"bfloat16"}
    kept = {path.name for path in (place / "full").iterdir()}
    assert kept >= {"tokenizer.json", "generation_config.json", "config.json"}
    (place / "model" / "generation_config.json").unlink()


# ------------------------------------------------------------------------------- stops


def test_two_processes_that_are_told_to_stop_save_and_one_device_goes_on(
    place, expected
):
    words = [*SHORT, *LORA, "--out", "stopped"]
    two = begin_two(place, "fine_tune.py", words, words, code=SLOWLY)
    said = read_until(two[0], f"step {SAVE:5}  eval loss")
    two[1].send_signal(signal.SIGTERM)
    assert statuses(two, 200) == [75, 75], two[0].complaints + two[1].complaints
    told = "^stopped: the same command goes on after step (.*)$"
    start = int(re.search(told, two[0].said, re.M)[1])
    assert SAVE < start < STEPS
    check(said + two[0].said, expected[0], stop=start)
    assert "step" not in two[1].said
    assert not (place / "stopped").exists()
    one = begin(place, "fine_tune.py", *words, "--emulate", 1)
    assert statuses([one], 200) == [0], one.complaints
    check(one.said, expected[0], start)
    assert f"step {start:5}  restored" in one.said
    close(read_adapters(place, "stopped"), expected[1], rtol=1e-2, atol=1e-4)


def copied(place: Path, folder: Path) -> list[object]:
    """The words of a run that goes on from copies of the checkpoints of `whole`."""
    shutil.copytree(place / "whole.checkpoints", folder)
    return [*SHORT, *LORA, "--folder", folder]


@linux_root
def test_a_full_disk_at_the_end_is_said_and_the_rest_has_the_same_bits(
    place, tmp_path, whole
):
    words = copied(place, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / str(STEPS))  # as if killed before it was whole
    with small_disk(tmp_path / "disk", "1m") as disk:
        words += ["--out", disk / "out", "--emulate", 8]
        ballast = fill(disk, leave=20_000)  # enough for the small file
        run = begin(place, "fine_tune.py", *words)
        assert statuses([run], 200) == [78]
        assert f"step {2 * SAVE:5}  restored" in run.said
        assert run.said.splitlines()[-2:] == whole.splitlines()[-3:-1]
        reason = f"{disk / 'out'} is not written: No space left on device; what"
        assert run.complaints.startswith(reason)
        assert [*disk.iterdir()] == [ballast]
        ballast.unlink()
        again = begin(place, "fine_tune.py", *words)
        assert statuses([again], 200) == [0], again.complaints
        same_bits(place / "whole", disk / "out")


@linux_root
def test_no_room_for_a_small_file_leaves_nothing(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        ballast = fill(disk, leave=0)
        with pytest.raises(OSError, match="No space left on device"):
            decoder.save_folder(disk / "out", {"config.json": "{}"}, {})
        assert [*disk.iterdir()] == [ballast]


ONE_CANNOT = """
import adapters, errno, numpy as np

def memmap(path, *rest):
    raise OSError(errno.EIO, "no", str(path))

def save(*words):
    if sys.argv[-1] == "1":
        np.memmap = memmap
    save_adapters(*words)

save_adapters, adapters.save_adapters = adapters.save_adapters, save
"""


def test_what_one_process_cannot_write_ends_both(place, tmp_path, whole):
    words = [*copied(place, tmp_path / "run"), "--out", tmp_path / "out"]
    two = begin_two(place, "fine_tune.py", words, words, code=ONE_CANNOT)
    assert statuses(two, 200) == [78, 78], two[0].complaints + two[1].complaints
    reason = "not written: Input/output error (in process 1); what"
    assert reason in two[0].complaints
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    again = begin_two(place, "fine_tune.py", words, words)
    assert statuses(again, 200) == [0, 0], again[0].complaints + again[1].complaints
    same_bits(place / "whole", tmp_path / "out")


def test_a_number_that_is_none_ends_it(place, tmp_path, monkeypatch, capsys):
    load = decoder.load
    spoil = partial(jax.tree.map, lambda x: x * np.nan)
    monkeypatch.setattr(decoder, "load", lambda *words: spoil(load(*words)))
    monkeypatch.setattr(lifecycle, "hear_no_more", lambda: None)
    words = [place / "model", place / "data.jsonl", "--out", tmp_path / "out"]
    with pytest.raises(SystemExit, match="^78$"):
        fine_tune.main(options_of(fine_tune, *words, "--devices", 1))
    assert "the loss of step 1 is nan" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------ the adapters


def test_generate_answers_as_merged_weights_do(place, whole):
    engine, requests, _ = prepared(place, "--adapters", place / "whole")
    found = answers(engine, requests)
    weights, c = plain_weights(place / "model")
    merged = added(weights, read_adapters(place, "whole"), 2.0)
    assert found == plain_answers(merged, c, requests)
    assert found != plain_answers(weights, c, requests)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (say(peft_type="IA3"), "is of 'IA3', not of LORA"),
        (say(r=8), "is not for this model: it differs in base_"),
        (say(bias="all"), "asks for what is not here: bias 'all'"),
        (say(layers_to_transform=[0]), "layers_to_transform"),
        (give(b'{"peft_type": "LORA"}'), "is not as it should be: "),
        (give(b"[]"), "is not as it should be: "),
    ],
)
def test_adapters_that_will_not_do_are_refused(place, whole, tmp_path, damage, reason):
    folder = shutil.copytree(place / "whole", tmp_path / "adapters")
    damage(folder / "adapter_config.json")
    words = ["model", "--prompts", "requests.jsonl", "--adapters", folder]
    assert reason in sentence(place, generate, *words)


# -------------------------------------------------------------------------------- rows

NAMED = "tokenizer_config.json"


@pytest.mark.parametrize(
    ("name", "change", "due"),
    [
        ("config.json", {}, []),
        ("config.json", {"eos_token_id": 9}, [9]),
        ("config.json", {"eos_token_id": [9, 8]}, []),
        (NAMED, {"eos_token": "blue"}, [53]),
        (NAMED, {"eos_token": {"content": "blue"}}, [53]),
    ],
)
def test_an_answer_that_is_a_text_ends_where_answers_end(
    place, tmp_path, name, change, due
):
    folder = damaged(place, tmp_path, name, say(**change))
    model = generate.read_model(folder)
    assert fine_tune.end_of_answers(folder, model.tokenizer) == due
    row = fine_tune.read_row({"prompt": "the sea", "answer": "is"}, model, due, 9)
    assert row == ([1, 15, 7, 9, *due], 3)
    row = fine_tune.read_row({"tokens": [4], "answer": [5, 6]}, model, due, 9)
    assert row == ([4, 5, 6], 1)


def test_a_batch_has_answers_for_targets_and_few_lengths():
    rows = [fine_tune.Row([4, 5, 6], 1), fine_tune.Row([7, 8, 9, 10], 3)]
    batch = fine_tune.make_batch(rows, 3, longest=40)
    assert batch.tokens.shape == batch.targets.shape == (3, 16)
    targets = np.full((3, 16), -1)
    targets[0, :2], targets[1, 2] = [5, 6], 10
    np.testing.assert_array_equal(batch.targets, targets)
    np.testing.assert_array_equal(batch.tokens[1, :5], [7, 8, 9, 10, 0])
    for longest, due in ((40, {16, 32, 48}), (300, {16, 32, 64, 128, 256, 384})):
        sizes = range(1, longest + 1)
        assert {fine_tune.bucket(size, longest) for size in sizes} == due
        assert all(fine_tune.bucket(size, longest) >= size for size in sizes)
    held = [len(row["tokens"] + row["answer"]) for row in some_rows(1, 13)]
    assert 32 >= held[0] > 16 >= held[8]  # the runs above score batches of two lengths


# ---------------------------------------------------------------------------- refusals

ASK = ["model", "data.jsonl", "--out", "new", "--devices", 1]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere", *ASK[1:]], "nowhere is no folder"),
        (["model", "none.jsonl", *ASK[2:]], "none.jsonl: No such file"),
        (["model", os.devnull, *ASK[2:]], "/dev/null has no row"),
        (ASK[:2], "the following arguments are required: --out"),
        ([*ASK, "--out", "model"], "model exists: nothing is written over it"),
        ([*ASK, "--out", "data.jsonl/new"], "data.jsonl: File exists"),
        ([*ASK, "--eval", "none.jsonl"], "none.jsonl: No such file"),
        ([*ASK, "--length", 8], "tokens with its answer, and may have 8"),
        ([*ASK, "--length", 257], "--length 257: the model was made for 256"),
        ([*ASK, "--devices", 999], "--devices 999: there are "),
        ([*ASK, "--rank", 0], "argument --rank: 0 is no whole number from 1"),
        ([*ASK, "--rate", "nan"], "argument --rate: nan is no number from"),
        ([*ASK, "--full", "--rank", 4], "--rank and --alpha are of adapters"),
        ([*ASK, "--steps", 4, "--epochs", 1], "give --steps or --epochs, not both"),
        ([*ASK, "--process", 1], "--coordinator, --processes and --process go"),
        ([*ASK, "--dtype", "float16"], "argument --dtype: invalid choice"),
    ],
)
def test_what_cannot_be_is_refused(place, words, reason):
    assert reason in sentence(place, fine_tune, *words)


def test_a_batch_that_does_not_divide_is_refused(place):
    words = ["model", "data.jsonl", "--out", "new", "--batch", 12]
    two = begin_two(place, "fine_tune.py", words, words)
    assert statuses(two, 200) == [2, 2]
    line = "--batch 12 has to be a multiple of the 8 devices"
    assert [run.complaints.count(line) for run in two] == [1, 0]
    assert not [*place.glob("new*")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"tokens": [1, 2', "it is not JSON (Expecting ',' delimiter)"),
        (b"[1, 2]", 'it is no object with either "prompt" or "tokens"'),
        (b'{"answer": [1]}', 'it is no object with either "prompt" or "tokens"'),
        (b'{"tokens": [1]}', 'it has no "answer"'),
        (b'{"tokens": [1], "answer": []}', "its answer needs at least one token"),
        (b'{"tokens": [], "answer": [1]}', "its prompt needs at least one token"),
        (b'{"prompt": "sea", "answer": [7]}', "its answer is no Unicode text"),
        (b'{"tokens": [1], "answer": "sea"}', "its answer is no list of tokens"),
        (b'{"tokens": [1], "answer": [321]}', "321 is no token"),
        (b'{"tokens": [1], "answer": [1], "answers": [2]}', "it has ['answers']"),
    ],
)
def test_a_bad_line_is_refused_and_named(place, tmp_path, line, reason):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"tokens": [1], "answer": [2]}\n\n' + line + b"\n")
    said = sentence(place, fine_tune, "model", file, "--out", "new")
    assert said.startswith(f"{file}, line 3: {reason}")


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("tokenizer.json", Path.unlink, "a text needs a tokenizer, and"),
        (NAMED, say(eos_token="wet"), "its eos_token 'wet' is not in"),
        (NAMED, say(eos_token=["wet"]), "is not as it should be: "),
    ],
)
def test_a_tokenizer_that_will_not_do_is_refused(place, tmp_path, name, damage, reason):
    folder = damaged(place, tmp_path, name, damage)
    write_rows(tmp_path / "text.jsonl", [{"prompt": "the sea", "answer": "is"}])
    words = [folder, tmp_path / "text.jsonl", "--out", "new"]
    assert reason in sentence(place, fine_tune, *words)


def test_too_little_memory_is_refused(place, tmp_path):
    write_rows(tmp_path / "long.jsonl", [{"tokens": [1] * 250, "answer": [2]}])
    words = ["model", tmp_path / "long.jsonl", "--out", "new", "--devices", 1]
    said = sentence(place, fine_tune, *words, "--batch", 2**20)
    # Eight heads' scores of 256 tokens each with each, twice, and all of it twice.
    assert "too little memory: a device needs " in said
    assert "(weights 0.00, state 0.00, gathered 0.00, inputs of layers 128.00, " in said


def test_what_decides_the_numbers_is_a_setting(place, monkeypatch):
    monkeypatch.chdir(place)
    write_model(place / "other", seed=1)
    write_rows(place / "fewer.jsonl", some_rows(0, 29))

    def settings(*words: object, dtype=np.float32) -> str:
        options = options_of(fine_tune, "--steps", 9, "--out", "new", *words)
        job = fine_tune.read_job(options)
        return json.dumps(fine_tune.settings_of(options, job, np.dtype(dtype)))

    usual = SHORT[:2]
    changes = [["--rank", 8], ["--alpha", 8], ["--rate", 0.5], ["--clip", 2]]
    changes += [["--steps", 25], ["--batch", 16], ["--seed", 1], ["--full"]]
    asked = [usual, ["other", "data.jsonl"], ["model", "fewer.jsonl"]]
    asked += [[*usual, *change] for change in changes]
    found = [settings(*usual, dtype=jnp.bfloat16), *[settings(*one) for one in asked]]
    assert len({*found}) == len(found) == 12
    same = ["--save-every", 3, "--log-every", 2, "--eval", "data.jsonl", "--length", 99]
    assert settings(*usual, *same) == settings(*usual)
