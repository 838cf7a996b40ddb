"""The house rules that running a notebook cannot check.

Each check takes the root of the repository and yields its complaints, a sentence each.
"""

import ast
import inspect
import json
import re
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
# Where a shared cell stands open, because the text around it explains it.
EXPLAINED = {
    "setup": "03_devices",
    "digits": "02_train_on_one_device",
    "models": "02_train_on_one_device",
}
# AST nodes a line in lesson cells, a chapter's average; JAX's guides have 11 to 12.5.
DENSEST = 12.5
CHECKS_SOMETHING = r"\bassert\b|\bassert_|\bon_cpu\("
REMOVED = {  # old name: what took its place
    r"jax\.tree_(map|multimap|leaves|flatten|unflatten)\b": "jax.tree.map and friends",
    r"\bjax\.experimental\.(shard_map|pjit|maps)\b": "jax.shard_map or jax.jit",
    r"\blax\.pvary\b": "jax.lax.pcast(..., to='varying')",
    r"\b(xmap|use_mesh|device_put_(replicated|sharded))\b": "see the old names",
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
    return bool(pair.shared_names(tags(cell)))


def is_lesson(cell: NotebookNode) -> bool:
    """Whether a code cell is one that the reader is meant to read through."""
    aside = {"hide-input", "hide-cell", "exercise", "check", "solution"}
    return not is_shared(cell) and not aside & {*tags(cell)}


def syntax(source: str) -> ast.Module:
    """The syntax of a code cell, without its lines for IPython."""
    return ast.parse(re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE))


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


