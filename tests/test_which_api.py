"""The decision tree of which_api.md is drawn from its lists, which name chapters."""

import pytest
from figures.which_api import FIGURES, PAGE, draw_page, read_tree


@pytest.mark.parametrize("name", FIGURES.values())
def test_the_figure_shows_the_list(name):
    drawn = draw_page(PAGE.read_text())[name]
    complaint = "run  python book/figures/which_api.py"
    assert (PAGE.parent / "figures" / name).read_text() == drawn, complaint


@pytest.mark.parametrize("heading", FIGURES)
def test_each_branch_ends_at_a_chapter(heading):
    nodes = read_tree(PAGE.read_text(), heading)
    assert nodes[0].level == 0 and len(nodes) > 10
    for node, after in zip(nodes, [*nodes[1:], nodes[0]]):
        assert after.level <= node.level + 1, f"{after.text} has no parent"
        ends = after.level <= node.level
        assert node.chapters or not ends, f"{node.text} names no chapter"
