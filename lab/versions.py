"""The table of legs and chapters from real runs: what passed, and in how many seconds.

A session that runs the chapters by pytest first notes its versions, as `legs.py
FILE.json`, and leaves pytest's report beside them; `execute.py` writes both into one
file. `nox -s legs` joins what it finds to what is kept.
"""

import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from record import ROOT, circumstances, code_digests

REPORTS = ROOT / "_build/legs"
KEPT = ROOT / "book/measured/legs.json"
PACKAGES = (
    "jax jaxlib flax optax orbax-checkpoint grain numpy scipy matplotlib ipython"
    " ipykernel nbclient"
).split()


def installed(name: str) -> str:
    """The version of a package, or "-" where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def versions() -> dict:
    """What a session runs, and with what."""
    about = circumstances() | {"Python": platform.python_version()}
    about |= {name: installed(name) for name in PACKAGES}
    return about | {"code": code_digests()}


def note_versions(file: Path) -> None:
    """Write down what a session is about to run, and with what."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(versions()))


def chapters(report: Path) -> dict[str, float | str]:
    """Seconds of each chapter that passed, and the word "failed" for the others."""
    results, known = {}, {path.stem for path in ROOT.glob("notebooks/*.md")}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname", "") + case.get("name", "")
        if ".ipynb" in name or name.startswith("notebooks"):
            slug = name.split("/")[-1].split(".ipynb")[0].split(".")[-1]
            if slug not in known:
                continue  # a test whose name has a file in it
            failed = any(case.find(tag) is not None for tag in ("failure", "error"))
            results[slug] = "failed" if failed else round(float(case.get("time")), 1)
    return results


def join() -> dict[str, dict]:
    """All legs: those that have run to their end on this machine since, and the
    others as they were kept."""
    found = json.loads(KEPT.read_text())
    for about in sorted(REPORTS.glob("*.json")):
        leg = json.loads(about.read_text())
        report = about.with_suffix(".xml")
        if "chapters" not in leg and report.exists():
            leg["chapters"] = chapters(report)
        if "chapters" in leg:
            found[about.stem] = leg
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        note_versions(Path(sys.argv[1]))
    else:
        KEPT.write_text(json.dumps(join(), indent=1) + "\n")
