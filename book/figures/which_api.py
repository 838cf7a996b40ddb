"""Draw the decision tree of which_api.md: one figure for each of its two lists.

The lists in the page are the source, so that the figures and the text agree. After a
change of a list, run  python book/figures/which_api.py
"""

import re
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

PAGE = Path(__file__).parents[1] / "which_api.md"
FIGURES = {  # the heading above each list, and the file that it is drawn into
    "How to write it": "which_api.svg",
    "What to shard": "which_parallelism.svg",
}
WIDTH, INDENT, GAP = 376, 18, 6  # of the figure, of one level, between two nodes
LINE, PADDING = 18, 5  # the height of a line of text, and the space around a node's
SIZE = 14  # of the font
TEXT, CODE = 0.56, 0.61  # the width of a character of size 1, estimated
MARKS = {"**": "strong", "`": "code"}
ITEM = re.compile(r"^( *)- (.+)$", re.MULTILINE)
CHAPTER = re.compile(r",? *\[chapter (\d+)\]\([^)]*\)")
STYLE = """<style>
text { font: 14px Inter, Roboto, Arial, "Liberation Sans", sans-serif; fill: #22242b }
.code { font-family: Iosevka, Menlo, Consolas, "DejaVu Sans Mono", monospace }
.strong { font-weight: 600 }
.chapter { font-weight: 600; text-anchor: end }
.answer .chapter { fill: #4b4fc4 }
.answer rect { fill: #f1f2fc; stroke: #c3c6ee }
.default rect { fill: #4b4fc4 }
.default text { fill: #ffffff }
path { fill: none; stroke: #8088a0 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ef }
.answer .chapter { fill: #b9bbff }
.answer rect { fill: #20263a; stroke: #474d7e }
}
</style>
"""
Word = list[tuple[str, str]]  # the pieces of a word, each with the classes of its look


class Node(NamedTuple):
    """An item of a list: its level from 0, its text and the chapters that it names."""

    level: int
    text: str
    chapters: list[str]


def read_tree(page: str, heading: str) -> list[Node]:
    """Return the items of the list below a heading of the page, in order."""
    section = page.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    items = ITEM.findall(section)
    return [
        Node(len(indent) // 2, CHAPTER.sub("", text), CHAPTER.findall(text))
        for indent, text in items
    ]


def split_words(text: str) -> list[Word]:
    """Return the words of an item, which may be strong, code or both in parts."""
    words, look = [[]], set()
    for piece in re.findall(r"\*\*|`| |[^ `*]+", text):
        if piece in MARKS:
            look ^= {MARKS[piece]}
        elif piece == " ":
            words.append([])
        else:
            words[-1].append((piece, " ".join(sorted(look))))
    return words


def wrap(words: list[Word], width: float) -> list[list[Word]]:
    """Break words into lines of at most this many pixels."""
    lines, room = [], 0.0
    for word in words:
        needed = SIZE * sum(
            len(piece) * (CODE if "code" in look else TEXT) for piece, look in word
        )
        if needed > room:
            lines.append([])
            room = width
        lines[-1].append(word)
        room -= needed + TEXT * SIZE
    return lines


def draw_line(line: list[Word], x: float, y: float) -> str:
    """Return the SVG of one line of text, which begins at (x, y)."""
    words = (
        "".join(
            f'<tspan class="{look}">{escape(piece)}</tspan>' if look else escape(piece)
            for piece, look in word
        )
        for word in line
    )
    return f'<text x="{x}" y="{y:g}">{" ".join(words)}</text>\n'


def draw_tree(nodes: list[Node]) -> str:
    """Return the SVG of a tree: one row for each node, indented by its level."""
    drawn, top, stems = "", 1, {}
    for level, text, chapters in nodes:
        x, label = 1 + level * INDENT, ", ".join(chapters)
        if level == 0:
            label = f"chapter{'s' if len(chapters) > 1 else ''} {label}"
        room = WIDTH - x - (25 + len(label) * TEXT * SIZE if chapters else 9)
        lines = wrap(split_words(text), room)
        height = len(lines) * LINE + 2 * PADDING
        middle = top + height / 2
        if level:
            stem = x - INDENT / 2 + 0.5  # a sharp line, between two pixels
            drawn += f'<path d="M{stem:g} {stems[level - 1]}V{middle:g}H{x}"/>\n'
        stems[level] = top + height
        kind = "default" if level == 0 else "answer" if chapters else "question"
        drawn += f'<g class="{kind}">\n'
        if chapters:
            size = f'width="{WIDTH - 1 - x}" height="{height}"'
            drawn += f'<rect x="{x}" y="{top}" {size} rx="5"/>\n'
        for i, line in enumerate(lines):
            drawn += draw_line(line, x + 7, top + PADDING + (i + 0.75) * LINE)
        if chapters:
            place = f'x="{WIDTH - 9}" y="{middle + LINE / 4:g}"'
            drawn += f'<text class="chapter" {place}>{label}</text>\n'
        drawn += "</g>\n"
        top += height + GAP
    height = top - GAP + 1
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{STYLE}{drawn}</svg>\n'


def draw_page(page: str) -> dict[str, str]:
    """Return the SVG of each figure of the page, by its file's name."""
    return {
        name: draw_tree(read_tree(page, heading)) for heading, name in FIGURES.items()
    }


if __name__ == "__main__":
    for name, svg in draw_page(PAGE.read_text()).items():
        Path(__file__).with_name(name).write_text(svg)
