"""What a run measured, kept in book/measured for the pages that show it."""

import datetime
import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def code_digest(notebook: Path) -> str:
    """The digest of a notebook's code cells; prose may change without changing it."""
    cells = json.loads(notebook.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]


def code_digests() -> dict[str, str]:
    """The digest of every chapter's code, by the chapter's name."""
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return {path.stem: code_digest(path) for path in paths}


def text_digest(page: Path) -> str:
    """The digest of a page's or a program's whole text."""
    return hashlib.sha256(page.read_bytes()).hexdigest()[:16]


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


def earlier(name: str) -> dict:
    """What an earlier run found, or nothing."""
    path = ROOT / f"book/measured/{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def record(name: str, numbers: dict) -> None:
    """Keep what a run found in book/measured, with its circumstances."""
    path = ROOT / f"book/measured/{name}.json"
    path.write_text(json.dumps(circumstances() | numbers, indent=1) + "\n")
