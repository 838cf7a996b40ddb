"""Keep what was measured in book/measured, and tell what of it is older.

book/measured/NAME.json holds the parts of a record: of each what was found, when, by
which commit, on what machine, with which versions, and a digest of every file that was
measured. A part is *older* as soon as one of those files would run otherwise. Comments,
docstrings, the layout of code, the type hints of functions and a record that a notebook
holds change nothing.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "book/measured"
Part = dict  # recorded, commit, on, versions, of, found
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def meaning(code: str) -> str:
    """What Python makes of a program: no comment, docstring or hint is part of it."""
    tree = ast.parse(re.sub(r"^([ \t]*)[%!].*$", r"\1pass", code, flags=re.MULTILINE))
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    # Python before 3.13 also names the lists of a tree that are empty.
    return re.sub(r", \w+=\[\]|\w+=\[\](, )?", "", ast.dump(tree))


def without_records(code: str) -> str:
    """The code of a notebook without the records that some of its cells hold."""
    for path in sorted((ROOT / "book/cells").glob("recorded_*.py")):
        _, _, text = path.read_text().strip().partition("\n")  # pairing edits its title
        code = code.replace(text, "")
    return code


def digest(path: Path) -> str:
    """A digest of what a notebook or a program does, or of any other file's bytes."""
    return read_digest(path, path.stat().st_mtime_ns) if path.exists() else "no file"


@cache
def read_digest(path: Path, written: int) -> str:
    """The digest of a file, made once for each time that it was written."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
        text = meaning(without_records("\n".join(code))).encode()
    elif path.suffix == ".py":
        text = meaning(path.read_text()).encode()
    else:
        text = path.read_bytes()
    return hashlib.sha256(text).hexdigest()[:16]


def ask_git(*words: str) -> str:
    """What git says of this repository; nothing, where there is none."""
    command = ["git", "-C", str(ROOT), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def circumstances() -> dict[str, str]:
    """When, by which commit and on what machine something is measured."""
    commit = ask_git("rev-parse", "--short", "HEAD") or "unknown"
    edited = ["status", "--porcelain", "--untracked-files=no", ":!book/measured"]
    if ask_git(*edited):
        commit += " and what was not committed"
    system = platform.system()
    if system == "Linux":
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    return {
        "recorded": f"{datetime.date.today()}",
        "commit": commit,
        "on": f"{system}, {platform.machine()}, {os.cpu_count()} cores,"
        f" Python {platform.python_version()}",
    }


def installed(*names: str) -> dict[str, str]:
    """The versions of these packages, of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def read(name: str) -> dict[str, Part]:
    """The parts of a record as they were kept; none, if nothing was."""
    path = KEPT / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(
    name: str, part: str, found: object, of: Iterable[str], versions: dict[str, str]
) -> None:
    """Write what was found of a part beside the other parts of its record.

    `of` names the files that were measured, from the root of the repository.
    """
    digests = {file: digest(ROOT / file) for file in sorted(of)}
    about = {"versions": versions, "of": digests, "found": found}
    parts = read(name) | {part: circumstances() | about}
    KEPT.mkdir(exist_ok=True)
    text = json.dumps(dict(sorted(parts.items())), indent=1, ensure_ascii=False)
    (KEPT / f"{name}.json").write_text(text + "\n")


def older(part: Part) -> list[str]:
    """The measured files that would run otherwise today; none, if the part holds."""
    return [file for file, known in part["of"].items() if digest(ROOT / file) != known]


def told(parts: dict[str, Part]) -> str:
    """A sentence for a page: when, by which commits, on what and with what."""

    def every(key: str) -> str:
        return " and ".join(sorted({part[key] for part in parts.values()}))

    versions = {
        f"{name} {number}"
        for part in parts.values()
        for name, number in part["versions"].items()
    }
    text = f"Recorded {every('recorded')} by commit {every('commit')} on {every('on')}"
    text += f", with {', '.join(sorted(versions))}." if versions else "."
    changed = sorted({file for part in parts.values() for file in older(part)})
    if changed:
        text += f" **Older than what it measured:** {', '.join(changed)}."
    return text
