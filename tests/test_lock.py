"""The locks are what uv makes of their inputs, given the versions that they pin."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import yaml
from faults import assert_all_planted, complaints, each
from pair import ROOT

OPTIONS = ["--universal", "--python-version", "3.11", "--generate-hashes"]
# Each lock, and what uv compiles it from.
LOCKS = {
    "requirements.lock": ["requirements.txt"],
    "tests/requirements.lock": ["tests/requirements.txt", "-c", "requirements.lock"],
    ".github/requirements.txt": [".github/requirements.in"],
}
UV = shutil.which(os.environ.get("UV", "uv"))


@pytest.fixture(scope="module")
def index() -> None:
    """Skip where uv or its package index is out of reach."""
    if UV is None:
        pytest.skip("there is no uv; `nox -s lint` brings it")
    ask = [UV, "pip", "compile", "--quiet", "--no-cache", "--no-deps", "-"]
    answer = subprocess.run(ask, input="pip", capture_output=True, text=True)
    if answer.returncode:
        pytest.skip(f"uv reaches no package index: {answer.stderr}")


@pytest.fixture
def tree(index, tmp_path: Path) -> Path:
    """A copy of the locks and of what they are compiled from."""
    for lock, (source, *_) in LOCKS.items():
        for name in (lock, source):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def pins(lock: Path) -> dict[str, set[str]]:
    """Each pin of a lock, with its marker, and the hashes that it allows."""
    found = {}
    text = re.sub(r"(?m)^ *#.*\n", "", lock.read_text())
    for entry in text.replace("\\\n", "").splitlines():
        pin, *hashes = re.split(r" +--hash=", entry.strip())
        found[pin] = set(hashes)
    return found


def differences(root: Path, lock: str) -> list[str]:
    """Compile a lock anew, from its pins as preferences but not from its hashes."""
    locked, fresh = pins(root / lock), Path(f"{root / lock}.fresh")
    fresh.write_text("\n".join(locked))
    command = [UV, "pip", "compile", "--quiet", *OPTIONS, *LOCKS[lock], "-o", fresh]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if run.returncode:
        return [f"uv finds no versions: {run.stderr}"]
    found, compiled = [], pins(fresh)
    for pin in sorted(locked.keys() ^ compiled.keys()):
        says = "uv does not arrive at" if pin in locked else "uv needs"
        found.append(f"{says} {pin}")
    for pin in sorted(locked.keys() & compiled.keys()):
        if not locked[pin]:
            found.append(f"{pin} has no hash")
        elif not locked[pin] <= compiled[pin]:
            found.append(f"{pin} has a hash that its index does not know")
    return found


def locks_are_compiled(root: Path) -> Iterator[str]:
    with ThreadPoolExecutor() as pool:
        for lock, found in zip(LOCKS, pool.map(partial(differences, root), LOCKS)):
            yield from (f"{lock}: {complaint}" for complaint in found)


def test_locks(tree):
    found = list(locks_are_compiled(tree))
    assert not found, "\n".join(["renew the locks as CONTRIBUTING.md says:", *found])


LOCK, RANGES = "requirements.lock", "requirements.txt"
TOOLS, TESTS = ".github/requirements.txt", "tests/requirements.lock"
# The first match of a pattern, what takes its place, the complaint; and where, if not
# in LOCK.
FAULTS = {
    locks_are_compiled: [
        (r"optax>=.*", "optax>=99", "uv finds no versions", RANGES),
        (r"jax>=.*", "jax<0.12", "uv does not arrive at jax==", RANGES),
        (r"scikit-learn>=.*\n", "", "does not arrive at scikit-learn==", RANGES),
        (r"\Z", "pandas\n", "uv needs pandas==", RANGES),
        (r"(?m)^absl-py==(.*\n )+.*\n", "", "uv needs absl-py=="),
        (r"(?m)^optax==\S+", "optax==0.2.5", "optax==0.2.5 has a hash"),
        (r"(?m)^optax==\S+", "optax==0.0.1", "not arrive at optax==0.0.1"),
        (
            r"(?m)^(optax==\S+)",
            r"\1 ; python_version < '3.12'",
            "not arrive at optax==",
        ),
        (r"(?m)^(optax==\S+)( .*\n )+.*\n", r"\1\n", "has no hash"),
        (r"(?m)^(optax==\S+ \\\n +--hash=sha256:)\w", r"\1g", "has a hash"),
        (r"(?m)^pypdf==(.*\n )+.*\n", "", "uv needs pypdf==", TESTS),
        (r"(?m)^virtualenv==(.*\n )+.*\n", "", "uv needs virtualenv==", TOOLS),
    ],
}


def test_every_rule_has_a_fault():
    assert_all_planted([locks_are_compiled], FAULTS)


@each(FAULTS, file=LOCK)
def test_planted_fault_is_found(tree, rule, fault):
    assert fault.complaint in complaints(rule, tree, fault)


def test_hooks_use_the_versions_of_the_lock():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    locked = "\n".join(pins(ROOT / "requirements.lock"))
    for hook in hooks["repos"][0]["hooks"]:
        for pin in hook["additional_dependencies"]:
            name = re.escape(pin.split("==")[0])
            versions = re.findall(rf"^{name}==[^\s;]+", locked, re.MULTILINE)
            assert not versions or versions == [pin], hook["id"]
