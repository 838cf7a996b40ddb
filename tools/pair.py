"""Bring all that is generated up to date: run by `nox -s pair`.

Every cell tagged shared-NAME, in a chapter or in a page of book/, gets the text of
book/cells/NAME.py, or of launch/NAME.py, or, as shared-MODULE-PART, that part of
MODULE.py which a line `# %% PART` begins; and every chapter gets its links.
Then notebooks/X.ipynb is written from notebooks/X.md, and the tables of README.md and
book/index.md from all chapters, with the steps of the path above the map. A notebook
that holds an edit of its own is left alone, and the run fails and says so.
"""

import hashlib
import re
import sys
from functools import cache
from pathlib import Path

import jupytext
import nbformat
import yaml
from nbformat import NotebookNode
from nbformat.v4 import new_notebook

ROOT = Path(__file__).parent.parent
LINKS = re.compile(r"^\[Open in Colab\]\(.*$", re.MULTILINE)
CELL = re.compile(
    r"^```\{code-cell\} ipython3\n"
    r"(?P<head>---\n(?s:.*?)\n---\n|(?::.*\n)+\n?|)(?P<text>(?s:.*?))^```$",
    re.MULTILINE,
)
KEPT = ("accelerator", "colab", "kernelspec")
FOLDED = {  # what JupyterLab folds away, as the site does, and Colab as a form
    "hide-input": {"source_hidden": True},
    "hide-cell": {"source_hidden": True, "outputs_hidden": True},
}
MARKS = {"read": "●", "skim": "○"}
PATH = re.compile(r"^:::\{container\} path\n(?s:.*?)^:::$", re.MULTILINE)
MINUTES = re.compile(r"\babout (\d+) minutes\b", re.IGNORECASE)
AFTER = "what you can do after it"  # the column of README.md that is written by hand
UNWRITTEN = "…"  # what a new chapter has there


def head_links(root: Path, slug: str) -> str:
    """The line at the head of a chapter, made from repository.url in _config.yml."""
    repository = yaml.safe_load((root / "_config.yml").read_text())["repository"]
    url = f"{repository['url']}/blob/{repository['branch']}/notebooks/{slug}.ipynb"
    colab = url.replace("github.com", "colab.research.google.com/github")
    kaggle = f"https://kaggle.com/kernels/welcome?src={url}"
    return f"[Open in Colab]({colab}) · [Open in Kaggle]({kaggle})"


def shared_source(root: Path, name: str) -> str:
    """The text of book/cells/NAME.py, of a program in launch, or of a part of these."""
    cell, module = root / f"book/cells/{name}.py", root / f"launch/{name}.py"
    if cell.exists():
        return cell.read_text().strip()
    if module.exists():  # its docstring's first line is its title for Colab
        _, said, program = module.read_text().split('"""', 2)
        title = said.partition("\n")[0].rstrip(".")
        return f"# @title {title}\n{program.strip()}"
    module, _, part = name.partition("-")
    sources = root / f"book/cells/{module}.py", root / f"launch/{module}.py"
    text = "".join(path.read_text() for path in sources if path.exists())
    parts = re.split(r"^# %% (\S+)$", text, flags=re.MULTILINE)
    if part not in parts[1::2]:
        raise ValueError(
            f"there is no source for shared-{name} in book/cells or launch"
        )
    return parts[parts.index(part) + 1].strip()


def shared_text(root: Path, names: list[str]) -> str:
    """The text of a cell with these names, one after the other, of which only the first
    keeps its title for Colab."""
    parts = [shared_source(root, name) for name in names]
    rest = [part.replace("# @title ", "# ", 1) for part in parts[1:]]
    return "\n\n\n".join([*parts[:1], *rest])


def fill(root: Path, source: str) -> str:
    """A source whose shared cells have the text of their files in book/cells."""

    def filled(cell: re.Match) -> str:
        tags = re.search(r"^:?tags: (.*)$", cell["head"], re.MULTILINE)
        names = re.findall(r"\bshared-([\w-]+)", tags[1]) if tags else []
        if not names:
            return cell[0]
        head = f"```{{code-cell}} ipython3\n{cell['head']}"
        return f"{head}{shared_text(root, names)}\n```"

    return CELL.sub(filled, source)


def cell_ids(cells: list[NotebookNode]) -> list[str]:
    """An id for each cell that follows from its text, and from nothing else."""
    texts = [f"{cell.cell_type}\n{cell.source}" for cell in cells]
    texts = [f"{text}\n{texts[:i].count(text)}" for i, text in enumerate(texts)]
    return [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts]


@cache
def twin(source: str) -> NotebookNode:
    """The notebook that a chapter's source stands for, without outputs."""
    read = jupytext.reads(source, "md:myst")
    metadata = {key: read.metadata[key] for key in KEPT if key in read.metadata}
    metadata["language_info"] = {"name": "python"}
    for cell, cell_id in zip(read.cells, cell_ids(read.cells), strict=True):
        cell.id = cell_id
        for tag in cell.metadata.get("tags", []):
            if tag in FOLDED:
                cell.metadata["jupyter"] = FOLDED[tag]
                cell.metadata["cellView"] = "form"
    return new_notebook(cells=read.cells, metadata=metadata)


def hand_edits(path: Path, source: NotebookNode) -> list[int]:
    """Numbers of a notebook's cells, from 1, whose text is its own: neither generated
    by `twin` nor found in the source."""
    cells = nbformat.read(path, as_version=4).cells if path.exists() else []
    known = {cell.source for cell in source.cells}
    return [
        number
        for number, (cell, cell_id) in enumerate(zip(cells, cell_ids(cells)), start=1)
        if cell.get("id") != cell_id and cell.source not in known
    ]


