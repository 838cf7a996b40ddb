"""The house rules that running a notebook cannot check.

Each check takes the root of the repository and yields its complaints, a sentence each.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise, zip_longest
from pathlib import Path

import pair
import yaml
from nbformat import NotebookNode

FIRST = ["What you will learn", "Setup"]
LAST = ["Pitfalls", "Exercises", "Recap", "Next"]
NOT_PORTABLE = {  # what only Sphinx, only Jupyter or only one site would understand
    "a MyST directive": r"^\s*(:::|```\{)",
    "a MyST role": r"\{[a-z:]+\}`",
    "a MyST label": r"^\([\w-]+\)=\s*$",
    "an image link": r"!\[",
    "a link to a chapter's source": r"\]\(\d\d_\w+\.md",
    "HTML": r"</?[a-zA-Z][^>]*>",
}
# Where a shared cell stands open, because the text around it explains it.
EXPLAINED = {
    "setup": "03_devices",
    "digits": "02_train_on_one_device",
    "models": "02_train_on_one_device",
    "checkpoint-*": "29_pretrained_weights",
    "adapters-*": "31_fine_tune",
    "decoder-choose": "30_generate",
    "decoder-step": "30_generate",
    "decoder-*": "29_pretrained_weights",
}
# AST nodes a line in lesson cells, types of signatures aside, a chapter's average;
# JAX's guides, which have no types, have 11 to 12.5.
DENSEST = 12
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
CHECKS_SOMETHING = r"\bassert\b|\bassert_|\bon_cpu\("
SHOWS_SOMETHING = r"^ *(print|plt\.\w+|draw_\w+|HTML|judge|reject)\("
TEACH_PMAP = range(4, 9)  # chapters
CALLOUTS = "Predict", "Pitfall", "Takeaway"
INSTEAD = {  # what a chapter leaves alone: what it has instead
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
    r"device\.platform [!=]=": "on_cpu(found, expected), for what one compiler does",
}


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def shared_names(cell: NotebookNode) -> list[str]:
    """The names in a cell's tags of the form shared-NAME, in their order."""
    return [tag.split("-", 1)[1] for tag in tags(cell) if tag.startswith("shared-")]


def is_lesson(cell: NotebookNode) -> bool:
    """Whether a code cell is one that the reader is meant to read through."""
    aside = {"hide-input", "hide-cell", "exercise", "check", "solution"}
    return not shared_names(cell) and not aside & {*tags(cell)}


def syntax(source: str) -> ast.Module:
    """The syntax of a code cell, without its lines for IPython."""
    return ast.parse(re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE))


def untyped(tree: ast.AST) -> ast.AST:
    """A tree of syntax that has lost the types in its signatures."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, FUNCTION):
            node.returns = None
    return tree


def code_lines(cell: NotebookNode) -> int:
    return sum(bool(line.strip()) for line in cell.source.splitlines())


def chapters(root: Path) -> Iterator[tuple[str, NotebookNode, list, list]]:
    """Name, notebook, code cells and Markdown cells of every chapter's source."""
    for path in sorted((root / "notebooks").glob("*.md")):
        notebook = pair.twin(path.read_text())
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        prose = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
        yield path.stem, notebook, code, prose


def text(prose: list[NotebookNode]) -> str:
    return "\n".join(cell.source for cell in prose)


def headings(prose: list[NotebookNode], level: int) -> list[str]:
    return re.findall(rf"^{'#' * level} (.+)$", text(prose), re.MULTILINE)


def everything_is_paired(root: Path) -> Iterator[str]:
    texts, problems = pair.plan(root)
    yield from problems
    for path in texts:
        yield f"{path.relative_to(root)} is out of date. Run: nox -s pair"


def the_address_is_written_once(root: Path) -> Iterator[str]:
    url = yaml.safe_load((root / "_config.yml").read_text())["repository"]["url"]
    elsewhere = ":(exclude)_config.yml", ":(exclude)notebooks"
    words = ["git", "grep", "-lF", url, "--", *elsewhere]
    found = subprocess.run(words, cwd=root, capture_output=True, text=True)
    for file in found.stdout.splitlines():
        yield f"{file} names {url}, which only _config.yml may"
    if found.returncode > 1:
        yield found.stderr


