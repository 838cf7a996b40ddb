"""The workflows hold what they promise: pinned, with few rights, and by nox alone."""

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pair import ROOT

TOOLS = ".github/requirements.txt"
CONTAINER = ".devcontainer/devcontainer.json"
FETCHES = re.compile(r"\b(curl|wget|npx|pipx|uvx|uv run|uv tool|install)\b")


def workflows(root: Path) -> Iterator[tuple[str, dict]]:
    for path in sorted((root / ".github/workflows").iterdir()):
        yield path.name, yaml.safe_load(path.read_text())


def jobs(root: Path) -> Iterator[tuple[str, dict]]:
    for name, workflow in workflows(root):
        for job, content in workflow["jobs"].items():
            yield f"{name}, {job}", content


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


def actions_are_pinned(root: Path) -> Iterator[str]:
    for path in sorted((root / ".github/workflows").iterdir()):
        for line in re.findall(r"^.*\buses:.*$", path.read_text(), re.MULTILINE):
            if not re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line):
                yield f"{path.name}: not a commit and its version: {line.strip()}"


def rights_are_few(root: Path) -> Iterator[str]:
    for name, workflow in workflows(root):
        if workflow.get("permissions") != {}:
            yield f"{name}: the workflow itself needs 'permissions: {{}}'"
    for name, job in jobs(root):
        rights = job.get("permissions")
        if not isinstance(rights, dict):
            yield f"{name}: name the permissions one by one"
        elif "write" in rights.values() and any(
            uses(step, "actions/checkout") for step in job["steps"]
        ):
            yield f"{name}: may write, and runs what a pull request can change"
    for name, step in steps(root):
        keeps = step.get("with", {}).get("persist-credentials") is not False
        if uses(step, "actions/checkout") and keeps:
            yield f"{name}: a checkout without 'persist-credentials: false'"


def strangers_run_nothing(root: Path) -> Iterator[str]:
    for name, workflow in workflows(root):
        # YAML reads the key 'on' as true.
        for trigger in {"pull_request_target", "workflow_run"} & {*workflow[True]}:
            yield f"{name}: {trigger} gives a stranger's code the project's rights"
    for name, step in steps(root):
        if "${{" in step.get("run", ""):
            yield f"{name}: '${{{{' in a script; pass the value through env"


def runs_end(root: Path) -> Iterator[str]:
    for name, workflow in workflows(root):
        if "concurrency" not in workflow:
            yield f"{name}: no concurrency group"
    for name, job in jobs(root):
        if "timeout-minutes" not in job:
            yield f"{name}: no timeout-minutes"


def installs_are_pinned(root: Path) -> Iterator[str]:
    tools = re.sub(r"#.*", "", (root / TOOLS).read_text()).split()
    yield from (f"{TOOLS}: {tool} has no ==" for tool in tools if "==" not in tool)
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
    known = {
        node.name
        for node in ast.parse((root / "noxfile.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any("session" in ast.unparse(mark) for mark in node.decorator_list)
    }
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
    actions_are_pinned,
    rights_are_few,
    strangers_run_nothing,
    runs_end,
    installs_are_pinned,
    sessions_exist,
    caches_follow_the_lock,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_workflows(rule):
    complaints = list(rule(ROOT))
    assert not complaints, "\n" + "\n".join(complaints)


CHECK = ".github/workflows/check.yml"
# What a fault replaces, by what, what the complaint says; and where, if not in CHECK.
FAULTS = {
    actions_are_pinned: [
        (r"@[0-9a-f]{40} # v7", "@v7 # v7", "not a commit"),
        (r"([0-9a-f]{40}) # v[\d.]+", r"\1", "not a commit"),
        (r"@([0-9a-f]{39})[0-9a-f]", r"@\1", "not a commit"),
    ],
    rights_are_few: [
        ("permissions: {}\n", "", "the workflow itself"),
        ("permissions: {}", "permissions: read-all", "the workflow itself"),
        (" +permissions:\n +contents: read.*\n", "", "one by one"),
        ("permissions:\n +contents: read", "permissions: write-all", "one by one"),
        ("contents: read", "contents: write", "may write"),
        ("persist-credentials: false", "fetch-depth: 0", "persist-credentials"),
        ("persist-credentials: false", "persist-credentials: true", "persist"),
    ],
    strangers_run_nothing: [
        ("pull_request:", "pull_request_target:", "stranger"),
        (r'nox -s "\$SESSION"', "nox -s ${{ matrix.session }}", "through env"),
    ],
    runs_end: [
        (" +timeout-minutes: 60\n", "", "timeout-minutes"),
        (r"concurrency:\n(  .*\n)+", "", "concurrency"),
    ],
    installs_are_pinned: [
        (" --with-requirements \\S+ nox", " nox", "neither"),
        (" --python [0-9.]+", "", "neither"),
        (" --python [0-9.]+", " --python 3.9", "neither"),
        ("run: uvx", "run: pip install nox && uvx", "neither"),
        ("run: uvx", "run: uv tool install nox; uvx", "neither"),
        ("run: uvx", "run: curl -f https://x.sh | sh; uvx", "neither"),
        ("version-file: .*", "version: latest", "setup-uv without"),
        ("uv==.*", "uv>=0.13", "has no ==", TOOLS),
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
    assert set(FAULTS) == set(RULES)


@pytest.mark.parametrize(
    "rule, fault",
    [(rule, fault) for rule, faults in FAULTS.items() for fault in faults],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_fault_is_found(tmp_path, rule, fault):
    old, new, complaint, *file = fault
    for folder in (".github", ".devcontainer"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("noxfile.py", ".python-version"):
        shutil.copy(ROOT / name, tmp_path)
    path = tmp_path / (file or [CHECK])[0]
    text, changed = re.subn(old, new, path.read_text(), count=1)
    assert changed
    path.write_text(text)
    assert complaint in "\n".join(rule(tmp_path))
