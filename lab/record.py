"""Store measured values in book/measured, and find those that are older than the code.

book/measured/NAME.json stores the parts of a record. Each part has its results, the
date, the commit, the machine, the versions, and a digest of every measured file. A part
is *older* if one of those files would now run differently. Comments, docstrings,
formatting, type hints of functions and recorded values in a notebook do not count.
Files that were deleted do not count either: a page links them at the recorded commit.
"""

import ast
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "book/measured"
Part = dict  # recorded, commit, on, versions, of, found
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def normal_form(code: str) -> str:
    """Return the syntax tree of code without comments, docstrings and type hints."""
    tree = ast.parse(re.sub(r"^([ \t]*)[%!].*$", r"\1pass", code, flags=re.MULTILINE))
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    # Before Python 3.13, ast.dump also shows empty lists.
    return re.sub(r", \w+=\[\]|\w+=\[\](, )?", "", ast.dump(tree))


@cache
def digest(path: Path) -> str:
    """Return a digest of the code of a notebook or program, or of a file's bytes."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        code = "\n".join(
            "".join(c["source"]) for c in cells if c["cell_type"] == "code"
        )
        for cell in sorted((ROOT / "book/cells").glob("recorded_*.py")):
            _, _, recorded = cell.read_text().strip().partition("\n")  # without title
            code = code.replace(recorded, "")
        content = normal_form(code).encode()
    elif path.suffix == ".py":
        content = normal_form(path.read_text()).encode()
    else:
        content = path.read_bytes()
    return hashlib.sha256(content).hexdigest()[:16]


def commit() -> str:
    """Return the commit that is checked out, and whether files differ from it."""
    short = ["rev-parse", "--short", "HEAD"]
    status = ["status", "--porcelain", "--untracked-files=no"]
    status += [":!book/measured", ":!book/cells/recorded_*"]  # records write these
    name, edits = (
        subprocess.check_output(["git", *args], cwd=ROOT, text=True).strip()
        for args in (short, status)
    )
    return f"{name} with edits" if edits else name


def installed(*names: str) -> dict[str, str]:
    """Return the versions of the named packages, except those not installed."""
    versions = {package.name: package.version for package in distributions()}
    return {name: versions[name] for name in names if name in versions}


def read(name: str) -> dict[str, Part]:
    """Return the parts of a record; none if there is no record."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save(
    name: str, part: str, found: object, of: Iterable[str], versions: dict[str, str]
) -> None:
    """Write one part of a record, measured of files `of`; keep the other parts."""
    system = platform.system()
    if system == "Linux":
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    parts = read(name)
    parts[part] = {
        "recorded": f"{datetime.date.today()}",
        "commit": commit(),
        "on": f"{system}, {platform.machine()}, {os.cpu_count()} cores,"
        f" Python {platform.python_version()}",
        "versions": versions,
        "of": {file: digest(ROOT / file) for file in sorted(of)},
        "found": found,
    }
    text = json.dumps(dict(sorted(parts.items())), indent=1, ensure_ascii=False)
    (RECORDS / f"{name}.json").write_text(text + "\n")


def older(part: Part) -> list[str]:
    """Return the measured files that would now run differently."""
    return [
        file
        for file, recorded in part["of"].items()
        if (ROOT / file).exists() and digest(ROOT / file) != recorded
    ]


def describe(parts: dict[str, Part], program: str = "") -> str:
    """Return the date, commits, machine and versions of a record as Markdown.

    If a program is given, which may be deleted by now, each commit links to it.
    """
    url = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"]
    commits = {part["commit"] for part in parts.values()}
    if program:
        commits = {f"[{c}]({url}/blob/{c.split()[0]}/{program})" for c in commits}
    dates, machines = (
        " and ".join(sorted({part[key] for part in parts.values()}))
        for key in ("recorded", "on")
    )
    text = f"Recorded {dates} by commit {' and '.join(sorted(commits))} on {machines}"
    pairs = {pair for part in parts.values() for pair in part["versions"].items()}
    if pairs:
        text += f", with {', '.join(sorted(map(' '.join, pairs)))}"
    changed = sorted({file for part in parts.values() for file in older(part)})
    if changed:
        text += f". **Older than the present version of:** {', '.join(changed)}"
    return f"{text}."
