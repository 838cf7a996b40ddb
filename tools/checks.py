"""The house rules that running a notebook cannot check.

Each check takes the root of the repository and yields its complaints, a sentence each.
"""

import json
import re
import statistics
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
import pair
import yaml
from nbformat import NotebookNode

FIRST = ["What you will learn", "Setup"]
LAST = ["Pitfalls", "Exercises", "Recap", "Next"]
PARTS = [
    "One program, many devices",
    "One array, many devices",
    "Every parallelism",
    "Beyond one process",
    "Knowing what it costs",
]
NOT_PORTABLE = {  # what only Sphinx, only Jupyter or only one site would understand
    "a MyST directive": r"^\s*(:::|```\{)",
    "a MyST role": r"\{[a-z:]+\}`",
    "a MyST label": r"^\([\w-]+\)=\s*$",
    "an image link": r"!\[",
    "HTML": r"</?[a-zA-Z][^>]*>",
}
REMOVED = {  # old name: what took its place
    r"jax\.tree_(map|multimap|leaves|flatten|unflatten)\b": "jax.tree.map and friends",
    r"\bjax\.experimental\.(shard_map|pjit|maps)\b": "jax.shard_map or jax.jit",
    r"\b(xmap|pvary|use_mesh|device_put_(replicated|sharded))\b": "see the old names",
    r"\b(Positional|Pmap)Sharding\b": "NamedSharding",
    r"\b(in|out)_axis_resources\b": "in_shardings, out_shardings",
    r"\bcheck_rep\b": "check_vma",
    r"\bcolab_tpu\b": "the setup cell",
    r"\bwith (\w+\.)?mesh\b": "with jax.set_mesh(mesh)",
    r"\bPRNGKey\b": "jax.random.key",
}


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def is_shared(cell: NotebookNode) -> bool:
    return any(tag.startswith("shared-") for tag in tags(cell))


def code_lines(cell: NotebookNode) -> int:
    return sum(bool(line.strip()) for line in cell.source.splitlines())


@cache
def parse(source: str) -> NotebookNode:
    return pair.twin(source)


def chapters(root: Path) -> Iterator[tuple[str, NotebookNode, list, list]]:
    """Name, notebook, code cells and Markdown cells of every chapter's source."""
    for path in sorted((root / "notebooks").glob("*.md")):
        notebook = parse(path.read_text())
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        prose = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
        yield path.stem, notebook, code, prose


def headings(prose: list[NotebookNode], level: int) -> list[str]:
    text = "\n".join(cell.source for cell in prose)
    return re.findall(rf"^{'#' * level} (.+)$", text, re.MULTILINE)


def notebooks_follow_their_sources(root: Path) -> Iterator[str]:
    folder, cure = root / "notebooks", "Run: nox -s pair"
    for path in sorted(folder.glob("*.ipynb")):
        if not path.with_suffix(".md").exists():
            yield (
                f"{path.name} has no source {path.stem}.md. "
                f"To make one: jupytext --to md:myst notebooks/{path.name}"
            )
    for name, notebook, _, _ in chapters(root):
        path = folder / f"{name}.ipynb"
        if not path.exists():
            yield f"{name}.md has no notebook {name}.ipynb. {cure}"
            continue
        old = nbformat.read(path, as_version=4)
        pairs = list(zip(pair.content(notebook), pair.content(old), strict=False))
        differ = [i for i, (new, was) in enumerate(pairs, start=1) if new != was]
        if len(notebook.cells) != len(old.cells):
            differ.append(len(pairs) + 1)
        if differ:
            yield f"{name}.ipynb differs from its source in cell {differ[0]}. {cure}"
        elif any(
            old.metadata.get(key) != notebook.metadata.get(key) for key in pair.KEPT
        ):
            yield f"{name}.ipynb has other metadata than {name}.md. {cure}"


def notebooks_hold_no_outputs(root: Path) -> Iterator[str]:
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        for i, cell in enumerate(json.loads(path.read_text())["cells"], start=1):
            if cell.get("outputs") or cell.get("execution_count"):
                yield f"{path.name}, cell {i}: outputs are left. Run: nox -s pair"


