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
    file: str | None = None  # None: the file that the table names for all its faults


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
        for row in table:
            fault = Fault(*row)
            if fault.file is None:
                fault = fault._replace(file=file)
            name = f"{rule.__name__}-{fault.file}-{fault.complaint}"
            params.append(pytest.param(rule, fault, id=name))
    return pytest.mark.parametrize("rule, fault", params)


def assert_all_planted(rules: Iterable[Rule], faults: dict[Rule, list[tuple]]) -> None:
    """Fail if a rule has no fault, or a fault no rule."""
    planted = {rule.__name__ for rule, table in faults.items() if table}
    assert planted == {rule.__name__ for rule in rules}