def numbers(listed: object) -> list[int]:
    """The chapters in a list such as `1-3 7`."""
    spans = [span.partition("-") for span in str(listed).split()]
    return [n for a, _, b in spans for n in range(int(a), int(b or a) + 1)]


def paths(root: Path) -> dict[str, dict[int, str]]:
    """The paths of _toc.yml, each with the mark of every chapter on it."""
    listed = yaml.safe_load((root / "_toc.yml").read_text())["meta"]["paths"]
    return {
        name: {
            n: mark for kind, mark in MARKS.items() for n in numbers(path.get(kind, ""))
        }
        for name, path in listed.items()
    }


def from_ddp(root: Path) -> list[Path]:
    """The chapters and pages of the path above the map, in its order."""
    listed = yaml.safe_load((root / "_toc.yml").read_text())["meta"]["from_ddp"]
    return [root / f"{file}.md" for file in listed]


def with_steps(index: str, steps: list[Path]) -> str:
    """book/index.md with the steps of the path above its map: of each its title and the
    minutes that it states, and of all the sum."""
    lines, total = [], 0
    for path in steps:
        text = path.read_text() if path.exists() else ""
        title = re.search(r"^# (.*)$", text, re.MULTILINE)
        minutes = MINUTES.search(text)
        if not title or not minutes:
            raise ValueError(f"{path.name} lacks a title, or 'about N minutes'")
        chapter = path.parent.name == "notebooks"
        link = f"../notebooks/{path.stem}.ipynb" if chapter else path.name
        lines.append(f"1. [{title[1]}]({link}): {minutes[1]} minutes.\n")
        total += int(minutes[1])
    lines += [f"\nTogether {total} minutes.\n"]
    path = f":::{{container}} path\n{''.join(lines)}:::"
    index, found = PATH.subn(lambda _: path, index)
    if found != 1:
        raise ValueError("book/index.md has one ':::{container} path'")
    return index


def with_table(page: str, columns: list[str], rows: list[list[str]]) -> str:
    """A page whose table with this last column has these columns and rows."""
    head, *lines = [f"| {' | '.join(row)} |\n" for row in (columns, *rows)]
    table = "".join([head, "|---" * len(columns), "|\n", *lines])
    old = rf"^\|.* {columns[-1]} \|\n(\|.*\n)*"
    page, found = re.subn(old, lambda _: table, page, flags=re.MULTILINE)
    if not found:
        raise ValueError(f"there is no table whose last column is {columns[-1]!r}")
    return page


def with_tables(root: Path, readme: str, index: str) -> tuple[str, str]:
    """README.md and book/index.md with a row for every chapter.

    What one can do after a chapter stays as README.md has it; the rest of a row comes
    from the chapter's name and title, and from the paths of _toc.yml.
    """
    line = re.compile(r"\(notebooks/\d\d_(\w+)\.ipynb\) \| (.*) \|$", re.MULTILINE)
    after, marks = dict(line.findall(readme)), paths(root)
    listed, mapped = [], []
    for path in sorted((root / "notebooks").glob("[0-9][0-9]_*.md")):
        number, slug = int(path.stem[:2]), path.stem[3:]
        title = re.search(r"^# (.*)$", path.read_text(), re.MULTILINE)
        link = f"[{title[1] if title else slug}]({{}}notebooks/{path.stem}.ipynb)"
        listed.append([str(number), link.format(""), after.pop(slug, UNWRITTEN)])
        dots = [marked.get(number, "") for marked in marks.values()]
        mapped.append([*dots, f"{number}. {link.format('../')}"])
    if after:
        raise ValueError(f"README.md has rows of no chapter: {', '.join(after)}")
    return (
        with_table(readme, ["no.", "chapter", AFTER], listed),
        with_table(index, [*marks, "Chapter"], mapped),
    )


def plan(root: Path = ROOT) -> tuple[dict[Path, str], list[str]]:
    """The texts of the files that are out of date, and what stands in the way."""
    texts, problems = {}, []
    for path in sorted(root.glob("notebooks/*.ipynb")):
        if not path.with_suffix(".md").exists():
            problems.append(f"{path.name} has no source: jupytext --to md:myst")
    for path in sorted([*root.glob("book/*.md"), *root.glob("notebooks/*.md")]):
        text = fill(root, path.read_text())
        if path.parent.name == "notebooks":
            notebook, links = path.with_suffix(".ipynb"), head_links(root, path.stem)
            text, found = LINKS.subn(lambda _, line=links: line, text, count=1)
            if not found:
                problems.append(f"{path.name} lacks '[Open in Colab]()' at its head")
                continue
            if edits := hand_edits(notebook, twin(text)):
                problems.append(
                    f"{notebook.name} was edited by hand in cells {edits}: put that"
                    f" into {path.name}, delete {notebook.name}, run this again"
                )
                continue
            texts[notebook] = nbformat.writes(twin(text)) + "\n"
        texts[path] = text
    readme, index = root / "README.md", root / "book/index.md"
    try:
        page = with_steps(texts[index], from_ddp(root))
        texts[readme], texts[index] = with_tables(root, readme.read_text(), page)
    except ValueError as error:
        problems.append(f"README.md and book/index.md keep their tables: {error}")
    behind = {p: t for p, t in texts.items() if not p.exists() or p.read_text() != t}
    return behind, problems


def pair(root: Path = ROOT) -> list[str]:
    """Bring every file up to date; return what stood in the way."""
    texts, problems = plan(root)
    for path, text in texts.items():
        path.write_text(text)
    return problems


if __name__ == "__main__":
    sys.exit("\n".join(pair()) or None)