def links_open_their_own_file(root: Path) -> Iterator[str]:
    for name, notebook, _, prose in chapters(root):
        if pair.head_links(root, name) not in notebook.cells[0].source:
            yield f"{name}: the links at the head do not open {name}. Run: nox -s pair"
        for target in re.findall(
            r"\]\(([^)#:]+)(?:#[^)]*)?\)", "\n".join(c.source for c in prose)
        ):
            if not (root / "notebooks" / target).resolve().exists():
                yield f"{name}: the link to {target} leads nowhere"
            elif target.endswith(".md") and not target.startswith("../"):
                yield f"{name}: link to the notebook, not to {target}"


def the_address_is_written_once(root: Path) -> Iterator[str]:
    url = yaml.safe_load((root / "_config.yml").read_text())["repository"]["url"]
    tracked = subprocess.check_output(["git", "ls-files"], cwd=root, text=True).split(
        "\n"
    )
    for file in filter(None, tracked):
        if file == "_config.yml" or file.startswith("notebooks/"):
            continue
        path = root / file
        if path.is_file() and url in path.read_text(errors="ignore"):
            yield f"{file} names {url}, which only _config.yml may"


def setup_is_the_same(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        if not code or "shared-setup" not in tags(code[0]):
            yield f"{name}: the first code cell is not tagged shared-setup"


def shared_cells_agree(root: Path) -> Iterator[str]:
    seen = {}
    for name, _, code, _ in chapters(root):
        for cell in filter(is_shared, code):
            tag = next(tag for tag in tags(cell) if tag.startswith("shared-"))
            first, text = seen.setdefault(tag, (name, cell.source))
            if cell.source != text:
                yield f"{name}: the cell {tag} differs from the one in {first}"


def chapters_have_the_skeleton(root: Path) -> Iterator[str]:
    for name, notebook, _, prose in chapters(root):
        titles, sections = headings(prose, 1), headings(prose, 2)
        if not notebook.cells[0].source.startswith("# ") or len(titles) != 1:
            yield f"{name}: a chapter starts with its one title"
        elif re.match(r"(chapter\s*)?\d", titles[0], re.IGNORECASE):
            yield f"{name}: the title has a number"
        if not re.fullmatch(r"\d\d_[a-z0-9_]+", name):
            yield f"{name}: a chapter's file is named NN_slug"
        own = sections[len(FIRST) : -len(LAST)]
        if sections != FIRST + own + LAST:
            yield f"{name}: sections run {FIRST}, its own, {LAST}; found {sections}"
        elif not 3 <= len(own) <= 6:
            yield f"{name}: three to six sections of its own, found {len(own)}"


def cells_are_short(root: Path) -> Iterator[str]:
    for name, _, code, prose in chapters(root):
        sizes = sorted(code_lines(cell) for cell in code if not is_shared(cell))
        words = sum(len(cell.source.split()) for cell in prose)
        if not 20 <= len(code) <= 36:
            yield f"{name}: 20 to 36 code cells, found {len(code)}"
        if max(code_lines(cell) for cell in code) > 25:
            yield f"{name}: a code cell has over 25 lines"
        if statistics.median(sizes or [0]) > 6:
            yield f"{name}: the median code cell has over 6 lines"
        if sum(size > 16 for size in sizes) > len(sizes) / 10:
            yield f"{name}: over a tenth of the code cells have more than 16 lines"
        if not 1500 <= words <= 3000:
            yield f"{name}: 1,500 to 3,000 words, found {words}"


def markdown_is_portable(root: Path) -> Iterator[str]:
    for name, _, _, prose in chapters(root):
        for cell in prose:
            text = re.sub(
                r"^```\w*\n.*?^```$", "", cell.source, flags=re.DOTALL | re.MULTILINE
            )
            for what, pattern in NOT_PORTABLE.items():
                plain = (
                    text
                    if "role" in what
                    else re.sub(r"`[^`\n]*`|\$[^$\n]*\$", "", text)
                )
                if found := re.search(pattern, plain, re.MULTILINE):
                    yield f"{name}: {what}, {found[0]!r}, reads differently elsewhere"


def figures_have_alt_text(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        for cell in code:
            draws = re.search(
                r"\bplt\.(subplots|figure)\(|^draw_\w+\(", cell.source, re.M
            )
            image = cell.metadata.get("mystnb", {}).get("image", {})
            if draws and not is_shared(cell) and len(image.get("alt", "")) < 20:
                line = cell.source.splitlines()[-1]
                yield f"{name}: a figure without alt text: {line!r}"
            label = re.search(r'aria-label="([^"]*)"', cell.source)
            if re.search(r"^HTML\(", cell.source, re.M) and not (
                label and len(label[1]) >= 20
            ):
                yield f"{name}: a drawing in HTML without an aria-label"


def code_uses_todays_names(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        for cell in code:
            for old, new in REMOVED.items():
                if found := re.search(old, cell.source):
                    yield f"{name}: {found[0]} is an old name; today: {new}"
            if "raises-exception" in tags(cell):
                yield f"{name}: raises-exception passes either way; use try/except/else"


def exercises_have_checked_solutions(root: Path) -> Iterator[str]:
    for name, notebook, _, prose in chapters(root):
        titles = [title for title in headings(prose, 3) if title.startswith("Exercise")]
        if not 2 <= len(titles) <= 4:
            yield f"{name}: two to four exercises, found {len(titles)}"
        current, cells = None, {title: [] for title in titles}
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                for heading in re.findall(r"^#{2,3} (.+)$", cell.source, re.MULTILINE):
                    current = heading
            elif current in cells:
                cells[current].append(cell)
        for title, own in cells.items():
            stub = [cell for cell in own if "exercise" in tags(cell)]
            answer = [
                cell for cell in own if {"solution", "hide-cell"} <= {*tags(cell)}
            ]
            if len(stub) != 1 or '"""' not in stub[0].source:
                yield f"{name}, {title}: one cell tagged exercise, with a docstring"
            if not answer:
                yield f"{name}, {title}: no cell tagged solution and hide-cell"
            elif not any(
                re.search(r"^ *(assert\b|.*\.assert_)", c.source, re.M) for c in answer
            ):
                yield f"{name}, {title}: the solution asserts nothing"
            elif not answer[0].source.startswith("# @title Solution"):
                yield f"{name}, {title}: the solution starts with '# @title Solution'"
            elif answer[0].metadata.get("cellView") != "form":
                yield f"{name}, {title}: the solution lacks cellView: form (Colab)"


def contents_match_the_files(root: Path) -> Iterator[str]:
    toc = yaml.safe_load((root / "_toc.yml").read_text())
    files = {
        part["caption"]: [c["file"] for c in part["chapters"]] for part in toc["parts"]
    }
    listed = [file for entries in files.values() for file in entries]
    for file in [toc["root"], *listed]:
        if not any((root / f"{file}{suffix}").exists() for suffix in (".md", ".ipynb")):
            yield f"_toc.yml names {file}, which does not exist"
    in_toc = [file for file in listed if file.startswith("notebooks/")]
    on_disk = [f"notebooks/{name}" for name, *_ in chapters(root)]
    if in_toc != on_disk:
        yield f"_toc.yml lists {in_toc}; the folder holds {on_disk}, in this order"
    pages = sorted(f"book/{path.stem}" for path in (root / "book").glob("*.md"))
    if missing := {*pages} - {toc["root"], *listed}:
        yield f"_toc.yml leaves out {sorted(missing)}"
    if [caption for caption in files if caption in PARTS] != PARTS:
        yield f"_toc.yml has the parts {PARTS}"
    readme = (root / "README.md").read_text()
    for name in on_disk:
        if f"({name}.ipynb)" not in readme:
            yield f"README.md does not link {name}.ipynb"


CHECKS = [
    notebooks_follow_their_sources,
    notebooks_hold_no_outputs,
    links_open_their_own_file,
    the_address_is_written_once,
    setup_is_the_same,
    shared_cells_agree,
    chapters_have_the_skeleton,
    cells_are_short,
    markdown_is_portable,
    figures_have_alt_text,
    code_uses_todays_names,
    exercises_have_checked_solutions,
    contents_match_the_files,
]
