"""requirements.lock pins what requirements.txt asks for, all of it and nothing else."""

import re
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pair import ROOT

PYTHONS = ["3.11.9", "3.12.9", "3.13.9"]


def requirements(file: Path) -> list[Requirement]:
    """What a requirements file names, an entry each, without comments and hashes."""
    text = re.sub(r"(^| )#.*", "", file.read_text().replace("\\\n", " "), flags=re.M)
    return [Requirement(line.split("--hash")[0]) for line in text.splitlines() if line]


def applies(requirement: Requirement, extra: str = "", **environment: str) -> bool:
    marker = requirement.marker
    return marker is None or marker.evaluate({**environment, "extra": extra})


def entries_have_hashes(root: Path) -> Iterator[str]:
    entries = re.split(r"\n(?=\w)", (root / "requirements.lock").read_text())
    for entry in entries:
        if "==" in entry and not re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry):
            yield f"{entry.split()[0]} has no hash"


def pins_are_in_range(root: Path) -> Iterator[str]:
    lock = requirements(root / "requirements.lock")
    for python in PYTHONS:
        environment = {
            "python_version": python.rpartition(".")[0],
            "python_full_version": python,
        }
        pins = {
            canonicalize_name(pin.name): next(iter(pin.specifier)).version
            for pin in lock
            if applies(pin, **environment)
        }
        for wanted in requirements(root / "requirements.txt"):
            pin = pins.get(canonicalize_name(wanted.name))
            if pin is None:
                yield f"{wanted} has no pin for Python {python}"
            elif not wanted.specifier.contains(pin, prereleases=True):
                yield f"{wanted} does not allow {pin}, the pin for Python {python}"


def lock_holds_what_follows(root: Path) -> Iterator[str]:
    """Follow the requirements through the packages that are installed here."""
    reached, todo = set(), requirements(root / "requirements.txt")
    while todo:
        asked = todo.pop()
        for extra in ["", *asked.extras]:
            visit = (canonicalize_name(asked.name), extra)
            if visit in reached:
                continue
            reached.add(visit)
            try:
                further = requires(asked.name) or []
            except PackageNotFoundError:
                yield f"{asked.name} is needed and not installed"
                continue
            todo += [r for r in map(Requirement, further) if applies(r, extra)]
    needed = {name for name, _ in reached}
    lock = requirements(root / "requirements.lock")
    locked = {canonicalize_name(pin.name) for pin in lock if applies(pin)}
    for name in sorted(needed - locked):
        yield f"{name} is needed and has no pin"
    for name in sorted(locked - needed):
        yield f"{name} is pinned and nothing needs it"


RULES = [entries_have_hashes, pins_are_in_range, lock_holds_what_follows]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_lock(rule):
    complaints = list(rule(ROOT))
    assert not complaints, "\n".join(["renew requirements.lock:", *complaints])


LOCK, RANGES = "requirements.lock", "requirements.txt"
HASHES, PINS, CLOSURE = RULES
# The rule; the file, a pattern in it, what takes its place; the complaint.
FAULTS = [
    (HASHES, LOCK, r"(?m)^(optax==\S+) (.*\n.*)+?\n(?=\w)", r"\1\n", "optax"),
    (PINS, RANGES, r"\Z", "pandas>=2\n", "pandas>=2 has no pin"),
    (PINS, RANGES, "optax>=.*", "optax>=99", "optax>=99 does not allow"),
    (PINS, RANGES, "<2", "<1", "jupyter-book<1"),
    (PINS, LOCK, r"(?m)^(optax==\S+)", r"\1 ; python_version < '3.12'", "Python 3.12"),
    (CLOSURE, RANGES, r"\Z", "not-a-package\n", "not installed"),
    (CLOSURE, RANGES, "scikit-learn>=.*", "", "nothing needs it"),
    (CLOSURE, LOCK, r"(?m)^absl-py==", "# ", "absl-py is needed"),
]


@pytest.mark.parametrize("rule, file, old, new, complaint", FAULTS)
def test_planted_fault_is_found(tmp_path, rule, file, old, new, complaint):
    for name in (LOCK, RANGES):
        shutil.copy(ROOT / name, tmp_path)
    text, changed = re.subn(old, new, (tmp_path / file).read_text(), count=1)
    assert changed
    (tmp_path / file).write_text(text)
    assert complaint in "\n".join(rule(tmp_path))
