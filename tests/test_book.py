"""The book keeps its own house rules."""

import pytest
from checks import CHECKS
from pair import ROOT


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_house_rule(check):
    complaints = list(check(ROOT))
    assert not complaints, "\n" + "\n".join(complaints)