def setup_comes_first(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        if not code or pair.shared_names(tags(code[0]))[:1] != ["setup"]:
            yield f"{name}: the first code cell is not tagged shared-setup"


def shared_cells_have_one_source(root: Path) -> Iterator[str]:
    cure = "Edit book/cells and run: nox -s pair"
    cells = {path.stem for path in (root / "book/cells").glob("*.py")}
    sources = [*(root / "notebooks").glob("*.md"), *(root / "book").glob("*.md")]
    used = set()
    for path in sorted(sources):
        for number, cell in enumerate(parse(path.read_text()).cells, start=1):
            names = pair.shared_names(tags(cell))
            used |= {*names}
            if missing := {*names} - cells:
                yield f"{path.stem}: book/cells has no {sorted(missing)}"
            elif names and cell.source != pair.shared_text(root, names):
                yield f"{path.stem}, cell {number}: not as in book/cells. {cure}"
    for name in sorted(cells - used):
        yield f"no chapter or page uses book/cells/{name}.py"


def shared_cells_are_folded(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        for cell in filter(is_shared, code):
            shared = pair.shared_names(tags(cell))
            folded = "hide-input" in tags(cell)
            explained = [EXPLAINED.get(part) for part in shared] == [name]
            if folded == explained:
                how = "open" if explained else "folded, with hide-input"
                yield f"{name}: the cell shared-{shared[0]} stands {how}"
            elif folded and cell.metadata.get("cellView") != "form":
                yield f"{name}: the cell shared-{shared[0]} lacks cellView: form"


def folded_cells_are_one(root: Path) -> Iterator[str]:
    for name, notebook, _, _ in chapters(root):
        for before, cell in zip(notebook.cells, notebook.cells[1:], strict=False):
            both = {*tags(before)} & {*tags(cell)}
            if "hide-input" in both:
                line = cell.source.splitlines()[0]
                yield f"{name}: two folded cells in a row, the second with {line!r}"


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


def code_is_for_eyes(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        lesson = [cell for cell in code if is_lesson(cell)]
        for cell in code:
            free = is_shared(cell) or "solution" in tags(cell)
            if code_lines(cell) > 25 and not free:
                start = cell.source.splitlines()[0]
                yield f"{name}: a cell of over 25 lines: {start!r}"
        nodes = sum(1 for cell in lesson for _ in ast.walk(syntax(cell.source)))
        density = nodes / max(1, sum(map(code_lines, lesson)))
        if density > DENSEST:
            yield f"{name}: {density:.1f} AST nodes a line, over {DENSEST}"


def chapters_have_a_length(root: Path) -> Iterator[str]:
    for name, _, _, prose in chapters(root):
        words = sum(len(cell.source.split()) for cell in prose)
        if not 1500 <= words <= 4500:
            yield f"{name}: 1,500 to 4,500 words, found {words}"


def predictions_are_left_to_the_reader(root: Path) -> Iterator[str]:
    for name, notebook, _, _ in chapters(root):
        asked = False
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                asked = asked or "**Predict.**" in cell.source
                continue
            check = re.search(CHECKS_SOMETHING, cell.source, re.M)
            if asked and check:
                yield f"{name}: the cell after a Predict checks it: {check[0]!r}"
            asked = False


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
                # A shared cell may name what an older release has, and is tested.
                if (found := re.search(old, cell.source)) and not is_shared(cell):
                    yield f"{name}: {found[0]} is an old name; today: {new}"
            if "raises-exception" in tags(cell):
                yield f"{name}: raises-exception passes either way; use try/except/else"


def exercises(notebook: NotebookNode) -> dict[str, list[NotebookNode]]:
    """The code cells under each heading "Exercise N: ..." of a chapter."""
    found, current = {}, None
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for title in re.findall(r"^#{2,3} (.+)$", cell.source, re.MULTILINE):
                current = title
                if title.startswith("Exercise "):
                    found[title] = []
        elif current in found:
            found[current].append(cell)
    return found


def functions(cell: NotebookNode) -> dict[str, ast.FunctionDef]:
    defined = [
        node for node in syntax(cell.source).body if isinstance(node, ast.FunctionDef)
    ]
    return {node.name: node for node in defined}


def signature(function: ast.FunctionDef) -> inspect.Signature:
    """How a function can be called: names and kinds of its parameters, no types."""
    bare = f"def f({ast.unparse(function.args)}): pass"
    tree = ast.parse(bare)
    for argument in ast.walk(tree):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    names = {}
    exec(ast.unparse(tree), names)  # a def with an empty body: nothing of it is run
    return inspect.signature(names["f"])


def calls(cell: NotebookNode, name: str) -> list[list[str]]:
    """The arguments, as text, of every call of a function with this name."""
    found = [
        node
        for node in ast.walk(syntax(cell.source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    ]
    return [[ast.unparse(argument) for argument in node.args] for node in found]


def is_stub(function: ast.FunctionDef) -> bool:
    """Whether a body is a specification in a docstring, and NotImplementedError."""
    return (
        ast.get_docstring(function) is not None
        and len(function.body) == 2
        and ast.unparse(function.body[1]) == "raise NotImplementedError"
    )


def misuses(check: ast.FunctionDef, call: inspect.Signature) -> Iterator[str]:
    """What a check does with an answer that the stub's signature does not promise."""
    for node in ast.walk(check):
        match node:
            case ast.Attribute(ast.Name("answer"), attribute):
                yield f"answer.{attribute}"
            case ast.Call(ast.Name("answer"), arguments, keywords):
                if any(isinstance(argument, ast.Starred) for argument in arguments):
                    continue
                named = {keyword.arg: 0 for keyword in keywords if keyword.arg}
                try:
                    call.bind(*arguments, **named)
                except TypeError:
                    yield ast.unparse(node)


def exercise_faults(cells: list[NotebookNode]) -> Iterator[str]:
    """What is wrong with the three cells of one exercise."""
    kinds = "exercise", "check", "solution"
    order = [kind for cell in cells for kind in kinds if kind in tags(cell)]
    if order != [*kinds]:
        yield f"one cell each tagged {', '.join(kinds)}, in this order; found {order}"
        return
    stub_cell, check_cell, solution_cell = (
        cell for cell in cells if {*kinds} & {*tags(cell)}
    )
    for cell, title in (check_cell, "Check"), (solution_cell, "Solution"):
        if not cell.source.startswith(f"# @title {title}\n"):
            yield f"the {title.lower()} starts with '# @title {title}'"
        if cell.metadata.get("cellView") != "form":
            yield f"the {title.lower()} lacks cellView: form (Colab)"
    if "hide-input" not in tags(check_cell):
        yield "the check is tagged hide-input"
    if "hide-cell" not in tags(solution_cell):
        yield "the solution is tagged hide-cell"
    stubs = [
        function for function in functions(stub_cell).values() if is_stub(function)
    ]
    if len(stubs) != 1:
        yield "one stub: a docstring, then raise NotImplementedError"
        return
    (stub,) = stubs
    check = functions(check_cell).get("check")
    if check is None or [argument.arg for argument in check.args.args] != ["answer"]:
        yield "the check defines check(answer)"
        return
    if not re.search(CHECKS_SOMETHING, ast.unparse(check)):
        yield "the check asserts nothing"
    if re.search(rf"\b{stub.name}\b", ast.unparse(check)):
        yield f"the check judges {stub.name}, not the answer that it is given"
    for use in misuses(check, signature(stub)):
        yield f"the check uses {use}, which the stub does not promise"
    if ast.unparse(syntax(check_cell.source).body[-1]) != f"judge(check, {stub.name})":
        yield f"the check ends with judge(check, {stub.name})"
    defined = functions(solution_cell)
    if stub.name in defined:
        yield f"the solution overwrites the reader's {stub.name}"
    if "answer" not in defined or ["answer"] not in calls(solution_cell, "check"):
        yield "the solution defines answer and calls check(answer)"
    rejected = calls(solution_cell, "reject")
    wrong = [arguments[-1] for arguments in rejected if arguments[0] == "check"]
    if not wrong or not {*wrong} <= {*defined}:
        yield "the solution defines a wrong answer and calls reject(check, it)"
    for name in {"answer", *wrong} & {*defined}:
        if signature(defined[name]) != signature(stub):
            yield f"{name} has another signature than {stub.name}"


def exercises_judge_the_reader(root: Path) -> Iterator[str]:
    for name, notebook, _, _ in chapters(root):
        found = exercises(notebook)
        if not 2 <= len(found) <= 4:
            yield f"{name}: two to four exercises, found {len(found)}"
        for title, cells in found.items():
            for fault in exercise_faults(cells):
                yield f"{name}, {title}: {fault}"


def compiler_facts_go_through_on_cpu(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        for cell in code:
            if not is_shared(cell) and re.search(
                r"device\.platform [!=]=", cell.source
            ):
                yield f"{name}: what holds on the CPU's compiler only goes to on_cpu"


def paths_are_complete(root: Path) -> Iterator[str]:
    """Every chapter on a path of book/index.md has what it needs on the same path."""
    needs = {}
    for name, _, _, prose in chapters(root):
        text = "\n".join(cell.source for cell in prose)
        line = re.search(r"^You need .*$", text, re.MULTILINE)
        if not line:
            yield f"{name}: a line under 'What you will learn' starts with 'You need'"
            continue
        needs[name[:2]] = re.findall(r"\((\d\d)_\w+\.ipynb\)", line[0])
        for first, last in re.findall(
            r"\((\d\d)_\w+\.ipynb\) to \[[^]]*\]\((\d\d)_", line[0]
        ):
            needs[name[:2]] += [f"{n:02}" for n in range(int(first), int(last))]
    index = (root / "book/index.md").read_text()
    head = re.search(r"^\|(.*)\| Chapter \|$", index, re.MULTILINE)
    if not head:
        yield "book/index.md has no table whose last column is 'Chapter'"
        return
    rows = re.findall(r"^\|(.*)\|[^|]*notebooks/(\d\d)_\w+\.ipynb\) \|$", index, re.M)
    if {number for _, number in rows} != {*needs}:
        yield "the table in book/index.md does not list every chapter once"
    for column, path in enumerate(head[1].split("|")):
        marked = {number for marks, number in rows if marks.split("|")[column].strip()}
        for number in sorted(marked):
            missing = sorted({*needs.get(number, [])} - marked)
            if missing:
                yield f"the path {path.strip()!r} has {number} without {missing}"


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
    setup_comes_first,
    shared_cells_have_one_source,
    shared_cells_are_folded,
    folded_cells_are_one,
    chapters_have_the_skeleton,
    code_is_for_eyes,
    chapters_have_a_length,
    predictions_are_left_to_the_reader,
    markdown_is_portable,
    figures_have_alt_text,
    code_uses_todays_names,
    exercises_judge_the_reader,
    compiler_facts_go_through_on_cpu,
    contents_match_the_files,
    paths_are_complete,
]
