"""Plant a fault in a correct tree: the rule that the fault breaks must report it."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

Rule = Callable[[Path], Iterable[str]]


class Fault(NamedTuple):
    """A change to one file, and words of the message that it must lead to."""

    old: str  # a regular expression; every match is replaced by new
    new: str
    message: str
    file: str


def edit(path: Path, old: str, new: str) -> None:
    """Replace all matches of old, and fail if there is none."""
    text, found = re.subn(old, new, path.read_text())
    assert found, f"{path.name}: nothing matches {old!r}"
    path.write_text(text)


def messages(rule: Rule, root: Path, fault: Fault) -> str:
    """Plant a fault in the tree under root, and return what a rule reports."""
    edit(root / fault.file, fault.old, fault.new)
    return "\n".join(rule(root))


def each(faults: dict[Rule, list[tuple]], file: str) -> pytest.MarkDecorator:
    """Run a test once with every (rule, fault); file is where most faults go."""
    params = []
    for rule, table in faults.items():
        for old, new, message, *where in table:
            fault = Fault(old, new, message, *(where or [file]))
            params.append(pytest.param(rule, fault, id=f"{rule.__name__}-{message}"))
    return pytest.mark.parametrize("rule, fault", params)
