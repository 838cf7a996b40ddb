"""An old name whose releases do not bear out what its row says is found."""

import pytest
import since

OLD = since.Row("jax.old", "fails", "0.5.3", "0.6.0", "jax.new", 1)


@pytest.mark.parametrize(
    "before, after, told",
    [
        ("runs", "fails", []),
        ("warns", "fails", []),
        ("fails", "fails", ["jax.old: fails on 0.5.3, fails on 0.6.0"]),
        ("runs", "warns", ["jax.old: runs on 0.5.3, warns on 0.6.0"]),
    ],
)
def test_a_row_that_its_releases_contradict_is_told(before, after, told):
    found = {"0.5.3": {"jax.old": before}, "0.6.0": {"jax.old": after}}
    assert since.contradictions([OLD], found) == told


def test_what_is_installed_for_a_release():
    assert since.requirements("0.4.13")[:2] == ["jax==0.4.13", "jaxlib<=0.4.13"]
    assert "numpy<2" in since.requirements("0.4.25")
    assert "numpy<2" not in since.requirements("0.10.2")
    assert since.requirements("flax 0.11.0")[0] == "flax==0.11.0"


def test_rows_that_name_no_release_give_a_source_and_no_old_line_stands_twice():
    assert all(row.since for row in since.EVERY)
    lines = [row.old for row in since.EVERY]
    assert len(lines) == len({*lines})
