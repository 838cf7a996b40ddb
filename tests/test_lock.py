"""The locks are what uv makes of their inputs, given the versions that they pin."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from faults import edit
from pair import ROOT

COMPILE = [os.environ.get("UV", "uv"), "pip", "compile", "--quiet", "--universal"]
OPTIONS = ["--python-version=3.11", "--generate-hashes", "--no-header", "--no-annotate"]
# Each lock, and what uv compiles it from.
LOCKS = {
    "requirements.lock": ["requirements.txt"],
    "tests/requirements.lock": ["tests/requirements.txt", "-c", "requirements.lock"],
    ".github/requirements.txt": [".github/requirements.in"],
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the locks and of their sources, where there is uv."""
    if shutil.which(COMPILE[0]) is None:
        pytest.skip("there is no uv")
    for lock, (source, *_) in LOCKS.items():
        for name in (lock, source):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def differences(root: Path, lock: str) -> list[str]:
    """Where a lock is not what uv makes that knows its pins, but not its hashes."""
    locked = re.findall(r"(?m)^ *[^# \n].*?(?= *\\?$)", (root / lock).read_text())
    fresh = root / "fresh"
    fresh.write_text("\n".join(line for line in locked if line[0] != " "))
    command = [*COMPILE, *OPTIONS, *LOCKS[lock], "-o", fresh]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    made = [line.rstrip(" \\") for line in fresh.read_text().splitlines()]
    needed = [pin for pin in made if pin[0] != " " and pin not in locked]
    found = [f"uv does not make {line.strip()}" for line in locked if line not in made]
    return [*found, *(f"uv needs {pin}" for pin in needed), *run.stderr.splitlines()]


@pytest.mark.parametrize("lock", LOCKS)
def test_locks(tree, lock):
    found = differences(tree, lock)
    assert not found, "\n".join(["renew the locks as CONTRIBUTING.md says:", *found])


@pytest.mark.parametrize(
    "name, old, new, complaint",
    [
        ("requirements.txt", "jax>=.*", "jax<0.12", "uv does not make jax=="),
        ("requirements.lock", r"(?m)^absl-py==(.*\n )+.*\n", "", "uv needs absl-py=="),
        ("requirements.lock", r"sha256:\w{4}", "sha256:0000", "not make --hash=sha256"),
    ],
)
def test_planted_fault_is_found(tree, name, old, new, complaint):
    edit(tree / name, old, new)
    assert complaint in "\n".join(differences(tree, "requirements.lock"))


def test_hooks_use_the_versions_of_the_lock():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    locked = (ROOT / "requirements.lock").read_text()
    for hook in hooks["repos"][0]["hooks"]:
        for pin in hook["additional_dependencies"]:
            name = re.escape(pin.split("==")[0])
            versions = re.findall(rf"^{name}==[^\s;]+", locked, re.MULTILINE)
            assert not versions or versions == [pin], hook["id"]
