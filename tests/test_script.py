"""The script of book/script.md: equal numbers on 1, 2 and 8 devices, and after stops.

What goes wrong beside is in test_faults.py.
"""

import re
import signal
import sys
from types import SimpleNamespace

import lifecycle
import pytest
from pair import ROOT
from runs import HANGS_IN_SAVE, LAUNCH, SLOWLY, contents, train


@pytest.mark.parametrize(("processes", "devices"), [(1, 1), (1, 2), (1, 8), (2, 8)])
def test_any_number_of_devices_gives_the_same_numbers(begin, processes, devices):
    run = begin(processes=processes, devices=devices)
    run.repeats()
    said, *quiet = run.said
    assert f"{devices} cpu devices, {64 // devices} rows of a batch on each\n" in said
    assert not re.search("step|devices", "".join(quiet))


def test_a_stop_saves_and_a_restart_goes_on(begin):
    """On eight devices, then on one, which is told often, and on two to the end."""
    saved = begin(code=SLOWLY).stop("step     8", signal.SIGINT)
    again = begin(devices=1, code=SLOWLY)
    due = saved // 8 * 8 + 8  # the first loss that it prints
    saved = again.stop(f"step {due:5}  loss", *[signal.SIGTERM] * 20)
    assert again.complaints == [""]
    begin(devices=2).repeats(start=saved)


def test_one_of_two_is_stopped_and_grain_goes_on(begin):
    run = begin("--data", "grain", processes=2, code=SLOWLY)
    saved = run.stop("step    20  test loss")
    assert saved > 20
    begin("--data", "grain", processes=2).repeats(saved, data="grain")


def test_one_of_two_is_killed(begin):
    run = begin(processes=2, code=SLOWLY)
    run.wait_for(20)
    run.send(signal.SIGKILL)
    assert 0 not in run.end() and run.names()[-1] == "20"
    begin(devices=2).repeats(start=20)


def test_a_kill_during_a_save_leaves_the_save_before(begin):
    """Until then no other job trains in the folder."""
    run = begin("--save-limit", "300", code=HANGS_IN_SAVE)
    run.read_until("waiting")
    second = begin("--rate", "0.01")
    assert (second.end(), second.said) == ([78], [""])
    assert second.complaints[0].startswith("another job trains in /")
    run.send(signal.SIGKILL)
    assert run.end() == [-signal.SIGKILL]
    whole, half = run.names()
    assert whole == "20" and half.startswith("40.orbax-checkpoint-tmp")
    begin(devices=1).repeats(start=20)
    assert run.names() == ["20", "40", "48"]


SETTINGS = "steps, batch, rate, seed, data, save_every, log_every"


@pytest.mark.parametrize(
    ("processes", "options", "complaint"),
    [
        (
            1,
            "--emulate 3",
            "--batch 64 will not do: it has to be a multiple of the 3 d",
        ),
        (1, "--distributed", "cannot join the other processes: coordinator_address"),
        (1, "--processes 2 --process 0", "cannot join the other processes: "),
        (2, "--save-every 70", f"all processes need the same {SETTINGS}\n"),
        (2, "--folder own", "--folder has to be on a disk that all"),
        (2, "--emulate 2", "processes need equal numbers of devices, and have [2, 4]"),
    ],
)
def test_what_cannot_train_is_refused(begin, tmp_path, processes, options, complaint):
    """Options of one process alone, or of the first of two."""
    run = begin(processes=processes, first=options.split())
    assert run.end() == [78] * processes
    assert complaint in run.complaints[0]
    if processes == 1:
        assert run.said == [""] and run.complaints[0].startswith(complaint)
    assert not contents(tmp_path)


@pytest.fixture
def train_here(tmp_path, monkeypatch, capsys, quiet):
    """A function that trains for two steps in this process: what it prints."""
    monkeypatch.setattr(lifecycle.fcntl, "flock", lambda *_: None)  # of this process
    folder = str(tmp_path / "checkpoints")

    def run(*more: str) -> str:
        as_begun = ["train.py", "--folder", folder, "--steps", "2"]
        monkeypatch.setattr(sys, "argv", [*as_begun, *more])
        train.main(train.read_options())
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    "name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"]
)
def test_a_launcher_that_is_not_asked_is_refused(
    train_here, tmp_path, monkeypatch, capsys, name
):
    monkeypatch.setenv(name, "2")  # what it says to each of two processes
    with pytest.raises(SystemExit, match="78"):
        train_here()
    said, complaint = capsys.readouterr()
    assert not said and not [*tmp_path.iterdir()]
    assert complaint.startswith(f"{name} is 2: without --distributed (or, under torc")


def test_other_settings_are_refused_and_nothing_is_lost(train_here, tmp_path, capsys):
    score = train_here().splitlines()[-1]
    saved = contents(tmp_path)
    changes = {"steps": 3, "batch": 128, "rate": 0.01, "seed": 1, "data": "grain"}
    assert [*changes] == [*train.SETTINGS]
    for name, new in changes.items():
        with pytest.raises(SystemExit, match="78"):
            train_here(f"--{name}", str(new))
        words = rf"begun with --{name} \S+, not with '?{new}'?: ask for the same again"
        assert re.search(words, capsys.readouterr().err)
    assert contents(tmp_path) == saved
    assert train_here().splitlines()[1:] == ["step     2  restored", score]


@pytest.mark.parametrize("name", ["train.py", "lifecycle.py"])
def test_the_page_shows_every_line_once(name):
    """Its parts of a file, one after the other, are the file but for gaps."""
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
