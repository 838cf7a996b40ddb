"""Plant faults in a sound tree: the rule that a fault is for must find it."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

Rule = Callable[[Path], Iterable[str]]


class Fault(NamedTuple):
    """A change to one file, and words of the complaint that it must raise."""

    old: str  # a regular expression, whose first match gives way to new
    new: str
    complaint: str
    file: str


def edit(path: Path, old: str, new: str) -> None:
    """Replace the first match of old, and fail if that changes nothing."""
    before = path.read_text()
    after = re.sub(old, new, before, count=1)
    assert after != before, f"{path.name}: {old!r} finds nothing to change"
    path.write_text(after)


def complaints(rule: Rule, root: Path, fault: Fault) -> str:
    """What a rule says about the tree under root once the fault is in it."""
    edit(root / fault.file, fault.old, fault.new)
    return "\n".join(rule(root))


def each(faults: dict[Rule, list[tuple]], file: str) -> pytest.MarkDecorator:
    """Run a test once with every (rule, fault); file is where most faults go."""
    params = []
    for rule, table in faults.items():
        for old, new, complaint, *where in table:
            fault = Fault(old, new, complaint, *(where or [file]))
            params.append(pytest.param(rule, fault, id=f"{rule.__name__}-{complaint}"))
    return pytest.mark.parametrize("rule, fault", params)
