"""Test that the book follows its house rules."""

import pytest
from checks import CHECKS
from pair import ROOT


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_house_rule(check):
    violations = list(check(ROOT))
    assert not violations, "\n" + "\n".join(violations)
