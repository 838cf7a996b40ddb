"""Record on which versions each chapter passes, and the seconds that it takes.

With `nox -s colab kaggle newest -- --record`, each session runs all chapters with
pytest, two at a time, without compiler flags and without a compilation cache. Then, in
the same environment, `python lab versions SESSION --record` reads pytest's report. The
locked versions need no record, because every build runs them.
"""

import platform
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import record

PACKAGES = (
    "jax jaxlib flax optax orbax-checkpoint grain numpy scipy matplotlib ipython"
    " ipykernel nbclient"
).split()
# A chapter's name in reports of nbmake and of tests/test_reader.py.
CASE = re.compile(r"(?:test_chapter_\w+\[)?(\d\d_\w+)(?:\.ipynb|\])")


def chapters() -> list[str]:
    """Return the names of all chapters."""
    return sorted(path.stem for path in record.ROOT.glob("notebooks/*.md"))


def measure(*sessions: str) -> Iterator[tuple[str, dict]]:
    """Yield for each session its chapters' seconds, or "failed"."""
    for session in sessions or sys.exit("which of colab, kaggle and newest?"):
        found = {}
        report = record.ROOT / f"_build/versions/{session}.xml"
        for case in ElementTree.parse(report).iter("testcase"):
            name = CASE.fullmatch(case.get("name"))
            if name and name[1] in chapters():
                bad = any(case.find(tag) is not None for tag in ("failure", "error"))
                found[name[1]] = "failed" if bad else round(float(case.get("time")), 1)
        yield session, dict(sorted(found.items()))


def files(session: str) -> list[str]:
    """Return the measured files: the chapters, and for Colab its versions."""
    pins = ["tests/colab.txt"] if session == "colab" else []
    return [*pins, *(f"notebooks/{name}.ipynb" for name in chapters())]


def versions() -> dict[str, str]:
    """Return the installed versions, with which the chapters have just run."""
    return {"Python": platform.python_version()} | record.installed(*PACKAGES)


def passed(part: record.Part) -> set[str]:
    """Return the chapters that passed in a session and have not changed since."""
    changed = record.older(part)
    return {
        name
        for name, seconds in part["found"].items()
        if seconds != "failed" and f"notebooks/{name}.ipynb" not in changed
    }


def passed_as_recorded(session: str) -> set[str]:
    """Return unchanged chapters that passed on the same pinned versions."""
    part = record.read("versions").get(session)
    if part is None or "tests/colab.txt" in record.older(part):
        return set()
    return passed(part)


def passed_on(parts: dict[str, record.Part]) -> dict[str, set[str]]:
    """Return the versions of JAX on which each chapter passed, if unchanged since."""
    found = {name: set() for name in chapters()}
    for part in parts.values():
        for name in passed(part) & set(found):
            found[name].add(part["versions"]["jax"])
    return found
