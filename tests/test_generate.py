"""Test that launch/generate.py answers as a plain loop does, on 1 and on 8 devices.

test_rejected_inputs.py tests the inputs that it rejects.
"""

import json
import os
import shutil
import signal

import decoder
import generate
import jax
import numpy as np
import pytest
from runs import coordinator_options, options_of, statuses
from toy_model import (
    LENGTH,
    REQUESTS,
    WORDS,
    answers,
    model_in,
    plain_answers,
    plain_results,
    plain_weights,
    prepared,
    start_in,
    start_two,
    write_gemma,
    write_rows,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with model_in(tmp_path_factory.mktemp("generate")) as place:
        yield place


@pytest.fixture(scope="module")
def served(place):
    """Prepare three slots for all requests."""
    return prepared(place, "--slots", 3)


@pytest.fixture(scope="module")
def plain(place, served):
    return plain_answers(*plain_weights(place / "model"), served[1])


def test_answers_equal_those_of_the_plain_loop(served, plain):
    engine, requests, _ = served
    assert engine.shape[:4] == (3, LENGTH, 4, 16)
    assert answers(engine, requests) == plain
    assert len(plain[8]) == LENGTH - 92 and requests[8].finish_reason == "length"
    assert plain[3] == plain[5] != plain[6]  # seeds 5, 5 and 6


def test_log_probabilities_equal_those_of_the_plain_loop(place, served):
    engine, requests, _ = served
    some = requests[1:3]  # one of them samples at temperature 1
    answers(engine, some)
    results = plain_results(*plain_weights(place / "model"), some)
    for request in some:
        expected = results[request.name][1]
        np.testing.assert_allclose(request.logprobs, expected, atol=1e-4)


def test_stop_string_ends_an_answer_and_is_never_streamed(served, plain):
    engine, requests, model = served
    request = requests[7]
    words = model.tokenizer.decode(plain["text"][:6]).split()
    request.stop = [f"{words[4]} {words[5]}"]  # of two tokens
    answers(engine, [request])
    assert request.generated == plain["text"]  # without a tokenizer
    assert answers(engine, [request], frozenset(), model.tokenizer) == {
        "text": plain["text"][:6]
    }
    line = json.loads(request.as_json(model.tokenizer, False))
    assert line["text"] == "".join(f" {word}" for word in words[:4]) + " "
    assert line["finish_reason"] == "stop"

    request.generated, request.finish_reason, request.scheduled = [], "", 0
    after_each = generate.serve(engine, [request], set(), model.tokenizer, stream=True)
    pieces = [one.new_text() for one in after_each]
    assert "".join(pieces) == line["text"] and len([*filter(None, pieces)]) > 2
    request.stop = []


def test_incomplete_character_is_not_streamed():
    request = generate.Request(0, [1], [], 9, 0.0, 0, 1.0, 0, text="blue\ufffd")
    assert request.new_text() == "blue"
    request.text, request.finish_reason = "blue é", "length"
    assert request.new_text() == " é"


def test_chat_template(place, tmp_path):
    """It is found in both places, and its text is encoded without a second BOS."""
    template = (
        "{{ bos_token }} {% for m in messages %}{% generation %}\n"
        "{{ m.content }} {% endgeneration %}{% endfor %}\n"
        "{% if add_generation_prompt %}{{ mood or 'is' }}{% endif %}"
    )
    sea, blue = {"role": "user", "content": "sea"}, {"content": "blue"}
    names = "named", "file", "bad", "json_filter"
    named, file, bad, json_filter = (tmp_path / name for name in names)
    for folder, chat_template in [
        (named, [{"name": "default", "template": template}]),
        (file, "other"),
        (bad, "{{ raise_exception('no system role') }}"),
        (json_filter, "{{ messages | tojson }}"),
    ]:
        folder.mkdir()
        data = {"bos_token": {"content": "<s>"}, "chat_template": chat_template}
        (folder / "tokenizer_config.json").write_text(json.dumps(data))
    (file / "chat_template.jinja").write_text(template)
    for folder in (named, file):
        assert generate.read_chat_template(folder)([sea], False) == "<s> sea "
    with pytest.raises(ValueError, match="the chat template fails: no system role"):
        generate.read_chat_template(bad)([sea])
    text = generate.read_chat_template(json_filter)([{"content": "<é>"}])
    assert text == '[{"content": "<é>"}]'  # not escaped for HTML

    model = generate.read_model(place / "model")
    options = options_of(generate, file, "--chat", "--prompt", "sea")
    assert generate.read_requests(options, model)[0].prompt == [1, 7, 9]
    data = {"messages": [sea, blue], "chat_template_kwargs": {"mood": "the"}}
    assert generate.read_request(data, 0, options, model).prompt == [1, 7, 53, 15]


def test_gemma3_gives_the_logits_of_transformers(tmp_path):
    """Its sliding layers attend to 10 of 24 positions. The logits are those of
    Transformers 5.23 in float32 for the same folder."""
    write_gemma(tmp_path / "model")
    weights, config = plain_weights(tmp_path / "model")
    tokens = np.random.default_rng(9).integers(2, 321, (1, 24))
    positions = np.arange(24)[None]
    x, _ = decoder.hidden_states(weights, tokens, positions, config)
    caches = decoder.init_cache(config, 1, 24, np.float32)
    for part in (slice(16), slice(16, 24)):
        args = tokens[:, part], positions[:, part], config, caches
        cached, caches = decoder.hidden_states(weights, *args)
    for final in (x, cached):
        logits = decoder.compute_logits(weights, final[0, -1], config)
        expected = [-0.09035, -0.16122, 4.57322, -0.89322, -1.02016]
        np.testing.assert_allclose(logits[::80], expected, atol=1e-4)


def test_gemma3_answers_equal_those_of_the_plain_loop(place, tmp_path):
    write_gemma(tmp_path / "model")
    shutil.copy(place / "model/tokenizer.json", tmp_path / "model")
    write_rows(tmp_path / "requests.jsonl", [REQUESTS[1], REQUESTS[3]])
    engine, requests, _ = prepared(tmp_path)
    plain = plain_answers(*plain_weights(tmp_path / "model"), requests)
    assert answers(engine, requests) == plain


def test_weights_that_are_not_finite_are_named(place):
    config = decoder.read_config(place / "model")
    files = decoder.open_model(place / "model")
    mesh = decoder.model_mesh(config)
    name = "model.layers.1.mlp.up_proj.weight"
    files[name] = np.array(files[name])
    files[name][-1, -1] = np.nan
    with pytest.raises(ValueError, match=f"^{name} has NaN or infinite values"):
        decoder.load_model(files, config, mesh, sharding_of=generate.fitting_sharding)


def test_steps_neither_compile_nor_copy_the_cache(place):
    engine, requests, _ = prepared(place, "--slots", 2, "--dtype", "bfloat16")
    compiled = []

    def note(event, seconds, **_):
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    jax.jit(lambda x: x + 1)(np.arange(3))
    assert compiled  # the listener works
    compiled.clear()
    before = jax.tree.leaves(engine.caches)
    answers(engine, requests)
    assert not compiled
    assert all(cache.is_deleted() for cache in before)
    size = sum(cache.nbytes for cache in jax.tree.leaves(engine.caches))
    for program in (engine.prefill, engine.decode):
        assert program.memory_analysis().alias_size_in_bytes >= size
    assert {x.dtype.name for x in jax.tree.leaves(engine.weights)} == {"bfloat16"}


def test_answers_end_at_stop_tokens(place, served, plain):
    engine, requests, model = served
    assert model.stop_tokens == set()  # config.json has null
    stop = plain[0][6]
    found = answers(engine, requests, {stop})
    for request in requests:
        full = plain[request.name]
        size = full.index(stop) + 1 if stop in full else len(full)
        assert found[request.name] == full[:size]
        assert request.finish_reason == ("stop" if stop in full else "length")
    assert len(found[0]) <= 7


def test_generation_config_has_stop_tokens_and_sampling_defaults(tmp_path):
    for eos, generation, stop_tokens, sampling in [
        (3, None, {3}, {}),
        ([3, 4], None, {3, 4}, {}),
        (3, {"eos_token_id": [5, 6], "temperature": 0.5}, {5, 6}, {}),
        (3, {"do_sample": True, "top_k": 20}, {3}, {"temperature": 1.0, "top_k": 20}),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
        if generation:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        found = generate.read_generation(tmp_path)
        assert found == (np.inf, stop_tokens, sampling)


def test_two_processes_of_four_devices_give_the_same_answers(place, plain):
    args = ["model", "--prompts", "requests.jsonl", "--length", LENGTH + 1]
    args += ["--slots", 4, "--dtype", "float32"]
    two = start_two(place, "generate.py", args, args)
    assert statuses(two) == [0, 0], two[0].errors[-2000:]
    assert two[1].output == ""
    lines = [json.loads(line) for line in two[0].output.splitlines()]
    found = {line["id"]: line["tokens"] for line in lines}
    assert len(found[8]) == 5
    assert found | {8: found[8][:4]} == plain
    assert lines[0]["id"] == 2  # the shortest answer comes first
    names = {number: word for word, number in WORDS.items()}
    expected = {
        "id": "text",
        "prompt_tokens": 4,
        "tokens": plain["text"],
        "text": "".join(f" {names[n]}" for n in plain["text"] if n != 1),
        "finish_reason": "length",
        "seed": 7,
    }
    assert expected in lines
    assert "on 8 cpu devices" in two[0].errors and "tokens/s" in two[0].errors


def test_requests_from_stdin_and_a_streamed_answer(place):
    (place / "two.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "the sea"}\n{"tokens": [7]}'
    )
    args = ["model", "--prompts", "-", "--stream", "--logprobs", "--max-tokens", 3]
    with (place / "two.jsonl").open() as stdin:
        run = start_in(place, "generate.py", *args, stdin=stdin)
        assert statuses([run]) == [0], run.errors
    lines = [json.loads(line) for line in run.output.splitlines()]
    done = {line["id"]: line for line in lines if "finish_reason" in line}
    assert done.keys() == {0, 1}
    for name, line in done.items():
        pieces = [
            each["new_text"]
            for each in lines
            if each["id"] == name and "new_text" in each
        ]
        assert "".join(pieces) == line["text"] and len(pieces) == 3
        assert len(line["logprobs"]) == 3 and max(line["logprobs"]) <= 0


def test_connected_process_ends_at_sigterm(place):
    code = """
import decoder, os, signal, time

def load_model(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
    os._exit(0)

decoder.load_model = load_model
"""
    args = ["model", "--prompt", "the sea is", *coordinator_options(1), 0]
    run = start_in(place, "generate.py", *args, code=code)
    assert statuses([run]) == [-signal.SIGTERM], run.errors


def test_output_that_cannot_be_written(place):
    """A closed pipe ends the program silently; a full disk ends it with the reason."""
    read, write = os.pipe()
    os.close(read)
    args = ["model", "--prompt", "the sea is", "--max-tokens", 2]
    with open(write, "w") as pipe, open("/dev/full", "w") as full:
        runs = [
            start_in(place, "generate.py", *args, stdout=file) for file in (pipe, full)
        ]
    assert statuses(runs) == [128 + signal.SIGPIPE, 1]
    closed, on_full = [run.errors.splitlines()[-1] for run in runs]
    assert closed.startswith("loaded in")
    assert "No space left on device" in on_full
