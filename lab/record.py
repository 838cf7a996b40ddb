"""Keep measured values in book/measured, and find those that are older than the code.

book/measured/NAME.json holds the parts of a record. Each part has its results, the
date, the commit, the machine, the versions, and a digest of every file that was
measured. A part is *older* if one of those files would now run differently. Comments,
docstrings, layout, type hints of functions and the records that a notebook holds do
not count, and neither do files that have since left the repository: a retired program
stands at the commit of its record.
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
KEPT = ROOT / "book/measured"
Part = dict  # recorded, commit, on, versions, of, found
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def meaning(code: str) -> str:
    """Return the syntax tree of a program without comments, docstrings and hints."""
    tree = ast.parse(re.sub(r"^([ \t]*)[%!].*$", r"\1pass", code, flags=re.MULTILINE))
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    # Python before 3.13 also names the empty lists of a tree.
    return re.sub(r", \w+=\[\]|\w+=\[\](, )?", "", ast.dump(tree))


@cache
def digest(path: Path) -> str:
    """Return a digest of what a notebook or a program does, or of a file's bytes."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        code = "\n".join(
            "".join(c["source"]) for c in cells if c["cell_type"] == "code"
        )
        for cell in sorted((ROOT / "book/cells").glob("recorded_*.py")):
            _, _, recorded = cell.read_text().strip().partition("\n")  # without title
            code = code.replace(recorded, "")
        content = meaning(code).encode()
    elif path.suffix == ".py":
        content = meaning(path.read_text()).encode()
    else:
        content = path.read_bytes()
    return hashlib.sha256(content).hexdigest()[:16]


def commit() -> str:
    """Return the commit that is checked out, and whether files differ from it."""
    short = ["rev-parse", "--short", "HEAD"]
    status = ["status", "--porcelain", "--untracked-files=no"]
    status += [":!book/measured", ":!book/cells/recorded_*"]  # what records write
    name, edits = (
        subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()
        for words in (short, status)
    )
    return f"{name} with edits" if edits else name


def installed(*names: str) -> dict[str, str]:
    """Return the versions of those of these packages that are installed."""
    known = {found.name: found.version for found in distributions()}
    return {name: known[name] for name in names if name in known}


def read(name: str) -> dict[str, Part]:
    """Return the parts of a record; none if there is no record."""
    path = KEPT / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(
    name: str, part: str, found: object, of: Iterable[str], versions: dict[str, str]
) -> None:
    """Write one part of a record, measured of these files, and keep its other parts."""
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
    (KEPT / f"{name}.json").write_text(text + "\n")


def older(part: Part) -> list[str]:
    """Return the measured files that would now run differently."""
    return [
        file
        for file, known in part["of"].items()
        if (ROOT / file).exists() and digest(ROOT / file) != known
    ]


def told(parts: dict[str, Part], program: str = "") -> str:
    """Return a sentence for a page: when, by which commits, on what and with what.

    With a program that has since left the repository, each commit links to it.
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
        text += f". **Older than what it measured:** {', '.join(changed)}"
    return f"{text}."
