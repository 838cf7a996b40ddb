"""Bring all that is generated up to date: run by `nox -s pair`.

Every cell tagged shared-NAME, in a chapter or in a page of book/, gets the text of
book/cells/NAME.py, or of launch/NAME.py, or, as shared-MODULE-PART, that part of
MODULE.py which a line `# %% PART` begins; and every chapter gets its links.
Then notebooks/X.ipynb is written from notebooks/X.md, and the lists of _toc.yml into
book/index.md and README.md. A notebook with an edit of its own is not overwritten, and
the run fails with a message.
"""

import hashlib
import os
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
LISTS = {"book/index.md": ["course", "ddp"], "README.md": ["course"]}  # of _toc.yml
LIST = r"^<!-- {0} -->\n(?s:.*?)^<!-- end of {0} -->$"
TITLE = re.compile(r"^# (.*)$", re.MULTILINE)
MINUTES = re.compile(r"\babout (\d+) minutes\b", re.IGNORECASE)


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
        _, docstring, program = module.read_text().split('"""', 2)
        title = docstring.partition("\n")[0].rstrip(".")
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


def listed(root: Path, name: str) -> dict[Path, str]:
    """Return the pages of a list in _toc.yml, in order, each with its description."""
    lists = yaml.safe_load((root / "_toc.yml").read_text())["meta"]
    return {
        root / f"{file}.md": about or lists["course"][file]
        for file, about in lists[name].items()
    }


def reading_list(root: Path, name: str, page: Path) -> str:
    """Return a list of _toc.yml with titles, links from `page`, minutes and hours."""
    lines, total = [], 0
    for path, about in listed(root, name).items():
        text = path.read_text() if path.exists() else ""
        title, minutes = TITLE.search(text), MINUTES.search(text)
        if not title or not minutes:
            raise ValueError(f"{path.name} lacks a title, or 'about N minutes'")
        label, target = title[1], path
        if path.parent.name == "notebooks":
            label, target = f"{int(path.stem[:2])}. {label}", path.with_suffix(".ipynb")
        link = Path(os.path.relpath(target, page.parent)).as_posix()
        lines.append(f"- [{label}]({link}) ({minutes[1]} minutes). {about}\n")
        total += int(minutes[1])
    kind = "chapters" if name == "course" else "pages"
    head = f"{len(lines)} {kind}, about {round(total / 30) / 2:g} hours of reading:"
    return f"{head}\n\n{''.join(lines)}"


def with_list(text: str, name: str, content: str) -> str:
    """Return the text of a page with this content between the marks of a list."""
    block = f"<!-- {name} -->\n\n{content}\n<!-- end of {name} -->"
    pattern = re.compile(LIST.format(name), re.MULTILINE)
    text, found = pattern.subn(lambda _: block, text)
    if found != 1:
        raise ValueError(f"it needs one '<!-- {name} -->' with its end, not {found}")
    return text


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
    for file, names in LISTS.items():
        page = root / file
        text = texts.get(page) or page.read_text()
        try:
            for name in names:
                text = with_list(text, name, reading_list(root, name, page))
        except ValueError as error:
            problems.append(f"{file} is not updated: {error}")
        texts[page] = text
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
