"""The workflows run sessions of nox alone, from pinned tools, as the hooks are.

What `zizmor` and the schemas of the `lint` session find is not tested here again.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from faults import complaints, each
from pair import ROOT

TOOLS = ".github/requirements.txt"
HOOKS = ".pre-commit-config.yaml"
CONTAINER = ".devcontainer/devcontainer.json"
FETCHES = re.compile(r"\b(curl|wget|npx|pipx|uvx|uv run|uv tool|install)\b")
AS_ROOT = 'sudo --preserve-env env "PATH=$PATH" '


def steps(root: Path) -> Iterator[tuple[str, dict]]:
    """Every step, with the name of its workflow."""
    for path in sorted((root / ".github/workflows").iterdir()):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            yield from ((path.name, step) for step in job["steps"])


def installs_are_pinned(root: Path) -> Iterator[str]:
    python = (root / ".python-version").read_text().strip()
    nox = f"uvx --python {python} --with-requirements {TOOLS} nox -s "
    container = json.loads((root / CONTAINER).read_text())
    if container["postCreateCommand"] != f"pip install --user -r {TOOLS}":
        yield f"{CONTAINER}: not from {TOOLS}: {container['postCreateCommand']}"
    if not re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", container["image"]):
        yield f"{CONTAINER}: the image has no tag and digest: {container['image']}"
    for name, step in steps(root):
        for command in re.split(r"&&|\|\||[;|\n]", step.get("run", "")):
            command = command.strip().removeprefix(AS_ROOT)
            if FETCHES.search(command) and not command.startswith(nox):
                yield f"{name}: not {nox!r}: {command}"
        uv = "astral-sh/setup-uv" in step.get("uses", "")
        if uv and step["with"].get("version-file") != TOOLS:
            yield f"{name}: setup-uv without 'version-file: {TOOLS}'"


def sessions_exist(root: Path) -> Iterator[str]:
    sessions = r"(?m)^@nox\.session.*\ndef (\w+)"
    known = re.findall(sessions, (root / "noxfile.py").read_text())
    for path in sorted((root / ".github/workflows").iterdir()):
        text = path.read_text()
        named = re.findall(r"\bsession: \[(.*)\]", text)
        named += re.findall(r"\bnox -s ([\w ]+?)(?: --|$)", text, re.MULTILINE)
        for session in re.findall(r"\w+", " ".join(named)):
            if session not in known:
                yield f"{path.name}: noxfile.py has no session {session}"


def hooks_have_the_versions_of_the_lock(root: Path) -> Iterator[str]:
    locked = (root / "requirements.lock").read_text()
    hooks = yaml.safe_load((root / HOOKS).read_text())["repos"][0]["hooks"]
    for pin in {pin for hook in hooks for pin in hook["additional_dependencies"]}:
        name = pin.split("==")[0]
        if f"\n{name}==" in locked and f"\n{pin} " not in locked:
            yield f"{HOOKS}: {pin} is not the version of requirements.lock"


CHECK = ".github/workflows/check.yml"
# What a fault replaces, by what, what the complaint says; and where, if not in CHECK.
FAULTS = {
    installs_are_pinned: [
        (" --with-requirements \\S+ nox", " nox", "check.yml: not"),
        ("run: uvx", "run: curl -f https://x.sh | sh; uvx", "check.yml: not"),
        ("version-file: .*", "version: latest", "setup-uv without"),
        (f"-r {TOOLS}", f"-r {TOOLS} black", "not from", CONTAINER),
        ("@sha256:[0-9a-f]{64}", "", "digest", CONTAINER),
    ],
    sessions_exist: [
        (r"\[lint, tests", "[lnit, tests", "no session lnit"),
        ("nox -s lab", "nox -s bal", "no session bal"),
    ],
    hooks_have_the_versions_of_the_lock: [
        (r"jupytext==\S+,", "jupytext==1.0,", "jupytext==1.0 is not", HOOKS),
    ],
}


@pytest.mark.parametrize("rule", FAULTS, ids=lambda rule: rule.__name__)
def test_workflows(rule):
    assert not list(rule(ROOT))


@each(FAULTS, file=CHECK)
def test_planted_fault_is_found(tmp_path, rule, fault):
    for folder in (".github", ".devcontainer"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("noxfile.py", ".python-version", "requirements.lock", HOOKS):
        shutil.copy(ROOT / name, tmp_path)
    assert fault.complaint in complaints(rule, tmp_path, fault)
