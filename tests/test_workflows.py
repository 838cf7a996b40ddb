"""The workflows run nox alone, from pinned tools, and leave nothing behind.

What `zizmor` and the schemas of the `lint` session find is not tested here again.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from faults import assert_all_planted, complaints, each
from pair import ROOT

TOOLS = ".github/requirements.txt"
CONTAINER = ".devcontainer/devcontainer.json"
FETCHES = re.compile(r"\b(curl|wget|npx|pipx|uvx|uv run|uv tool|install)\b")


def jobs(root: Path) -> Iterator[tuple[str, dict]]:
    for path in sorted((root / ".github/workflows").iterdir()):
        for job, content in yaml.safe_load(path.read_text())["jobs"].items():
            yield f"{path.name}, {job}", content


def steps(root: Path) -> Iterator[tuple[str, dict]]:
    for name, job in jobs(root):
        for step in job["steps"]:
            yield name, step


def uses(step: dict, action: str) -> bool:
    return step.get("uses", "").startswith(f"{action}@")


def commands(root: Path) -> Iterator[tuple[str, str]]:
    """Every command that a workflow or the dev container runs."""
    scripts = [(name, step.get("run", "")) for name, step in steps(root)]
    container = json.loads((root / CONTAINER).read_text())
    scripts += [
        (CONTAINER, text) for key, text in container.items() if key.endswith("Command")
    ]
    for name, script in scripts:
        for command in re.split(r"&&|\|\||[;|\n]", script.replace("\\\n", " ")):
            yield name, command.strip()


def pins_name_their_version(root: Path) -> Iterator[str]:
    """A commit does not tell its version: the comment beside it does."""
    for path in sorted((root / ".github/workflows").iterdir()):
        for line in re.findall(r"^.*\buses:.*$", path.read_text(), re.MULTILINE):
            if not re.search(r" # v\d+\.\d+\.\d+$", line):
                yield f"{path.name}: a commit without its version: {line.strip()}"


def writers_run_no_checkout(root: Path) -> Iterator[str]:
    for name, job in jobs(root):
        if "write" not in str(job.get("permissions")):
            continue
        if any(uses(step, "actions/checkout") for step in job["steps"]):
            yield f"{name}: may write, and runs what a pull request can change"


def checkouts_keep_no_token(root: Path) -> Iterator[str]:
    for name, step in steps(root):
        keeps = step.get("with", {}).get("persist-credentials") is not False
        if uses(step, "actions/checkout") and keeps:
            yield f"{name}: a checkout without 'persist-credentials: false'"


def jobs_end(root: Path) -> Iterator[str]:
    for name, job in jobs(root):
        if "timeout-minutes" not in job:
            yield f"{name}: no timeout-minutes"


def installs_are_pinned(root: Path) -> Iterator[str]:
    python = (root / ".python-version").read_text().strip()
    nox = f"uvx --python {python} --with-requirements {TOOLS} nox -s "
    pip = f"pip install --user -r {TOOLS}"
    for name, command in commands(root):
        if FETCHES.search(command) and not (command.startswith(nox) or command == pip):
            yield f"{name}: neither {nox!r} nor {pip!r}: {command}"
    for name, step in steps(root):
        versions = step.get("with", {}).get("version-file")
        if uses(step, "astral-sh/setup-uv") and versions != TOOLS:
            yield f"{name}: setup-uv without 'version-file: {TOOLS}'"
    image = json.loads((root / CONTAINER).read_text())["image"]
    if not re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", image):
        yield f"{CONTAINER}: the image has no tag and digest: {image}"


def sessions_exist(root: Path) -> Iterator[str]:
    sessions = r"(?m)^@nox\.session.*\ndef (\w+)"
    known = re.findall(sessions, (root / "noxfile.py").read_text())
    for name, job in jobs(root):
        named = job.get("strategy", {}).get("matrix", {}).get("session", [])
        for step in job["steps"]:
            for words in re.findall(r"\bnox -s (.*)", step.get("run", "")):
                named = named + [word for word in words.split() if word.isidentifier()]
        for session in named:
            if session not in known:
                yield f"{name}: noxfile.py has no session {session}"


def caches_follow_the_lock(root: Path) -> Iterator[str]:
    for name, step in steps(root):
        options = step.get("with", {})
        if uses(step, "actions/cache"):
            keys = [options["key"], *options.get("restore-keys", "").split("\n")]
            if not all("hashFiles('requirements.lock'" in key for key in keys if key):
                yield f"{name}: a cache that outlives requirements.lock"
        if uses(step, "astral-sh/setup-uv"):
            files = options.get("cache-dependency-glob", "")
            off = options.get("enable-cache") is False
            if not off and "requirements.lock" not in files:
                yield f"{name}: setup-uv keeps a cache that outlives requirements.lock"


RULES = [
    pins_name_their_version,
    writers_run_no_checkout,
    checkouts_keep_no_token,
    jobs_end,
    installs_are_pinned,
    sessions_exist,
    caches_follow_the_lock,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_workflows(rule):
    found = list(rule(ROOT))
    assert not found, "\n" + "\n".join(found)


CHECK = ".github/workflows/check.yml"
# What a fault replaces, by what, what the complaint says; and where, if not in CHECK.
FAULTS = {
    pins_name_their_version: [
        (r"([0-9a-f]{40}) # v[\d.]+", r"\1", "without its version"),
        (r"# v(\d+)\..*", r"# v\1", "without its version"),
    ],
    writers_run_no_checkout: [
        ("contents: read", "contents: write", "may write"),
    ],
    checkouts_keep_no_token: [
        ("persist-credentials: false", "persist-credentials: true", "persist"),
    ],
    jobs_end: [(" +timeout-minutes: 60\n", "", "timeout-minutes")],
    installs_are_pinned: [
        (" --with-requirements \\S+ nox", " nox", "neither"),
        (" --python [0-9.]+", "", "neither"),
        (" --python [0-9.]+", " --python 3.9", "neither"),
        ("run: uvx", "run: pip install nox && uvx", "neither"),
        ("run: uvx", "run: uv tool install nox; uvx", "neither"),
        ("run: uvx", "run: curl -f https://x.sh | sh; uvx", "neither"),
        ("version-file: .*", "version: latest", "setup-uv without"),
        (f"-r {TOOLS}", "nox", "neither", CONTAINER),
        (f"-r {TOOLS}", f"-r {TOOLS} black", "neither", CONTAINER),
        ("@sha256:[0-9a-f]{64}", "", "digest", CONTAINER),
    ],
    sessions_exist: [
        (r"\[lint, tests", "[lnit, tests", "no session lnit"),
        ("nox -s book", "nox -s boko", "no session boko"),
        ("def colab", "def collab", "no session colab", "noxfile.py"),
    ],
    caches_follow_the_lock: [
        (
            r"results-\$\{\{ hashFiles\('requirements.lock'\) \}\}",
            "results",
            "outlives",
        ),
        (r"restore-keys: .*", "restore-keys: results-", "outlives"),
        ("enable-cache: false", "enable-cache: true", "setup-uv keeps"),
        (" +enable-cache: false\n", "", "setup-uv keeps"),
    ],
}


def test_every_rule_has_a_fault():
    assert_all_planted(RULES, FAULTS)


@each(FAULTS, file=CHECK)
def test_planted_fault_is_found(tmp_path, rule, fault):
    for folder in (".github", ".devcontainer"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("noxfile.py", ".python-version"):
        shutil.copy(ROOT / name, tmp_path)
    assert fault.complaint in complaints(rule, tmp_path, fault)
