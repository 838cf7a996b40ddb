"""Test launch/train.py: equal losses on 1, 2 and 8 devices, and after stops.

test_train_faults.py tests other faults.
"""

import re
import signal
from types import SimpleNamespace

import lifecycle
import pytest
import train
from pair import ROOT
from runs import HANGS_IN_SAVE, LAUNCH, SLOW_STEPS, contents, options_of


@pytest.mark.parametrize(("processes", "devices"), [(1, 1), (1, 2), (1, 8), (2, 8)])
def test_any_number_of_devices_gives_the_same_losses(start_run, processes, devices):
    run = start_run(processes=processes, devices=devices)
    run.check_losses()
    output, *others = run.output
    assert f"{devices} cpu devices, {64 // devices} examples on each\n" in output
    assert not re.search("step|devices", "".join(others))


def test_run_saves_at_a_stop_and_continues_after_a_restart(start_run):
    """On eight devices, on one, which gets twenty signals, and on two to the end."""
    saved = start_run(code=SLOW_STEPS).stop("step     8", signal.SIGINT)
    second = start_run(devices=1, code=SLOW_STEPS)
    step = saved // 8 * 8 + 8  # the first loss that it prints
    saved = second.stop(f"step {step:5}  loss", *[signal.SIGTERM] * 20)
    assert second.errors == [""]
    start_run(devices=2).check_losses(start=saved)


def test_stop_of_one_process_and_restart_with_grain(start_run):
    run = start_run("--data", "grain", processes=2, code=SLOW_STEPS)
    saved = run.stop("step    20  test loss")
    assert saved > 20
    start_run("--data", "grain", processes=2).check_losses(saved, data="grain")


def test_kill_of_one_process(start_run):
    run = start_run(processes=2, code=SLOW_STEPS)
    run.wait_for(20)
    run.send(signal.SIGKILL)
    assert 0 not in run.end()
    start_run(devices=2).check_losses(start=run.complete()[-1])


def test_kill_during_a_save_keeps_the_checkpoint_before(start_run):
    """Before the kill, no second job can train in the folder."""
    run = start_run("--save-limit", "3600", code=HANGS_IN_SAVE)
    run.read_until("waiting")
    second = start_run("--rate", "0.01")
    assert (second.end(), second.output) == ([78], [""])
    assert str(run.folder) in second.errors[0]
    run.send(signal.SIGKILL)
    assert run.end() == [-signal.SIGKILL]
    complete, partial = run.names()
    assert complete == "20" and partial.startswith("40.orbax-checkpoint-tmp")
    start_run(devices=1).check_losses(start=20)
    assert run.names() == ["20", "40", "48"]


@pytest.mark.parametrize(
    ("processes", "options", "named"),
    [
        (1, "--emulate 3", "--batch 64"),
        (1, "--distributed", "coordinator_address"),
        (2, "--save-every 70", "--save-every"),
        (2, "--folder own", "--folder"),
        (2, "--emulate 2", "devices, but have [2, 4]"),
    ],
)
def test_bad_options_are_rejected(start_run, tmp_path, processes, options, named):
    """Of a run with one process, or of the first of two."""
    run = start_run(processes=processes, first=options.split())
    assert run.end() == [78] * processes
    assert named in run.errors[0]
    if processes == 1:
        assert run.output == [""] and run.errors[0].count("\n") == 1
    assert not contents(tmp_path)


@pytest.fixture
def train_here(tmp_path, monkeypatch, capsys, keep_lifecycle):
    """Return a function that trains two steps in this process and returns the output,
    or the one line on stderr if the run ends with status 78."""
    monkeypatch.setattr(lifecycle.fcntl, "flock", lambda *_: None)  # run several times
    folder = str(tmp_path / "checkpoints")

    def run(*more: str) -> str:
        options = options_of(train, "--folder", folder, "--steps", 2, *more)
        try:
            train.main(options)
        except SystemExit as end:
            assert end.code == 78
            output, errors = capsys.readouterr()
            assert errors.count("\n") == 1 and "step" not in output
            return errors
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    "name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"]
)
def test_one_of_several_processes_is_rejected(train_here, tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "2")  # as a launcher does for two processes
    assert train_here().startswith(f"error: {name} is 2, ")
    assert not [*tmp_path.iterdir()]


def test_other_settings_are_rejected_and_checkpoints_kept(train_here, tmp_path):
    score = train_here().splitlines()[-1]
    saved = contents(tmp_path)
    changes = {"steps": 3, "batch": 128, "rate": 0.01, "seed": 1, "data": "grain"}
    assert [*changes] == [*train.SETTINGS]
    for name, new in changes.items():
        assert re.search(rf"--{name} .*{new}", train_here(f"--{name}", str(new)))
    assert contents(tmp_path) == saved
    assert train_here().splitlines()[1:] == ["step     2  restored", score]


@pytest.mark.parametrize("name", ["train.py", "lifecycle.py"])
def test_page_shows_every_line_once(name):
    """The parts of a file that the page includes add up to the file."""
    code = pytest.importorskip("sphinx.directives.code")
    config = SimpleNamespace(source_encoding="utf-8")
    page = (ROOT / "book" / "script.md").read_text()
    shown, included = "", rf"(?ms)^```{{literalinclude}} ../launch/{name}\n(.*?)^```$"
    for part in re.findall(included, page):
        options = dict(re.findall(r"(?m)^:([\w-]+): '?(.*?)'?$", part))
        reader = code.LiteralIncludeReader(LAUNCH / name, options, config)
        shown += reader.read()[0]
    script = (LAUNCH / name).read_text()
    assert re.findall(".+", shown) == re.findall(".+", script)
