"""On which versions every chapter passes.

`nox -s tests colab kaggle newest -- --record`: each of these sessions runs all chapters
by pytest and then, where they ran, `python lab versions SESSION --record`, which reads
the report that pytest has left.
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
# A chapter's name, as nbmake reports it or as tests/test_reader.py does.
CASE = re.compile(r"(?:test_chapter_\w+\[)?(\d\d_\w+)(?:\.ipynb|\])")


def chapters() -> list[str]:
    """The names of all chapters."""
    return sorted(path.stem for path in record.ROOT.glob("notebooks/*.md"))


def measure(*sessions: str) -> Iterator[tuple[str, dict]]:
    """Seconds of each chapter that passed in a session, and "failed" for the others."""
    for session in sessions or sys.exit("which of tests, colab, kaggle and newest?"):
        found = {}
        report = record.ROOT / f"_build/versions/{session}.xml"
        for case in ElementTree.parse(report).iter("testcase"):
            name = CASE.fullmatch(case.get("name"))
            if name and name[1] in chapters():
                bad = any(case.find(tag) is not None for tag in ("failure", "error"))
                found[name[1]] = "failed" if bad else round(float(case.get("time")), 1)
        yield session, dict(sorted(found.items()))


def files(session: str) -> list[str]:
    """The chapters, whose digests are those of this moment."""
    return [f"notebooks/{name}.ipynb" for name in chapters()]


def versions() -> dict[str, str]:
    """What is installed where the chapters have just run."""
    return {"Python": platform.python_version()} | record.installed(*PACKAGES)


def passed_on(parts: dict[str, record.Part]) -> dict[str, set[str]]:
    """The versions of JAX on which each chapter passed as it stands today."""
    passed = {name: set() for name in chapters()}
    for part in parts.values():
        old = record.older(part)
        for name, took in part["found"].items():
            holds = took != "failed" and f"notebooks/{name}.ipynb" not in old
            if name in passed and holds:
                passed[name].add(part["versions"]["jax"])
    return passed