def explained_in(shared: str) -> str | None:
    """The chapter in which a shared cell stands open; parts of a program do in one."""
    return EXPLAINED.get(shared) or EXPLAINED.get(f"{shared.partition('-')[0]}-*")


def shared_cells_are_in_place(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        if not code or shared_names(code[0])[:1] != ["setup"]:
            yield f"{name}: the first code cell is not tagged shared-setup"
        for cell in filter(shared_names, code):
            shared = shared_names(cell)
            folded = "hide-input" in tags(cell)
            explained = [explained_in(part) for part in shared] == [name]
            if folded == explained:
                how = "open" if explained else "folded, with hide-input"
                yield f"{name}: the cell shared-{shared[0]} stands {how}"


def folded_cells_are_one(root: Path) -> Iterator[str]:
    for name, notebook, _, _ in chapters(root):
        for before, cell in pairwise(notebook.cells):
            both = {*tags(before)} & {*tags(cell)}
            if "hide-input" in both:
                line = cell.source.splitlines()[0]
                yield f"{name}: two folded cells in a row, the second with {line!r}"


def chapters_have_the_skeleton(root: Path) -> Iterator[str]:
    for number, (name, notebook, _, prose) in enumerate(chapters(root), start=1):
        titles, sections = headings(prose, 1), headings(prose, 2)
        if not re.fullmatch(rf"{number:02}_[a-z0-9_]+", name):
            yield f"{name}: chapter {number} in the folder is named {number:02}_slug"
        if not notebook.cells[0].source.startswith("# ") or len(titles) != 1:
            yield f"{name}: a chapter starts with its one title"
        elif re.match(r"(chapter\s*)?\d", titles[0], re.IGNORECASE):
            yield f"{name}: the title has a number"
        own = sections[len(FIRST) : -len(LAST)]
        if sections != FIRST + own + LAST:
            yield f"{name}: sections run {FIRST}, its own, {LAST}; found {sections}"
        elif not 3 <= len(own) <= 6:
            yield f"{name}: three to six sections of its own, found {len(own)}"


def code_is_for_eyes(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        lesson = [cell for cell in code if is_lesson(cell)]
        for cell in code:
            free = shared_names(cell) or "solution" in tags(cell)
            if code_lines(cell) > 25 and not free:
                start = cell.source.splitlines()[0]
                yield f"{name}: a cell of over 25 lines: {start!r}"
        trees = [untyped(syntax(cell.source)) for cell in lesson]
        nodes = sum(1 for tree in trees for _ in ast.walk(tree))
        density = nodes / max(1, sum(map(code_lines, lesson)))
        if density > DENSEST:
            yield f"{name}: {density:.1f} AST nodes a line, over {DENSEST}"


def lessons_have_types(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        trees = [syntax(cell.source) for cell in code if is_lesson(cell)]
        for node in [node for tree in trees for node in ast.walk(tree)]:
            if isinstance(node, FUNCTION):
                below = ast.iter_child_nodes(node.args)
                bare = [a.arg for a in below if hasattr(a, "arg") and not a.annotation]
                bare = [arg for arg in bare if arg != "self"]
                bare += [] if node.returns else ["what it returns"]
                if bare:
                    lack, form = ", ".join(bare), "(x: jax.Array, n: int) -> jax.Array"
                    yield f"{name}: give types to {lack} in def {node.name}, as {form}"


def chapters_show_and_tell(root: Path) -> Iterator[str]:
    for name, _, code, prose in chapters(root):
        words = len(text(prose).split())
        if not 1500 <= words <= 3500:
            yield f"{name}: 1,500 to 3,500 words, found {words}"
        shown = [c for c in code if re.search(SHOWS_SOMETHING, c.source, re.MULTILINE)]
        if len(shown) < 10:
            yield f"{name}: only {len(shown)} cells print or draw; show ten results"
        for label in CALLOUTS:
            start = f"**{label}.**"
            if not re.search(rf"^(> )?{re.escape(start)}", text(prose), re.MULTILINE):
                yield f"{name}: no {label}. Start a paragraph or a quote with {start}"


def predictions_are_left_to_the_reader(root: Path) -> Iterator[str]:
    for name, notebook, _, _ in chapters(root):
        for before, cell in pairwise(notebook.cells):
            check = re.search(CHECKS_SOMETHING, cell.source)
            if "**Predict.**" in before.source and check:
                yield f"{name}: the cell after a Predict checks it: {check[0]!r}"


def markdown_is_portable(root: Path) -> Iterator[str]:
    for name, _, _, prose in chapters(root):
        for cell in prose:
            source = re.sub(r"^```\w*\n(?s:.*?)^```$", "", cell.source, flags=re.M)
            plain = re.sub(r"`[^`\n]*`|\$[^$\n]*\$", "", source)
            for what, pattern in NOT_PORTABLE.items():
                where = source if "role" in what else plain
                if found := re.search(pattern, where, re.MULTILINE):
                    yield f"{name}: {what}, {found[0]!r}, reads differently elsewhere"


def figures_have_alt_text(root: Path) -> Iterator[str]:
    draws = re.compile(r"\bplt\.(subplots|figure)\(|^draw_\w+\(", re.MULTILINE)
    for name, _, code, _ in chapters(root):
        for cell in code:
            image = cell.metadata.get("mystnb", {}).get("image", {})
            alt, html = image.get("alt", ""), re.search(r"^HTML\(", cell.source, re.M)
            if draws.search(cell.source) and not shared_names(cell) and len(alt) < 20:
                line = cell.source.splitlines()[-1]
                yield f"{name}: a figure without alt text: {line!r}"
            if html and not re.search(r'aria-label="[^"]{20}', cell.source):
                yield f"{name}: a drawing in HTML without an aria-label"


def code_is_of_today(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        for cell in code:
            for old, new in INSTEAD.items():
                # A shared cell may name what an older release has, and is tested.
                if (found := re.search(old, cell.source)) and not shared_names(cell):
                    yield f"{name}: in place of {found[0]!r}, {new}"
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
    body = syntax(cell.source).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> str:
    """What stands between the parentheses of a signature, without types."""
    return ast.unparse(untyped(function.args))


def calls(cell: NotebookNode, name: str) -> list[list[str]]:
    """The arguments, as text, of every call of a function with this name."""
    return [
        [ast.unparse(argument) for argument in node.args]
        for node in ast.walk(syntax(cell.source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    ]


def is_stub(function: ast.FunctionDef) -> bool:
    """Whether a body is a specification in a docstring, and NotImplementedError."""
    rest = [ast.unparse(node) for node in function.body[1:]]
    return bool(ast.get_docstring(function)) and rest == ["raise NotImplementedError"]


def exercise_faults(cells: list[NotebookNode]) -> Iterator[str]:
    """What is wrong with the three cells of one exercise."""
    kinds = "exercise", "check", "solution"
    found = [(kind, cell) for cell in cells for kind in kinds if kind in tags(cell)]
    if (order := [kind for kind, _ in found]) != [*kinds]:
        yield f"one cell each tagged {', '.join(kinds)}, in this order; found {order}"
        return
    stub_cell, check_cell, solution_cell = (cell for _, cell in found)
    for cell, title, fold in (
        (check_cell, "Check", "hide-input"),
        (solution_cell, "Solution", "hide-cell"),
    ):
        folded = fold in tags(cell)
        if not folded or not cell.source.startswith(f"# @title {title}\n"):
            yield f"# @title {title} and the tag {fold} go together"
    stubs = [stub for stub in functions(stub_cell).values() if is_stub(stub)]
    if len(stubs) != 1:
        yield "one stub: a docstring, then raise NotImplementedError"
        return
    (stub,) = stubs
    if "def check(answer" not in check_cell.source:
        yield "the check defines check(answer)"
    if use := re.search(r"\banswer\.\w+", check_cell.source):
        yield f"the check uses {use[0]}, which the stub does not promise"
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
        if parameters(defined[name]) != parameters(stub):
            yield f"{name} has another signature than {stub.name}"


def exercises_judge_the_reader(root: Path) -> Iterator[str]:
    for name, notebook, _, _ in chapters(root):
        found = exercises(notebook)
        if not 2 <= len(found) <= 4:
            yield f"{name}: two to four exercises, found {len(found)}"
        for title, cells in found.items():
            for fault in exercise_faults(cells):
                yield f"{name}, {title}: {fault}"


def needs(prose: list[NotebookNode]) -> tuple[str, set[int]]:
    """The line that says what a chapter or a page needs, and the chapters in it."""
    line = "".join(re.findall(r"^You need .*$", text(prose), re.MULTILINE)[:1])
    links = re.sub(r"\[[^]]*\]\([^)]*?(\d\d)_\w+\.ipynb\)", r"<\1>", line)
    spans = re.findall(r"<(\d\d)>(?: to <(\d\d)>)?", links)
    return line, {*pair.numbers(" ".join(f"{a}-{b or a}" for a, b in spans))}


def paths_are_complete(root: Path) -> Iterator[str]:
    """Every chapter is on a path, with what it needs on the same path."""
    needed = {}
    for number, (name, _, _, prose) in enumerate(chapters(root), start=1):
        line, needed[number] = needs(prose)
        if not line:
            yield f"{name}: a line under 'What you will learn' starts with 'You need'"
    paths = pair.paths(root)
    for number in sorted({*needed}.difference(*paths.values())):
        yield f"_toc.yml: chapter {number} is on none of the paths at its head"
    for path, marks in paths.items():
        for number in sorted(marks):
            if missing := sorted(needed[number] - {*marks}):
                yield f"_toc.yml: the path {path!r} has {number} without {missing}"


def the_path_from_ddp_needs_no_pmap(root: Path) -> Iterator[str]:
    """No step calls pmap or needs a chapter that teaches it, and each leads on."""
    steps = pair.from_ddp(root)
    for path, following in zip_longest(steps, steps[1:]):
        cells = pair.twin(path.read_text()).cells
        for cell in cells:
            used = re.search(r"\bjax\.pmap\b|\bpmap\(", cell.source)
            if cell.cell_type == "code" and used:
                yield f"{path.stem} is on the path from DDP and calls {used[0]}"
        prose = [cell for cell in cells if cell.cell_type == "markdown"]
        if taught := sorted(needs(prose)[1] & {*TEACH_PMAP}):
            yield f"{path.stem} is on the path from DDP and needs chapters {taught}"
        last = text(prose).rpartition("\n## ")[2]
        if following and not re.search(rf"\b{following.stem}\.", last):
            yield f"{path.stem}: its last section links to {following.stem}, the next"


def contents_match_the_files(root: Path) -> Iterator[str]:
    toc = yaml.safe_load((root / "_toc.yml").read_text())
    listed = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    sources = [*(root / "notebooks").glob("*.md"), *(root / "book").glob("*.md")]
    files = {f"{path.parent.name}/{path.stem}" for path in sources}
    for file in sorted(files - {toc["root"], *listed}):
        yield f"_toc.yml leaves out {file}: list it in a part"
    in_toc = [file for file in listed if file.startswith("notebooks/")]
    if in_toc != sorted(in_toc):
        yield "_toc.yml lists chapters in another order than that of their numbers"
    row = rf"^\| \d+ \| (.*) \| {pair.UNWRITTEN} \|$"
    for chapter in re.findall(row, (root / "README.md").read_text(), re.MULTILINE):
        yield f"README.md: in place of {pair.UNWRITTEN}, {pair.AFTER}: {chapter}"


CHECKS = [
    rule
    for rule in list(globals().values())
    if getattr(rule, "__annotations__", 0) == {"root": Path, "return": Iterator[str]}
]
